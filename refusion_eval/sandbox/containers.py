"""Kinds of containers: how to read and to write each, past whatever methods a subclass of it has."""

import contextlib
import ipaddress
import pathlib
import statistics
import uuid
from array import array
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, UserString, defaultdict, deque
from collections.abc import Callable, Iterable
from fractions import Fraction
from operator import is_
from types import MemberDescriptorType, SimpleNamespace
from typing import Any, NamedTuple

from refusion_eval.sandbox import wire


class Container(NamedTuple):
    tag: str
    items: Callable[[Any], list[Any]]  # contents as a flat list
    fill: Callable[[Any, list[Any]], None]  # replaces the contents
    option: Callable[[Any], Any] = lambda _: None  # a further argument of the constructor
    # Makes an empty container of a class `kind` that is or derives from the class of data `base`.
    start: Callable[[Any, Any, Any], Any] = lambda base, kind, option: base.__new__(kind)


def _pairs(flat: list[Any]) -> Iterable[tuple[Any, Any]]:
    half = len(flat) // 2
    return zip(flat[:half], flat[half:], strict=True)


def _mapping(tag: str, kind: Any, **constructor: Any) -> Container:
    def fill(value: dict[Any, Any], flat: list[Any]) -> None:
        pairs = list(_pairs(flat))
        kind.clear(value)
        for key, item in pairs:
            kind.__setitem__(value, key, item)

    return Container(tag, lambda value: [*kind.keys(value), *kind.values(value)], fill, **constructor)


def _fill_deque(value: deque[Any], items: list[Any]) -> None:
    deque.clear(value)
    deque.extend(value, items)


def _fill_set(value: set[Any], items: list[Any]) -> None:
    """Fill a set so that it is read in the order of `items` where one of two ways of making it gives that order."""
    # The order follows from the size of the set's table, which depends on how the set was made: item by item or at
    # once. It also depends on which of two items with the same place in the table came first; nothing tells that later.
    set.clear(value)
    set.update(value, items)
    if not same(list(set.__iter__(value)), items):
        set.clear(value)
        set.update(value, dict.fromkeys(items))


def _attributes(value: Any) -> dict[str, Any]:
    return object.__getattribute__(value, "__dict__")


def _start(base: Any, kind: Any, option: Any) -> Any:
    made = base.__new__(kind)
    base.__init__(made, *((), option) if base is deque else (option,))
    return made


def _of_attributes(kind: type) -> Container:
    """Objects of a class of values, such as paths, as containers of their attributes."""
    names = {name: member for base in kind.__mro__ for name, member in vars(base).items()}
    names.pop("__dict__", None)
    # Attributes that are not entries of a `__dict__`.
    members = {name: member for name, member in names.items() if isinstance(member, MemberDescriptorType)}

    def items(value: Any) -> list[Any]:
        attributes: dict[str, Any] = {}
        with contextlib.suppress(AttributeError):  # it has none but the members
            attributes |= _attributes(value)
        for name, member in members.items():
            with contextlib.suppress(AttributeError):  # not set
                attributes[name] = member.__get__(value)
        return [*attributes, *attributes.values()]

    def fill(value: Any, flat: list[Any]) -> None:
        parts = dict(_pairs(flat))
        if kind is Fraction:
            numerator, denominator = parts.get("_numerator"), parts.get("_denominator")
            if type(numerator) is not int or type(denominator) is not int or denominator <= 0:
                return  # nothing can be done with it
        for name, item in parts.items():
            if name in members:
                members[name].__set__(value, item)
            elif type(name) is str and not hasattr(kind, name):  # a method stays the judge's
                with contextlib.suppress(AttributeError):  # an object of the class of data itself has no such place
                    _attributes(value)[name] = item

    # No constructor of the library's own: it would use methods of the subclass.
    of_object = SimpleNamespace if kind is SimpleNamespace else object
    return Container(
        f"a:{kind.__module__}.{kind.__name__}", items, fill, start=lambda base, kind, option: of_object.__new__(kind)
    )


