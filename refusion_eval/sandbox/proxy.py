"""The judge's view of the candidate: handles whose every use is a request that is answered with data.

A comparison of a handle with plain data is always False, so an object that claims to equal everything equals nothing.
Only two objects of the candidate are compared by the candidate itself.
"""

import builtins
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from refusion_eval.sandbox import wire

_MAX_TEXT_CHARS = 300


class Broken(BaseException):
    """A fault that ends the check, whatever the test does next. It is no Exception, so that no test can swallow it.

    `reason` is a key of `result.STATUS_OF_REASON`.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class Candidate:
    """The judge's end of the connection to the candidate's process.

    Attributes:
        broken: the first fatal fault; once set, the check cannot pass.
        remote_errors: exceptions of the candidate that were raised again here, each with its class's name there.
        compared_with_data: whether an object that is not data was compared with data.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.broken: Broken | None = None
        self.remote_errors: list[tuple[BaseException, str]] = []
        self.compared_with_data = False

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

    def request(self, name: str, *operands: Any) -> Any:
        """Ask for one operation and return its result as data, or as a `Handle` where it is no data.

        Raises:
            Broken: the candidate is gone, sends malformed answers or sends too much.
            Exception: what the operation raised, as the nearest builtin exception.
        """
        if self.broken:
            raise self.broken
        try:
            how, *parts = self._exchange(name, operands)
        except (wire.PeerGone, OSError):
            self._fail("exited", "the program ended before the test did")
        except (wire.FrameTooLarge, MemoryError) as error:
            self._fail("output_limit", f"a value is too large {error}".rstrip())
        except (wire.WireError, RecursionError) as error:
            self._fail("protocol_error", str(error))
        if how == "oversized":
            self._fail("output_limit", f"a value is too large: {parts[2]}")
        if how == "exited":
            self._fail("exited", f"{parts[0]}: {parts[2]}")
        if how == "raised":
            class_name, builtin_name, text = parts
            if builtin_name == "StopIteration" and name != "next":
                # As in a generator (PEP 479): else it would end a loop of the test, such as all(map(...)), unseen.
                builtin_name = "RuntimeError"
            self._raise(class_name, builtin_name, text)
        return parts[0]

    def load(self, source: str, names: list[str]) -> dict[str, Any]:
        """Have the program run; returns the objects that it defines under some of these names, and under no other.

        Raises:
            SyntaxError: it is no program.
            Broken: as `request`.
            Exception: what running it raised.
        """
        wanted = frozenset(names)
        found = self.request("load", source, names)
        if not (isinstance(found, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in found)):
            self._fail("protocol_error", "malformed names")
        return {name: value for name, value in found if isinstance(name, str) and name in wanted}

    def _exchange(self, name: str, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        """Send a request and check the form of its answer: ("ok", result) or (how, class, builtin class, message)."""
        nonce = secrets.token_hex(8)
        wire.send(self._sock, [nonce, name, [wire.pack(operand, _number_of) for operand in operands]])
        reply = wire.receive(self._sock)
        if not isinstance(reply, list) or len(reply) < 2 or reply[0] != nonce:
            raise wire.WireError("an answer to no question")
        if reply[1] == "ok" and len(reply) == 4:
            if name == "call":  # nothing else may change what was sent along, such as the names of `load`
                self._apply(reply[3], operands)
            return "ok", self._unpack(reply[2])
        if reply[1] in ("raised", "exited", "oversized") and len(reply) == 5:
            return tuple(_printable(str(part)) for part in reply[1:])
        raise wire.WireError("an answer of no known form")

    def _unpack(self, message: Any) -> Any:
        return wire.unpack(message, lambda number: Handle(self, number))

    def _apply(self, changes: Any, operands: tuple[Any, ...]) -> None:
        """Bring what the candidate changed in its arguments back into the test's own objects."""
        if not isinstance(changes, list):
            raise wire.WireError("malformed changes")
        for change in changes:
            if not (isinstance(change, list) and len(change) == 2 and change[0] in range(len(operands))):
                raise wire.WireError("malformed changes")
            _update(operands[change[0]], self._unpack(change[1]))

    def _raise(self, class_name: str, builtin_name: str, text: str) -> NoReturn:
        """Raise an exception of the candidate again, as the builtin class nearest to its own."""
        found = vars(builtins).get(builtin_name)
        kind = found if isinstance(found, type) and issubclass(found, Exception) else Exception
        try:
            error = kind(text)
        except TypeError:  # UnicodeDecodeError and its like want more
            error = Exception(text)
        self.remote_errors.append((error, class_name))
        raise error

    def _fail(self, reason: str, detail: str) -> NoReturn:
        self.broken = Broken(reason, detail)
        raise self.broken


def _operation(name: str, kind: Callable[[Any], Any] | None = None) -> Any:
    """A method of `Handle` that requests an operation; `kind` makes its answer the type that Python insists on."""

    def request(self: "Handle", *operands: Any) -> Any:
        answer = self._candidate.request(name, self, *operands)
        return answer if kind is None else kind(answer)

    return request


class Handle:
    """An object of the candidate by its number: a function, a class, an instance, an iterator.

    Every operation on it is a request, which is answered by data or by another handle, such as that of a bound method.
    """

    __slots__ = ("_candidate", "_number")
    _candidate: Candidate
    _number: int

    def __init__(self, candidate: Candidate, number: int) -> None:
        object.__setattr__(self, "_candidate", candidate)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it with data and handles; changes to mutable arguments come back."""
        return self._candidate.request("call", self, list(args), kwargs)

    __getattr__ = _operation("getattr")
    __setattr__ = _operation("setattr")
    __delattr__ = _operation("delattr")
    __getitem__ = _operation("getitem")
    __setitem__ = _operation("setitem")
    __next__ = _operation("next")
    __len__ = _operation("len", int)
    __hash__ = _operation("hash", int)
    __bool__ = _operation("bool", bool)
    __str__ = _operation("str", str)
    __repr__ = _operation("repr", str)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Handle):
            self._candidate.compared_with_data = True
            return False
        return bool(self._candidate.request("eq", self, other))

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Handle):
            return NotImplemented
        return bool(self._candidate.request("lt", self, other))

    def __iter__(self) -> Iterator[Any]:
        # Item by item, so that an endless generator can be read in part.
        iterator = self._candidate.request("iter", self)
        if not isinstance(iterator, Handle):
            raise TypeError("the iterator is no iterator")
        while True:
            try:
                item = self._candidate.request("next", iterator)
            except StopIteration:
                return
            yield item

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Handle) and bool(self._candidate.request("isinstance", instance, self))


def _printable(text: str) -> str:
    """A program's text, fit for a terminal and a table."""
    return "".join(char if char.isprintable() else " " for char in text[:_MAX_TEXT_CHARS])


def _number_of(value: Any) -> int:
    if isinstance(value, Handle):
        return int(value._number)
    raise TypeError(f"a {type(value).__name__} cannot be passed to the program: it is not data")


def _update(old: Any, new: Any) -> None:
    """Give a mutable container of the test the contents of its changed copy; nested ones stay the same objects."""
    if type(old) is not type(new):
        return
    if isinstance(old, list | deque):
        kept = [_kept(before, after) for before, after in zip(old, new, strict=False)]
        old.clear()
        old.extend(kept + list(new)[len(kept) :])
    elif isinstance(old, dict):
        kept_items = {key: _kept(old.get(key), item) for key, item in new.items()}
        old.clear()
        old.update(kept_items)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray):
        old[:] = new
    elif isinstance(old, tuple):
        for before, after in zip(old, new, strict=False):
            _update(before, after)


def _kept(before: Any, after: Any) -> Any:
    """The old object if it was updated in place, else the new one."""
    mutable = isinstance(before, list | deque | dict | set | bytearray) and type(before) is type(after)
    if mutable:
        _update(before, after)
    return before if mutable else after
