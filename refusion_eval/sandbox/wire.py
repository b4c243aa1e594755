"""Values as tagged, data-only JSON between the judge and the candidate; neither side can send the other code.

None, booleans, finite floats, strings and small integers are themselves; everything else is a list whose first item is
a tag. Subclasses are flattened to their base, so an object that claims to equal everything arrives as the plain value
it is. What is not data is turned into a handle: a number that names an object living on the candidate's side.
"""

import builtins
import datetime
import json
import math
import socket
import struct
from collections import deque
from collections.abc import Callable, ItemsView, KeysView
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_FRAME_BYTES = 32 << 20
MAX_DEPTH = 100
_JSON_INT_LIMIT = 1 << 53
_HEADER = struct.Struct(">I")


class WireError(Exception):
    """The other side sent something malformed, or nothing."""


class FrameTooLarge(Exception):
    """A message would exceed `MAX_FRAME_BYTES`."""


class PeerGone(WireError):
    """The other side closed the connection."""


def send(sock: socket.socket, message: Any) -> None:
    """Send one message (JSON types only).

    Raises:
        FrameTooLarge: nothing was sent.
        OSError: the other side is gone.
    """
    data = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(data) > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"{len(data)} bytes")
    sock.sendall(_HEADER.pack(len(data)) + data)


def receive(sock: socket.socket) -> Any:
    """Receive one message.

    Raises:
        PeerGone: end of stream.
        FrameTooLarge: the header announces more than `MAX_FRAME_BYTES`.
        WireError: not JSON, or nested too deeply.
    """
    (num_bytes,) = _HEADER.unpack(_read(sock, _HEADER.size))
    if num_bytes > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"{num_bytes} bytes")
    try:
        return json.loads(_read(sock, num_bytes))
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a message: {error}") from None


def _read(sock: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = sock.recv(min(num_bytes, 1 << 20))
        if not part:
            raise PeerGone("the connection is closed")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


# tag -> (base class, iterator over the bare items, constructor from a list of items)
_SEQUENCES: dict[str, tuple[type, Callable[[Any], Any], Callable[[list[Any]], Any]]] = {
    "l": (list, list.__iter__, list),
    "t": (tuple, tuple.__iter__, tuple),
    "s": (set, set.__iter__, set),
    "z": (frozenset, frozenset.__iter__, frozenset),
    "q": (deque, deque.__iter__, deque),
}
_VIEWS = (KeysView, ItemsView)
# tag -> (class, text of a value, value of a text)
_TEXT_TYPES: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "b": (bytes, bytes.hex, bytes.fromhex),
    "B": (bytearray, bytearray.hex, bytearray.fromhex),
    "D": (Decimal, Decimal.__str__, Decimal),
    "F": (Fraction, Fraction.__str__, Fraction),
    "ts": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "da": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "ti": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
}


def pack(value: Any, handle_of: Callable[[Any], int], depth: int = 0) -> Any:
    """Turn any object into JSON types.

    `handle_of` gives the number that names an object which is not data; it may raise to refuse. `depth` is the current
    nesting, for the limit `MAX_DEPTH`; deeper containers become handles.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -_JSON_INT_LIMIT < number < _JSON_INT_LIMIT else ["i", hex(number)]
    if isinstance(value, float):
        real = float.__float__(value)
        return real if math.isfinite(real) else ["f", repr(real)]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        return ["c", pack(value.real, handle_of), pack(value.imag, handle_of)]
    if depth < MAX_DEPTH:
        container = _pack_container(value, handle_of, depth + 1)
        if container is not None:
            return container
    for tag, (base, text_of, _) in _TEXT_TYPES.items():
        if isinstance(value, base):
            return [tag, text_of(value)]
    if kind is range:
        return ["r", *(pack(bound, handle_of) for bound in (value.start, value.stop, value.step))]
    if kind is datetime.timedelta:
        return ["td", value.days, value.seconds, value.microseconds]
    if kind is type and vars(builtins).get(name := str(value.__name__)) is value:
        return ["T", name]
    if value is ...:
        return ["E"]
    return ["h", handle_of(value)]


def _pack_container(value: Any, handle_of: Callable[[Any], int], depth: int) -> list[Any] | None:
    for tag, (base, items_of, _) in _SEQUENCES.items():
        if isinstance(value, base):
            return [tag, *[pack(item, handle_of, depth) for item in items_of(value)]]
    if isinstance(value, dict):
        return ["d", *[[pack(key, handle_of, depth), pack(item, handle_of, depth)] for key, item in dict.items(value)]]
    if isinstance(value, _VIEWS):
        return ["s", *[pack(item, handle_of, depth) for item in value]]
    return None


def unpack(message: Any, object_of: Callable[[int], Any], depth: int = 0) -> Any:
    """Turn JSON types back into a value: the inverse of `pack`, with the function from a handle's number to its object.

    Raises:
        WireError: the message is not what `pack` makes. It may be hostile.
    """
    if message is None or isinstance(message, bool | int | float | str):
        return message
    if not isinstance(message, list) or not message or depth > MAX_DEPTH + 2:
        raise WireError("malformed value")
    tag, *items = message
    try:
        if tag in _SEQUENCES:
            return _SEQUENCES[tag][2]([unpack(item, object_of, depth + 1) for item in items])
        if tag == "d":
            return {unpack(key, object_of, depth + 1): unpack(item, object_of, depth + 1) for key, item in items}
        return _unpack_scalar(tag, items, object_of)
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise WireError(f"malformed value: {type(error).__name__}") from None


def _unpack_scalar(tag: str, items: list[Any], object_of: Callable[[int], Any]) -> Any:
    if tag == "i":
        return int(items[0], 16)
    if tag == "f":
        return float(items[0])
    if tag == "h":
        return object_of(int(items[0]))
    if tag in _TEXT_TYPES:
        return _TEXT_TYPES[tag][2](items[0])
    if tag == "c":
        return complex(*(unpack(item, object_of) for item in items))
    if tag == "r":
        return range(*(unpack(item, object_of) for item in items))
    if tag == "td":
        return datetime.timedelta(*items)
    if tag == "T" and isinstance(vars(builtins).get(items[0]), type):
        return vars(builtins)[items[0]]
    if tag == "E":
        return Ellipsis
    raise WireError(f"unknown tag {str(tag)[:20]!r}")
