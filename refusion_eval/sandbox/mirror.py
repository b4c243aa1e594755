"""The judge's stand-ins for the candidate's classes and objects: every use of one is a request to the candidate.

A class of the candidate becomes a class here, with stand-ins for its bases, so that `isinstance`, `type` and `except`
work as in one process; it has the special methods that the class has there, and no others. An object of a class that
derives from data, such as a named tuple, is that data here: its value is compared by the judge.

An object answers questions about itself. It is not asked how it relates to the test's data (is it equal, does it
contain, what is the difference?), because it could claim what the test expects. Exceptions are `Asked.may_decide`'s.
"""

import types
from collections.abc import Callable
from datetime import date, time, timedelta
from typing import Any, Protocol

from refusion_eval.sandbox.containers import CONTAINERS, data_class

COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "lshift", "rshift")
_LOGIC = ("and", "or", "xor")
BINARY = (
    *COMPARISONS,
    "__contains__",
    *(f"__{side}{name}__" for side in ("", "r", "i") for name in (*_ARITHMETIC, *_LOGIC)),
)
# Operators whose result may be of the same kind as their operands.
OPERATORS = frozenset(BINARY[len(COMPARISONS) + 1 :]) | {
    *("__abs__", "__invert__", "__neg__", "__pos__", "__round__"),
    "__enter__",
}
# fmt: off
UNARY = (
    "__abs__", "__bool__", "__bytes__", "__ceil__", "__complex__", "__delitem__", "__enter__", "__exit__", "__float__",
    "__floor__", "__format__", "__getitem__", "__hash__", "__index__", "__int__", "__invert__", "__iter__", "__len__",
    "__neg__", "__next__", "__pos__", "__repr__", "__reversed__", "__round__", "__setitem__", "__str__", "__trunc__",
)
# fmt: on
SPECIAL = frozenset((*BINARY, *UNARY, "__call__"))
# What an object of these classes is here, by their names there.
_KNOWN = {
    kind.__name__: kind
    for kind in (
        types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.GeneratorType, types.ModuleType,
        map, filter, zip, enumerate, reversed,
    )
}  # fmt: skip


class Asked(Protocol):
    """The candidate, as its stand-ins see it."""

    def request(self, name: str, *operands: Any) -> Any:
        """Ask for an operation."""

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function or class."""

    def operate(self, name: str, value: Any, *operands: Any) -> Any:
        """Ask for a special method of an object."""

    def may_decide(self, name: str, value: Any, other: Any) -> bool:
        """Whether the candidate is asked how its object relates to another."""

    def knows(self, value: Any) -> bool:
        """Whether an object is one of the candidate's."""


class _Attribute:
    """An attribute that is read and written there, whatever the stand-in's base has under its name."""

    def __init__(self, candidate: Asked, name: str) -> None:
        self._candidate = candidate
        self._name = name

    def __get__(self, value: Any, owner: Any) -> Any:
        return self._candidate.request("getattr", owner if value is None else value, self._name)


