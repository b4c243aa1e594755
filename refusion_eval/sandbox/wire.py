"""Messages of data-only JSON between judge and guest, and single values in them: neither side can send the other code.

None, booleans, finite floats, strings and small integers are themselves; everything else is a list whose first item is
a tag. `table` adds values that hold others, and objects that are not data.
"""

import builtins
import contextlib
import datetime
import json
import math
import socket
import struct
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

MAX_FRAME_BYTES = 32 << 20
MAX_JOB_BYTES = 288 << 20  # of a program with its test, which has all inputs
_JSON_INT_LIMIT = 1 << 53  # other readers of JSON would round larger ones
_OF_TIME = "hour minute second microsecond fold"
_HEADER = struct.Struct(">I")


class WireError(Exception):
    """The other side sent something malformed, or nothing."""


class FrameTooLarge(Exception):
    """A message would exceed the most bytes that it may have."""


class PeerGone(WireError):
    """The other side closed the connection."""


def send(sock: socket.socket, message: Any, most_bytes: int = MAX_FRAME_BYTES) -> None:
    """Send a message of JSON types; OSError if the other side is gone, FrameTooLarge if nothing was sent."""
    data = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(data) > most_bytes:
        raise FrameTooLarge(f"{len(data)} bytes")
    sock.sendall(_HEADER.pack(len(data)) + data)


def receive(sock: socket.socket, most_bytes: int = MAX_FRAME_BYTES) -> Any:
    """Receive a message; PeerGone at the end of the stream, FrameTooLarge, or WireError for what is not JSON."""
    (num_bytes,) = _HEADER.unpack(_read(sock, _HEADER.size))
    if num_bytes > most_bytes:
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


def _pack_delta(value: datetime.timedelta) -> list[Any]:
    parts = ("days", "seconds", "microseconds")
    return ["td", *[vars(datetime.timedelta)[part].__get__(value) for part in parts]]


class _Zone(datetime.tzinfo):
    """What a time zone of some class says about one moment: the other side does not have the class."""

    def __init__(self, *parts: Any) -> None:
        self._offset, self._dst, self._name = (
            unpack(part[0], part[1:]) if type(part) is list else part for part in parts
        )

    def utcoffset(self, moment: Any) -> Any:
        return self._offset

    def dst(self, moment: Any) -> Any:
        return self._dst

    def tzname(self, moment: Any) -> Any:
        return self._name


def _pack_moment(tag: str, kind: Any, parts: str) -> Callable[[Any], list[Any]]:
    """The packer of a class of times of day, with or without a date, which have these parts."""
    members = [vars(base)[part].__get__ for part in parts.split() for base in kind.__mro__ if part in vars(base)]

    def pack(value: Any) -> list[Any]:
        zone, *numbers = (member(value) for member in members)
        if type(zone) is datetime.timezone:
            zone = PACKERS[datetime.timezone](zone)
        elif type(zone) is ZoneInfo and zone.key:
            zone = ["zi", zone.key]
        elif zone is not None:
            zone = ["zo"]
            for method in (kind.utcoffset, kind.dst, kind.tzname):
                told = None
                with contextlib.suppress(NotImplementedError):
                    told = method(value)
                zone.append(told if told is None or isinstance(told, str) else _pack_delta(told))
        return [tag, *numbers, zone]

    return pack


def _unpack_moment(kind: Any) -> Callable[..., Any]:
    def made(*parts: Any) -> Any:
        *numbers, fold, zone = parts
        return kind(*numbers, unpack(zone[0], zone[1:]) if type(zone) is list else zone, fold=fold)

    return made


# Class -> packer of its values and of its subclasses' values, which are flattened to the plain value that they are.
# The methods are those of the class itself, because a subclass may have others.
PACKERS: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: _pack_int,
    float: _pack_float,
    complex: lambda value: ["c", _pack_float(complex.__pos__(value).real), _pack_float(complex.__pos__(value).imag)],
    bytes: lambda value: ["b", bytes.hex(value)],
    Decimal: lambda value: ["D", Decimal.__str__(value)],
    datetime.datetime: _pack_moment("ts", datetime.datetime, f"tzinfo year month day {_OF_TIME}"),
    datetime.date: lambda value: ["da", datetime.date.isoformat(value)],
    datetime.time: _pack_moment("ti", datetime.time, f"tzinfo {_OF_TIME}"),
    datetime.timedelta: _pack_delta,
    datetime.timezone: lambda value: ["tz", *_pack_delta(value.utcoffset(None))[1:], value.tzname(None)],
}


def _float_of(text: str) -> float:
    real = float(text)
    return math.nan if math.isnan(real) else real  # a list is equal to another one with the same NaN only


def _timezone_of(days: int, seconds: int, microseconds: int, name: str) -> datetime.timezone:
    zone = datetime.timezone(datetime.timedelta(days, seconds, microseconds), name)
    return datetime.UTC if name == "UTC" and zone == datetime.UTC else zone


def _builtin_class(name: str) -> type:
    kind = vars(builtins).get(name)
    if not isinstance(kind, type):
        raise WireError("not a builtin class")
    return kind


_UNPACKERS: dict[str, Callable[..., Any]] = {
    "i": lambda text: int(text, 16),
    "f": _float_of,
    "c": lambda *parts: complex(*(float(part if isinstance(part, float) else part[1]) for part in parts)),
    "b": bytes.fromhex,
    "D": Decimal,
    "ts": _unpack_moment(datetime.datetime),
    "da": datetime.date.fromisoformat,
    "ti": _unpack_moment(datetime.time),
    "td": datetime.timedelta,
    "tz": _timezone_of,
    "zi": ZoneInfo,
    "zo": _Zone,
    "E": lambda: Ellipsis,
    "N": lambda: NotImplemented,
    "T": _builtin_class,
}


def unpack(tag: str, items: list[Any]) -> Any:
    """The value of a tag and its items; WireError for an unknown tag, any exception for hostile items."""
    if tag not in _UNPACKERS:
        raise WireError(f"unknown tag {str(tag)[:20]!r}")
    return _UNPACKERS[tag](*items)
