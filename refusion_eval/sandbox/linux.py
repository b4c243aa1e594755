"""The few Linux calls that Python's standard library lacks, through ctypes; each raises OSError like its own."""

import ctypes
import itertools
import os
import signal
import stat
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_CLONE_VM, _CLONE_FILES = 0x100, 0x400
_STACK_BYTES, _STACK_ALIGNMENT = 1 << 14, 16
_STACK = ctypes.create_string_buffer(_STACK_BYTES)  # kept, because a process runs on it
_SIGNAL_SET_BYTES = 128

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 0x1, 0x2, 0x4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_PR_SET_SECCOMP, _PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 22, 23, 24, 47, 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522

_SYSTEM_CALLS = {
    "pivot_root": {"x86_64": 155, "aarch64": 41}.get(os.uname().machine, -1),
    # The same numbers on every architecture that has them: they are newer than the shared table.
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}

LANDLOCK_ABI_SIGNALS = 6  # first version of Landlock that stops signals to processes outside
_LANDLOCK_ABI_TCP = 4
_READ_FILE, _READ_DIR, _WRITE_FILE = 1 << 2, 1 << 3, 1 << 1
_FIRST_RIGHTS = (1 << 13) - 1
_LATER_RIGHTS = ((2, 1 << 13), (3, 1 << 14), (5, 1 << 15))  # since version: move between folders, truncate, ioctl
_BOTH_TCP, _BOTH_SCOPES = 3, 3
LANDLOCK_SIGNALS = 2  # the scope that leaves a process signals to what it starts from then on


_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def call(name: str, *args: int | str | bytes | None) -> int:
    """Call a function of the C library, or make a system call for which older versions have none."""
    function, numbers = (_libc.syscall, [_SYSTEM_CALLS[name]]) if name in _SYSTEM_CALLS else (getattr(_libc, name), [])
    encoded = [os.fsencode(arg) if isinstance(arg, str) else arg for arg in (*numbers, *args)]
    return _check(function(*[ctypes.c_ulong(arg) if isinstance(arg, int) else arg for arg in encoded]), name)


def start_first_process() -> int:
    """Start the first process of a new pid namespace, which waits until it is killed; only one at a time may run."""
    # The kernel spares the first process of a namespace every signal that it has no handler for, and ends the others
    # with it. This one has the memory and the open files of its parent, because a copy would take forty times as long;
    # it never comes back from the C library's pause(), because it takes no signals.
    top = (ctypes.addressof(_STACK) + _STACK_BYTES) // _STACK_ALIGNMENT * _STACK_ALIGNMENT
    pause = ctypes.cast(_libc.pause, ctypes.c_void_p)
    flags = _CLONE_VM | _CLONE_FILES | signal.SIGCHLD
    before = ctypes.create_string_buffer(_SIGNAL_SET_BYTES)
    # Directly, because the function of the standard library takes half a millisecond.
    _libc.sigprocmask(signal.SIG_SETMASK, b"\xff" * _SIGNAL_SET_BYTES, before)
    try:
        return _check(_libc.clone(pause, ctypes.c_void_p(top), flags, None), "clone")
    finally:
        _libc.sigprocmask(signal.SIG_SETMASK, before, None)


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    call("mount", source, target, kind, flags, data)


def set_mount_attributes(target: str, attributes: int, *, recursive: bool) -> None:
    """Add MOUNT_ATTR_* to a mount, or to all mounts below a path as well (kernel 5.12 or newer)."""
    structure = struct.pack("=QQQQ", attributes, 0, 0, 0)
    call("mount_setattr", _AT_FDCWD, target, _AT_RECURSIVE if recursive else 0, structure, len(structure))


def prctl(option: int, value: int) -> None:
    # PR_SET_PDEATHSIG is lost on a change of uid, PR_SET_NO_NEW_PRIVS is for good.
    call("prctl", option, value, 0, 0, 0)


def drop_bounding_capabilities() -> None:
    """Empty the bounding set; needs CAP_SETPCAP, so it comes before a change of uid."""
    known = itertools.takewhile(lambda number: _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) >= 0, itertools.count())
    for capability in known:
        prctl(_PR_CAPBSET_DROP, capability)


def drop_capabilities() -> None:
    """Empty the effective, permitted, inheritable and ambient sets."""
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    call("capset", struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24))


def install_seccomp(program: bytes) -> None:
    """Install a BPF program (8-byte instructions); needs PR_SET_NO_NEW_PRIVS first."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer)))
    call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(header), 0, 0)


def landlock_abi() -> int:
    try:
        return call("landlock_create_ruleset", None, 0, 1)
    except OSError:
        return 0


def landlock_ruleset(readable: list[str], hidden_names: frozenset[str]) -> int:
    """Descriptor of a ruleset that refuses all but to read folders, without hidden names, and to use devices."""
    abi = landlock_abi()
    files = sum((right for version, right in _LATER_RIGHTS if abi >= version), _FIRST_RIGHTS)
    tcp = _BOTH_TCP if abi >= _LANDLOCK_ABI_TCP else 0
    ruleset_fd = create_landlock_ruleset(files, tcp, _BOTH_SCOPES if abi >= LANDLOCK_ABI_SIGNALS else 0)
    for path in readable:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            _landlock_allow(ruleset_fd, _READ_FILE | _WRITE_FILE, path)
        elif hidden_names.isdisjoint(os.listdir(path)):
            _landlock_allow(ruleset_fd, _READ_FILE | _READ_DIR, path)
        else:  # rules only ever add rights below a path, so a folder with a hidden entry is allowed entry by entry
            for entry in os.scandir(path):
                if entry.name not in hidden_names:
                    _landlock_allow(ruleset_fd, _READ_FILE | (_READ_DIR if entry.is_dir() else 0), entry.path)
    return ruleset_fd


def create_landlock_ruleset(files: int = 0, tcp: int = 0, scopes: int = 0) -> int:
    attributes = struct.pack("=QQQ", files, tcp, scopes)  # older kernels take fields that they do not know if 0
    return call("landlock_create_ruleset", attributes, len(attributes), 0)


def _landlock_allow(ruleset_fd: int, rights: int, path: str) -> None:
    path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        call("landlock_add_rule", ruleset_fd, 1, struct.pack("=Qi", rights, path_fd), 0)
    finally:
        os.close(path_fd)
