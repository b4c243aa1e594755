"""The folders that a program under test may read: standard library, shared libraries and time zones, no package."""

import importlib
import os
import sys
import zoneinfo
from collections.abc import Callable
from pathlib import Path

HIDDEN_NAMES = frozenset({"site-packages", "dist-packages"})
# Not /dev/zero: a shared mapping of it is memory that outlives the mapping and that nobody counts.
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")

ForkHooks = list[dict[str, Callable[[], object]]]  # arguments of calls of `os.register_at_fork`

# Imported before the first fork, so that every program finds them loaded.
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
    """Absolute paths of the folders that Python needs to go on importing, and of those of its time zones."""
    stdlib = {Path(path) for path in search_path() if os.path.isdir(path)}
    mapped = [Path(line.split(maxsplit=5)[-1]) for line in Path("/proc/self/maps").read_text().splitlines()]
    libraries = {path.parent for path in mapped if path.is_absolute() and ".so" in path.name}
    # A library folder that contains the standard library is left out: it would bring the installed packages with it,
    # and what was loaded from it stays loaded.
    zones = {Path(path) for path in zoneinfo.TZPATH if os.path.isdir(path)}
    wanted = (
        stdlib | zones | {folder for folder in libraries if not any(inner.is_relative_to(folder) for inner in stdlib)}
    )
    return sorted(str(path) for path in wanted if wanted.isdisjoint(path.parents))


def search_path() -> list[str]:
    """sys.path for programs under test: the standard library alone."""
    return [os.path.realpath(path) for path in sys.path if path and HIDDEN_NAMES.isdisjoint(path.split("/"))]
