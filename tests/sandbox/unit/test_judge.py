"""What a test is given, and how its end is named."""

import pytest

from refusion_eval.sandbox import Program, check_program, probe
from refusion_eval.sandbox.analysis import case_of
from refusion_eval.sandbox.pool import check_on
from tests.sandbox.unit.conftest import skip_without

_WARNS = "import warnings\nwith warnings.catch_warnings(record=True) as w:\n    f()\nassert w"
_SUBSET = "assert f().issubset({2})"
_SHELL = "import os\nassert os.system('true') == 0"
_OWN_ZONE = """
from datetime import datetime, timedelta, tzinfo
class Zone(tzinfo):
    def utcoffset(self, moment):
        return timedelta(0)
def f():
    return datetime(2024, 5, 1, tzinfo=Zone())
"""
_TOLD = """
class Told:
    def difference(self, other):
        self.known = other
    def __iter__(self):
        return iter(self.known)
def f():
    return Told()
"""
_ASSERT_SET = """
import unittest
class T(unittest.TestCase):
    def test(self):
        self.assertSetEqual(f(), {1, 4, 9})
assert unittest.TextTestRunner(stream=open('/dev/null', 'w')).run(T('test')).wasSuccessful()
"""
_STOPS = """
class Kind(type):
    def __call__(cls, x):
        raise type.__call__(cls)
class f(StopIteration, metaclass=Kind):
    pass
"""
_NAMED = "def f(x):\n    raise type('BaseException', (SystemExit,), {})"
_LOCK = """
import threading
lock = threading.Event()
def wait():
    lock.wait()
def let():
    lock.set()
"""
_WAITS = """
import threading
threads = [threading.Thread(target=wait, daemon=True), threading.Thread(target=let, daemon=True)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def _names(test: str, defined: set[str] | None = None):
    return case_of(test).names(defined or set())


def test_a_test_is_given_the_names_it_does_not_define():
    test = "def check(candidate):\n    y = 1\n    assert candidate(y) == f(2)\ncheck(solve)"
    assert _names(test) == (["f", "solve"], [])


def test_builtins_stay_the_judges():
    assert _names("assert abs(f(1)) == sum([1])") == (["f"], [])


def test_builtins_are_the_programs_where_a_test_names_nothing_else():
    assert _names("assert sum(1, 2) == 3") == (["sum"], [])


def test_helpers_are_not_asked_of_the_program():
    assert _names("assert poly(f(1)) == 0", {"poly"}) == (["f"], [])


def test_a_standard_module_is_imported_by_the_judge():
    assert _names("assert math.isclose(f(1), 1)") == (["f"], ["math"])


def test_a_name_is_not_that_of_a_module_that_lacks_what_is_read_of_it():
    assert _names("assert queue.push(1) and queue.Queue and math.pi") == (["queue"], ["math"])
    assert _names("assert msvcrt.getch()") == (["msvcrt"], [])  # which no Linux has


@pytest.mark.parametrize(
    ("program", "test", "reason"),
    [
        ("", "assert f(1)", "no_code"),
        ("x = 1", "assert f(1)", "no_code"),
        ("def f(:", "assert f(1)", "syntax_error"),
        ("def f(x):\n    return 2", "assert f(1) == 1", "failed_assertion"),
        ("def f(x):\n    return object()", "assert f(1) == 1", "wrong_type"),
        ("def f(x):\n    return None", "assert f(1) + 1 == 1", "wrong_type"),
        ("def f(x):\n    return 1 / 0", "assert f(1) == 1", "raised"),
        ("1 / 0", "assert f(1) == 1", "raised"),
        ("import os\nos._exit(0)", "assert f(1) == 1", "exited"),
        ("def f(x):\n    raise SystemExit(0)", "assert f(1) == 1", "exited"),
        ("raise SystemExit(0)", "try:\n    f(1)\nexcept SystemExit:\n    pass", "exited"),
        ("def f(x):\n    raise SystemExit(x)", "try:\n    f(1)\nexcept SystemExit:\n    f(0)", "exited"),
        (_STOPS, "assert all(map(f, [1, 2]))", "raised"),
        (_STOPS.replace("StopIteration", "SystemExit"), "try:\n    f(1)\nexcept BaseException:\n    pass", "exited"),
        (_NAMED, "try:\n    f(1)\nexcept BaseException:\n    pass", "exited"),
        ("import ctypes\ndef f(x):\n    ctypes.string_at(0)", "assert f(1) == 1", "signal"),
        ("def f(x):\n    raise MemoryError", "assert f(1) == 1", "memory"),
        ("def f(x):\n    return 'x' * (40 << 20)", "assert f(1) == 1", "output_limit"),
        ("def f(x):\n    return 1", "assert f(1) == 1 and", "sandbox_error"),
        ("def f(x):\n    return 1", "import no_such_module", "sandbox_error"),
    ],
)
def test_each_end_has_its_reason(judge, program, test, reason):
    verdict = judge(program, test)
    assert verdict.reason == reason, verdict


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x):\n    return 1", "class A:\n    pass\nassert f(A()) == 1"),
        ("def f(xs, key):\n    return sorted(xs, key=key)", "import functools\nf([1], functools.cmp_to_key(max))"),
        ("class A:\n    pass", "assert isinstance(A(), A) and A() == 1"),
        ("class A:\n    def __lt__(self, other):\n        return True", "assert isinstance(A(), A) and A() < 1"),
        ("def f():\n    return input()", "import sys, io\nsys.stdin = io.StringIO('a')\nassert f() == 'a'"),
        (
            "def f():\n    print(1)",
            "from unittest.mock import patch\nwith patch('builtins.print') as p:\n    assert f()",
        ),
        ("class A:\n    pass", "class B(A):\n    x = 1\nassert B().x == 1 and f() == 'the test'"),
        ("import warnings\ndef f():\n    warnings.warn('a')", _WARNS),
        ("def f(x):\n    return x.a", "from collections import namedtuple\nassert f(namedtuple('P', 'a')(1)) == 1"),
        ("def f(kind):\n    return isinstance(1, kind)", "class A(int):\n    pass\nassert f(A) is False"),
        ("import re\ndef f():\n    return re.match('a', 'a')", "import re\nassert isinstance(f(), re.Match)"),
        ("def f():\n    return 1", "assert globals()['f']() == 1"),
        ("def f():\n    return 1", "import subprocess\nassert f() and subprocess.run(['true']).returncode == 0"),
        ("class S(set):\n    def issubset(self, other):\n        return True\ndef f():\n    return S({1})", _SUBSET),
        (_TOLD, _ASSERT_SET),
        ("def f():\n    return SystemExit(0)", "raise f()  # in the test"),
        ("data = bytearray(b'ab')\ndef f():\n    return memoryview(data)", "v = f()\nv[0] = 0  # of the test"),
        (_OWN_ZONE, "assert type(f().tzinfo).__name__ == 'Zone'  # the test's question"),
        (_LOCK, _WAITS),
        ("def f():\n    return '6'", "assert eval(f()) == 6"),
        ("import pickle\ndef f():\n    return pickle.dumps(6)", "import pickle\nassert pickle.loads(f()) == 6"),
    ],
)
def test_what_only_one_process_could_tell_is_an_error_and_not_a_failure(judge, program, test):
    verdict = judge(program, test, timeout_s=1)  # threads that wait for each other end with the time
    assert (verdict.status, verdict.reason) == ("error", "inseparable"), verdict
    assert "test" in verdict.detail


@pytest.mark.parametrize(
    "attempt", ["import socket\nsocket.socket()", "open('/etc/passwd').read()", "open('/usr/x', 'w')", _SHELL]
)
@pytest.mark.parametrize("profile", ["namespaces", "user-namespaces", "root-landlock", "landlock"])
def test_a_test_has_no_more_rights_than_a_program(profile, attempt):
    skip_without(profile)
    program = Program(candidate="def f():\n    return 1", test=f"f()\n{attempt}", timeout_s=5)
    assert not check_on(profile, program).passed


def test_a_program_reads_and_changes_the_files_of_its_test():
    if probe().tier != "A":
        pytest.skip("programs have no folder of their own in this tier")
    program = """
