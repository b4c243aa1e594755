"""The filter of system calls: those that no program under test needs, as data, and a BPF program made of them.

Some look harmless and are not: without namespaces, a program that runs under the harness's own uid may change the
limits, priority and processors of the harness, the modes and times of its files and its System V memory, and neither
Landlock nor anything else that an ordinary user has at hand stops it.
"""

import errno
import os
import struct
from typing import NamedTuple

# Numbers of a call on (x86_64, aarch64); None where the architecture lacks it.
Numbers = tuple[int | None, int | None]

# fmt: off
DENIED: dict[str, Numbers] = {
    # The network, and sockets with names. A connected pair of sockets stays, without messages that carry descriptors.
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    # Other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "pidfd_getfd": (438, 438),
    "kcmp": (312, 272), "migrate_pages": (256, 238), "move_pages": (279, 239), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    # What outlives a process.
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "shmdt": (67, 197), "semget": (64, 190), "semctl": (66, 191), "semop": (65, 193),
    "semtimedop": (220, 192), "msgget": (68, 186), "msgctl": (71, 187), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "mq_open": (240, 180), "mq_unlink": (241, 181),
    # Mounts and namespaces.
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97),
    "setns": (308, 268), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    # Names of files that others open: a watch needs no right to read the folder under Landlock.
    "inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    # Large and seldom used parts of the kernel.
    "bpf": (321, 280), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "userfaultfd": (323, 282),
    "personality": (135, 92), "modify_ldt": (154, None), "lookup_dcookie": (212, 18),
    # The machine.
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "acct": (163, 89), "swapon": (167, 224),
    "swapoff": (168, 225), "reboot": (169, 142), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "syslog": (103, 116),
    "vhangup": (153, 58), "iopl": (172, None), "ioperm": (173, None),
}

# Properties of files, which Landlock does not guard; where it is in force a program has no file of its own to give any.
DENIED_WITH_LANDLOCK: dict[str, Numbers] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "getxattr": (191, 8), "lgetxattr": (192, 9), "getxattrat": (464, 464), "listxattr": (194, 11),
    "llistxattr": (195, 12), "listxattrat": (465, 465), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "file_setattr": (469, 469),
}
# fmt: on

# Flags live in memory that a filter cannot read; without clone3 the C library uses clone.
CLONE3 = 435

ANY_BIT, ALL_BITS, EQUAL, UNEQUAL = "any bit", "all bits", "equal", "unequal"


class Refused(NamedTuple):
    """A call that is refused for some values of one argument."""

    numbers: tuple[int, int]  # on x86_64 and on aarch64
    argument: int  # 0-based index; its low 32 bits are compared
    test: str  # `ANY_BIT`, `ALL_BITS`, `EQUAL` or `UNEQUAL`
    value: int


_CLONE_NEW, _CLONE_PARENT = 0x7E020080, 0x8000
_MAP_SHARED_ANONYMOUS, _MAP_HUGETLB = 0x21, 0x40000
_NOT_A_STREAM = 0xE  # SOCK_STREAM is 1, and every other kind has one of these bits
_PR_SET_PDEATHSIG = 1
_SIGCHLD = 17
REFUSED_ARGUMENTS = (
    Refused((56, 220), 0, ANY_BIT, _CLONE_NEW | _CLONE_PARENT),  # clone: namespaces, a sibling instead of a child
    Refused((157, 167), 0, EQUAL, _PR_SET_PDEATHSIG),  # prctl
    # rt_sigaction: the times of ended children count once they are waited for, and with this ignored they never are.
    Refused((13, 134), 0, EQUAL, _SIGCHLD),
    Refused((302, 261), 0, UNEQUAL, 0),  # prlimit64: limits of another process
    Refused((53, 199), 1, ANY_BIT, _NOT_A_STREAM),  # socketpair: a datagram socket reaches any named socket
    # mmap: shared memory that no process maps, and huge pages, are missing from what the watchdog adds up.
    Refused((9, 222), 3, ALL_BITS, _MAP_SHARED_ANONYMOUS),
    Refused((9, 222), 3, ANY_BIT, _MAP_HUGETLB),
)

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, audit number
X32_BIT = 0x40000000

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_OFFSET_NUMBER, _OFFSET_ARCHITECTURE, _OFFSET_ARGUMENTS, _ARGUMENT_BYTES = 0, 4, 16, 8

Step = tuple[int, int, int, int]  # operation, steps to skip if true, if false, operand


def supported() -> bool:
    """Whether the numbers of this machine's system calls are known here."""
    return os.uname().machine in ARCHITECTURES


def deny_program(with_landlock: bool) -> bytes:
    """BPF program for this machine: foreign call tables kill, denied calls fail with EPERM, the rest is allowed.

    `with_landlock` also denies the calls that Landlock leaves open (`DENIED_WITH_LANDLOCK`).
    """
    column, architecture = ARCHITECTURES[os.uname().machine]
    steps: list[Step] = [
        (_LOAD, 0, 0, _OFFSET_ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    if column == 0:
        steps += [(_JUMP_AT_LEAST, 0, 1, X32_BIT), (_RETURN, 0, 0, _KILL)]
    denied = DENIED | (DENIED_WITH_LANDLOCK if with_landlock else {})
    for numbers in denied.values():
        number = numbers[column]
        if number is not None:
            steps += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    steps += [(_JUMP_EQUAL, 0, 1, CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for refused in REFUSED_ARGUMENTS:
        steps += _refuse_argument(refused, column)
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _refuse_argument(refused: Refused, column: int) -> list[Step]:
    """Refuse a call by one argument; ends with the call's number loaded again."""
    tests: dict[str, list[Step]] = {
        ANY_BIT: [(_JUMP_ANY_BIT, 0, 1, refused.value)],
        EQUAL: [(_JUMP_EQUAL, 0, 1, refused.value)],
        UNEQUAL: [(_JUMP_EQUAL, 1, 0, refused.value)],
        ALL_BITS: [(_AND, 0, 0, refused.value), (_JUMP_EQUAL, 0, 1, refused.value)],
    }
    body = [
        (_LOAD, 0, 0, _OFFSET_ARGUMENTS + _ARGUMENT_BYTES * refused.argument),
        *tests[refused.test],
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    return [(_JUMP_EQUAL, 0, len(body), refused.numbers[column]), *body]
