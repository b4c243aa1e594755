"""Values as data: what goes in comes out, and what is malformed is refused."""

import socket
import struct

import pytest

from refusion_eval.sandbox import wire


def _refuse(value):
    raise TypeError(f"{value!r} is no data")


def _round_trip(value):
    return wire.unpack(wire.pack(value, _refuse), _refuse)


def test_a_container_comes_back_equal_and_of_the_same_type():
    value = {"a": [1, (2.5, None)], (1, 2): {frozenset({3})}, b"x": {True: 10**400}}
    assert _round_trip(value) == value


def test_an_object_that_equals_everything_arrives_as_its_plain_value():
    class Equal(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    result = _round_trip([Equal(3)])
    assert type(result[0]) is int
    assert result != [4]


def test_what_is_no_data_becomes_a_handle():
    assert wire.pack([object()], lambda value: 7) == ["l", ["h", 7]]


def test_a_container_nested_too_deeply_becomes_a_handle():
    value = []
    for _ in range(wire.MAX_DEPTH + 10):
        value = [value]
    assert '["h",7]' in str(wire.pack(value, lambda inner: 7)).replace("'", '"').replace(" ", "")


@pytest.mark.parametrize(
    "message",
    [
        [],
        {},
        [[]],
        ["?"],
        ["i", "x"],
        ["i"],
        ["f", "x"],
        ["d", 1],
        ["d", [1]],
        ["s", ["l"]],
        ["T", "print"],
        ["h", None],
        ["c", "x"],
        ["r", "x"],
        ["b", "0"],
        ["td", "x"],
        ["D", "x"],
        ["F", "1/0"],
        [None, 1],
    ],
)
def test_a_malformed_value_is_refused(message):
    with pytest.raises(wire.WireError):
        wire.unpack(message, lambda number: number)


def test_a_message_crosses_a_socket():
    left, right = socket.socketpair()
    with left, right:
        wire.send(left, ["a", "\ud800", None])
        assert wire.receive(right) == ["a", "\ud800", None]


def test_an_announced_length_over_the_limit_is_refused_before_it_is_read():
    left, right = socket.socketpair()
    with left, right:
        left.sendall(struct.pack(">I", wire.MAX_FRAME_BYTES + 1))
        with pytest.raises(wire.FrameTooLarge):
            wire.receive(right)


def test_a_closed_connection_is_told_from_a_malformed_message():
    left, right = socket.socketpair()
    with right:
        left.close()
        with pytest.raises(wire.PeerGone):
            wire.receive(right)
