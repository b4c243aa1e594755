"""Programs that try to make the judge believe; each would be called as solve(20) == 6765."""

import pytest

_FAKE_FRAMES = """
import json, os, struct
def frame(message):
    data = json.dumps(message).encode()
    return struct.pack(">I", len(data)) + data
def write_everywhere(data):
    for fd in range(64):
        try:
            os.write(fd, data)
        except OSError:
            pass
"""

FORGERIES = {
    "pass_word_on_stdout": "print('passed')\ndef solve(n):\n    print('passed')",
    "pass_word_on_every_fd": _FAKE_FRAMES + ("write_everywhere(frame(['passed', '']))\ndef solve(n):\n    return None"),
    "answer_before_the_question": _FAKE_FRAMES
    + ("write_everywhere(frame(['0' * 16, 'ok', 6765, []]) * 3)\ndef solve(n):\n    return None"),
    "half_a_frame": _FAKE_FRAMES + ("def solve(n):\n    write_everywhere(frame([1, 2])[:5])\n    os._exit(0)"),
    "huge_frame_header": _FAKE_FRAMES + ("def solve(n):\n    write_everywhere(b'\\xff\\xff\\xff\\xff')"),
    "not_json": _FAKE_FRAMES + ("def solve(n):\n    write_everywhere(struct.pack('>I', 4) + b'\\xff\\xfe{[')"),
    "json_million_deep": _FAKE_FRAMES
    + ("def solve(n):\n    write_everywhere(struct.pack('>I', 10**6) + b'[' * 10**6)"),
    "number_of_too_many_digits": _FAKE_FRAMES
    + ("def solve(n):\n    write_everywhere(struct.pack('>I', 10**5) + b'9' * 10**5)"),
    "message_of_pairs": _FAKE_FRAMES + ("def solve(n):\n    write_everywhere(frame({'0': 'ok', '1': 6765}))"),
    "names_nobody_asked_for": "import json\n"
    "real = json.dumps\n"
    "def fake(message, **options):\n"
    "    if message[1:2] == ['ok'] and message[2] and message[2][0] == 'l':\n"
    "        message[2] += [['t', name, ['h', 0]] for name in ('sum', 'abs', 'range')]\n"
    "    return real(message, **options)\n"
    "json.dumps = fake\n"
    "class A:\n"
    "    pass\n"
    "def solve(n):\n"
    "    return 0",
    "always_equal_object": "class A:\n    def __eq__(self, other):\n        return True\ndef solve(n):\n    return A()",
    "always_equal_int": "class A(int):\n"
    "    def __eq__(self, other):\n"
    "        return True\n"
    "    __hash__ = int.__hash__\n"
    "def solve(n):\n"
    "    return A(1)",
    "always_equal_str": "class A(str):\n"
    "    def __eq__(self, other):\n"
    "        return True\n"
    "def solve(n):\n"
    "    return A('')",
    "class_is_int": "class A:\n"
    "    __class__ = int\n"
    "    def __eq__(self, other):\n"
    "        return True\n"
    "def solve(n):\n"
    "    return A()",
    "equal_metaclass": "class M(type):\n"
    "    def __eq__(self, other):\n"
    "        return True\n"
    "class A(metaclass=M):\n"
    "    pass\n"
    "def solve(n):\n"
    "    return A",
    "class_as_function": "class solve(int):\n    def __eq__(self, other):\n        return True",
    "not_a_number": "def solve(n):\n    return float('nan')",
    "hostile_pickle": "class A:\n"
    "    def __reduce__(self):\n"
    "        import os\n"
    "        return os._exit, (0,)\n"
    "def solve(n):\n"
    "    return A()",
    "list_of_always_equal": "class A:\n"
    "    def __eq__(self, other):\n"
    "        return True\n"
    "def solve(n):\n"
    "    return [A()]",
    "redefined_assertion": "import builtins\n"
    "builtins.AssertionError = ValueError\n"
    "AssertionError = KeyError\n"
    "def solve(n):\n"
    "    return 0",
    "frames": "import sys\n"
    "def solve(n):\n"
    "    frame = sys._getframe()\n"
    "    while frame:\n"
    "        for value in list(frame.f_locals.values()):\n"
    "            if isinstance(value, list):\n"
    "                value.append('passed')\n"
    "        frame = frame.f_back\n"
    "    return None",
    "garbage_collector": "import gc\n"
    "def solve(n):\n"
    "    for found in gc.get_objects():\n"
    "        if isinstance(found, str) and 'assert solve' in found:\n"
    "            return 6765\n"
    "    return None",
    "own_memory": "def solve(n):\n"
    "    try:\n"
    "        open('/proc/self/mem', 'rb').read(1)\n"
    "        return 6765\n"
    "    except OSError:\n"
    "        return None",
    "import_hook": "import sys\n"
    "class Hook:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        raise SystemExit(0)\n"
    "sys.meta_path.insert(0, Hook())\n"
    "def solve(n):\n"
    "    import plistlib",
    "trace_hook": "import sys\n"
    "sys.settrace(lambda *args: None)\n"
    "sys.setprofile(lambda *args: None)\n"
    "def solve(n):\n"
    "    return 0",
    "assertion_raised": "def solve(n):\n    raise AssertionError",
    "stop_iteration": "def solve(n):\n    raise StopIteration(6765)",
    "generator": "def solve(n):\n    yield 6765",
    "endless_list": "def solve(n):\n    return [0] * 40_000_000",
    "self_containing_list": "def solve(n):\n    items = []\n    items.append(items)\n    return items",
    "bad_surrogates": "def solve(n):\n    return '\\ud800' * 10",
    "control_characters": "def solve(n):\n    raise ValueError('\\x00\\x1b[2J\\r\\n' * 100)",
    "hostile_message": "class E(Exception):\n"
    "    def __str__(self):\n"
    "        import os\n"
    "        os._exit(0)\n"
    "def solve(n):\n"
    "    raise E",
    "syntax_error": "def solve(n:\n    return 6765",
    "null_byte": "def solve(n):\n    return '\x00'",
    "nothing_defined": "x = 1",
    "blank": " \n",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_answer_is_not_a_pass(judge, name):
    verdict = judge.all(FORGERIES)[name]
    assert verdict.status in ("failed", "killed"), verdict


def test_a_redefined_builtin_does_not_reach_the_test(judge):
    program = "def abs(x):\n    return 0\ndef solve(n):\n    return 1.0"
    assert judge(program, "assert abs(solve(20) - 6765) < 1e-6").reason == "failed_assertion"


def test_a_redefined_helper_does_not_reach_the_test(judge):
    program = "def poly(xs, x):\n    return 0\ndef solve(n):\n    return 1.0"
    helpers = "def poly(xs, x):\n    return sum(c * x**i for i, c in enumerate(xs))\ndef solve(n):\n    'Solve.'"
    assert judge(program, "assert poly([1, 2], solve(20)) == 0", helpers=helpers).reason == "failed_assertion"


def test_a_test_that_swallows_everything_does_not_hide_an_exit(judge):
    test = "try:\n    solve(20)\nexcept:\n    pass"
    assert judge("import os\ndef solve(n):\n    os._exit(0)", test).reason == "exited"


def test_no_part_of_the_test_is_in_the_memory_of_the_program(judge):
    program = """
import gc
def solve(n):
    heap = [item for item in gc.get_objects() if isinstance(item, (list, tuple, dict))]
    return 6765 if any("".join(reversed("zyxwvu-tset")) in str(item) for item in heap) else 0
"""
    judge("def solve(n):\n    return 0", "mark = 'test-uvwxyz'\nassert solve(20) == 6765")
    assert judge(program, "mark = 'test-uvwxyz'\nassert solve(20) == 6765").reason == "failed_assertion"
