"""The judge's stand-ins for the candidate's classes and objects."""

# A class of the candidate becomes a class here, with stand-ins for its bases, so that `isinstance`, `type` and `except`
# work as in one process; it has the special methods that the class has there, and no others.
# The judge asks no object of a program how it relates to the test's data (is it equal, does it contain, what is the
# difference?), because it could claim what the test expects; and the test's data is not told to it. So an object whose
# class derives from data is that data here, past all methods, and an object of another class is compared by its
# content, if it has one. An object answers questions about itself, unless its class of data can (`Candidate.is_asked`).
# docs/explanations/sandbox.md has all rules.

import contextlib
import dataclasses
import inspect
import types
from collections.abc import Callable, Generator
from datetime import date, time, timedelta
from typing import Any

from refusion_eval.sandbox.containers import CONTAINERS, DATA, data_class, plain

# fmt: off
COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_ARITHMETIC = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "lshift", "rshift", "and", "or",
    "xor",
)
BINARY = (*COMPARISONS, "__contains__", *(f"__{side}{name}__" for side in ("", "r", "i") for name in _ARITHMETIC))
_IN_PLACE = frozenset(f"__i{name}__" for name in _ARITHMETIC)
# Operators whose result may be of the same kind as their operands.
OPERATORS = frozenset((
    *BINARY[len(COMPARISONS) + 1 :], "__abs__", "__enter__", "__invert__", "__neg__", "__pos__", "__round__",
))
CONVERSIONS = (  # whose answer is a plain value that only the object knows
    "__bool__", "__bytes__", "__ceil__", "__complex__", "__float__", "__floor__", "__hash__", "__index__", "__int__",
    "__len__", "__round__", "__trunc__",
)
UNARY = (
    *CONVERSIONS, "__abs__", "__aenter__", "__aexit__", "__aiter__", "__anext__", "__delitem__", "__enter__",
    "__exit__", "__format__", "__getitem__", "__invert__", "__iter__", "__missing__", "__neg__", "__next__", "__pos__",
    "__repr__", "__reversed__", "__setitem__", "__str__",
)
# fmt: on
SPECIAL = frozenset((*BINARY, *UNARY, "__await__", "__call__"))
_METHODS_OF_DATA = frozenset(name for kind in DATA for name in dir(kind) if not name.startswith("_"))
# What objects of these classes are here, by their names there.
_KNOWN = {
    kind.__name__: kind
    for kind in (
        types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.GeneratorType, types.ModuleType,
        types.CoroutineType, types.AsyncGeneratorType, map, filter, zip, enumerate, reversed,
    )
}  # fmt: skip


Asked = Any  # the candidate, as its stand-ins see it: `proxy.Candidate`


class _Attribute:  # that is read and written in the guest
    def __init__(self, candidate: Asked, name: str, base: type = object) -> None:
        self._candidate = candidate
        self._name = name
        # A method that data of the class `base` has is the judge's own, because its arguments may be what the test
        # expects: `issubset`, say. That method is the candidate's only of an object that the test made.
        self._native = inspect.getattr_static(base, name, None) if base in DATA else None

    def __get__(self, value: Any, owner: Any) -> Any:
        native = None if value is None or self._candidate.was_made(value) else self._native
        if native is None or callable(native):
            attribute = self._candidate.request("getattr", owner if value is None else value, self._name)
            if native is None or not callable(attribute):
                return attribute
            self._candidate.note_inseparable(f"the program's class has a method {self._name} of its own")
        return native.__get__(value, type(value)) if hasattr(native, "__get__") else native


def class_of(candidate: Asked, name: str, builtin: bool, bases: list[Any], own: list[str], of_class: list[str]) -> Any:
    # `own` are special methods of its objects, "-__hash__" for none; and all other names it defines, if it is data.
    base = next((real for parent in bases if (real := _real_base(parent)) is not None), object)
    metaclass: Any = type
    if not builtin:
        above = tuple(dict.fromkeys(type(parent) for parent in bases if type(parent) is not type))
        metaclass = type("class of classes", above or (type,), _metaclass_names(candidate, of_class))
    names: dict[str, Any] = {
        "__getattr__": lambda self, key: _attribute(candidate, self, key),
        "__copy__": lambda self: candidate.request("copy", self),
        "__deepcopy__": lambda self, memo: candidate.request("deepcopy", self),
    }
    if not issubclass(base, BaseException):  # whose attributes Python sets
        names["__setattr__"] = lambda self, key, value: (
            # Python code of the library sets attributes of an object in the making.
            candidate.request("setattr", self, key, value)
            if candidate.knows(self)
            else object.__setattr__(self, key, value)
        )
        names["__delattr__"] = lambda self, key: candidate.request("delattr", self, key)
    if base is object:
        names["__slots__"] = ()
        names["__doc__"] = _Attribute(candidate, "__doc__")
        own = [*own, "__str__", "__repr__", "__eq__"] if not bases else own
        kind = _KNOWN.get(name) if builtin else None
        if kind is not None:
            names["__class__"] = property(lambda self: kind)
        if kind is types.FunctionType:
            names["__get__"] = lambda self, value, owner=None: self if value is None else types.MethodType(self, value)
        if kind is types.CoroutineType:
            names["send"] = lambda self, value: next(_awaiting(candidate, self))
    for key in own:
        if key in SPECIAL:
            names[key] = _special(candidate, key, base)
        elif key.startswith("__"):
            raise TypeError(f"{key} is none of the special methods")
        elif not key.startswith("-"):
            names[key] = _Attribute(candidate, key, base)
    if base in DATA:
        names |= {key: _special(candidate, key, base) for key in BINARY if hasattr(base, key)}
        if base.__hash__ is not None:
            names["__hash__"] = base.__hash__
    if "__eq__" in names and "__hash__" not in names:
        names["__hash__"] = None if "-__hash__" in own else base.__hash__
    return metaclass(name, tuple(bases) or (object,), names)