import os
def f(path):
    with open(path, 'a') as file:
        file.write('b')
    os.rename(path, 'c.txt')
    with open('made.txt', 'w') as file:
        file.write('d')
"""
    test = """
import os
with open('a.txt', 'w') as file:
    file.write('a')
f('a.txt')
assert open('c.txt').read() == 'ab' and open('made.txt').read() == 'd'
os.remove('made.txt')
assert os.listdir() == ['c.txt']
"""
    for _ in range(2):  # nothing is left for the next check
        verdict = check_program(program, test)
        assert verdict.passed, verdict


_SHARED_FILES = """
import os, tempfile
folder = tempfile.mkdtemp()
with open(os.path.join(folder, "a"), "w") as file:
    file.write("6")
assert f(file.name) == "6"
with tempfile.NamedTemporaryFile("w") as file:
    file.write("7")
    file.flush()
    assert f(file.name) == "7"
with open(g()) as file:
    assert file.read() == "8"
"""
_READS_FILES = """
import os, tempfile
def f(path):
    with open(path) as file:
        return file.read()
def g():
    file, path = tempfile.mkstemp(dir=tempfile.mkdtemp())
    os.write(file, b"8")
    return path
"""


@pytest.mark.parametrize("profile", ["namespaces", "user-namespaces"])
def test_files_that_are_their_owners_alone_are_of_program_and_test(profile):
    skip_without(profile)
    verdict = check_on(profile, Program(candidate=_READS_FILES, test=_SHARED_FILES))
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("test", "classes"),
    [
        ("assert f(1) == 2 and Sum(3) == 3", set()),
        ("x = f(1)\nx.sort()\nassert f(1).upper()", set()),
        ("x = Node(1)\nx.left = Node(2)", {"Node"}),
        ("assert Node(1).left is None", {"Node"}),
        ("assert isinstance(f(1), Node)", {"Node"}),
        ("try:\n    f(1)\nexcept (Own, ValueError):\n    pass", {"Own", "ValueError"}),
        ("assert Vec(1) + 2 == Vec(3)", {"Vec"}),
        ("assert f(1) == f(2) and Colour.RED", {"Colour"}),
    ],
)
def test_a_class_is_known_by_its_use(test, classes):
    assert case_of(test).classes == classes


def test_no_program_knows_the_random_numbers_of_a_test(judge):
    details = {judge("def f():\n    return 1", "raise ValueError(f'{f()} {random.random()}')").detail for _ in range(3)}
    assert len(details) == 3


def test_a_program_draws_the_same_numbers_in_every_check(judge):
    program = "import random\ndef f():\n    return random.random()"
    assert len({judge(program, "raise ValueError(f())").detail for _ in range(3)}) == 1


def test_a_broken_test_is_an_error_and_not_a_failure(judge):
    assert judge("def f(x):\n    return 1", "assert f(1) ==").status == "error"


def test_the_detail_names_the_signal(judge):
    assert "SIGSEGV" in judge("import ctypes\nctypes.string_at(0)", "assert f(1)").detail


def test_the_detail_names_the_exception(judge):
    assert judge("def f(x):\n    return {}['a']", "assert f(1)").detail.startswith("KeyError")


_COUNTED = """
import weakref
alive = weakref.WeakSet()
class Made:
    def fail(self):
        raise KeyError(self)
def make():
    made = Made()
    alive.add(made)
    return made
def count():
    return len(alive)
"""


@pytest.mark.parametrize(("error", "act"), [("AttributeError", "made.missing"), ("KeyError", "made.fail()")])
def test_an_error_that_the_test_has_caught_keeps_no_object(judge, error, act):
    test = f"""
def catch():
    made = make()
    try:
        {act}
    except {error}:
        return 1
assert sum(catch() for _ in range(20)) == 20
make()
assert count() <= 3, count()
"""
    verdict = judge(_COUNTED, test)
    assert verdict.passed, verdict
