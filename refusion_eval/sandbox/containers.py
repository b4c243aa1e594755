"""Kinds of containers: how to read and to write each, past whatever methods a subclass of it has."""

import copyreg
import sys
from collections import Counter, OrderedDict, UserDict, UserList, UserString, defaultdict, deque
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any, NamedTuple

from refusion_eval.sandbox import wire


class Container(NamedTuple):
    """How to read and write one kind of container, past whatever methods a subclass has.

    `items` gives its contents as a flat list, `fill` replaces them. `option` is a further argument of its constructor,
    which `start` hands over.
    """

    tag: str
    items: Callable[[Any], list[Any]]
    fill: Callable[[Any, list[Any]], None]
    option: Callable[[Any], Any] = lambda _: None
    start: Callable[[Any, Any], None] = lambda _, option: None


def _flat(kind: type[dict[Any, Any]]) -> Callable[[Any], list[Any]]:
    return lambda value: [*kind.keys(value), *kind.values(value)]


def _pairs(flat: list[Any]) -> Iterable[tuple[Any, Any]]:
    half = len(flat) // 2
    return zip(flat[:half], flat[half:], strict=True)


def _fill_list(value: list[Any], items: list[Any]) -> None:
    list.__setitem__(value, slice(None), items)


def _fill_dict(kind: type[dict[Any, Any]]) -> Callable[[Any, list[Any]], None]:
    def fill(value: dict[Any, Any], flat: list[Any]) -> None:
        pairs = list(_pairs(flat))
        kind.clear(value)
        for key, item in pairs:
            kind.__setitem__(value, key, item)

    return fill


def _fill_deque(value: deque[Any], items: list[Any]) -> None:
    deque.clear(value)
    deque.extend(value, items)


def _fill_set(value: set[Any], items: list[Any]) -> None:
    """Fill a set so that it is read in the order of `items` where one of two ways of making it gives that order.

    The order follows from the size of the set's table, which depends on how the set was made: item by item or at once.
    It also depends on which of two items with the same place in the table came first, which nothing tells afterwards.
    """
    set.clear(value)
    set.update(value, items)
    if not same(list(set.__iter__(value)), items):
        set.clear(value)
        set.update(value, dict.fromkeys(items))


def _fill_bytes(value: bytearray, items: list[Any]) -> None:
    bytearray.__setitem__(value, slice(None), bytes(items))


def _fill_user(value: Any, items: list[Any]) -> None:
    (vars(value)["data"],) = items


_OF_USER = (lambda value: [vars(value)["data"]], _fill_user)
KINDS: dict[type, Container] = {
    list: Container("l", lambda value: list(list.__iter__(value)), _fill_list),
    dict: Container("d", _flat(dict), _fill_dict(dict)),
    set: Container("s", lambda value: list(set.__iter__(value)), _fill_set),
    deque: Container(
        "q",
        lambda value: list(deque.__iter__(value)),
        _fill_deque,
        lambda value: value.maxlen,
        lambda value, maxlen: deque.__init__(value, (), maxlen),
    ),
    bytearray: Container("B", lambda value: list(bytearray.__iter__(value)), _fill_bytes),
    OrderedDict: Container("O", _flat(OrderedDict), _fill_dict(OrderedDict)),
    Counter: Container("C", _flat(dict), _fill_dict(dict)),
    defaultdict: Container(
        "dd", _flat(dict), _fill_dict(dict), lambda value: value.default_factory, defaultdict.__init__
    ),
    UserList: Container("UL", *_OF_USER),
    UserDict: Container("UD", *_OF_USER),
    UserString: Container("US", *_OF_USER),
}
BY_TAG = {container.tag: (kind, container) for kind, container in KINDS.items()}
LATE = ("s", "d", "O", "C", "dd")  # filled last: looking a key up may ask the program, which must find the rest done
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
    """The class of data that a class is or derives from; None if its objects are no data."""
    return next((base for base in kind.__mro__ if base in DATA), None)


def plain(value: Any) -> Any:
    """The data that an object is, as an object of the class of data itself, past all methods; other objects as is."""
    kind = type(value)
    base = data_class(kind)
    if base is None or base is kind or kind is bool:
        return value
    if base in KINDS:
        container = KINDS[base]
        made: Any = base.__new__(base)  # type: ignore[call-overload]
        container.start(made, container.option(value))
        container.fill(made, container.items(value))
        return made
    if base is tuple or base is frozenset:
        return base(base.__iter__(value))  # type: ignore[attr-defined]
    packed = wire.PACKERS[base](value)
    return wire.unpack(packed[0], packed[1:]) if isinstance(packed, list) else packed


def library_parts(value: Any) -> tuple[Any, ...] | None:
    """What makes up an object of a class of the library that says how it compares, such as a path or a UUID.

    Returns the class's module and name, and what `copy` makes another such object of; None for other objects.
    """
    kind = next((kind for kind in type(value).__mro__ if "__eq__" in vars(kind) and _is_library(kind)), object)
    if kind is object:
        return None
    try:
        reduced = copyreg.dispatch_table.get(kind, lambda value: value.__reduce_ex__(4))(value)
    except TypeError:  # no copy can be made
        return None
    arguments, state = (*reduced[1:3], None)[:2]
    return kind.__module__, kind.__qualname__, tuple(part for part in arguments if not isinstance(part, type)), state


def _is_library(kind: type) -> bool:
    """Whether a class is the library's, and not one whose methods say only what a mapping or a set is."""
    return kind.__module__.partition(".")[0] in sys.stdlib_module_names and kind.__module__ != "collections.abc"


def frozen(items: list[Any]) -> frozenset[Any]:
    """A frozen set that is read in the order of `items`, as `_fill_set`."""
    made = frozenset(items)
    return made if same(list(made), items) else frozenset(dict.fromkeys(items))


def same(left: list[Any], right: list[Any]) -> bool:
    """Whether two lists hold the same objects. Nothing is compared that could answer for itself."""
    return len(left) == len(right) and all(map(is_, left, right))