_OF_USER = (lambda value: [_attributes(value)["data"]], lambda value, items: _attributes(value).update(data=items[0]))
# Read past a subclass, as all here.
_TYPE_OF_ARRAY, _LENGTH_OF_DEQUE = vars(array)["typecode"].__get__, vars(deque)["maxlen"].__get__
_FACTORY_OF_DICT = vars(defaultdict)["default_factory"].__get__
# fmt: off
_OF_VALUES: tuple[type, ...] = (
    Fraction, SimpleNamespace, statistics.NormalDist, uuid.UUID, pathlib.PurePosixPath, pathlib.PureWindowsPath,
    pathlib.PosixPath, ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Network,
    ipaddress.IPv4Interface, ipaddress.IPv6Interface,
)
# fmt: on
KINDS: dict[type, Container] = {
    list: Container(
        "l", lambda value: list(list.__iter__(value)), lambda value, items: list.__setitem__(value, slice(None), items)
    ),
    dict: _mapping("d", dict),
    set: Container("s", lambda value: list(set.__iter__(value)), _fill_set),
    deque: Container("q", lambda value: list(deque.__iter__(value)), _fill_deque, _LENGTH_OF_DEQUE, _start),
    bytearray: Container(
        "B",
        lambda value: list(bytearray.__iter__(value)),
        lambda value, items: bytearray.__setitem__(value, slice(None), bytes(items)),
    ),
    OrderedDict: _mapping("O", OrderedDict),
    Counter: _mapping("C", dict),
    defaultdict: _mapping("dd", dict, option=_FACTORY_OF_DICT, start=_start),
    UserList: Container("UL", *_OF_USER),
    UserDict: Container("UD", *_OF_USER),
    UserString: Container("US", *_OF_USER),
    ChainMap: Container(
        "CM",
        lambda value: list(_attributes(value)["maps"]),
        lambda value, items: _attributes(value).update(maps=items),
    ),
    array: Container(
        "ar",
        array.tolist,
        lambda value, items: array.__setitem__(value, slice(None), array(_TYPE_OF_ARRAY(value), items)),
        _TYPE_OF_ARRAY,
        lambda base, kind, option: base.__new__(kind, option),
    ),
    **{kind: _of_attributes(kind) for kind in _OF_VALUES},
}
BY_TAG = {container.tag: (kind, container) for kind, container in KINDS.items()}
# Filled last: looking a key up may ask the program, which must find the rest done.
LATE = ("s", "d", "O", "C", "dd")
VIEWS: dict[str, tuple[type, Callable[[list[Any]], Any]]] = {
    "vk": (type({}.keys()), lambda items: dict.fromkeys(items).keys()),
    "vi": (type({}.items()), lambda items: dict(items).items()),
    "vv": (type({}.values()), lambda items: dict(enumerate(items)).values()),
    "ok": (type(OrderedDict().keys()), lambda items: OrderedDict.fromkeys(items).keys()),
    "oi": (type(OrderedDict().items()), lambda items: OrderedDict(items).items()),
    "ov": (type(OrderedDict().values()), lambda items: OrderedDict(enumerate(items)).values()),
}
BOUNDS: dict[str, Callable[..., Any]] = {"r": range, "sl": slice}
VIEW_TAGS = {kind: tag for tag, (kind, _) in VIEWS.items()}
CONTAINERS = frozenset(KINDS)
DATA = CONTAINERS | wire.PACKERS.keys() | {tuple, frozenset}


def data_class(kind: type) -> type | None:
    """The class of data that a class is or derives from; None if its objects are not data."""
    return next((base for base in kind.__mro__ if base in DATA), None)


def plain(value: Any) -> Any:
    """The data that an object is, as an object of the class of data itself, past all methods; other objects as is."""
    kind = type(value)
    base = data_class(kind)
    if base is None or base is kind or kind is bool:
        return value
    if base in KINDS:
        container = KINDS[base]
        made = container.start(base, base, container.option(value))
        container.fill(made, container.items(value))
        return made
    if base is tuple or base is frozenset:
        return base(base.__iter__(value))  # type: ignore[attr-defined]
    packed = wire.PACKERS[base](value)
    return wire.unpack(packed[0], packed[1:]) if isinstance(packed, list) else packed


def frozen(items: list[Any]) -> frozenset[Any]:
    """A frozen set that is read in the order of `items`, as `_fill_set`."""
    made = frozenset(items)
    return made if same(list(made), items) else frozenset(dict.fromkeys(items))


def same(left: list[Any], right: list[Any]) -> bool:
    """Whether two lists hold the same objects. Nothing is compared that could answer for itself."""
    return len(left) == len(right) and all(map(is_, left, right))
