"""The judge's view of the candidate: handles whose every use is a request that is answered with data.

A comparison of a handle with plain data is always False, so an object that claims to equal everything equals nothing.
Only two objects of the candidate are compared by the candidate itself.
"""

import builtins
import secrets
import socket
from collections import deque
from collections.abc import Iterator
from typing import Any, NoReturn

from refusion_eval.sandbox import wire

_MAX_TEXT_CHARS = 300


class Broken(BaseException):
    """A fault that ends the check, whatever the test does next. It is no Exception, so that no test can swallow it."""

    def __init__(self, reason: str, detail: str) -> None:
        """Keep the reason (a key of `result.STATUS_OF_REASON`) and one line of detail."""
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
        """Take over the connection."""
        self._sock = sock
        self.broken: Broken | None = None
        self.remote_errors: list[tuple[BaseException, str]] = []
        self.compared_with_data = False

    def wait_until_ready(self) -> None:
        """Wait for the sandbox to be locked down; nothing of the candidate has run before that.

        Raises:
            RuntimeError: the sandbox could not be set up.
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
        """Have the program run.

        Returns:
            The objects that it defines under some of these names, and under no other.

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


class Handle:
    """An object of the candidate: a function, a class, an instance, an iterator."""

    __slots__ = ("_candidate", "_number")

    def __init__(self, candidate: Candidate, number: int) -> None:
        """Name the object by its number."""
        object.__setattr__(self, "_candidate", candidate)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it with data and handles; changes to mutable arguments come back."""
        return self._candidate.request("call", self, list(args), kwargs)

    def __getattr__(self, name: str) -> Any:
        """Read an attribute; a bound method is a handle again."""
        return self._candidate.request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the candidate's object."""
        self._candidate.request("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the candidate's object."""
        self._candidate.request("delattr", self, name)

    def __eq__(self, other: object) -> bool:
        """Compare two objects of the candidate there; unequal to any data (see the module's text)."""
        if not isinstance(other, Handle):
            self._candidate.compared_with_data = True
            return False
        return bool(self._candidate.request("eq", self, other))

    def __lt__(self, other: object) -> bool:
        """Order two objects of the candidate, as sorted() does."""
        if not isinstance(other, Handle):
            return NotImplemented
        return bool(self._candidate.request("lt", self, other))

    def __hash__(self) -> int:
        """Hash of the candidate's object."""
        return int(self._candidate.request("hash", self))

    def __iter__(self) -> Iterator[Any]:
        """Iterate, item by item, so that an endless generator can be read in part."""
        iterator = self._candidate.request("iter", self)
        if not isinstance(iterator, Handle):
            raise TypeError("the iterator is no iterator")
        while True:
            try:
                item = self._candidate.request("next", iterator)
            except StopIteration:
                return
            yield item

    def __next__(self) -> Any:
        """Next item of an iterator."""
        return self._candidate.request("next", self)

    def __len__(self) -> int:
        """Its length."""
        return int(self._candidate.request("len", self))

    def __getitem__(self, key: Any) -> Any:
        """One item."""
        return self._candidate.request("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set one item."""
        self._candidate.request("setitem", self, key, value)

    def __bool__(self) -> bool:
        """Its truth value."""
        return bool(self._candidate.request("bool", self))

    def __str__(self) -> str:
        """Its text."""
        return str(self._candidate.request("str", self))

    def __repr__(self) -> str:
        """Its text for programmers."""
        return str(self._candidate.request("repr", self))

    def __instancecheck__(self, instance: object) -> bool:
        """isinstance(x, HandleOfAClass)."""
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
