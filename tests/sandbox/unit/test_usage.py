"""The usage of a process counts memory wherever it is held."""

import os
import signal
import subprocess
import sys

import pytest

from refusion_eval.sandbox.watch import Proc

_MIB = 1 << 20
_HOLDERS = {
    "pages": "kept = bytearray(b'x') * (50 << 20)",
    "pages whose first thread has ended": """
import ctypes, threading, time
def hold():
    time.sleep(0.2)
    kept = bytearray(b'x') * (50 << 20)
    print(flush=True)
    time.sleep(100)
threading.Thread(target=hold).start()
ctypes.CDLL(None).pthread_exit(None)
""",
    "tables of pages": """
import mmap
without_reserve = 0x4000
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | without_reserve
kept = mmap.mmap(-1, 26 << 30, flags=flags, prot=mmap.PROT_READ)
kept.madvise(mmap.MADV_NOHUGEPAGE)
for position in range(0, len(kept), 2 << 20):
    kept[position]
""",
    "messages in sockets": """
import socket
kept = [socket.socketpair() for _ in range(140)]
for pair in kept:
    for end in pair:
        end.setblocking(False)
        try:
            while True:
                end.send(bytes(1 << 16))
        except BlockingIOError:
            pass
""",
}


@pytest.mark.parametrize("holder", _HOLDERS)
def test_fifty_mebibytes_count(holder):
    idle, holding = (_start(text) for text in ("", _HOLDERS[holder]))
    try:
        least, most = (Proc().memory_bytes([process.pid]) for process in (idle, holding))
        assert most - least > 45 * _MIB
    finally:
        for process in (idle, holding):
            process.kill()
            process.communicate()


def _start(text: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-S", "-c", f"{text}\nprint(flush=True)\nimport time\ntime.sleep(100)"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_file_that_several_processes_have_open_counts_once():
    parent = _start("import os\npipes = [os.pipe() for _ in range(100)]\nos.fork()")
    proc = Proc()
    both = [parent.pid, *proc.children(parent.pid)]
    try:
        assert len(both) == 2
        apart = [proc.memory_bytes([pid]) for pid in both]
        assert sum(apart) - proc.memory_bytes(both) > 100 * 200_000
    finally:
        for pid in both:
            os.kill(pid, signal.SIGKILL)
        parent.communicate()
