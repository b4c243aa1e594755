"""The ways to isolate a program, as data (`PROFILES`; `probe` finds one that holds), and the steps that lock it in."""

# Namespaces and a small root are made once per worker, everything else once per program. Each step gives up a right
# that no later step needs.

import errno
import os
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

from refusion_eval.sandbox import layout, linux

_INSIDE_ID = 1000  # uid and gid that a user namespace shows to the program
_MIB = 1 << 20
_TMP_MIB = 64
_TMP_FILES = 4096
_FILE_MIB = 32
_NUM_OPEN_FILES = 64
NUM_PROCESSES = 32
_NUM_QUEUED_SIGNALS = 64  # timers too, counted over all processes of the uid
_FIRST_UID, _NUM_UIDS = 20000, 20000  # two per worker, chosen by its pid; below 65536, where containers stop
_READ_ONLY = linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID
_SEALED = _READ_ONLY | linux.MOUNT_ATTR_NODEV
_KEPT = "/.kept"  # where folders below /tmp stay while /tmp is mounted anew
_MOUNT_POINTS = ("/mnt", "/media", "/srv", "/opt", "/home", "/tmp")


@dataclass(frozen=True, kw_only=True)
class Profile:
    tier: str
    layers: tuple[str, ...]
    namespaces: bool = False
    user_namespace: bool = False
    change_uid: bool = False
    restrict_files: bool = False
    filter_calls: bool = True


_COMMON = ("seccomp filter", "resource limits", "memory and time watchdog", "empty environment")
_NO_FOLDER = ("no writable folder", *_COMMON)
_ROOT = ("mount, pid, network, ipc and uts namespaces", "read-only root with the standard library", "private /tmp")
PROFILES = {
    "namespaces": Profile(tier="A", layers=(*_ROOT, "unprivileged uid", *_COMMON), namespaces=True, change_uid=True),
    "user-namespaces": Profile(
        tier="A", layers=("user namespace", *_ROOT, *_COMMON), namespaces=True, user_namespace=True
    ),
    "root-landlock": Profile(
        tier="B", layers=("unprivileged uid", "Landlock", *_NO_FOLDER), change_uid=True, restrict_files=True
    ),
    "landlock": Profile(tier="C", layers=("Landlock with signal scope", *_NO_FOLDER), restrict_files=True),
    "none": Profile(tier="none", layers=("resource limits", "memory and time watchdog"), filter_calls=False),
}


def unprivileged_ids(pid: int) -> tuple[int, int]:
    """Uids for the program and for its judge where it has another; each worker has its own, which count apart."""
    guest = _FIRST_UID + 2 * (pid % _NUM_UIDS)
    return guest, guest + 1


def enter_namespaces(profile: Profile) -> None:
    """Move this process into new namespaces; the next child is the first of the new pid namespace."""
    uid, gid = os.getuid(), os.getgid()
    flags = linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    if not profile.user_namespace:
        linux.call("unshare", flags)
        return
    if uid == 0:  # a real uid of 0 may write /proc/sys even from a user namespace without capabilities
        uid = gid = unprivileged_ids(os.getpid())[0]
        become(uid)
        linux.prctl(linux.PR_SET_DUMPABLE, 1)  # the change of uid took /proc/self away
    try:
        linux.call("unshare", flags | linux.CLONE_NEWUSER)
    except OSError as error:
        raise OSError(error.errno, _why_no_user_namespace(error)) from error
    # Groups first: the kernel takes a gid_map of an unprivileged process only after that.
    maps = {"setgroups": "deny", "gid_map": f"{_INSIDE_ID} {gid} 1", "uid_map": f"{_INSIDE_ID} {uid} 1"}
    for name, text in maps.items():
        Path(f"/proc/self/{name}").write_text(text)


def _why_no_user_namespace(error: OSError) -> str:
    """The setting to look at, which the kernel's own message ("no space left on device") does not name."""
    settings = map(Path, ("/proc/sys/user/max_user_namespaces", "/proc/sys/kernel/unprivileged_userns_clone"))
    if off := [".".join(path.parts[3:]) for path in settings if path.exists() and path.read_text().strip() == "0"]:
        return f"user namespaces are switched off: {' and '.join(off)} = 0"
    if error.errno == errno.ENOSPC:
        return "user namespaces are used up, or limited to none by the container around this one"
    return f"user namespaces are refused ({os.strerror(error.errno or 0)}), by a container's filter or by AppArmor"


