"""A lock for the only writer of a run directory, which the kernel releases when the process ends for any reason."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from refusion_eval.errors import StoreError

LOCK_NAME = "run.lock"

# Locks of this process. POSIX locks never exclude their own process, and they are not inherited by forked workers, so
# a worker that outlives a killed run does not keep its directory closed.
_held: set[str] = set()


class DirectoryLock:
    """Exclusive right to write into a directory until `release` or the end of the process."""

    def __init__(self, directory: Path) -> None:
        self._name = str(directory.resolve())
        if self._name in _held:
            raise StoreError(
                f"{directory} is already open for writing in this process (pid {os.getpid()}); close it first"
            )
        path = directory / LOCK_NAME
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be opened for writing ({error.strerror}); choose a writable run directory"
            ) from error
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, 200, 0).decode("utf-8", "replace").strip() or "pid not yet known"
            os.close(self._descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                reason = f"is being written by another process ({holder}); wait for it, stop it, or choose another"
            else:
                reason = f"cannot be locked ({error.strerror}); put the run on a file system with POSIX locks"
            raise StoreError(f"{directory} {reason}") from error
        _held.add(self._name)
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            self.release()
            raise StoreError(f"{path} cannot be written ({error.strerror}); free some space and run again") from error

    def release(self) -> None:
        """Releases the lock. The file stays and means nothing without the kernel's lock."""
        if self._name in _held:
            _held.discard(self._name)
            os.close(self._descriptor)
