"""What stands around a sandbox under attack, and what an attack changed in it."""

import contextlib
import ctypes
import fcntl
import os
import resource
import secrets
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from refusion_eval.sandbox import seccomp
from tests.sandbox.refused import REFUSED

_GONE_WITHIN_S = 3.0
_KILLED_WITHIN_S = 0.2
_LEVELS = 2  # of processes below a worker: with namespaces the judge is a child of the first process inside
_VICTIM = "import time\nwhile True:\n    time.sleep(1000)\n"
_SYSV = ("shm", "sem", "msg")
_WATCHED = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/", "/home", "/root", "/dev/mqueue", ".")
_libc = ctypes.CDLL(None, use_errno=True)


class Scene:
    """Things that a program under test must not reach, set up so that reaching them shows.

    Attributes:
        places: what `$NAME` in an attack stands for.
        secret: text that no program may come to know.
    """

    def __init__(self, python: str) -> None:
        """Set everything up, before any worker starts.

        Args:
            python: interpreter for the bystander process.
        """
        self._alone = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._alone, fcntl.LOCK_EX)  # System V memory and ports belong to the whole machine
        self._mark = f"rfs{secrets.token_hex(5)}"  # short enough for the name of a process
        self.secret = secrets.token_hex(12)
        os.environ["REFUSION_SECRET"] = self.secret
        self._folder = Path(tempfile.mkdtemp(prefix="scene-"))
        self._folder.chmod(0o777)
        self._planted = {
            "secret.txt": self.secret,
            "victim.txt": "unchanged",
            "planted.py": f"secret = {self.secret!r}\n",
        }
        for name, text in self._planted.items():
            path = self._folder / name
            path.write_text(text)
            path.chmod(0o666)
        self._bystander = subprocess.Popen([python, "-S", "-c", _VICTIM], start_new_session=True)
        self._sockets = self._listen()
        self._queue = f"/q{self._mark}"
        self._num_queue = _libc.mq_open(self._queue.encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
        self._shared_memory = _libc.shmget(0, 4096, 0o1666)
        free = socket.create_server(("127.0.0.1", 0))
        self._free_port = free.getsockname()[1]
        free.close()
        column = seccomp.ARCHITECTURES[os.uname().machine][0]
        self.places: dict[str, Any] = {
            "SECRET_FILE": str(self._folder / "secret.txt"),
            "VICTIM_FILE": str(self._folder / "victim.txt"),
            "FOLDER": str(self._folder),
            "HOME": os.path.expanduser("~"),
            "HARNESS_FILE": seccomp.__file__,
            "MARK": self._mark,
            "PID": os.getpid(),
            "PARENT_PID": os.getppid(),
            "GROUP": os.getpgrp(),
            "VICTIM_PID": self._bystander.pid,
            "TCP_PORT": self._sockets["tcp"].getsockname()[1],
            "UDP_PORT": self._sockets["udp"].getsockname()[1],
            "FREE_PORT": self._free_port,
            "STREAM_PATH": str(self._folder / "stream"),
            "DATAGRAM_PATH": str(self._folder / "datagram"),
            "ABSTRACT": self._mark + "a",
            "QUEUE": self._queue,
            "SHARED_MEMORY": self._shared_memory,
            "REFUSED_CALLS": {name: both[column] for name, both in REFUSED.items() if both[column] is not None},
            "CLONE": (56, 220)[column],
            "EXIT": (60, 93)[column],
            "IOPRIO_SET": REFUSED["ioprio_set"][column],
            "KEYCTL": REFUSED["keyctl"][column],
            "MOVE_PAGES": REFUSED["move_pages"][column],
        }
        for path in self._files():
            os.utime(path, (1, 2))  # read before it was last changed: the next read shows
        time.sleep(0.05)
        self._before = self._state()

    def _files(self) -> list[Path]:
        return [self._folder / name for name in self._planted]

    def _listen(self) -> dict[str, socket.socket]:
        sockets = {"tcp": socket.create_server(("127.0.0.1", 0))}
        for name, kind, address in (
            ("stream", socket.SOCK_STREAM, str(self._folder / "stream")),
            ("datagram", socket.SOCK_DGRAM, str(self._folder / "datagram")),
            ("abstract", socket.SOCK_STREAM, f"\0{self._mark}a"),
        ):
            sockets[name] = socket.socket(socket.AF_UNIX, kind)
            sockets[name].bind(address)
            if not address.startswith("\0"):
                os.chmod(address, 0o777)
            if kind == socket.SOCK_STREAM:
                sockets[name].listen()
        sockets["udp"] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sockets["udp"].bind(("127.0.0.1", 0))
        for found in sockets.values():
            found.setblocking(False)
        return sockets

    def _state(self) -> dict[str, Any]:
        """Everything that must be the same before and after."""
        state: dict[str, Any] = {}
        for path in self._files():
            try:
                info = path.stat()
                state[f"{path.name}: mode"] = stat.filemode(info.st_mode)
                state[f"{path.name}: owner"] = (info.st_uid, info.st_gid, info.st_nlink)
                state[f"{path.name}: read at, written at"] = (info.st_atime, info.st_mtime)
                state[f"{path.name}: bytes"] = info.st_size
                state[f"{path.name}: attributes"] = os.listxattr(path)
            except OSError as error:
                state[path.name] = error.strerror
        state["files in the folder"] = sorted(os.listdir(self._folder))
        state["bystander alive"] = self._bystander.poll() is None
        for who, pid in (("harness", 0), ("bystander", self._bystander.pid)):
            try:
                state[f"{who}: priority"] = os.getpriority(os.PRIO_PROCESS, pid)
                state[f"{who}: processors"] = sorted(os.sched_getaffinity(pid))
                state[f"{who}: scheduler"] = os.sched_getscheduler(pid)
                names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
                state[f"{who}: limits"] = [resource.prlimit(pid, getattr(resource, name)) for name in names]
            except OSError as error:
                state[who] = error.strerror
        for device in ("/dev/null", "/dev/random", "/dev/urandom"):
            info = os.stat(device)
            state[f"{device}: owner, times"] = (info.st_mode, info.st_uid, info.st_atime_ns, info.st_mtime_ns)
        state["host name"] = os.uname().nodename
        for kind in _SYSV:
            lines = Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
            state[f"System V {kind}"] = sorted(line.split()[1] for line in lines)
        again = _libc.mq_open(self._queue.encode(), os.O_RDWR)
        state["message queue"] = again >= 0
        if again >= 0:
            os.close(again)
        return state

    def effects(self) -> list[str]:
        """What an attack did outside of its sandbox; empty if nothing."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # a kill takes a moment
            self._bystander.wait(_KILLED_WITHIN_S)
        after = self._state()
        names = {**self._before, **after}
        pairs = {name: (self._before.get(name), after.get(name)) for name in names}
        found = [f"{name}: {old} -> {new}" for name, (old, new) in pairs.items() if old != new]
        found += [f"the {name} socket was reached" for name, used in self._sockets.items() if _was_reached(used)]
        found += [f"file {path}" for folder in _WATCHED for path in _marked(folder, self._mark)]
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._free_port), 0.2):
            found.append("something listens")
        deadline_s = time.monotonic() + _GONE_WITHIN_S
        while (left := self._left_processes()) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return found + [f"process left: {name}" for name in left]

    def _left_processes(self) -> list[str]:
        """Processes that carry the mark, and those of idle workers that do not belong there."""
        found = []
        own = _children(os.getpid())
        for path in Path("/proc").glob("[0-9]*/comm"):
            with contextlib.suppress(OSError):
                name = path.read_text().strip()
                if self._mark.startswith(name[:15]) and len(name) > 3:
                    found.append(f"{path.parent.name} {name}")
        for worker in own:
            line, level = [worker], 0
            while line:
                found += [f"{pid} beside a worker" for pid in line[1:]]
                found += [f"{pid} below a worker" for pid in line if level > _LEVELS]
                line, level = [child for pid in line for child in _children(pid)], level + 1
        return found

    def close(self) -> None:
        """Take everything down."""
        self._bystander.kill()
        self._bystander.wait()
        for found in self._sockets.values():
            found.close()
        if self._num_queue >= 0:
            os.close(self._num_queue)
            _libc.mq_unlink(self._queue.encode())
        _libc.shmctl(self._shared_memory, 0, None)
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._alone)


def _children(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in path.read_text().split()]
    return found


def _was_reached(found: socket.socket) -> bool:
    try:
        if found.type == socket.SOCK_STREAM:
            found.accept()[0].close()
        else:
            found.recv(100)
    except BlockingIOError:
        return False
    return True


def _marked(folder: str, mark: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [os.path.join(folder, name) for name in os.listdir(folder) if mark in name and not name.startswith("q")]
    return []
