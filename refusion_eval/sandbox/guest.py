"""The candidate's side: loads the program, then answers the judge's requests with data, one at a time."""

# Everything here shares its process with untrusted code, which may take the process over. It can then lie about its own
# values and do nothing else, because the judge reads data only.

import builtins
import contextlib
import copy
import dataclasses
import functools
import importlib
import io
import operator
import socket
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence, Set
from enum import Enum
from typing import Any

from refusion_eval.sandbox import wire
from refusion_eval.sandbox.containers import CONTAINERS, DATA, data_class, plain
from refusion_eval.sandbox.mirror import SPECIAL
from refusion_eval.sandbox.table import ObjectTable, exception_of

MODULE_NAME = "candidate"  # not "__main__": blocks that read input() must not run
RECURSION_LIMIT = 2000  # room for a program that recurses 1000 deep below our own frames
_MAX_MESSAGE_CHARS = 300


class Guest:
    """Objects of the candidate that the judge, at the other end of `sock`, knows by number, and operations on them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._table = ObjectTable(1, self._describe, self._build)
        self._classes: dict[type, Any] = {}  # packed
        self._library = frozenset(sys.modules)  # the judge has these modules too
        self._module = types.ModuleType(MODULE_NAME)
        self._names: tuple[str, ...] = ()  # that the test reads
        self._bound: dict[str, Any] = {}  # what the judge knows them as
        self._loop: Any = None
        self._nonce = ""
        self._printed = io.StringIO()
        self._one_at_a_time = threading.RLock()  # a program's threads may call functions of the test
        self._operations: dict[str, Callable[..., Any]] = {
            "load": self._load,
            "call": lambda function, args, kwargs: function(*args, **dict(kwargs)),
            "getattr": getattr,
            "setattr": setattr,
            "delattr": delattr,
            "isinstance": isinstance,
            "content": _content,
            "fields": lambda value: tuple((field.name, field.init) for field in dataclasses.fields(value)),
            "await": self._await,
            "copy": copy.copy,
            "deepcopy": copy.deepcopy,
            "special": lambda value, name, *operands: getattr(type(value), name)(value, *operands),
        }

    def serve(self) -> None:
        wire.send(self._sock, ["ready"])
        with contextlib.suppress(wire.PeerGone):
            while True:
                self._answer(*self._receive())

    def _receive(self) -> tuple[str, str, list[Any], bool]:
        nonce, name, packed, entries, forgotten, captures = wire.receive(self._sock)
        self._table.forget(forgotten)
        return nonce, name, self._table.unpack_all(packed, entries), captures

    def _send(self, nonce: str, how: str, *values: Any) -> None:
        bound = {name: self._module.__dict__[name] for name in self._names if name in self._module.__dict__}
        changed = {name: value for name, value in bound.items() if value is not self._bound.get(name, self)}
        self._bound |= changed
        printed = self._printed.getvalue()
        self._printed.seek(0)
        self._printed.truncate()
        packed, entries = self._table.pack_all((tuple(changed.items()), *values))
        wire.send(self._sock, [nonce, how, packed, entries, printed])

    def _answer(self, nonce: str, name: str, operands: list[Any], captures: bool) -> None:
        outer_nonce, self._nonce = self._nonce, nonce
        outer_stdout = sys.stdout
        if captures:
            sys.stdout = self._printed
        try:
            answer = ["ok", self._operations[name](*operands)]
        except BaseException as error:  # noqa: BLE001 - a failure of the candidate becomes a record, sys.exit() too
            # A traceback would keep alive all that its frames hold.
            answer = ["raised", BaseException.with_traceback(error, None), *_describe_error(error)]
        finally:
            if captures:
                sys.stdout = outer_stdout
            self._nonce = outer_nonce
        with self._one_at_a_time:
            try:
                self._send(nonce, *answer)
            except wire.FrameTooLarge as error:
                wire.send(self._sock, [nonce, "oversized", [["t"], None, "", str(error)], [], ""])
            except (LookupError, AttributeError, TypeError) as error:  # an object that lacks a part
                self._send(nonce, "raised", error.with_traceback(None), *_describe_error(error))

    def _ask(self, how: str, lent: Any, args: tuple[Any, ...], kwargs: tuple[Any, ...]) -> Any:
        with self._one_at_a_time:
            self._send(self._nonce, "ask", how, lent, args, kwargs)
            while True:
                nonce, name, operands, captures = self._receive()
                if name == "told":
                    return operands[0]
                if name == "raise":
                    raise operands[0]
                self._answer(nonce, name, operands, captures)

    def _load(self, source: str, names: tuple[str, ...], imports: str) -> None:
        try:
            code = compile(source, f"{MODULE_NAME}.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise SyntaxError(str(error)) from None
        sys.modules[MODULE_NAME] = self._module
        sys.setrecursionlimit(RECURSION_LIMIT)
        self._names = names
        exec(code, self._module.__dict__)  # the purpose of this process
        if imports:
            with contextlib.suppress(ImportError):
                exec(imports, self._module.__dict__)

    def _await(self, value: Any) -> tuple[Any, bool]:
        """Run an awaitable to its end in the program's own event loop; says also whether it had to wait there."""
        import asyncio  # takes longer than most programs

        async def wait_for() -> Any:
            return await value

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        task = self._loop.create_task(wait_for())
        waited: list[bool] = []
        self._loop.call_soon(lambda: waited.append(not task.done()))  # after the first step of the task
        return self._loop.run_until_complete(task), waited[0]

    def _describe(self, value: Any) -> Any:
        kind = type(value)
        if issubclass(kind, type):
            return self._class(value)
        base = data_class(kind)
        if base in CONTAINERS:
            return self._table.add_container(value, base, self._mirrored(kind))
        if base is not None:
            return self._table.add(value, "v", self._mirrored(kind), self._table.pack(plain(value)))
        if kind is memoryview:
            parts = (value.tobytes(), value.format, value.shape, value.readonly)
            return self._table.add(value, "m", *map(self._table.pack, parts))
        mirrored = self._mirrored(kind)
        if issubclass(kind, BaseException):
            return self._table.add(value, "x", mirrored, self._table.pack(value.args))
        return self._table.add(value, "h", mirrored)

    def _class(self, kind: type) -> Any:
        return self._shared(kind) or self._mirrored(kind)

    def _shared(self, kind: type) -> Any:
        """Pack a class of data or exceptions by its name; None if the judge does not have it."""
        if kind in DATA or issubclass(kind, BaseException):
            if kind.__module__ == "builtins":
                return ["T", kind.__name__]
            if kind.__module__ in self._library and vars(sys.modules[kind.__module__]).get(kind.__name__) is kind:
                return ["n", kind.__module__, kind.__name__]
        return None

    def _mirrored(self, kind: type) -> Any:
        """Pack a class by what the judge needs to stand in for it."""
        if kind not in self._classes:
            shared = self._shared(kind)
            bases = [shared] if shared else [self._class(base) for base in kind.__bases__ if base is not object]
            above = kind.__mro__[: kind.__mro__.index(data_class(kind) or object)]
            names = [name for base in above for name in vars(base) if not name.startswith("__")]
            own = [*_special_names(kind), *(names if data_class(kind) else [])]
            builtin = kind.__module__ == "builtins"
            entry = ["k", str(kind.__name__), builtin, bases, own, _special_names(type(kind))]
            self._classes[kind] = self._table.add(kind, *entry)
        return self._classes[kind]

    def _build(self, tag: str, rest: list[Any]) -> Any:
        if tag == "n":
            module, name = rest
            return operator.attrgetter(name)(importlib.import_module(module))
        if tag == "zo":
            return wire.unpack(tag, rest)
        if tag == "call":

            def function(*args: Any, **kwargs: Any) -> Any:
                return self._ask("call", function, args, tuple(kwargs.items()))

            function.__name__, function.__doc__ = rest
            return function
        if tag == "next":
            return _Iterator(self._ask)
        return exception_of(vars(builtins)[rest[0]], rest[1:])


