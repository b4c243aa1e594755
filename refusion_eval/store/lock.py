"""The lock of a run directory: one process writes it at a time."""

import fcntl
import os
import re
import socket
from contextlib import ExitStack
from pathlib import Path

from refusion_eval.errors import StoreError
from refusion_eval.store.atomic_write import open_own
from refusion_eval.store.run_files import LOCK_NAME, refusing

_OWN_LOCK = re.compile(rb"(pid \d+ on [^\n]{0,300}\n)?")  # what this project writes into it

# Directories that this process has locked. POSIX locks never exclude their own process, and they are not inherited by
# forked workers, so a worker that outlives a killed run does not keep its directory closed.
_held: set[str] = set()


class DirectoryLock:
    """Exclusive right to write into a directory until `release` or the end of the process."""

    def __init__(self, directory: Path) -> None:
        self._name = str(directory.resolve())
        if self._name in _held:
            reason = f"is already open for writing in this process (pid {os.getpid()}); close it first"
            raise StoreError(f"{directory} {reason}")
        path = directory / LOCK_NAME
        with ExitStack() as opened, refusing(path):
            self._descriptor = open_own(path, os.O_RDWR)
            opened.callback(os.close, self._descriptor)
            content = os.pread(self._descriptor, 400, 0)
            if not _OWN_LOCK.fullmatch(content):  # a user's file that happens to have this name is never overwritten
                raise StoreError(f"{path} is not the lock of a run; remove it, or name another directory")
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                holder = content.decode("utf-8", "replace").strip() or "pid not yet known"
                reason = f"is being written by another process ({holder}); wait for it, stop it, or choose another"
                raise StoreError(f"{directory} {reason}") from error
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            opened.pop_all()
        _held.add(self._name)

    def release(self) -> None:
        # The file stays: if it were removed, two writers could hold locks on two files of one name.
        if self._name in _held:
            _held.discard(self._name)
            os.close(self._descriptor)
