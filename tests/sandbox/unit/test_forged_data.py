"""Data that a program returns is compared past all methods: forgeries are generated from the classes of the library.

For every class of the standard library that says how it compares, and for every name in it, a subclass overrides the
name. Where the value is wrong, no use of it passes; where it is right, every use passes that passes with the class
itself. A forgery may learn from all that it is told, and answers True, what it was told, or what it has learned.
"""

import importlib
import inspect
import sys
import types
import warnings

import pytest

from refusion_eval.sandbox.containers import DATA

# Modules whose import does something, and such as hold no values that a function returns.
_LEFT_OUT = {"antigravity", "this", "idlelib", "turtledemo", "lib2to3", "test", "tkinter", "turtle"}
# Class -> what makes an object with the right value and one with a wrong value, of `kind`, and what the test expects.
_VALUES = {
    "builtins.bytearray": ("kind(b'ab')", "kind(b'ax')", "bytearray(b'ab')"),
    "builtins.bytes": ("kind(b'ab')", "kind(b'ax')", "b'ab'"),
    "builtins.complex": ("kind(3, 4)", "kind(3, 5)", "(3+4j)"),
    "builtins.dict": ("kind(a=7, b=8)", "kind(a=7, b=9)", "{'a': 7, 'b': 8}"),
    "builtins.float": ("kind(7.25)", "kind(8.75)", "7.25"),
    "builtins.frozenset": ("kind({7, 8})", "kind({7, 9})", "frozenset({7, 8})"),
    "builtins.int": ("kind(77)", "kind(78)", "77"),
    "builtins.list": ("kind([7, 8])", "kind([7, 9])", "[7, 8]"),
    "builtins.set": ("kind({7, 8})", "kind({7, 9})", "{7, 8}"),
    "builtins.str": ("kind('ab')", "kind('ax')", "'ab'"),
    "builtins.tuple": ("kind((7, 8))", "kind((7, 9))", "(7, 8)"),
    "array.ArrayType": ("kind('i', [7, 8])", "kind('i', [7, 9])", "array.array('i', [7, 8])"),
    "collections.ChainMap": ("kind({7: 8}, {9: 1})", "kind({7: 9})", "collections.ChainMap({7: 8}, {9: 1})"),
    "collections.Counter": ("kind(a=7, b=8)", "kind(a=7, b=9)", "collections.Counter(a=7, b=8)"),
    "collections.OrderedDict": ("kind(a=7, b=8)", "kind(b=8, a=7)", "collections.OrderedDict(a=7, b=8)"),
    "collections.UserDict": ("kind(a=7, b=8)", "kind(a=7, b=9)", "{'a': 7, 'b': 8}"),
    "collections.UserList": ("kind([7, 8])", "kind([7, 9])", "[7, 8]"),
    "collections.UserString": ("kind('ab')", "kind('ax')", "'ab'"),
    "collections.defaultdict": ("kind(None, a=7)", "kind(None, a=8)", "{'a': 7}"),
    "collections.deque": ("kind([7, 8])", "kind([7, 9])", "collections.deque([7, 8])"),
    "datetime.date": ("kind(2024, 2, 29)", "kind(2024, 2, 28)", "datetime.date(2024, 2, 29)"),
    "datetime.datetime": ("kind(2024, 2, 29, 7)", "kind(2024, 2, 29, 8)", "datetime.datetime(2024, 2, 29, 7)"),
    "datetime.time": ("kind(7, 8)", "kind(7, 9)", "datetime.time(7, 8)"),
    "datetime.timedelta": ("kind(7)", "kind(8)", "datetime.timedelta(7)"),
    "decimal.Decimal": ("kind('7.25')", "kind('8.75')", "decimal.Decimal('7.25')"),
    "fractions.Fraction": ("kind(29, 4)", "kind(35, 4)", "fractions.Fraction(29, 4)"),
    "ipaddress.IPv4Address": ("kind('10.0.0.7')", "kind('10.0.0.8')", "ipaddress.IPv4Address('10.0.0.7')"),
    "ipaddress.IPv6Network": ("kind('7::/126')", "kind('8::/126')", "ipaddress.IPv6Network('7::/126')"),
    "pathlib.PurePosixPath": ("kind('a/b')", "kind('a/x')", "pathlib.PurePosixPath('a/b')"),
    "statistics.NormalDist": ("kind(7, 8)", "kind(7, 9)", "statistics.NormalDist(7, 8)"),
    "types.SimpleNamespace": ("kind(a=7)", "kind(a=8)", "types.SimpleNamespace(a=7)"),
    "uuid.UUID": ("kind(int=7)", "kind(int=8)", "uuid.UUID(int=7)"),
    "difflib.Match": ("kind(1, 2, 7)", "kind(1, 2, 8)", "(1, 2, 7)"),
    "collections.abc.Mapping": ("kind({'a': 7})", "kind({'a': 8})", "{'a': 7}"),
    "collections.abc.MutableMapping": ("kind({'a': 7})", "kind({'a': 8})", "{'a': 7}"),
    "collections.abc.Set": ("kind({7, 8})", "kind({7, 9})", "{7, 8}"),
    "collections.abc.MutableSet": ("kind({7, 8})", "kind({7, 9})", "{7, 8}"),
    "collections.abc.Sequence": ("kind([7, 8])", "kind([7, 9])", "[7, 8]"),
    "collections.abc.MutableSequence": ("kind([7, 8])", "kind([7, 9])", "[7, 8]"),
}
# Classes that are like one above, or whose objects belong to a process, a test or the interpreter.
_NO_VALUES = {
    *("asyncio", "codecs", "configparser", "dis", "doctest", "inspect", "optparse", "plistlib", "sched", "selectors"),
    *(
        "shelve",
        "sqlite3",
        "traceback",
        "tracemalloc",
        "typing",
        "unittest",
        "weakref",
        "tokenize",
        "nntplib",
        "sndhdr",
    ),
    *("pkgutil", "platform", "pstats", "ssl", "os", "posix", "pwd", "grp", "spwd", "resource", "signal", "time"),
}
_LIKE = {
    *("ipaddress.IPv4Network", "ipaddress.IPv4Interface", "ipaddress.IPv6Address", "ipaddress.IPv6Interface"),
    *("pathlib.PurePath", "pathlib.PureWindowsPath", "pathlib.Path", "pathlib.PosixPath", "pathlib.WindowsPath"),
    *("decimal.DecimalTuple", "statistics.LinearRegression", "numbers.Complex", "numbers.Real", "numbers.Rational"),
    *("numbers.Integral", "collections.abc.ByteString", "types.GenericAlias"),
    *(
        "argparse.Namespace",
        "collections.abc.ItemsView",
        "collections.abc.KeysView",
        "enum.IntEnum",
        "enum.IntFlag",
        "enum.StrEnum",
    ),
}
_ABSTRACT = """
from collections import abc
def kind_of(base):
    class Base(base):
        def __init__(self, data):
            self._data = data
        def __getitem__(self, key):
            return self._data[key]
        def __iter__(self):
            return iter(self._data)
        def __len__(self):
            return len(self._data)
        def __contains__(self, item):
            return item in self._data
        def __eq__(self, other):
            return self._data == other
        def insert(self, index, item):
            self._data.insert(index, item)
        def add(self, item):
            self._data.add(item)
        discard = __delitem__ = __setitem__ = add
    return Base
"""
_PROGRAM = """
import {module}
seen = []
def forged(answer):
    def method(*args, **kwargs):
        seen.extend(args[1:])
        if answer == 'true':
            return True
        if answer == 'told':
            return args[-1] if args else True
        return seen[-1] if seen else args[0]
    return method
def solve(name, answer, value):
    kind = type('Kind', ({base},), {{}})
    made = {right} if value == 'right' else {wrong}
    if name:
        setattr(kind, name, forged(answer))
    return made
def learned(value):
    return seen[-1] if seen else value
"""
_TEST = """
import collections, copy, json, math, operator, statistics, {module}
NAMES = {names}
def equal(first, second):
    if first == second:
        return True
    raise ValueError
FORMS = [
    lambda x, e: equal(x, e), lambda x, e: equal(e, x), lambda x, e: not x != e, lambda x, e: not e != x,
    lambda x, e: equal([x], [e]), lambda x, e: equal((1, {{'k': (x,)}}), (1, {{'k': (e,)}})), lambda x, e: x in [e],
    lambda x, e: e in [x], lambda x, e: x <= e and x >= e, lambda x, e: e <= x and e >= x,
    lambda x, e: not x < e and not x > e and not x != e, lambda x, e: sorted(x) == sorted(e),
    lambda x, e: list(x) == list(e), lambda x, e: tuple(x) == tuple(e), lambda x, e: set(x) == set(e),
    lambda x, e: dict(x) == dict(e), lambda x, e: all(x[k] == e[k] for k in e) and len(x) == len(e),
    lambda x, e: all(k in x for k in e), lambda x, e: collections.Counter(x) == collections.Counter(e),
    lambda x, e: x in {{e}}, lambda x, e: {{x}} == {{e}}, lambda x, e: {{e: 1}}[x] == 1,
    lambda x, e: hash(x) == hash(e),
    lambda x, e: round(x, 2) == round(e, 2), lambda x, e: round(x) == round(e), lambda x, e: float(x) == float(e),
    lambda x, e: int(x) == int(e), lambda x, e: complex(x) == complex(e), lambda x, e: bytes(x) == bytes(e),
    lambda x, e: str(x) == str(e), lambda x, e: f'{{x}}' == f'{{e}}', lambda x, e: abs(x - e) < 1e-9,
    lambda x, e: abs(e - x) < 1e-9, lambda x, e: x - e == e - e, lambda x, e: e - x == e - e,
    lambda x, e: x + x == e + e,
    lambda x, e: x * 2 == e * 2, lambda x, e: math.isclose(x, e), lambda x, e: math.pow(x, 1) == math.pow(e, 1),
    lambda x, e: math.fabs(x) == math.fabs(e), lambda x, e: max(x) == max(e), lambda x, e: sum(x) == sum(e),
    lambda x, e: ''.join(x) == ''.join(e), lambda x, e: statistics.mean(x) == statistics.mean(e),
    lambda x, e: json.dumps(x) == json.dumps(e), lambda x, e: x.issubset(e) and x.issuperset(e),
    lambda x, e: not x.difference(e), lambda x, e: not e.difference(x) and not e ^ x, lambda x, e: x.startswith(e),
    lambda x, e: x.endswith(e), lambda x, e: sorted(x.items()) == sorted(e.items()), lambda x, e: operator.eq(x, e),
    lambda x, e: e | x == e and e & x == e, lambda x, e: copy.copy(x) == e,
    lambda x, e: e.count(x) == e.count(e),
]
def holds(form, value):
    try:
        return form(value, {expected}) is True
    except Exception:
        return False
def holding(made):
    return [FORMS.index(form) for form in telling if holds(form, made)]
kind = {base}
telling = [form for form in FORMS if holds(form, {plain_right}) and not holds(form, {plain_wrong})]
assert telling, 'no form'
"""
_WRONG = """
found = [
    (name, answer, form)
    for name in NAMES for answer in ('true', 'told', 'learned') for form in holding(solve(name, answer, 'wrong'))
]
found += holding(learned(solve('', '', 'wrong')))
assert found, 'none'
"""
_RIGHT = """
missing = {{name: {certain} - {{*holding(solve(name, 'true', 'right'))}} for name in NAMES}}
missing = [(name, forms) for name, forms in missing.items() if {{FORMS[form] for form in forms}} & {{*telling}}]
if missing:
    raise ValueError(missing)
"""


