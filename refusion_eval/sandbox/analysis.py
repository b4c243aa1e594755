"""Analysis of a test's text: the names that the program must define for it, and what may need one process for both."""

import ast
import builtins
import contextlib
import importlib
import symtable
import sys
from collections.abc import Iterator
from types import FunctionType, GeneratorType, ModuleType
from typing import Any, NamedTuple

from refusion_eval.sandbox.containers import DATA

TEST_FILE, HELPERS_FILE = "<test>", "<helpers>"

# A judge that is kept from check to check must not carry anything from one test to the next. So it runs by itself only
# tests that can be seen to work on their own names alone, and forks for all others. These modules keep no state but
# caches; the numbers of `random` begin anew with every check.
# fmt: off
_STATELESS_MODULES = frozenset((
    "bisect", "cmath", "collections", "copy", "datetime", "fractions", "functools", "hashlib", "heapq", "itertools",
    "json", "math", "numbers", "operator", "random", "re", "statistics", "string", "typing",
))
# Names that reach further, wherever they are read from and whatever they are called afterwards, with those under which
# the stateless modules hold objects that can be changed: other modules, and containers.
_REACHING = frozenset((
    "breakpoint", "compile", "delattr", "eval", "exec", "exit", "getattr", "globals", "help", "input", "locals", "open",
    "quit", "setattr", "vars", "attrgetter", "get_type_hints", "gi_frame", "methodcaller", "register",
    "total_ordering", "update_wrapper", "wraps",
)) | {
    name
    for module in _STATELESS_MODULES
    for name, value in vars(importlib.import_module(module)).items()
    if isinstance(value, ModuleType | list | dict | set) and name not in _STATELESS_MODULES | {"abc"}
}
# fmt: on
_BUILTINS = frozenset(vars(builtins))
_ATTRIBUTES_OF_DATA = frozenset(
    name
    for kind in (*DATA, BaseException, FunctionType, GeneratorType, memoryview, range, slice, type(None))
    for name in dir(kind)
)
_NAMES_OF_DATA = frozenset(kind.__name__ for kind in DATA)
_INTO_PROGRAMS = ("unittest.mock.", "inspect.", "dis.", "gc.", "tracemalloc.", "warnings.", "weakref.")
_KIND_TESTS = ("isinstance", "issubclass", "assertIsInstance")
_RAISE_TESTS = ("assertRaises", "assertRaisesRegex")
_INTERPRETERS = ("pickle.", "marshal.", "shelve.", "code.", "codeop.", "runpy.")
# What reads or changes the state of a process, or the parts of an object that do not leave it.
# fmt: off
_OF_ONE_PROCESS = frozenset((
    "__annotations__", "__bases__", "__cause__", "__closure__", "__code__", "__context__", "__defaults__", "__dict__",
    "__globals__", "__kwdefaults__", "__module__", "__mro__", "__notes__", "__subclasses__", "__traceback__",
    "__wrapped__", "assertLogs", "assertNoLogs", "assertWarns", "assertWarnsRegex", "dir", "environ", "eval", "exec",
    "getcontext", "getrecursionlimit", "globals", "id", "localcontext", "redirect_stderr", "seed", "setrecursionlimit",
    "stderr", "vars",
))
# fmt: on


class Case(NamedTuple):
    """A parsed test and its helpers, and what the test does that is special."""

    test: ast.Module
    helpers: ast.Module  # without placeholders, which have a docstring and imports only
    foreign: frozenset[str]  # names that the test reads before it binds them, or does not bind
    attributes: frozenset[tuple[str, str]]  # of names, as it reads them
    classes: frozenset[str]
    own: frozenset[str]  # names that it binds
    needs_one_process: str  # reason why test and program must share a process, or ""
    runs_texts: str  # what may run a text of a program, or ""
    may_leave_traces: bool  # whether running the test may change more than its own names

    def names(self, defined: set[str]) -> tuple[list[str], list[str]]:
        """Names that only the program can supply, and standard modules, besides what trusted helpers define."""
        read = self.foreign - defined
        modules = {name for name in read & sys.stdlib_module_names if self._may_be_module(name)}
        # A builtin stays the judge's own, or a candidate could redefine abs() and agree with everything. Only a test
        # that names nothing else (MBPP 126 tests a function called `sum`) takes builtins from the candidate.
        wanted = read - modules - _BUILTINS or read & _BUILTINS
        return sorted(wanted), sorted(modules)

    def _may_be_module(self, name: str) -> bool:
        """Whether attributes of a name are read, and the module of that name has them all."""
        attributes = [attribute for owner, attribute in self.attributes if owner == name]
        with contextlib.suppress(ImportError):
            return bool(attributes) and all(hasattr(importlib.import_module(name), one) for one in attributes)
        return False

    @property
    def raises(self) -> frozenset[int]:
        """Lines of `raise` statements that stand directly in a `with`: what its context manager is to see."""
        withs = [node for node in ast.walk(self.test) if isinstance(node, ast.With | ast.AsyncWith)]
        return frozenset(step.lineno for node in withs for step in node.body if isinstance(step, ast.Raise))

    @property
    def imports(self) -> str:
        """The import statements of the test: a program in one file with it would find them done."""
        return "\n".join(ast.unparse(node) for node in self.test.body if isinstance(node, ast.Import | ast.ImportFrom))


