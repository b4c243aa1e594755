"""The judge's end of the connection to the candidate: requests, and what the candidate may ask meanwhile."""

import builtins
import contextlib
import operator
import secrets
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType, TracebackType
from typing import Any, NoReturn

from refusion_eval.sandbox import mirror, wire
from refusion_eval.sandbox.analysis import HELPERS_FILE, TEST_FILE, Case
from refusion_eval.sandbox.containers import CONTAINERS, DATA, data_class, plain
from refusion_eval.sandbox.table import ONLY_OURS, ObjectTable

_NUM_VALUES = {"ok": 1, "raised": 3, "oversized": 3, "ask": 4}  # of each form of answer
# Loaded before any test, so that a program can name no exception that means something to a framework of tests.
_LIBRARY = frozenset(name for name in sys.modules if name.partition(".")[0] in sys.stdlib_module_names)
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, MethodWrapperType, partial, type)


class Broken(BaseException):  # not an Exception, so that no test can swallow it
    """A fault that ends the check, whatever the test does next; its arguments are those of `judge.JudgeResult`."""


class Candidate:
    """The candidate at the other end of `sock`; `namespace` gives the test what it binds the `wanted` names to."""

    def __init__(
        self,
        sock: socket.socket,
        case: Case,
        wanted: list[str],
        namespace: dict[str, Any],
        asks_data: bool,
        num_calls: memoryview,
    ) -> None:
        self._sock = sock
        self._namespace = namespace
        self._case = case
        self._wanted = frozenset(wanted)
        self._bound: dict[str, Any] = {}  # what the candidate has bound these names to
        self._table = ObjectTable(-1, self._describe, self._build)
        self._lent: dict[int, str] = {}  # numbers of the test's objects that the candidate may use, and how
        self._made: set[int] = set()  # numbers of the objects that the test made of the classes it names
        self._mentioned: dict[int, int] = {}  # how often the last answer has mentioned objects
        self._asks_data = asks_data
        self._num_calls = num_calls  # in [0], for the watchdog
        self._told: dict[tuple[Any, ...], Any] = {}  # what objects gave for themselves since the last other request
        self._one_at_a_time = threading.RLock()  # threads of the test may use the program
        self._num_waiting = 0
        self.broken: Broken | None = None
        self.remote_errors: list[tuple[BaseException, str]] = []  # raised again here, each with class name and message
        self.compared_with_data = False
        self.failed_inside = ""  # where an assertion of the test failed that the program had called
        self.passed_over = False  # whether data told something about itself past a method that its class has for that
        self.inseparable = ""

    def load(self, source: str) -> None:
        """Have the program run once the guest is locked down; raises as `request`, or SyntaxError."""
        try:
            ready: Any = wire.receive(self._sock)
        except (wire.WireError, OSError) as error:
            ready = error
        if ready != ["ready"]:
            raise Broken("sandbox_error", f"the sandbox did not start: {str(ready)[:300]}")
        self.request("load", source, tuple(self._wanted), self._case.imports)

    def request(self, name: str, *operands: Any) -> Any:
        """Ask for one operation; raises what it raised, or Broken if the candidate is gone or its answer malformed."""
        if self.broken:
            raise self.broken
        self._num_waiting += 1
        with self._one_at_a_time:
            self._num_waiting -= 1
            return self._request(name, operands)

    def _request(self, name: str, operands: tuple[Any, ...]) -> Any:
        if not (name == "content" or (name == "special" and operands[1] in mirror.CONVERSIONS)):
            self._told.clear()
        self._forget_errors()
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
        text = ": ".join(map(str, about))
        if how == "oversized":
            self._fail("output_limit", f"a value is too large: {text}")
        if not isinstance(result, Exception) and not (isinstance(result, BaseException) and self._expects(result)):
            self._fail("exited", text)
        of_next = name == "special" and operands[1] == "__next__"
        if isinstance(result, StopIteration) and not (of_next or "StopIteration" in self._case.foreign):
            # As in a generator (PEP 479): else it would end a loop of the test, such as all(map(...)), unseen.
            result = RuntimeError(text)
        self.remote_errors.append((result, text))
        raise result

    def _expects(self, error: BaseException) -> bool:
        """Whether the test names a class of an exit as a class, other than that of all exceptions."""
        named = [self._namespace.get(name, getattr(builtins, name, None)) for name in self._case.classes]
        return any(kind is one for kind in type(error).__mro__ for one in named if kind not in (BaseException, object))

    def _forget_errors(self) -> None:
        # Each would keep alive the frames of its traceback, and as an AttributeError the object without the attribute.
        errors = self.remote_errors
        for index in reversed(range(len(errors))):
            BaseException.with_traceback(errors[index][0], None)
            in_table = self._table.number_of(errors[index][0]) is not None
            if sys.getrefcount(errors[index][0]) <= ONLY_OURS + in_table:
                del errors[index]

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        newest = self._table.newest
        self._num_calls[0] += 1
        result = self.request("call", function, args, tuple(kwargs.items()))
        number = self._table.number_of(result) or 0
        is_new = number > newest and self._mentioned[number] == 1  # else a list or an attribute may hold it, too
        named = any(self._namespace.get(name) is function for name in self._case.classes)
        if is_new and named and isinstance(function, type) and type.__instancecheck__(function, result):
            self._made.add(number)
        return result

    def operate(self, name: str, value: Any, *operands: Any) -> Any:
        if name in ("__exit__", "__aexit__"):
            *error, trace = operands
            swallows = self.request("special", value, name, *error, None)
            seen = _is_raised_by(trace, self._case.raises)
            return self._and_waited(swallows, seen) if name == "__aexit__" else seen and swallows
        if name in mirror.CONVERSIONS and not self.was_made(value):
            question = (self._table.number_of(value), name, *map(repr, operands))
            return self._ask_once(question, "special", value, name, *operands)
        result = self.request("special", value, name, *operands)
        if name in mirror.OPERATORS and self.was_made(value) and type(result) is type(value):
            self._made.add(self._table.number_of(result) or 0)
        return result

    async def _and_waited(self, swallows: Any, seen: bool) -> Any:
        return await swallows and seen

    def wait_for(self, value: Any) -> Any:
        """Have an awaitable run to its end in an event loop of the candidate; returns its result."""
        result, waited = self.request("await", value)
        if waited:
            import asyncio  # takes longer than most tests

            with contextlib.suppress(RuntimeError):  # no event loop
                if len(asyncio.all_tasks()) > 1:
                    self.note_inseparable("a coroutine of the program waits for others in the event loop of the test")
        return result

    def is_asked(self, value: Any) -> bool:
        """Whether what data tells about itself, such as its length, is asked of the candidate's class."""
        if self.was_made(value):
            return True
        # Another object is asked only if the test itself uses the method, not code of the library on its behalf, and
        # only when its plain value has led to no success (`pool`).
        if not self.is_used_by_test():
            return False
        self.passed_over = True
        return self._asks_data

    def is_used_by_test(self) -> bool:
        """Whether the test itself uses a stand-in, of which this is called by a method of a method."""
        return sys._getframe(3).f_code.co_filename in (TEST_FILE, HELPERS_FILE)

    def without_arguments(self, name: str, method: Any) -> Any:
        """A method that code of the library uses on the test's behalf, and that must not be told the test's data."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if args or kwargs:
                self._fail("inseparable", f"the library tells data of the test to the method {name} of the program")
            return method()

        return call

    def note_inseparable(self, why: str) -> None:
        """Note what may be otherwise in one process. It counts if the test does not pass."""
        self.inseparable = self.inseparable or why

    def may_decide(self, name: str, value: Any, other: Any) -> bool:
        """Whether the candidate is asked how its object relates to another."""
        # It is where the test itself made both objects of classes that it names; and for operators other than
        # comparisons, where it made the first one and the other is the test's. Else it is where both are the
        # candidate's and their values are unknown here: neither is data, or has a content to be compared.
        is_comparison = name in mirror.COMPARISONS
        if not self.knows(other):
            return self.was_made(value) and not is_comparison
        if self.was_made(value) and self.was_made(other):
            return True
        if data_class(type(value)) or data_class(type(other)):
            return False
        return not is_comparison or self._content(value) is None

    def compare(self, name: str, value: Any, other: Any) -> Any:
        """Compare the content of an object that is not data with data, or with that of another object."""
        kind, content = self._content(value) or ("", None)
        with_object = self.knows(other) and data_class(type(other)) is None
        of_other: tuple[str, Any] | None = ("items", plain(other))
        if with_object:
            of_other = self._content(other)
            related = issubclass(type(value), type(other)) or issubclass(type(other), type(value))
            of_other = of_other if related or kind == "items" else None
        elif type(content) is list and isinstance(other, tuple):
            content = tuple(content)
        if of_other is None or of_other[0] != kind:
            self.compared_with_data |= not with_object
            return NotImplemented
        return getattr(operator, name.strip("_"))(content, of_other[1])

    def _content(self, value: Any) -> tuple[str, Any] | None:
        content = self._ask_once((self._table.number_of(value), "content"), "content", value)
        return content if type(content) is tuple and len(content) == 2 else None

    def _ask_once(self, question: tuple[Any, ...], name: str, *operands: Any) -> Any:
        """The answer to a question about an object alone, which stays the same until the test uses the program."""
        if question not in self._told:
            self._told[question] = self.request(name, *operands)
        return self._told[question]

    def knows(self, value: Any) -> bool:
        number = self._table.number_of(value)
        return number is not None and number > 0 and type(value) not in CONTAINERS

    def was_made(self, value: Any) -> bool:
        return self._table.number_of(value) in self._made

    def _exchange(self, name: str, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        """The answer to a request: ("ok", result) or (how, exception, class name, message)."""
        nonce = secrets.token_hex(8)
        self._send(nonce, name, operands)
        while True:
            reply = wire.receive(self._sock)
            if not (isinstance(reply, list) and len(reply) == 5 and reply[0] == nonce):
                raise wire.WireError("an answer to no question")
            how, packed, entries, printed = reply[1:]
            if not isinstance(printed, str) or how not in _NUM_VALUES:
                raise wire.WireError("an answer of an unknown form")
            names, *values = self._table.unpack_all(packed, entries)
            if name != "special" or operands[1] not in mirror.OPERATORS:
                self._made -= self._table.mentioned.keys()  # else a function could return them instead of a number
            self._mentioned = dict(self._table.mentioned)
            self._table.mentioned.clear()
            if len(values) != _NUM_VALUES[how]:
                raise wire.WireError("an answer of an unknown form")
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
            if name in self._case.own and name in self._bound:
                continue  # the test binds it, maybe to an object that the candidate has as well
            if self._namespace.get(name, self) is self._bound.get(name, self):  # else the test has bound it since
                self._namespace[name] = self._bound[name] = value

    def _tell(self, nonce: str, how: Any, lent: Any, args: Any, kwargs: Any) -> None:
        """Let the candidate use a function or an iterator that the test has given it, and nothing else."""
        number = self._table.number_of(lent)
        if number is None or self._lent.get(number) != how:
            raise wire.WireError("it was given no such thing")
        try:
            result = lent(*args, **dict(kwargs)) if how == "call" else next(lent)
        except Broken:
            raise
        except BaseException as error:  # noqa: BLE001 - the program may expect it; else it ends the program
            if isinstance(error, AssertionError):
                self.failed_inside = self.failed_inside or place_in_test(error)
            self._send(nonce, "raise", (error,))
        else:
            self._send(nonce, "told", (result,))

    def _describe(self, value: Any) -> Any:
        if (in_library := _name_in_library(value)) is not None:
            return ["n", *in_library]
        if isinstance(value, BaseException):
            kind = next(base for base in type(value).__mro__ if base.__module__ == "builtins")
            return self._lend(value, "error", kind.__name__, str(value))
        base = data_class(type(value))
        name = type(value).__name__
        if base is not None:
            if type(value) is not base:
                self.note_inseparable(f"the test passes a {name} to the program, which gets a {base.__name__}")
            if base in CONTAINERS:
                return self._table.add_container(value, base, None)
            return self._table.pack(plain(value))
        if isinstance(value, Iterator):
            if type(value).__module__ not in ("builtins", "itertools"):
                self.note_inseparable(f"the test passes a {name} to the program, which gets an iterator")
            return self._lend(value, "next")
        if isinstance(value, type):
            if any(map(self.knows, type.mro(value))):
                self._fail("inseparable", f"the test passes its class {value.__name__} to the program")
            self.note_inseparable(f"the test passes its class {value.__name__} to the program, which gets a function")
        if isinstance(value, _FUNCTIONS):
            doc = getattr(value, "__doc__", None)
            return self._lend(value, "call", str(getattr(value, "__name__", "function")), doc and str(doc))
        return self._fail("inseparable", f"the test passes an object of a {name} to the program")

    def _lend(self, value: Any, how: str, *entry: Any) -> Any:
        reference = self._table.add(value, how, *entry)
        self._lent[reference[1]] = how
        return reference

    def _build(self, tag: str, rest: list[Any]) -> Any:
        unpack = self._table.unpack
        if tag == "n":
            module, name = rest
            kind = vars(sys.modules[module])[name] if module in _LIBRARY else None
            if kind not in DATA and not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise wire.WireError("not a class of data")
            return kind
        if tag == "zo":
            self.note_inseparable("the program has a time zone of a class of its own")
            return wire.unpack(tag, rest)
        if tag == "m":
            return self._view(*map(unpack, rest))
        if tag == "k":
            name, builtin, bases, own, of_class = rest
            return mirror.class_of(self, name, bool(builtin), [unpack(base) for base in bases], own, of_class)
        kind, *value = map(unpack, rest)
        if tag == "v":
            return mirror.value_of(kind, *value)
        if tag == "x":
            return mirror.exception_of(kind, *value)
        if tag == "h":
            return object.__new__(kind)
        raise wire.WireError("unknown entry")

    def _view(self, data: bytes, form: str, shape: tuple[int, ...], readonly: bool) -> memoryview:
        if not readonly:
            self.note_inseparable("the program has a view of data that it may change")
        view = memoryview(data)
        try:
            return view.cast(form) if len(shape) == 1 else view.cast(form, shape)  # type: ignore[call-overload]
        except ValueError:
            return self._fail("inseparable", f"the program has a view of the format {form}")

    def _fail(self, reason: str, detail: str) -> NoReturn:
        if self._num_waiting:
            self.note_inseparable("threads of the test may wait for one another inside the program")
        self.broken = Broken(reason, detail)
        raise self.broken


def _name_in_library(value: Any) -> tuple[str, str] | None:
    # The candidate has the functions and classes of the standard library too.
    owner = getattr(value, "__objclass__", value)
    module, name = getattr(owner, "__module__", None), getattr(value, "__qualname__", None)
    if module not in sys.stdlib_module_names or not isinstance(name, str):
        return None
    member: Any = sys.modules.get(module, builtins)
    for part in name.split("."):
        member = getattr(member, part, None)
    return (module, name) if member is value else None


def _is_raised_by(trace: TracebackType | None, lines: frozenset[int]) -> bool:
    """Whether an exception comes from one of these lines of the test."""
    last = [*traceback.walk_tb(trace)][-1:]
    return any(frame.f_code.co_filename == TEST_FILE and line in lines for frame, line in last)


def place_in_test(error: BaseException) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == TEST_FILE]
    return f"line {lines[-1]} of the test" if lines else "the test"
