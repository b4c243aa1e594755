"""Numbers of system calls that no program may make: attacks try each, and unit tests ask the filter about it."""

from refusion_eval.sandbox.seccomp import Numbers

# fmt: off
REFUSED: dict[str, Numbers] = {
    # The network, and sockets with names. A connected pair of sockets stays, without messages that carry descriptors.
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "sendmsg": (46, 211), "sendmmsg": (307, 269), "setsockopt": (54, 208),
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
    # Other programs, locks, and memory that nobody counts.
    "execve": (59, 221), "execveat": (322, 281), "flock": (73, 32), "fadvise64": (221, 223), "io_setup": (206, 0),
    "sendfile": (40, 71), "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75), "mlock": (149, 228),
    "mlockall": (151, 230), "remap_file_pages": (216, 234), "sync": (162, 81), "uselib": (134, None),
}
# fmt: on