def case_of(test: str, helpers: str = "") -> Case:
    """Parse and analyse trusted texts; any exception is a fault of the dataset."""
    tree, helping = ast.parse(test, TEST_FILE), ast.parse(helpers)
    helping.body = [node for node in helping.body if not _is_placeholder(node)]
    nodes = list(ast.walk(tree))
    attributes = frozenset(
        (node.value.id, node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    )
    foreign, own = map(frozenset, _foreign(tree, test))
    callees = _callees(nodes)
    classes = foreign & _class_names(nodes, callees)
    needs = _needs_one_process(nodes, foreign) or _compared_with_data(nodes, callees, classes)
    reaches_out = any(map(_reaches_out, (*nodes, *ast.walk(helping))))
    return Case(tree, helping, foreign, attributes, classes, own, needs, _runs_texts(nodes), reaches_out)


def _reaches_out(node: ast.AST) -> bool:
    """Whether a part of a source may change more than names of the source, whatever these names are."""
    if isinstance(node, ast.Name):
        return node.id.startswith("__") or node.id in _REACHING
    if isinstance(node, ast.Attribute):  # of another module, changed, or private
        of_module = getattr(node.value, "id", "") in sys.stdlib_module_names - _STATELESS_MODULES
        return of_module or not isinstance(node.ctx, ast.Load) or node.attr.startswith("_") or node.attr in _REACHING
    if isinstance(node, ast.Import | ast.ImportFrom):
        return any(
            module not in _STATELESS_MODULES or any(part.startswith("_") or part in _REACHING for part in parts)
            for module, *parts in (name.split(".") for name in _imported(node))
        )
    return isinstance(node, ast.ClassDef | ast.AsyncFunctionDef)  # not followed


def _is_placeholder(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and all(
        isinstance(step, ast.Pass | ast.Import | ast.ImportFrom)
        or (isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant))
        for step in node.body
    )


def _runs_texts(nodes: list[ast.AST]) -> str:
    imports = [name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for name in _imported(node)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("eval", "exec")]
    names = [name for name in imports if f"{name}.".startswith(_INTERPRETERS)]
    names += [_name(call.func) for call in calls if not any(isinstance(part, ast.Constant) for part in call.args[:1])]
    return names[0] if names else ""


def _foreign(tree: ast.Module, source: str) -> tuple[set[str], set[str]]:
    """Names that a source reads as global ones and does not bind before, and all names that it binds itself."""
    read: set[str] = set()
    bound: set[str] = set()
    tables = [symtable.symtable(source, TEST_FILE, "exec")]
    for table in tables:  # grows
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table.get_type() == "module" or symbol.is_global():
                if symbol.is_referenced():
                    read.add(symbol.get_name())
                if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
                    bound.add(symbol.get_name())
    bound |= {name for node in ast.walk(tree) for name in _bound_names(node) if isinstance(node, ast.ImportFrom)}
    early: set[str] = set()
    _note_early(tree.body, set(), early)
    return (read - bound) | (early & bound), bound


_BODIES = ("body", "handlers", "orelse", "finalbody", "cases")


def _note_early(statements: list[Any], own: set[str], early: set[str]) -> None:
    """Note which names statements bind, and which they read before that, in the order in which they run."""
    for statement in statements:
        # The statements of a class are parts of it, because it binds no names here. What one branch binds counts as
        # bound, so that a program never supplies what the test may have bound.
        bodies = [] if isinstance(statement, ast.ClassDef) else [getattr(statement, name, []) for name in _BODIES]
        inner = [child for body in bodies for child in body]
        parts = [child for child in ast.iter_child_nodes(statement) if child not in inner]
        names = [node for part in parts for node in _run_at_once(part) if isinstance(node, ast.Name)]
        early |= {name.id for name in names if isinstance(name.ctx, ast.Load | ast.Del)} - own
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            early |= {statement.target.id} - own
        own |= {name.id for name in names if isinstance(name.ctx, ast.Store)} | _bound_names(statement)
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):  # whose body runs when it is called
            _note_early(inner, own, early)