def class_of(candidate: Asked, name: str, builtin: bool, bases: list[Any], own: list[str], of_class: list[str]) -> Any:
    """The stand-in for a class of the candidate.

    Args:
        candidate: who answers.
        name: its name.
        builtin: whether it is Python's, such as that of functions.
        bases: its bases without `object`: stand-ins, and classes of data and exceptions.
        own: special methods of its objects, "-__hash__" for none; and all other names it defines, if it is data.
        of_class: special methods of the class itself.
    """
    base = next((found for parent in bases if (found := _real_base(parent)) is not None), object)
    metaclass: Any = type
    if not builtin:
        above = tuple(dict.fromkeys(type(parent) for parent in bases if type(parent) is not type))
        metaclass = type("class of classes", above or (type,), _metaclass_names(candidate, of_class))
    names: dict[str, Any] = {
        "__getattr__": lambda self, key: candidate.request("getattr", self, key),
        "__copy__": lambda self: candidate.request("copy", self),
        "__deepcopy__": lambda self, memo: candidate.request("deepcopy", self),
    }
    if not issubclass(base, BaseException):  # whose attributes Python sets
        names["__setattr__"] = lambda self, key, value: candidate.request("setattr", self, key, value)
        names["__delattr__"] = lambda self, key: candidate.request("delattr", self, key)
    if base is object:
        names["__slots__"] = ()
        names["__doc__"] = _Attribute(candidate, "__doc__")
        own = [*own, "__str__", "__repr__", "__eq__"] if not bases else own
        if builtin and name in _KNOWN:
            names["__class__"] = property(lambda self: _KNOWN[name])
    for key in own:
        if key in SPECIAL:
            names[key] = _special(candidate, key, getattr(base, key, None))
        elif key.startswith("__"):
            raise TypeError(f"{key} is none of the special methods")
        elif not key.startswith("-"):
            names[key] = _Attribute(candidate, key)
    if "__eq__" in names and "__hash__" not in names:
        names["__hash__"] = None if "-__hash__" in own else base.__hash__
    return metaclass(name, tuple(bases) or (object,), names)


def _real_base(parent: type) -> type | None:
    return data_class(parent) or next((kind for kind in parent.__mro__ if issubclass(kind, BaseException)), None)


def _metaclass_names(candidate: Asked, of_class: list[str]) -> dict[str, Any]:
    # A class is equal to itself alone: the judge looks classes up.
    names = {key: _special(candidate, key, None) for key in of_class if key in SPECIAL - {*COMPARISONS, "__hash__"}}
    return names | {
        "__call__": lambda cls, *args, **kwargs: candidate.call(cls, args, kwargs),
        "__getattr__": lambda cls, key: candidate.request("getattr", cls, key),
        "__setattr__": lambda cls, key, value: (
            # A class in the making, on which abstract base classes set attributes, is not known yet.
            candidate.request("setattr", cls, key, value) if candidate.knows(cls) else type.__setattr__(cls, key, value)
        ),
        "__delattr__": lambda cls, key: candidate.request("delattr", cls, key),
        "__instancecheck__": lambda cls, value: (
            type.__instancecheck__(cls, value)
            or (candidate.knows(value) and candidate.request("isinstance", value, cls) is True)
        ),
    }


def _special(candidate: Asked, name: str, native: Callable[..., Any] | None) -> Callable[..., Any]:
    """A special method; `native` is that of the data which the object is."""
    if name == "__call__":
        return lambda self, *args, **kwargs: candidate.call(self, args, kwargs)
    if name not in BINARY:
        return lambda self, *operands: candidate.operate(name, self, *operands)

    def method(self: Any, other: Any, *more: Any) -> Any:
        if candidate.may_decide(name, self, other):
            return candidate.operate(name, self, other, *more)
        if native is not None:
            return native(self, other, *more)
        if name == "__contains__":
            return any(item is other or item == other for item in self)
        return NotImplemented

    return method


def value_of(kind: Any, value: Any) -> Any:
    """An object of a stand-in for a class that derives from immutable data, with the data's value."""
    base = data_class(kind)
    if base is None or base is kind or base in CONTAINERS:
        raise TypeError("no class of the candidate's with immutable data")
    parts = value.__reduce__()[1] if isinstance(value, date | time | timedelta) else (value,)
    return base.__new__(kind, *parts)


def object_of(kind: Any) -> Any:
    """An object of a stand-in for a class that is no data."""
    return object.__new__(kind)


def exception_of(kind: Any, arguments: tuple[Any, ...]) -> BaseException:
    """An exception of a stand-in for a class of exceptions."""
    base = next(found for found in kind.__mro__ if found.__module__ == "builtins")
    made = base.__new__(kind, *arguments)
    if not isinstance(made, BaseException):
        raise TypeError("no exception")
    return made