def build_root(folders: list[str]) -> None:
    """Replace the root of this mount namespace by a read-only one with four devices and these folders, no more."""
    base = next(path for path in _MOUNT_POINTS if os.path.isdir(path) and not any(f.startswith(path) for f in folders))
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", base, "tmpfs", linux.MS_NOSUID, "size=1m,mode=755")
    for folder in folders:
        _bind(base, folder, folder, [name for name in layout.HIDDEN_NAMES if os.path.isdir(f"{folder}/{name}")])
    for path in ("/lib", "/lib64"):  # links through which the loader finds libraries
        if os.path.islink(path):
            os.symlink(os.readlink(path), base + path)
    os.mkdir(f"{base}/dev", 0o755)
    for device in layout.DEVICES:
        Path(base + device).touch(0o666)
        linux.mount(device, base + device, flags=linux.MS_BIND)
        # Read-only devices can be written to; their times and owners cannot be changed.
        linux.set_mount_attributes(base + device, _READ_ONLY, recursive=False)
    os.makedirs(f"{base}/tmp", exist_ok=True)
    for kept, folder in _below_tmp(folders).items():
        _bind(base, base + folder, kept)
    os.chdir(base)
    linux.call("pivot_root", ".", ".")
    linux.call("umount2", ".", linux.MNT_DETACH)
    os.chdir("/")
    linux.set_mount_attributes("/", _READ_ONLY, recursive=False)


def _below_tmp(folders: list[str]) -> dict[str, str]:
    """The folders that an empty /tmp would hide, such as those of a Python that somebody installed there, by a copy."""
    below = [folder for folder in folders if folder.startswith("/tmp/")]
    return {f"{_KEPT}/{number}": folder for number, folder in enumerate(below)}


def _bind(base: str, source: str, folder: str, hidden: list[str] | None = None) -> None:
    """Mount a folder, read-only and with empty folders over what is hidden in it, below `base`."""
    path = base
    for part in folder.strip("/").split("/"):
        path = f"{path}/{part}"
        if not os.path.isdir(path):
            os.mkdir(path)
            os.chmod(path, 0o111)  # can be passed through and not listed
    linux.mount(source, path, flags=linux.MS_BIND | linux.MS_REC)
    for name in hidden or []:
        linux.mount("tmpfs", f"{path}/{name}", "tmpfs", 0, "size=4k,mode=755")
    linux.set_mount_attributes(path, _SEALED, recursive=True)


class PrivateTmp:
    """An empty /tmp with limits on bytes and files, mounted anew where the last program left a trace in it."""

    def __init__(self, folders: list[str]) -> None:
        self._kept = _below_tmp(folders)
        self._mount()

    def _mount(self) -> None:
        limits = f"size={_TMP_MIB}m,nr_inodes={_TMP_FILES},mode=777"
        linux.mount("tmpfs", "/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, limits)
        for kept, folder in self._kept.items():
            _bind("", kept, folder)
        self._pristine = self._state()

    @staticmethod
    def _state() -> tuple[object, ...]:
        # Differs after any change: nobody sets the time of the last change back.
        folder, space = os.stat("/tmp"), os.statvfs("/tmp")
        times = (folder.st_ctime_ns, folder.st_mtime_ns, folder.st_atime_ns)
        return times, folder.st_mode, os.listxattr("/tmp"), space.f_ffree, space.f_bfree

    def renew(self) -> None:
        if self._state() != self._pristine:
            linux.call("umount2", "/tmp", linux.MNT_DETACH)
            self._mount()


def become(uid: int) -> None:
    """Change to an unprivileged uid and gid, without supplementary groups, for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def make_ruleset(profile: Profile, folders: list[str]) -> int | None:
    if not profile.restrict_files:
        return None
    if not profile.change_uid and linux.landlock_abi() < linux.LANDLOCK_ABI_SIGNALS:
        raise OSError(f"Landlock {linux.landlock_abi()} cannot stop signals; version {linux.LANDLOCK_ABI_SIGNALS} can")
    return linux.landlock_ruleset([*folders, *layout.DEVICES], layout.HIDDEN_NAMES)


def lock_down(profile: Profile, uid: int, ruleset_fd: int | None, limits: dict[int, int], filter_bytes: bytes) -> None:
    """Give up everything a program and its test must not have; nothing can be regained afterwards."""
    for name, value in limits.items():
        _, hard = resource.getrlimit(name)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))
    if profile.change_uid:
        become(uid)
    if not profile.namespaces:
        # After the change of uid, which clears it. With namespaces the end of the worker ends the pid namespace.
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if not profile.filter_calls:
        return
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.drop_capabilities()
    if ruleset_fd is not None:
        linux.call("landlock_restrict_self", ruleset_fd, 0)
    linux.install_seccomp(filter_bytes)


def limits_of(memory_bytes: int, cpu_s: int, num_processes: int) -> dict[int, int]:
    return {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: _FILE_MIB * _MIB,
        resource.RLIMIT_NOFILE: _NUM_OPEN_FILES,
        resource.RLIMIT_NPROC: num_processes,
        resource.RLIMIT_SIGPENDING: _NUM_QUEUED_SIGNALS,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_CORE: 0,
    }
