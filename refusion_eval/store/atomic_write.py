"""Replacing a file in one step, and the folders that results are written to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import tempfile
from pathlib import Path

from refusion_eval.errors import StoreError

# The disk is full, so is the user's share of it, or files may not grow so long.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a file by new content, so that a reader or a crash sees the old or the new one, never a part."""
    _remove_leftovers(path)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            _lock(stream.fileno())
            stream.write(content.encode("utf-8") if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
            os.fchmod(stream.fileno(), 0o644)
            os.replace(name, path)  # before the lock goes: another writer would take the part for a leftover
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove_leftovers(path: Path) -> None:
    """Removes what killed writers of this file left; a living one has locked its part before it holds a byte."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.????????"):
        with contextlib.suppress(OSError), leftover.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size and _lock(stream.fileno()):
                leftover.unlink()


def _lock(descriptor: int) -> bool:
    """Locks a file until it is closed; False where another has it locked, or the file system knows no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def prepare_output(path: str | os.PathLike[str]) -> Path:
    """Makes sure that a result can be written, before the work that it is the result of.

    Args:
        path: the file; its folder is created if it is missing.

    Raises:
        StoreError: the folder cannot be made or written to, or the path is a folder itself.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _failure(target, error) from error
    if target.is_dir():
        raise _refusal(target, "it is a folder")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise _refusal(target, f"no permission to write in {target.parent}")
    return target


def write_output(path: str | os.PathLike[str], text: str) -> None:
    """Writes a result atomically, in a folder that is created if it is missing; lone surrogates become escapes.

    Raises:
        StoreError: the file cannot be written.
    """
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a result that is no text, likewise.

    Raises:
        StoreError: the file cannot be written.
    """
    target = prepare_output(path)
    try:
        write_atomically(target, content)
    except OSError as error:
        raise _failure(target, error) from error


def _failure(target: Path, error: OSError) -> StoreError:
    if error.errno in _NO_SPACE:
        return StoreError(f"{target} cannot be written ({error.strerror}); free some space and run the command again")
    return _refusal(target, error.strerror)


def _refusal(target: Path, why: str | None) -> StoreError:
    return StoreError(f"{target} cannot be written ({why}); name another file")
