"""The suite itself: without a sandbox, what it looks for happens, and it sees it."""

import subprocess
import sys

import pytest

from tests.sandbox.corpus import Case, cases
from tests.sandbox.scene import Scene
from tests.sandbox.storm import storm

_SEEN = {
    "reads/planted_secret": "secret.txt: read at",
    "writes/planted_file_written": "victim.txt: bytes",
    "writes/planted_file_of_another_mode": "victim.txt: mode",
    "writes/planted_file_of_another_time": "victim.txt: read at, written at",
    "writes/folder_made": "files in the folder",
    "writes/temporary_folder_of_the_host": "file /tmp/",
    "writes/message_queue_of_the_host": "message queue",
    "writes/shared_memory_of_the_host_removed": "System V shm",
    "network/tcp_to_the_harness": "the tcp socket was reached",
    "network/udp_to_the_harness": "the udp socket was reached",
    "network/named_stream_socket_of_the_harness": "the stream socket was reached",
    "network/named_datagram_socket_from_a_pair": "the datagram socket was reached",
    "network/abstract_socket_of_the_harness": "the abstract socket was reached",
    "processes/bystander_limited": "bystander: limits",
    "processes/bystander_slowed": "bystander: priority",
    "processes/bystander_pinned": "bystander: processors",
    "processes/bystander_made_idle": "bystander: scheduler",
    "processes/bystander_killed": "bystander alive",
}


_KILLS = "processes/bystander_killed"  # runs alone: a dead bystander hides what others do to it


@pytest.mark.parametrize("group", ["reads", "writes", "network", "processes", _KILLS])
def test_each_effect_is_seen_where_nothing_prevents_it(group):
    names = [name for name in _SEEN if name.startswith(group) and (name == group or name != _KILLS)]
    found = storm("none", {name: cases()[name] for name in names})
    unseen = [name for name in names if not any(line.startswith(_SEEN[name]) for line in found.effects)]
    assert names
    assert not unseen, found


def test_a_told_secret_is_seen():
    name = "reads/planted_secret_told_by_an_exception"
    assert storm("none", {name: cases()[name]}).told == [name]


def test_a_process_left_behind_is_seen(monkeypatch):
    monkeypatch.setattr(sys.modules[Scene.__module__], "_GONE_WITHIN_S", 0.1)  # this one does not go
    scene = Scene(sys.executable)
    code = f"import ctypes, time; ctypes.CDLL(None).prctl(15, {scene.places['MARK'].encode()!r}); print(flush=True)"
    left = subprocess.Popen([sys.executable, "-c", f"{code}; time.sleep(60)"], stdout=subprocess.PIPE)
    try:
        left.stdout.readline()
        assert [line for line in scene.effects() if line.startswith(f"process left: {left.pid} ")]
    finally:
        left.kill()
        left.communicate()
        scene.close()


def test_a_pass_is_no_accident():
    assert (
        storm("none", {"right": Case(source="def solve(n):\n    return 6765")}).verdicts["right"]["status"] == "passed"
    )
