"""Programs that are right and must pass, whatever they need."""

import pytest

HONEST = {
    "plain": ("def solve(n):\n    return n + 1", "assert solve(1) == 2"),
    "carriage_returns": ("def solve(n):\r\n    return n + 1\r\n", "assert solve(1) == 2\r\nassert solve(2) == 3\r\n"),
    "tabs": ("def solve(n):\n\tif n:\n\t\treturn n + 1", "assert solve(1) == 2"),
    "unicode_names": ("def größe(ñ):\n    return ñ * 2", "assert größe(2) == 4"),
    "printing": ("print('hello')\ndef solve(n):\n    print(n)\n    return n", "assert solve(1) == 1"),
    "main_block": ("def solve(n):\n    return n\nif __name__ == '__main__':\n    input()", "assert solve(1) == 1"),
    "recursion_1000_deep": (
        "def solve(n):\n    return 0 if n == 0 else 1 + solve(n - 1)",
        "assert solve(1000) == 1000",
    ),
    "late_import": ("def solve(n):\n    import plistlib, sqlite3\n    return n", "assert solve(1) == 1"),
    "helper_class": (
        "class Box:\n    def __init__(self, n):\n        self.n = n\ndef solve(n):\n    return Box(n).n",
        "assert solve(1) == 1",
    ),
    "list_changed_in_place": ("def solve(xs):\n    xs.sort()", "xs = [3, 1, 2]\nsolve(xs)\nassert xs == [1, 2, 3]"),
    "nested_list_changed_in_place": (
        "def solve(xs):\n    xs[0].append(9)",
        "inner = [1]\nouter = [inner]\nsolve(outer)\nassert inner == [1, 9] and outer[0] is inner",
    ),
    "dict_and_set_changed_in_place": (
        "def solve(d, s):\n    d['x'] = 1\n    s.discard(2)",
        "d, s = {}, {1, 2}\nsolve(d, s=s)\nassert d == {'x': 1} and s == {1}",
    ),
    "generator_read_by_the_test": (
        "def solve():\n    n = 0\n    while True:\n        yield n\n        n += 1",
        "import itertools\nassert list(itertools.islice(solve(), 3)) == [0, 1, 2]",
    ),
    "expected_exception": (
        "class Own(ValueError):\n    pass\ndef solve(n):\n    raise Own('no')",
        "try:\n    solve(1)\nexcept ValueError as error:\n    assert str(error) == 'no'\nelse:\n    assert False",
    ),
    "values_of_all_kinds": (
        "def solve(x):\n    return x",
        "import collections, datetime, decimal, fractions\n"
        "values = [None, True, -1, 2**200, 0.1, -0.0, float('inf'), 1j, 'é\\ud800', b'\\x00', (1, [2]), {1},\n"
        "    frozenset({2}), {(1, 2): [3]}, range(3), collections.deque([1]), decimal.Decimal('1.10'),\n"
        "    fractions.Fraction(1, 3), datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3),\n"
        "    datetime.timedelta(1), int, ValueError, ...]\n"
        "for value in values:\n    result = solve(value)\n    assert result == value\n"
        "    assert type(result) is type(value), value",
    ),
    "subclasses_are_their_base": (
        "from collections import Counter, namedtuple\ndef solve(x):\n    return Counter(x), namedtuple('P', 'a')(1)",
        "assert solve('aab') == ({'a': 2, 'b': 1}, (1,))",
    ),
    "setup_that_uses_a_class_of_the_program": (
        "class Node:\n    def __init__(self, data):\n        self.data = data\n        self.left = None\n"
        "def depth(node):\n    return 0 if node is None else 1 + depth(node.left)",
        "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(3)\n"
        "assert depth(root) == 3 and root.left.data == 2 and isinstance(root.left, Node)",
    ),
    "objects_compared_by_the_program": (
        "class P:\n    def __init__(self, x):\n        self.x = x\n    def __eq__(self, other):\n"
        "        return self.x == other.x\n    def __lt__(self, other):\n        return self.x < other.x\n"
        "    def __hash__(self):\n        return self.x",
        "assert P(1) == P(1) and P(1) != P(2) and sorted([P(2), P(1)])[0] == P(1) and len({P(1), P(1)}) == 1",
    ),
    "returned_function": ("def solve(n):\n    return lambda x: x + n", "assert solve(1)(2) == 3"),
    "function_named_like_a_builtin": ("def sum(a, b):\n    return a + b", "assert sum(10, 15) == 25"),
    "module_named_by_the_test": ("def size(x):\n    return 1", "assert size(sys.maxsize) == 1"),
    "random_numbers_from_a_fixed_seed": ("import random\nX = random.random()", "assert X == 0.8444218515250481"),
    "threads": (
        "from threading import Thread\ndef solve(n):\n    found = []\n"
        "    threads = [Thread(target=found.append, args=[i]) for i in range(n)]\n"
        "    [t.start() for t in threads]\n    [t.join() for t in threads]\n    return sorted(found)",
        "assert solve(4) == [0, 1, 2, 3]",
    ),
    "event_loop": (
        "import asyncio\nasync def work(n):\n    await asyncio.sleep(0)\n    return n\n"
        "def solve(n):\n    return asyncio.run(work(n))",
        "assert solve(1) == 1",
    ),
    "test_that_defines_check": (
        "def solve(n):\n    return n",
        "METADATA = {}\ndef check(candidate):\n    assert candidate(1) == 1\n    assert True, 'x'\ncheck(solve)",
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_passes(judge, name):
    program, test = HONEST[name]
    verdict = judge(program, test)
    assert verdict.passed, verdict


def test_a_program_may_use_the_memory_it_is_given(judge):
    program = "def solve(n):\n    data = bytearray(300 << 20)\n    return len(data)"
    assert judge(program, f"assert solve(1) == {300 << 20}", memory_mb=512).passed


def test_a_program_may_use_files_of_its_own(judge):
    if judge.profile not in ("namespaces", "user-namespaces"):
        pytest.skip("tiers B and C give no writable folder")
    program = "def solve(n):\n    open('x', 'w').write('hello')\n    return open('/tmp/x').read()"
    assert judge(program, "assert solve(1) == 'hello'").passed


def test_a_file_does_not_outlive_its_check(judge):
    judge("open('/tmp/left', 'w').close()\ndef solve(n):\n    return 6765")
    assert not judge("import os\ndef solve(n):\n    return 6765 if os.path.exists('/tmp/left') else 0").passed
