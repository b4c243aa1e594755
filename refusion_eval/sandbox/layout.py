"""The folders that a program under test may read: the standard library and shared libraries, no installed package."""

import importlib
import os
import sys
from collections.abc import Callable

HIDDEN_NAMES = frozenset({"site-packages", "dist-packages"})
# Not /dev/zero: a shared mapping of it is memory that outlives the mapping and that nobody counts.
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")

ForkHooks = list[dict[str, Callable[[], object]]]  # arguments of calls of `os.register_at_fork`

# Imported before the first fork, so that every program finds them loaded; the rest of the standard library is read
# when it is asked for.
# fmt: off
_PRELOADED = (
    "array", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "csv", "dataclasses", "datetime",
    "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "inspect", "io", "itertools", "json", "math",
    "numbers", "operator", "queue", "random", "re", "statistics", "string", "textwrap", "threading", "time",
    "traceback", "typing", "unicodedata",
)
# fmt: on


def preload() -> ForkHooks:
    """Import the modules that programs use most, before all imports of a worker; returns what they run at forks."""
    # A worker has one thread and no use for new random numbers, and what the modules run would cost it more than the
    # fork; its guests register it for themselves.
    held_back: ForkHooks = []
    register = os.register_at_fork
    os.register_at_fork = lambda **hooks: held_back.append(hooks)
    try:
        for name in _PRELOADED:
            importlib.import_module(name)
    finally:
        os.register_at_fork = register
    return held_back


def readable_folders() -> list[str]:
    """Absolute paths of the folders that Python needs to go on importing."""
    stdlib = {path for path in search_path() if os.path.isdir(path)}
    folders = set(stdlib)
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if path.startswith("/") and ".so" in os.path.basename(path):
                folders.add(os.path.dirname(path))
    # A library folder that contains the standard library is left out: it would bring the installed packages with it,
    # and what was loaded from it stays loaded.
    libraries = {folder for folder in folders - stdlib if not any(_within(inner, folder) for inner in stdlib)}
    wanted = stdlib | libraries
    return sorted(path for path in wanted if not any(path != other and _within(path, other) for other in wanted))


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def search_path() -> list[str]:
    """sys.path for programs under test: the standard library alone."""
    return [os.path.realpath(path) for path in sys.path if path and HIDDEN_NAMES.isdisjoint(path.split("/"))]
