"""A Landlock ruleset that leaves a process the standard library to read and nothing to write."""

import os
import stat
import struct

from refusion_eval.sandbox import linux

ABI_SIGNALS = 6  # first version that stops signals to processes outside
_ABI_TCP = 4
_READ_FILE, _READ_DIR, _WRITE_FILE = 1 << 2, 1 << 3, 1 << 1
_FIRST_RIGHTS = (1 << 13) - 1
_LATER_RIGHTS = ((2, 1 << 13), (3, 1 << 14), (5, 1 << 15))  # since version: move between folders, truncate, ioctl
_BOTH_TCP, _BOTH_SCOPES = 3, 3
_SIGNALS = 2  # one of the scopes


def ruleset(readable: list[str], hidden_names: frozenset[str]) -> int:
    """Make a ruleset; every right it knows is refused except as said here.

    Args:
        readable: folders whose files may be read, and device files that may be read and written.
        hidden_names: names of entries of these folders that stay unreadable (installed packages).

    Returns:
        Its file descriptor.

    Raises:
        OSError: the kernel has no Landlock.
    """
    abi = linux.landlock_abi()
    files = _FIRST_RIGHTS
    for version, right in _LATER_RIGHTS:
        files |= right if abi >= version else 0
    attributes = struct.pack("=Q", files)
    if abi >= _ABI_TCP:
        attributes += struct.pack("=Q", _BOTH_TCP)
    if abi >= ABI_SIGNALS:
        attributes += struct.pack("=Q", _BOTH_SCOPES)
    ruleset_fd = linux.landlock_create(attributes)
    for path in readable:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            linux.landlock_allow(ruleset_fd, _READ_FILE | _WRITE_FILE, path)
        elif hidden_names.isdisjoint(os.listdir(path)):
            linux.landlock_allow(ruleset_fd, _READ_FILE | _READ_DIR, path)
        else:
            _allow_entries(ruleset_fd, path, hidden_names)
    return ruleset_fd


def own_signals_only() -> int:
    """Make a ruleset that leaves a process signals to what it starts from then on, and restricts nothing else.

    Returns:
        Its file descriptor.
    """
    return linux.landlock_create(struct.pack("=QQQ", 0, 0, _SIGNALS))


def _allow_entries(ruleset_fd: int, folder: str, hidden_names: frozenset[str]) -> None:
    """Rules only ever add rights below a path, so a folder with a hidden entry is allowed entry by entry."""
    for entry in os.scandir(folder):
        if entry.name in hidden_names:
            continue
        rights = _READ_FILE | (_READ_DIR if entry.is_dir() else 0)
        linux.landlock_allow(ruleset_fd, rights, entry.path)