class _Iterator:  # of the test
    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def __iter__(self) -> "_Iterator":
        return self

    def __next__(self) -> Any:
        return self._ask("next", self, (), ())


@functools.cache
def _special_names(kind: type) -> list[str]:
    """Special methods of a class's objects that are not those of every object or data; "-__hash__" for no hash."""
    of_all = (type, *(data_class(kind) or object).__mro__)
    owners = {name: next((base for base in kind.__mro__ if name in vars(base)), object) for name in SPECIAL}
    return [
        name if vars(owner)[name] is not None else f"-{name}"
        for name, owner in owners.items()
        if owner not in of_all and not (issubclass(owner, BaseException) and owner.__module__ == "builtins")
    ]


for _kind in (types.FunctionType, type):  # of every program, so found once for all
    _special_names(_kind)


def _content(value: Any) -> tuple[str, Any] | None:
    """What an object holds whose class says how it compares, with the kind of content; None for other objects."""
    kind = type(value)
    if getattr(kind, "__eq__", None) is object.__eq__:
        return None
    if dataclasses.is_dataclass(kind):
        return "fields", tuple(getattr(value, field.name) for field in dataclasses.fields(kind) if field.compare)
    if isinstance(value, Enum):
        return "member", value.name
    if isinstance(value, Mapping):
        return "items", {key: value[key] for key in value}
    if isinstance(value, Set):
        return "items", set(value)
    return ("items", [value[index] for index in range(len(value))]) if isinstance(value, Sequence) else None


def _describe_error(error: BaseException) -> tuple[str, str]:
    try:
        text = str(error)[:_MAX_MESSAGE_CHARS]
    except Exception:  # noqa: BLE001 - a hostile __str__
        text = ""
    return str(type(error).__name__), text
