"""Reads the source of a trusted test: the names it must be given, and whether running it may change its process.

A judge that is kept from check to check must not carry anything from one test to the next. So it runs by itself only
tests that can be seen to work on their own names alone, and forks for all others.
"""

import ast
import builtins
import importlib
import sys
from types import ModuleType
from typing import NamedTuple

# Modules whose functions keep no state but caches. The numbers of `random` begin anew with every check.
# fmt: off
_STATELESS_MODULES = frozenset((
    "bisect", "cmath", "collections", "copy", "datetime", "fractions", "functools", "hashlib", "heapq", "itertools",
    "json", "math", "numbers", "operator", "random", "re", "statistics", "string", "typing",
))
# Names that reach further, wherever they are read from and whatever they are called afterwards.
_REACHING_NAMES = frozenset((
    "breakpoint", "compile", "delattr", "eval", "exec", "exit", "getattr", "globals", "help", "input", "locals", "open",
    "quit", "setattr", "vars", "attrgetter", "get_type_hints", "gi_frame", "methodcaller", "register",
    "total_ordering", "update_wrapper", "wraps",
))
# fmt: on
_BUILTINS = frozenset(vars(builtins))


def _shared() -> frozenset[str]:
    """Names under which the stateless modules hold objects that can be changed: other modules, and containers."""
    return frozenset(
        name
        for module in _STATELESS_MODULES
        for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, ModuleType | list | dict | set) and name not in _STATELESS_MODULES | {"abc"}
    )


_REACHING = _REACHING_NAMES | _shared()


class Names(NamedTuple):
    """Names that a test must be given.

    Attributes:
        wanted: names that only the candidate can supply.
        modules: standard modules used as `module.attribute`.
    """

    wanted: list[str]
    modules: list[str]


class Analysis(NamedTuple):
    """Result of the analysis of a test or of its helpers.

    Attributes:
        foreign: names that the source reads and does not define.
        owners: names whose attributes the source reads.
        reaches_out: whether a statement may change more than names of the source, whatever these names are.
    """

    foreign: frozenset[str]
    owners: frozenset[str]
    reaches_out: bool

    @property
    def may_leave_traces(self) -> bool:
        """Whether running the source may change more than its own names."""
        modules = self.foreign & self.owners & sys.stdlib_module_names
        return self.reaches_out or not modules <= _STATELESS_MODULES

    def names(self, known: set[str]) -> Names:
        """Find the names that the test must be given.

        A builtin stays the judge's own, or a candidate could redefine abs() and agree with everything. Only a test that
        names nothing else (MBPP 126 tests a function called `sum`) takes builtins from the candidate.

        Args:
            known: names defined by trusted helpers.
        """
        read = self.foreign - known
        modules = read & self.owners & sys.stdlib_module_names
        wanted = read - modules - _BUILTINS or read & _BUILTINS
        return Names(sorted(wanted), sorted(modules))


def analyse(tree: ast.Module) -> Analysis:
    """Analyse a parsed test, or its helpers."""
    defined: set[str] = set()
    used: set[str] = set()
    owners: set[str] = set()
    reaches_out = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
            reaches_out |= node.id.startswith("__") or node.id in _REACHING
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name):
                owners.add(node.value.id)
            # An attribute that is changed, or a private one.
            reaches_out |= not isinstance(node.ctx, ast.Load) or node.attr.startswith("_") or node.attr in _REACHING
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.ClassDef | ast.AsyncFunctionDef):
            defined.add(node.name)
            reaches_out = True  # not followed
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
            reaches_out |= not all(map(_is_harmless, _imported(node)))
    return Analysis(frozenset(used - defined), frozenset(owners), reaches_out)


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Dotted names that a statement imports, each from its top-level module on."""
    start = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
    return [start + alias.name for alias in node.names]


def _is_harmless(dotted: str) -> bool:
    module, *parts = dotted.split(".")
    return module in _STATELESS_MODULES and not any(part.startswith("_") or part in _REACHING for part in parts)