def _bound_names(statement: ast.AST) -> set[str]:
    """Names that a statement binds by itself: those of functions, classes, handlers and imports."""
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        return {name} if (name := getattr(statement, "name", None)) else set()
    names = _imported_as(statement)
    if "*" in names and isinstance(statement, ast.ImportFrom):
        with contextlib.suppress(ImportError):  # the test will say so
            module = importlib.import_module(statement.module or "")
            names |= set(getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")]))
    return names


def _run_at_once(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a part of a statement, without the bodies of functions."""
    waiting: list[ast.AST] = [tree]
    for node in waiting:  # grows
        yield node
        inner = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            body = node.body if isinstance(node.body, list) else [node.body]
            inner = [child for child in inner if child not in body]
        waiting += inner


def _callees(nodes: list[ast.AST]) -> dict[str, str]:
    """Variable -> name of what was called to give it its value."""
    return {
        target.id: node.value.func.id
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _class_names(nodes: list[ast.AST], callees: dict[str, str]) -> set[str]:
    """Names that are used as only those of classes are; names of variables may be among them."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ExceptHandler) and node.type:
            names |= _names_in(node.type)
        elif isinstance(node, ast.ClassDef):
            names |= {name for base in node.bases for name in _names_in(base)}
        elif isinstance(node, ast.Call) and node.args:
            called = _name(node.func)
            if called in (*_KIND_TESTS, *_RAISE_TESTS):
                names |= _names_in(node.args[0 if called in _RAISE_TESTS else -1])
        elif isinstance(node, ast.Compare | ast.BinOp):  # calls of a capitalised name stand on both sides
            sides = (node.left, *([node.right] if isinstance(node, ast.BinOp) else node.comparators))
            names |= set.intersection(*({name for name in _called_in(side) if name[0].isupper()} for side in sides))
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name):
                names.add(node.value.id)
            if node.attr not in _ATTRIBUTES_OF_DATA:  # an attribute of what a call of the name returns
                names |= _called_in(node.value) | {callees[name] for name in _names_in(node.value) if name in callees}
    return names


def _names_in(tree: ast.expr) -> set[str]:
    """Names that an expression is, or that are in it if it is a tuple."""
    parts = tree.elts if isinstance(tree, ast.Tuple) else [tree]
    return {part.id for part in parts if isinstance(part, ast.Name)}


def _called_in(tree: ast.expr) -> set[str]:
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _compared_with_data(nodes: list[ast.AST], callees: dict[str, str], classes: frozenset[str]) -> str:
    """Reason, if the test compares an object that it makes of one of the classes with data; else ""."""
    for node in nodes:
        if classes and isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            made = {callees.get(getattr(side, "id", ""), "") for side in sides}
            made |= {getattr(side.func, "id", "") for side in sides if isinstance(side, ast.Call)}
            if (kinds := made & classes) and any(map(_is_literal, sides)):
                return f"the test compares an object of a {min(kinds)} with data"
    return ""


def _is_literal(tree: ast.expr) -> bool:
    try:
        ast.literal_eval(tree)
    except ValueError:
        return False
    return True


def _needs_one_process(nodes: list[ast.AST], foreign: frozenset[str]) -> str:
    """Reason, if the test does what would reach its program, or be told by it, in one process only; else ""."""
    modules: set[str] = set()
    imported: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Call) and _name(node.func) in _KIND_TESTS and node.args:
            asked = {_name(part) for part in ast.walk(node.args[-1]) if isinstance(part, ast.Attribute)}
            asked |= imported.intersection(map(_name, ast.walk(node.args[-1])))
            if kinds := sorted(name for name in asked - _NAMES_OF_DATA if not name.endswith("Error")):
                return f"the test asks whether an object of the program is a {kinds[0]} of its own process"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = _imported_as(node)
            modules |= names
            imported |= names if isinstance(node, ast.ImportFrom) else set()
            if used := next((name for name in _imported(node) if f"{name}.".startswith(_INTO_PROGRAMS)), ""):
                return f"the test looks into the program's process by {used}"
        elif isinstance(node, ast.ClassDef) and (base := next((n for n in map(_name, node.bases) if n in foreign), "")):
            return f"a class of the test derives from the program's {base}"
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            owner = getattr(node.value, "id", "")
            if owner in modules and (owner, node.attr) != ("sys", "stdout"):  # what is printed comes to the judge
                return f"the test changes {owner}.{node.attr}, which the program would see in one process with it"
        elif (name := _name(node)) in _OF_ONE_PROCESS:
            return f"the test uses {name}, which is its own process's"
    return ""


def _name(node: ast.AST) -> str:
    return str(getattr(node, "id", getattr(node, "attr", "")))


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Dotted names that a statement imports, each from its top-level module on."""
    start = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
    return [start + alias.name for alias in node.names]


def _imported_as(node: ast.Import | ast.ImportFrom) -> set[str]:
    return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
