"""The filter of system calls: those that a program under test may make, as data, and a BPF program made of them."""

# Every other call fails, because no list of harmful ones is complete. Some look harmless and are missing on purpose.
# Locks on files, signals on input, notes of changes and advice (flock, most of fcntl, fadvise64) reach files of the
# standard library, which all programs share. Pipes and sockets would hold memory that nobody counts: pages (splice,
# tee, vmsplice, sendfile), descriptors (sendmsg), or as much as they are told to (setsockopt). Some limits belong to
# the whole machine (io_setup, inotify_init). Without namespaces, a program that runs under the harness's own uid might
# change the priority and processors of the harness, the modes and times of its files and its System V memory.

import errno
import os
import struct
from typing import NamedTuple

# Numbers of a call on (x86_64, aarch64); None where the architecture lacks it.
Numbers = tuple[int | None, int | None]

# fmt: off
ALLOWED: dict[str, Numbers] = {
    # Open files.
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68),
    "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287), "lseek": (8, 62),
    "close": (3, 57), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59),
    "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46), "fallocate": (285, 47),
    "copy_file_range": (326, 285), "fstat": (5, 80), "fstatfs": (138, 44), "getdents64": (217, 61), "fchdir": (81, 50),
    # Files by name; which ones is up to namespaces and Landlock.
    "open": (2, None), "openat": (257, 56), "creat": (85, None), "stat": (4, None), "lstat": (6, None),
    "newfstatat": (262, 79), "statx": (332, 291), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78), "getcwd": (79, 17), "chdir": (80, 49),
    "statfs": (137, 43), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None),
    "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None),
    "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None), "mknodat": (259, 33),
    "truncate": (76, 45), "umask": (95, 166),
    # Memory, and what a C library asks for.
    "brk": (12, 214), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "msync": (26, 227),
    "getrandom": (318, 278), "uname": (63, 160), "sysinfo": (99, 179),
    # Signals and timers.
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "pidfd_send_signal": (424, 424), "pause": (34, None), "restart_syscall": (219, 128), "alarm": (37, None),
    "setitimer": (38, 103), "getitimer": (36, 102), "timer_create": (222, 107), "timer_settime": (223, 110),
    "timer_gettime": (224, 108), "timer_getoverrun": (225, 109), "timer_delete": (226, 111),
    "timerfd_create": (283, 85), "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87),
    # Processes and threads.
    "fork": (57, None), "vfork": (58, None), "wait4": (61, 260), "waitid": (247, 95), "exit": (60, 93),
    "exit_group": (231, 94), "pidfd_open": (434, 434), "set_tid_address": (218, 96), "set_robust_list": (273, 99),
    "futex": (202, 98), "rseq": (334, 293), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178),
    "getpgid": (121, 155), "getpgrp": (111, None), "getsid": (124, 156), "setsid": (112, 157), "setpgid": (109, 154),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148),
    "getresgid": (120, 150), "getgroups": (115, 158), "capget": (125, 90), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126), "getpriority": (140, 141),
    "getcpu": (309, 168), "getrlimit": (97, 163), "setrlimit": (160, 164), "getrusage": (98, 165), "times": (100, 153),
    # Time, and waiting.
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "time": (201, None), "select": (23, None), "pselect6": (270, 72), "poll": (7, None),
    "ppoll": (271, 73), "epoll_create": (213, None), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_wait": (232, None), "epoll_pwait": (281, 22), "eventfd": (284, None), "eventfd2": (290, 19),
    # A connected pair of sockets.
    "sendto": (44, 206), "recvfrom": (45, 207), "recvmsg": (47, 212), "shutdown": (48, 210), "getsockname": (51, 204),
    "getpeername": (52, 205), "getsockopt": (55, 209),
}

# Properties of files, which Landlock does not guard; where it is in force a program has no file of its own to give any.
ALLOWED_WITHOUT_LANDLOCK: dict[str, Numbers] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
    "llistxattr": (195, 12), "flistxattr": (196, 13), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
# fmt: on

_ALL_BITS = 0xFFFFFFFF


class Argument(NamedTuple):
    """What one argument of a call may be: its low 32 bits, as far as `mask` has them, are one of `values`."""

    position: int  # from 0
    values: tuple[int, ...]
    mask: int = _ALL_BITS


class Restricted(NamedTuple):
    """A call that is allowed where all of some arguments are as said, and fails with `error` elsewhere."""

    numbers: tuple[int, int]  # on x86_64 and on aarch64
    arguments: tuple[Argument, ...]
    error: int = errno.EPERM


_CLONE_NEW, _CLONE_PARENT = 0x7E020080, 0x8000
_CLONE_THREAD, _CLONE_FILES = 0x10000, 0x400
_CLONE_MASK = _CLONE_NEW | _CLONE_PARENT | _CLONE_FILES | _CLONE_THREAD
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x01, 0x20, 0x40000
_AF_UNIX, _SOCK_STREAM, _SOCK_KIND = 1, 1, 0xF
_SIGCHLD = 17

