"""The judge's end of the connection to the candidate: requests, and what the candidate may ask while one is open."""

import builtins
import secrets
import socket
import sys
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType, TracebackType
from typing import Any, NoReturn

from refusion_eval.sandbox import mirror, wire
from refusion_eval.sandbox.analysis import TEST_FILE, Case
from refusion_eval.sandbox.containers import CONTAINERS, DATA, data_class
from refusion_eval.sandbox.table import Table

_MAX_TEXT_CHARS = 300
_NUM_VALUES = {"ok": 1, "raised": 3, "exited": 3, "oversized": 3, "ask": 4}  # of each form of answer


_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, MethodWrapperType, partial, type)


class Broken(BaseException):
    """A fault that ends the check, whatever the test does next. It is no Exception, so that no test can swallow it.

    `reason` is a key of `result.STATUS_OF_REASON`.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class Candidate:
    """The candidate at the other end of `sock`; what it binds the `wanted` names to, `namespace` gives to the test.

    Attributes:
        broken: the first fatal fault; once set, the check cannot pass.
        remote_errors: exceptions of the candidate that were raised again here, each with its class's name and message.
        compared_with_data: whether an object that is not data was compared with data.
        failed_inside: the first failed assertion in a function of the test that the candidate called.
    """

    def __init__(self, sock: socket.socket, case: Case, wanted: list[str], namespace: dict[str, Any]) -> None:
        self._sock = sock
        self._namespace = namespace
        self._case = case
        self._wanted = frozenset(wanted)
        self._bound: dict[str, Any] = {}  # what the candidate has bound these names to
        self._table = Table(-1, self._describe, self._build)
        self._lent: dict[int, str] = {}  # numbers of the test's objects that the candidate may use, and how
        self._made: set[int] = set()  # numbers of the objects that the test made of the classes it names
        self.broken: Broken | None = None
        self.remote_errors: list[tuple[BaseException, str]] = []
        self.compared_with_data = False
        self.failed_inside: AssertionError | None = None

    def wait_until_ready(self) -> None:
        """Wait for the sandbox to be locked down; nothing of the candidate has run before that.

        Raises RuntimeError if the sandbox could not be set up.
        """
        try:
            first = wire.receive(self._sock)
        except wire.WireError as error:
            raise RuntimeError(f"the sandbox did not start: {error}") from None
        if first != ["ready"]:
            raise RuntimeError(f"the sandbox did not start: {str(first)[:300]}")

    def load(self, source: str) -> None:
        """Have the program run; what it binds the wanted names to, now or later, is found in the namespace.

        Raises:
            SyntaxError: it is no program.
            Broken: as `request`.
            Exception: what running it raised.
        """
        self.request("load", source, tuple(self._wanted), self._case.imports)

    def request(self, name: str, *operands: Any) -> Any:
        """Ask for one operation and return its result.

        Raises:
            Broken: the candidate is gone, sends malformed answers or sends too much, or only it could tell the result.
            Exception: what the operation raised.
        """
        if self.broken:
            raise self.broken
        try:
            how, result, *about = self._exchange(name, operands)
        except (wire.PeerGone, OSError):
            self._fail("exited", "the program ended before the test did")
        except (wire.FrameTooLarge, MemoryError) as error:
            self._fail("output_limit", f"a value is too large {error}".rstrip())
        except (wire.WireError, RecursionError) as error:
            self._fail("protocol_error", str(error))
        if how == "ok":
            return result
        text = _printable(": ".join(map(str, about)))
        if how == "oversized":
            self._fail("output_limit", f"a value is too large: {text}")
        if how == "exited" or not isinstance(result, Exception):
            self._fail("exited", text)
        if isinstance(result, StopIteration) and not (name == "special" and operands[1] == "__next__"):
            # As in a generator (PEP 479): else it would end a loop of the test, such as all(map(...)), unseen.
            result = RuntimeError(text)
        self.remote_errors.append((result, text))
        raise result

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function or a class of the candidate."""
        result = self.request("call", function, args, tuple(kwargs.items()))
        named = any(self._namespace.get(name) is function for name in self._case.analysis.classes)
        if named and isinstance(function, type) and type.__instancecheck__(function, result):
            self._note_made(result)
        return result

    def operate(self, name: str, value: Any, *operands: Any) -> Any:
        """Ask for a special method of an object."""
        if name == "__exit__":
            *error, trace = operands
            swallows = self.request("special", value, name, *error, None)
            return swallows if _is_raised_by(trace, self._case.raises) else False
        result = self.request("special", value, name, *operands)
        if name in mirror.OPERATORS and self._was_made(value) and type(result) is type(value):
            self._note_made(result)
        return result

    def may_decide(self, name: str, value: Any, other: Any) -> bool:
        """Whether the candidate is asked how its object relates to another.

        It is where both are its own and no data, or where the test itself made the object of a class that it names.
        """
        strange = data_class(type(value)) is None
        if self._was_made(value) and (self.knows(other) or name not in mirror.COMPARISONS):
            return True
        if not self.knows(other):
            self.compared_with_data |= strange
            return False
        return (strange and data_class(type(other)) is None) or self._was_made(other)

    def knows(self, value: Any) -> bool:
        """Whether an object is one of the candidate's, and not just data."""
        number = self._table.number_of(value)
        return number is not None and number > 0 and type(value) not in CONTAINERS

    def _was_made(self, value: Any) -> bool:
        return self._table.number_of(value) in self._made

    def _note_made(self, value: Any) -> None:
        number = self._table.number_of(value)
        if number is not None:
            self._made.add(number)

    def _exchange(self, name: str, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        """Send a request; returns its answer: ("ok", result) or (how, exception, class name, message)."""
        nonce = secrets.token_hex(8)
        self._send(nonce, name, operands)
        while True:
            reply = wire.receive(self._sock)
            if not (isinstance(reply, list) and len(reply) == 5 and reply[0] == nonce):
                raise wire.WireError("an answer to no question")
            how, packed, entries, printed = reply[1:]
            if not isinstance(printed, str) or how not in _NUM_VALUES:
                raise wire.WireError("an answer of no known form")
            names, *values = self._table.unpack_all(packed, entries)
            if name != "special" or operands[1] not in mirror.OPERATORS:
                self._made -= self._table.mentioned  # else a function could return them instead of a number
            self._table.mentioned.clear()
            if len(values) != _NUM_VALUES[how]:
                raise wire.WireError("an answer of no known form")
            self._bind(names)
            if printed:
                sys.stdout.write(printed)
            if how != "ask":
                return how, *values
            self._tell(nonce, *values)

    def _send(self, nonce: str, name: str, values: tuple[Any, ...]) -> None:
        forgotten = self._table.forget_unused(self._lent)
        packed, entries = self._table.pack_all(values)
        wire.send(self._sock, [nonce, name, packed, entries, forgotten, sys.stdout is not sys.__stdout__])

    def _bind(self, names: Any) -> None:
        """Take over what names of the test are bound to now, and no other names."""
        try:
            bound = dict(names)
        except (TypeError, ValueError):
            raise wire.WireError("malformed names") from None
        if not bound.keys() <= self._wanted:
            raise wire.WireError("names that nobody asked for")
        for name, value in bound.items():
            if self._namespace.get(name) is self._bound.get(name):  # else the test has bound it since
                self._namespace[name] = self._bound[name] = value

    def _tell(self, nonce: str, how: Any, lent: Any, args: Any, kwargs: Any) -> None:
        """Let the candidate use a function or an iterator that the test has given it, and nothing else."""
        number = self._table.number_of(lent)
        if number is None or self._lent.get(number) != how:
            raise wire.WireError("it was given no such thing")
        try:
            result = lent(*args, **dict(kwargs)) if how == "call" else next(lent)
        except Exception as error:  # noqa: BLE001 - the program may expect it
            if isinstance(error, AssertionError):
                self.failed_inside = self.failed_inside or error
            self._send(nonce, "raise", (error,))
        else:
            self._send(nonce, "told", (result,))

    def _describe(self, value: Any) -> Any:
        """Pack an object of the test that is no plain data."""
        if (name := _name_in_library(value)) is not None:
            return ["n", *name]
        if isinstance(value, BaseException):
            kind = next(base for base in type(value).__mro__ if base.__module__ == "builtins")
            return self._lend(value, "error", kind.__name__, str(value))
        base = data_class(type(value))
        if base in CONTAINERS:
            return self._table.add_container(value, base, None)
        if base is not None:
            return self._table.pack_as(value, base)
        if isinstance(value, Iterator):
            return self._lend(value, "next")
        if isinstance(value, _FUNCTIONS):
            return self._lend(value, "call", str(getattr(value, "__name__", "function")))
        return self._fail("inseparable", f"the test passes an object of a {type(value).__name__} to the program")

    def _lend(self, value: Any, how: str, *entry: Any) -> Any:
        reference = self._table.add(value, how, *entry)
        self._lent[reference[1]] = how
        return reference

    def _build(self, tag: str, rest: list[Any]) -> Any:
        """Make the stand-in for an object of the candidate."""
        unpack = self._table.unpack
        if tag == "n":
            module, name = rest
            found = vars(sys.modules[module])[name] if module.partition(".")[0] in sys.stdlib_module_names else None
            if found not in DATA and not (isinstance(found, type) and issubclass(found, BaseException)):
                raise wire.WireError("no class of data")
            return found
        if tag == "k":
            name, builtin, bases, own, of_class = rest
            return mirror.class_of(self, name, bool(builtin), [unpack(base) for base in bases], own, of_class)
        kind, *value = map(unpack, rest)
        if tag == "v":
            return mirror.value_of(kind, *value)
        if tag == "x":
            return mirror.exception_of(kind, *value)
        if tag == "h":
            return mirror.object_of(kind)
        raise wire.WireError("unknown entry")

    def _fail(self, reason: str, detail: str) -> NoReturn:
        self.broken = Broken(reason, detail)
        raise self.broken


def _name_in_library(value: Any) -> tuple[str, str] | None:
    """Module and name of a function or class of the standard library, which the candidate has too."""
    owner = getattr(value, "__objclass__", value)
    module, name = getattr(owner, "__module__", None), getattr(value, "__qualname__", None)
    if module not in sys.stdlib_module_names or not isinstance(name, str):
        return None
    found: Any = sys.modules.get(module, builtins)
    for part in name.split("."):
        found = getattr(found, part, None)
    return (module, name) if found is value else None


def _is_raised_by(trace: TracebackType | None, lines: frozenset[int]) -> bool:
    """Whether an exception comes from one of these lines of the test."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename == TEST_FILE and trace.tb_lineno in lines


def _printable(text: str) -> str:
    """A program's text, fit for a terminal and a table."""
    return "".join(char if char.isprintable() else " " for char in text[:_MAX_TEXT_CHARS])
