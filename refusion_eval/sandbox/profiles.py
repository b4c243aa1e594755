"""The ways to isolate a program, as data: `jail` carries them out, `probe` finds one that holds."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One way to isolate a program.

    Attributes:
        name: how it is asked for.
        tier: "A", "B", "C" or "none", as shown in verdicts.
        layers: what it consists of, for a reader.
        namespaces: own mount, pid, network, ipc and uts namespaces with a small read-only root.
        user_namespace: these through a user namespace of our own.
        change_uid: run as an unprivileged uid (the caller is root).
        restrict_files: Landlock.
        filter_calls: seccomp and no new privileges.
    """

    name: str
    tier: str
    layers: tuple[str, ...]
    namespaces: bool = False
    user_namespace: bool = False
    change_uid: bool = False
    restrict_files: bool = False
    filter_calls: bool = True


_COMMON = ("seccomp filter", "resource limits", "memory and time watchdog", "empty environment")
_ROOT = ("mount, pid, network, ipc and uts namespaces", "read-only root with the standard library", "private /tmp")
PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            name="namespaces", tier="A", layers=(*_ROOT, "unprivileged uid", *_COMMON), namespaces=True, change_uid=True
        ),
        Profile(
            name="user-namespaces",
            tier="A",
            layers=("user namespace", *_ROOT, *_COMMON),
            namespaces=True,
            user_namespace=True,
        ),
        Profile(
            name="root-landlock",
            tier="B",
            layers=("unprivileged uid", "Landlock", "no writable folder", *_COMMON),
            change_uid=True,
            restrict_files=True,
        ),
        Profile(
            name="landlock",
            tier="C",
            layers=("Landlock with signal scope", "no writable folder", *_COMMON),
            restrict_files=True,
        ),
        Profile(name="none", tier="none", layers=("resource limits", "memory and time watchdog"), filter_calls=False),
    )
}