RESTRICTED = {
    # No namespaces and no sibling instead of a child. A thread with open files of its own would hide them.
    "clone": Restricted((56, 220), (Argument(0, (0, _CLONE_FILES, _CLONE_FILES | _CLONE_THREAD), _CLONE_MASK),)),
    # Not CLOSE_RANGE_UNSHARE, for the same reason.
    "close_range": Restricted((436, 436), (Argument(2, (0, 4)),)),
    # The times of ended children count once they are waited for, and with SIGCHLD ignored they never are.
    "rt_sigaction": Restricted((13, 134), (Argument(0, tuple(sorted({*range(1, 65)} - {_SIGCHLD}))),)),
    # Limits of the process itself only.
    "prlimit64": Restricted((302, 261), (Argument(0, (0,)),)),
    # A datagram socket would reach any named socket.
    "socketpair": Restricted((53, 199), (Argument(0, (_AF_UNIX,)), Argument(1, (_SOCK_STREAM,), _SOCK_KIND))),
    # Shared memory that no process maps, and huge pages, are missing from what the watchdog adds up.
    "mmap": Restricted(
        (9, 222), (Argument(3, (0, _MAP_SHARED, _MAP_ANONYMOUS), _MAP_SHARED | _MAP_ANONYMOUS | _MAP_HUGETLB),)
    ),
    # Not MADV_PAGEOUT and MADV_COLD, which hide memory from the watchdog, nor MADV_MERGEABLE.
    "madvise": Restricted((28, 233), (Argument(2, (0, 1, 2, 3, 4, 8, 9, 10, 11, 14, 15, 16, 17, 18, 19, 102, 103)),)),
    # PR_SET_NAME, PR_GET_NAME, PR_GET_SECCOMP, PR_GET_NO_NEW_PRIVS, PR_SET_VMA.
    "prctl": Restricted((157, 167), (Argument(0, (15, 16, 21, 39, 0x53564D41)),)),
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL (its O_ASYNC does nothing without an owner), F_DUPFD_CLOEXEC,
    # F_GETPIPE_SZ.
    "fcntl": Restricted((72, 25), (Argument(1, (0, 1, 2, 3, 4, 1030, 1032)),)),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. The error is what isatty() expects of others.
    "ioctl": Restricted((16, 29), (Argument(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),), errno.ENOTTY),
}

# From this number on, calls are the same on both architectures and so recent that C libraries do without them: after
# ENOSYS they fall back on earlier ones, as on clone, whose flags a filter can read, instead of clone3.
FIRST_RECENT = 424
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, audit number
X32_BIT = 0x40000000

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_OFFSET_NUMBER, _OFFSET_ARCHITECTURE, _OFFSET_ARGUMENTS, _ARGUMENT_BYTES = 0, 4, 16, 8

Step = tuple[int, int, int, int]  # operation, steps to skip if true, if false, operand


def allow_program(with_landlock: bool) -> bytes:
    """BPF program for this machine: foreign call tables kill, calls that are not allowed fail with EPERM or ENOSYS."""
    if (machine := os.uname().machine) not in ARCHITECTURES:
        raise OSError(f"no system call numbers are known for {machine}")
    column, architecture = ARCHITECTURES[machine]
    steps: list[Step] = [
        (_LOAD, 0, 0, _OFFSET_ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    if column == 0:
        steps += [(_JUMP_AT_LEAST, 0, 1, X32_BIT), (_RETURN, 0, 0, _KILL)]
    for restricted in RESTRICTED.values():
        body = _check_arguments(restricted)
        steps += [(_JUMP_EQUAL, 0, len(body), restricted.numbers[column]), *body]
    calls = [*ALLOWED.values(), *([] if with_landlock else ALLOWED_WITHOUT_LANDLOCK.values())]
    calls += [restricted.numbers for restricted in RESTRICTED.values()]
    allowed = {number for numbers in calls if (number := numbers[column]) is not None}
    # One comparison for each range of numbers that end alike: the kernel compiles the program anew for each check.
    for number in range(max(*allowed, FIRST_RECENT) + 1, 0, -1):
        end = _end_of(number, allowed)
        if end != _end_of(number - 1, allowed):
            steps += [(_JUMP_AT_LEAST, 0, 1, number), (_RETURN, 0, 0, end)]
    steps.append((_RETURN, 0, 0, _end_of(0, allowed)))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _end_of(number: int, allowed: set[int]) -> int:
    if number in allowed:
        return _ALLOW
    return _ERRNO | (errno.ENOSYS if number >= FIRST_RECENT else errno.EPERM)


def _check_arguments(restricted: Restricted) -> list[Step]:
    steps: list[Step] = []
    for argument in restricted.arguments:
        offset = _OFFSET_ARGUMENTS + _ARGUMENT_BYTES * argument.position
        behind_refusal = range(len(argument.values), 0, -1)
        steps += [(_LOAD, 0, 0, offset), (_AND, 0, 0, argument.mask)]
        steps += [(_JUMP_EQUAL, skip, 0, value) for skip, value in zip(behind_refusal, argument.values, strict=True)]
        steps.append((_RETURN, 0, 0, _ERRNO | restricted.error))
    return [*steps, (_RETURN, 0, 0, _ALLOW)]
