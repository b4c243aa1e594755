"""What the text of a trusted test tells: the names it must be given, and whether running it may leave something behind.

A judge that is kept from check to check must not carry anything from one test to the next. So it runs by itself only
tests that can be seen to work on their own names alone, and forks for all others.
"""

import ast
import builtins
import sys
from typing import NamedTuple

# Modules whose functions keep nothing, or nothing but caches; the numbers of `random` begin anew with every check.
# fmt: off
_STATELESS_MODULES = frozenset((
    "bisect", "cmath", "collections", "copy", "datetime", "fractions", "functools", "hashlib", "heapq", "itertools",
    "json", "math", "numbers", "operator", "random", "re", "statistics", "string", "typing",
))
_REACHING_BUILTINS = frozenset((
    "__build_class__", "__import__", "breakpoint", "compile", "delattr", "eval", "exec", "exit", "globals", "help",
    "input", "locals", "open", "quit", "setattr", "vars",
))
# fmt: on
_BUILTINS = frozenset(vars(builtins))


class Names(NamedTuple):
    """Names that a test must be given.

    Attributes:
        wanted: names that only the candidate can supply.
        modules: standard modules used as `module.attribute`.
    """

    wanted: list[str]
    modules: list[str]


class Reading(NamedTuple):
    """What was found in a text.

    Attributes:
        foreign: names that it reads and does not define.
        owners: names that it reads attributes of.
        reaches_out: whether a statement of it may change more than its own names, whatever these names are.
    """

    foreign: frozenset[str]
    owners: frozenset[str]
    reaches_out: bool

    @property
    def may_leave_traces(self) -> bool:
        """Whether running it may change more than its own names."""
        modules = self.foreign & self.owners & sys.stdlib_module_names
        return self.reaches_out or not modules <= _STATELESS_MODULES or bool(self.foreign & _REACHING_BUILTINS)

    def names(self, known: set[str]) -> Names:
        """Find what the test must be given.

        A builtin stays the judge's own, or a candidate could redefine abs() and agree with everything. Only a test that
        names nothing else (MBPP 126 tests a function called `sum`) takes builtins from the candidate.

        Args:
            known: names defined by trusted helpers.
        """
        read = self.foreign - known
        modules = read & self.owners & sys.stdlib_module_names
        wanted = read - modules - _BUILTINS or read & _BUILTINS
        return Names(sorted(wanted), sorted(modules))


def read(tree: ast.Module) -> Reading:
    """Read a parsed test, or its helpers."""
    defined: set[str] = set()
    used: set[str] = set()
    owners: set[str] = set()
    reaches_out = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name):
                owners.add(node.value.id)
            # A changed attribute, or one that leads behind an object's public face.
            reaches_out |= not isinstance(node.ctx, ast.Load) or node.attr.startswith("_")
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.ClassDef | ast.AsyncFunctionDef):
            defined.add(node.name)
            reaches_out = True  # not followed
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
            reaches_out |= not _imported(node) <= _STATELESS_MODULES
    return Reading(frozenset(used - defined), frozenset(owners), reaches_out)


def _imported(node: ast.Import | ast.ImportFrom) -> set[str]:
    """Top-level modules that a statement imports."""
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return {name.partition(".")[0] for name in names}
