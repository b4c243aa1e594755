"""Atomic writes of result files: a reader or a crash sees the old content or the new one, never a part."""

# The trade-offs that this pattern accepts: a file takes twice its size on the disk while it is written; a hard link to
# the old file keeps the old content; where the file system has no locks, leftovers of killed writers stay.

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from refusion_eval.errors import StoreError
from refusion_eval.untrusted import kind_of, open_plain

# The disk or the user's quota is full, or the file is longer than allowed.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces the content of a file in one step; its folder has to exist."""
    _remove_leftovers(path)
    # In the target's folder, because only within one file system a rename is a single step.
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            _lock(stream.fileno())
            # Models write lone surrogates, which UTF-8 cannot encode and a result must not fail at.
            stream.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())  # before the rename, or a crash could leave the new name on an empty file
            os.fchmod(stream.fileno(), 0o644)
            os.replace(name, path)  # still locked, or another writer could remove it
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    # The rename itself is on the disk when the folder is.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove_leftovers(path: Path) -> None:
    """Removes temporary files of killed writers. A living writer locks its file before it writes the first byte."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.????????"):
        with contextlib.suppress(OSError), open_plain(leftover) as stream:
            if os.fstat(stream.fileno()).st_size and _lock(stream.fileno()):
                leftover.unlink()


def _lock(descriptor: int) -> bool:
    """Locks a file until it is closed; False if another process holds it or the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def prepare_output(path: str | os.PathLike[str]) -> Path:
    """Checks that a result can be written before the work for it starts, and creates its folder; else a StoreError."""
    target = Path(path)
    with _refusing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_file():
            raise OSError(f"it is a {kind_of(target.stat().st_mode)}")
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise OSError(f"no permission to write in {target.parent}")
    return target


def write_output(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a result atomically and creates its folder; a StoreError says why it cannot."""
    target = prepare_output(path)
    with _refusing(target):
        write_atomically(target, content)


def open_own(path: Path, flags: int) -> int:
    """Opens a file that this project writes in place, and creates it if it is missing; anything else is an OSError."""
    # A link could lead to any file of the user, and a pipe could wait for ever: neither is opened.
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(f"it is a {kind_of(mode)}, not a plain file")
    return descriptor


def append_line(path: Path, line: str) -> None:
    """Appends an ASCII line to a file by one call of the system, so that lines of several writers do not mix."""
    # Not flushed to the disk: a line costs microseconds, and a machine that loses power may lose lines.
    with _refusing(path), os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0) as stream:
        content = f"\n{line}\n".encode("ascii")  # a part of a line, left by a killed writer, spoils no later line
        if stream.write(content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def _refusing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = "free some space and run the command again" if error.errno in _NO_SPACE else "name another file"
        raise StoreError(f"{target} cannot be written ({error.strerror or error}); {advice}") from error