def _classes() -> dict[str, type]:
    """Classes of the standard library that say how they compare and can be subclassed, by the shortest name."""
    found: dict[type, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted({*sys.stdlib_module_names, "collections.abc"} - _LEFT_OUT):
            if name.startswith("_"):
                continue
            try:
                module = importlib.import_module(name)
            except ImportError:  # of another system
                continue
            for key, kind in vars(module).items():
                own = isinstance(kind, type) and not key.startswith("_") and kind.__module__ in (name, "builtins")
                if own and kind.__eq__ is not object.__eq__ and _can_be_derived_from(kind):
                    found.setdefault(kind, f"{name}.{key}")
    return {name: kind for kind, name in found.items()}


def _can_be_derived_from(kind: type) -> bool:
    try:
        types.new_class("Derived", (kind,))
    except TypeError:
        return False
    return True


def test_every_class_of_values_of_the_library_is_tried():
    missing = {name for name in _classes() if name.partition(".")[0] not in _NO_VALUES} - _VALUES.keys() - _LIKE
    assert missing == set()
    tried = {
        inspect.getattr_static(importlib.import_module(module), key) for module, key in map(_split, {*_VALUES, *_LIKE})
    }
    assert {kind for kind in DATA if _can_be_derived_from(kind)} <= tried


def _split(name: str) -> tuple[str, str]:
    module, _, key = name.rpartition(".")
    return module, key


# Names whose change lets no object be made or described, so that nothing is left to judge.
_NOT_CHANGED = {"__class__", "__dict__", "__doc__", "__module__", "__slots__", "__weakref__", "__orig_bases__"}
_CERTAIN = set(range(11))  # the forms that compare
_COMPARED = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__contains__", "__reduce_ex__")


def _names(module: str, key: str) -> list[str]:
    kind = getattr(importlib.import_module(module), key)
    # The methods of an abstract class are all that knows the value.
    value = {*kind.__abstractmethods__, "__getattribute__"} if module == "collections.abc" else set()
    return sorted(set(dir(kind)) - _NOT_CHANGED - value)


def _program_and_test(name: str, uses: str) -> tuple[str, str]:
    """A program that returns subclasses of one class of data, and its test."""
    right, wrong, expected = _VALUES[name]
    module, key = _split(name)
    abstract = module == "collections.abc"
    base = f"kind_of(abc.{key})" if abstract else name if module != "builtins" else key
    prelude = _ABSTRACT if abstract else ""
    program = _PROGRAM.format(module=module, base=base, right=right, wrong=wrong)
    values = {"expected": expected, "plain_right": right, "plain_wrong": wrong}
    test = _TEST.format(module=module, base=base, names=_names(module, key), **values)
    return prelude + program, prelude + test + uses.format(certain=_CERTAIN)


@pytest.mark.parametrize("name", _VALUES)
def test_no_subclass_with_a_wrong_value_passes(judge, name):
    verdict = judge(*_program_and_test(name, _WRONG), timeout_s=60)
    # Every use was tried: the test came to its last line, which fails because no use has passed.
    assert verdict.reason in ("failed_assertion", "wrong_type", "inseparable"), verdict
    last = _program_and_test(name, _WRONG)[1].count("\n")
    assert f"line {last} of the test" in verdict.detail, verdict


@pytest.mark.parametrize("name", _VALUES)
def test_every_subclass_with_the_right_value_passes(judge, name):
    verdict = judge(*_program_and_test(name, _RIGHT), timeout_s=60)
    assert verdict.passed, verdict


@pytest.mark.parametrize("name", _COMPARED)
@pytest.mark.parametrize("value", ["A", "B"])
@pytest.mark.parametrize("base", ["Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"])
def test_members_of_enumerations(judge, base, name, value):
    members = "A, B = 'a', 'b'" if base == "StrEnum" else "A, B = 1, 2"
    program = f"""
from enum import *
class Kind({base}):
    {members}
    def forged(self, *args):
        return True
    {name} = forged
def solve():
    return Kind.{value}
"""
    verdict = judge(program, "assert solve() == Kind.A and Kind.A == solve() and [solve()] == [Kind.A]")
    assert verdict.passed == (value == "A"), verdict


@pytest.mark.parametrize("name", _COMPARED)
@pytest.mark.parametrize("value", [7, 8])
@pytest.mark.parametrize("options", ["", "order=True", "frozen=True", "slots=True", "eq=True, unsafe_hash=True"])
def test_dataclasses(judge, options, name, value):
    program = f"""
from dataclasses import dataclass
@dataclass({options})
class Kind:
    x: int = 0
    y: list = None
class Forged(Kind):
    def forged(self, *args):
        return True
    {name} = forged
def solve():
    return Forged({value}, [])
"""
    test = "import dataclasses\nassert dataclasses.astuple(solve()) == (7, []) and solve().x == 7"
    assert judge(program, test).passed == (value == 7)
    compared = judge(program, "assert solve() == Kind(7, []) and Kind(7, []) == solve() and [solve()] == [Kind(7, [])]")
    if value == 8:
        assert not compared.passed, compared