def _real_base(parent: type) -> type | None:
    return data_class(parent) or next((kind for kind in parent.__mro__ if issubclass(kind, BaseException)), None)


def _metaclass_names(candidate: Asked, of_class: list[str]) -> dict[str, Any]:
    # A class is equal to itself alone: the judge looks classes up.
    names = {key: _special(candidate, key, object) for key in of_class if key in SPECIAL - {*COMPARISONS, "__hash__"}}
    return names | {
        "__call__": lambda cls, *args, **kwargs: candidate.call(cls, args, kwargs),
        "__getattr__": lambda cls, key: _attribute(candidate, cls, key),
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


def _attribute(candidate: Asked, value: Any, name: str) -> Any:
    if name != "__dataclass_fields__":
        attribute = candidate.request("getattr", value, name)
        if name in _METHODS_OF_DATA and callable(attribute) and not candidate.is_used_by_test():
            return candidate.without_arguments(name, attribute)
        return attribute
    # The functions of `dataclasses` know fields by objects of that module, which the judge has to make for itself. The
    # library writes their names into source text, so they have to be plain names.
    fields = candidate.request("fields", value)
    if not all(type(key) is str and key.isidentifier() for key, _ in fields):
        raise TypeError("fields whose names are not names")
    made = dataclasses.make_dataclass(
        "fields", [(key, object, dataclasses.field(init=init is True)) for key, init in fields]
    )
    return vars(made)[name]


def _awaiting(candidate: Asked, value: Any) -> Generator[None, None, Any]:
    """Steps of `await value`: there are none, because the candidate runs it to its end."""
    return candidate.wait_for(value)
    yield


def _special(candidate: Asked, name: str, base: type) -> Callable[..., Any]:
    """A special method of objects whose class of data or exceptions is `base`."""
    native = getattr(base, name, None) if base in DATA else None
    if name == "__call__":
        return lambda self, *args, **kwargs: candidate.call(self, args, kwargs)
    if name == "__await__":
        return lambda self: _awaiting(candidate, self)
    if name not in BINARY:

        def answer(self: Any, *operands: Any) -> Any:
            if native is None or candidate.is_asked(self):
                return candidate.operate(name, self, *operands)
            return native(self, *operands)

        return answer

    def relate(self: Any, other: Any, *more: Any) -> Any:
        if candidate.may_decide(name, self, other):
            return candidate.operate(name, self, other, *more)
        if native is not None:
            of_other = plain(other) if candidate.knows(other) else other
            return native(self if name in _IN_PLACE else plain(self), of_other, *more)
        if name == "__contains__":
            return any(item is other or item == other for item in self)
        return candidate.compare(name, self, other) if name in COMPARISONS else NotImplemented

    return relate


def value_of(kind: Any, value: Any) -> Any:
    """An object of a stand-in for a class that derives from immutable data, with the data's value."""
    base = data_class(kind)
    if base is None or base is kind or base in CONTAINERS:
        raise TypeError("not a class of the candidate's with immutable data")
    parts = value.__reduce_ex__(4)[1] if isinstance(value, date | time | timedelta) else (value,)
    return base.__new__(kind, *parts)


def exception_of(kind: Any, arguments: tuple[Any, ...]) -> BaseException:
    base = next(parent for parent in kind.__mro__ if parent.__module__ == "builtins")
    made = base.__new__(kind, *arguments)
    if not isinstance(made, BaseException):
        raise TypeError("not an exception")
    with contextlib.suppress(TypeError):  # the arguments may be fewer than the base takes
        base.__init__(made, *arguments)  # the code of a SystemExit, say
    return made
