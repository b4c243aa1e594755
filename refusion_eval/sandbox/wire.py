"""Messages of data-only JSON between the judge and the candidate, and single values in them.

None, booleans, finite floats, strings and small integers are themselves; everything else is a list whose first item is
a tag. Neither side can send the other code. `table` adds values that hold others, and objects that are no data.
"""

import builtins
import datetime
import json
import math
import socket
import struct
from collections.abc import Callable
from decimal import Decimal
from typing import Any

MAX_FRAME_BYTES = 32 << 20
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


def _pack_int(value: int) -> Any:
    number = int.__int__(value)
    return number if -_JSON_INT_LIMIT < number < _JSON_INT_LIMIT else ["i", hex(number)]


def _pack_float(value: float) -> Any:
    real = float.__float__(value)
    return real if math.isfinite(real) else ["f", repr(real)]


def _pack_complex(value: complex) -> Any:
    plain = complex.__pos__(value)
    return ["c", _pack_float(plain.real), _pack_float(plain.imag)]


# class -> (tag, text of a value, value of a text)
_TEXT_TYPES: dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    bytes: ("b", bytes.hex, bytes.fromhex),
    Decimal: ("D", Decimal.__str__, Decimal),
    datetime.datetime: ("ts", datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: ("da", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: ("ti", datetime.time.isoformat, datetime.time.fromisoformat),
}
_OF_TEXT = {tag: value_of for tag, _, value_of in _TEXT_TYPES.values()}


def _text_packer(tag: str, text_of: Callable[[Any], str]) -> Callable[[Any], Any]:
    return lambda value: [tag, text_of(value)]


_OF_DELTA = ("days", "seconds", "microseconds")


def _pack_delta(value: datetime.timedelta) -> list[Any]:
    return ["td", *[vars(datetime.timedelta)[part].__get__(value) for part in _OF_DELTA]]


# Class -> packer of its values and of its subclasses' values, which are flattened to the plain value that they are.
PACKERS: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: _pack_int,
    float: _pack_float,
    complex: _pack_complex,
    **{kind: _text_packer(tag, text_of) for kind, (tag, text_of, _) in _TEXT_TYPES.items()},
    datetime.timedelta: _pack_delta,
    datetime.timezone: lambda value: ["tz", *_pack_delta(value.utcoffset(None))[1:], value.tzname(None)],
}
_SINGLE = {"E": Ellipsis, "N": NotImplemented}
_TAG_OF_SINGLE = {id(value): tag for tag, value in _SINGLE.items()}


def pack(value: Any) -> Any:
    """Turn a single value without parts that may be objects into JSON types; None stands for any other value too."""
    if (packer := PACKERS.get(type(value))) is not None:
        return packer(value)
    if isinstance(value, bool):
        return value
    if (tag := _TAG_OF_SINGLE.get(id(value))) is not None:
        return [tag]
    if type(value) is type and vars(builtins).get(name := str(value.__name__)) is value:
        return ["T", name]
    return None


def unpack(tag: str, items: list[Any]) -> Any:
    """Turn a tag and what follows it back into a value: the inverse of `pack`.

    Raises:
        WireError: the tag is unknown.
        Exception: the items are not what `pack` makes. They may be hostile.
    """
    if tag == "i":
        return int(items[0], 16)
    if tag == "f":
        real = float(items[0])
        return math.nan if math.isnan(real) else real  # a list is equal to another one with the same NaN only
    if tag in _OF_TEXT:
        return _OF_TEXT[tag](items[0])
    if tag == "c":
        return complex(*(float(item if isinstance(item, float) else item[1]) for item in items))
    if tag == "td":
        return datetime.timedelta(*items)
    if tag == "tz":
        zone = datetime.timezone(datetime.timedelta(*items[:3]), items[3])
        return datetime.UTC if zone.tzname(None) == "UTC" and zone == datetime.UTC else zone
    if tag in _SINGLE:
        return _SINGLE[tag]
    if tag == "T" and isinstance(vars(builtins).get(items[0]), type):
        return vars(builtins)[items[0]]
    raise WireError(f"unknown tag {str(tag)[:20]!r}")
