"""What the kernel tells about processes in /proc: their children, and their usage of memory, processors and files."""

import contextlib
import os
import socket
from typing import NamedTuple

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PIPE_PAGES = 16
_EXITING = 0x4  # PF_EXITING of the kernel
_LAST_MESSAGE_BYTES = 64 << 10  # a socket takes one more message when its buffer is almost full


class Usage(NamedTuple):
    cpu_s: float  # processor seconds, ended and waited-for children included
    memory_bytes: int  # resident memory and page tables now, and what the open pipes and sockets may hold
    starved_s: float  # seconds the first process was ready to run and had no processor
    num_tasks: int  # processes and threads


class Proc:
    """The /proc of the machine, kept open so that it can be read from inside another root."""

    def __init__(self) -> None:
        self._fd = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        left, right = socket.socketpair()
        with left, right:
            socket_bytes = left.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) + _LAST_MESSAGE_BYTES
        self._file_bytes = max(socket_bytes, _PIPE_PAGES * _PAGE_BYTES)

    def _open(self, path: str, flags: int = os.O_RDONLY) -> int:
        return os.open(path, flags | os.O_CLOEXEC, dir_fd=self._fd)

    def _read(self, path: str) -> str:
        with os.fdopen(self._open(path), "rb", 0) as file:
            return file.read(65536).decode("ascii", "replace")

    def own_number(self) -> int:
        """This process's number as this /proc counts (another than os.getpid() in a pid namespace)."""
        return int(os.readlink("self", dir_fd=self._fd))

    def _list(self, path: str) -> list[str]:
        """Names in a folder; none if it is gone."""
        with contextlib.suppress(OSError):
            fd = self._open(path)
            try:
                return os.listdir(fd)
            finally:
                os.close(fd)
        return []

    def children(self, pid: int) -> list[int]:
        """Child processes of all threads of a process; none if it is gone."""
        children: list[int] = []
        for thread in self._list(f"{pid}/task"):
            with contextlib.suppress(OSError):
                children += [int(word) for word in self._read(f"{pid}/task/{thread}/children").split()]
        return children

    def tree(self, pid: int) -> list[int]:
        members = [pid]
        for member in members:
            members += [child for child in self.children(member) if child not in members]
        return members

    def usage(self, pids: list[int]) -> Usage:
        """Sums over processes; those that are gone count nothing."""
        cpu_ticks = memory_bytes = num_tasks = 0
        starved_s = 0.0
        files: set[tuple[int, int]] = set()
        for index, pid in enumerate(pids):
            try:
                after_name = self._read(f"{pid}/stat").rpartition(")")[2].split()
                cpu_ticks += sum(int(word) for word in after_name[11:15])
                num_tasks += int(after_name[17])
                # All threads have the same memory and files, and those that have ended none: the first one may be such.
                threads = self._list(f"{pid}/task") if after_name[0] == "Z" else [str(pid)]
                memory_bytes += max((self._memory_bytes(f"{pid}/task/{thread}") for thread in threads), default=0)
                files.update(*(self._files(f"{pid}/task/{thread}/fd") for thread in threads))
                if index == 0:
                    starved_s = int(self._read(f"{pid}/schedstat").split()[1]) / 1e9
            except (OSError, IndexError):
                continue
        memory_bytes += len(files) * self._file_bytes
        return Usage(cpu_ticks / _TICKS_PER_SECOND, memory_bytes, starved_s, num_tasks)

    def _memory_bytes(self, thread: str) -> int:
        # Pages, those swapped out, and page tables, which count pages only read, too.
        lines = self._read(f"{thread}/status").splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("VmRSS:", "VmSwap:", "VmPTE:")))

    def _files(self, folder: str) -> set[tuple[int, int]]:
        """Device and inode of the open files of a process, so that a file that several have open counts once."""
        files = set()
        for name in self._list(folder):
            with contextlib.suppress(OSError):
                status = os.stat(f"{folder}/{name}", dir_fd=self._fd)
                files.add((status.st_dev, status.st_ino))
        return files

    def is_ending(self, pid: int) -> bool:
        """Whether a child of this process, not waited for yet, has begun to end."""
        return bool(int(self._read(f"{pid}/stat").rpartition(")")[2].split()[6]) & _EXITING)

    def open_pid_namespace(self) -> int:
        return self._open("self/ns/pid")

    def address_space_bytes(self, pid: int) -> int:
        return int(self._read(f"{pid}/statm").split()[0]) * _PAGE_BYTES

    def die_first(self) -> None:
        """Offer this process to the kernel when memory runs out."""
        with os.fdopen(self._open("self/oom_score_adj", os.O_WRONLY), "wb", 0) as file:
            file.write(b"1000")

    def num_tasks_of(self, uid: int) -> int:
        total = 0
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    total += len(os.listdir(f"/proc/{name}/task"))
        return total
