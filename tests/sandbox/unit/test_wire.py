"""Values as data: what goes in comes out, and what is malformed is refused."""

import json
import socket
import struct
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque

import pytest

from refusion_eval.sandbox import wire
from refusion_eval.sandbox.table import ObjectTable


class _Sides:
    """A table on each side, with what is no data refused."""

    def __init__(self) -> None:
        self.left, self.right = ObjectTable(-1, self._refuse, self._refuse), ObjectTable(1, self._refuse, self._refuse)

    @staticmethod
    def _refuse(*values):
        raise wire.WireError(f"{values!r} is no data")

    def send(self, *values):
        """What arrives of values sent from the left to the right."""
        return self.right.unpack_all(*json.loads(json.dumps(self.left.pack_all(values))))

    def send_back(self, *values):
        return self.left.unpack_all(*json.loads(json.dumps(self.right.pack_all(values))))


VALUE = {"a": [1, (2.5, None)], (1, 2): {frozenset({3})}, b"x": {True: 10**400}, "s": [slice(1, 2), range(3), ...]}


def test_a_container_comes_back_equal_and_of_the_same_type():
    assert _Sides().send(VALUE) == [VALUE]


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(b=1, a=2),
        Counter("aab"),
        deque([1], maxlen=2),
        bytearray(b"ab"),
        UserList([1]),
        UserDict(a=1),
        defaultdict(list, a=[1]),
        {2: 1}.keys(),
        {2: [1]}.items(),
        ValueError("a", 1),
        -0.0,
        1j,
        10**400,
        "\ud800",
    ],
)
def test_each_kind_of_data_arrives_as_it_is(value):
    (arrived,) = _Sides().send(value)
    assert type(arrived) is type(value)
    assert repr(arrived) == repr(value)


def test_a_list_of_factories_keeps_its_factory():
    (arrived,) = _Sides().send(defaultdict(list))
    arrived["a"].append(1)
    assert arrived == {"a": [1]}


@pytest.mark.parametrize("make", [set, frozenset, dict.fromkeys, lambda items: set(frozenset(items))])
@pytest.mark.parametrize("items", [(12, 13, 14, 15, 16), (8, 0, 16, 3), (5, 7, 6), tuple(range(100, 0, -7))])
def test_a_set_is_read_in_its_order(make, items):
    value = make(items)
    assert list(_Sides().send(value)[0]) == list(value)


def test_a_change_on_either_side_reaches_the_other():
    sides, inner = _Sides(), [1]
    outer = {"x": (inner,), "y": inner}
    (there,) = sides.send(outer)
    assert there["x"][0] is there["y"]
    there["y"].append(2)
    there["z"] = there
    assert sides.send_back(there["y"]) == [[1, 2]]
    assert outer["x"][0] is inner
    assert inner == [1, 2]
    assert outer["z"] is outer


def test_nothing_is_sent_twice():
    sides, value = _Sides(), [[1], [2]]
    sides.send(value)
    assert sides.left.pack_all([value]) == ([["@", -1]], [])
    value[1].append(3)
    assert [entry[0] for entry in sides.left.pack_all([value])[1]] == [-3]


def test_what_nobody_sees_is_forgotten_once_its_changes_are_sent():
    sides, kept = _Sides(), [1]
    sides.send([kept], kept)
    assert sides.left.forget_unused(()) == [-1]
    assert sides.left.forget_unused((-2,)) == []
    kept.append(2)
    del kept
    assert sides.left.forget_unused(()) == []
    sides.send()
    assert sides.left.forget_unused(()) == [-2]


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
        ["t", ["?"]],
        ["z", ["@", 1]],
        ["T", "print"],
        ["X", "print", []],
        ["X", "int", []],
        ["@", None],
        ["@", 5],
        ["@", []],
        ["vk", ["t"], 5, ["?"]],
        ["vi", 5],
        ["c", "x"],
        ["r", "x"],
        ["b", "0"],
        ["td", "x"],
        ["D", "x"],
        ["F", "1/0"],
        [["t"]],
    ],
)
def test_a_malformed_value_is_refused(message):
    with pytest.raises(wire.WireError):
        _Sides().right.unpack_all([message], [])


@pytest.mark.parametrize(
    "entry",
    [
        [],
        [-1],
        [-1, "l"],
        [-1, "l", None, None, 5],
        [-1, "l", ["T", "int"], None, []],
        [-1, "d", None, None, [1]],
        [-1, "s", None, None, [["@", -1]]],
        [-1, "B", None, None, [256]],
        [1, "l", None, None, []],
        [0, "l", None, None, []],
        [None, "l", None, None, []],
        [True, "l", None, None, []],
        [-1, "?", None],
        [-1, [], None],
    ],
)
def test_a_malformed_entry_is_refused(entry):
    with pytest.raises(wire.WireError):
        _Sides().right.unpack_all([], [entry])


def test_the_kind_of_a_container_does_not_change():
    sides = _Sides()
    sides.send([1])
    with pytest.raises(wire.WireError):
        sides.right.unpack_all([], [[-1, "q", None, None, [1]]])


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
