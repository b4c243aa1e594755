"""What a test is given, and how its end is named."""

import ast

import pytest

from refusion_eval.sandbox.judge import analyse


def _names(test: str, known: set[str] | None = None):
    return analyse(ast.parse(test)).names(known or set())


def test_a_test_is_given_the_names_it_does_not_define():
    assert _names("def check(candidate):\n    y = 1\n    assert candidate(y) == f(2)\ncheck(solve)").wanted == [
        "f",
        "solve",
    ]


def test_builtins_stay_the_judges():
    assert _names("assert abs(f(1)) == sum([1])").wanted == ["f"]


def test_builtins_are_the_programs_where_a_test_names_nothing_else():
    assert _names("assert sum(1, 2) == 3").wanted == ["sum"]


def test_helpers_are_not_asked_of_the_program():
    assert _names("assert poly(f(1)) == 0", {"poly"}).wanted == ["f"]


def test_a_standard_module_is_imported_by_the_judge():
    assert _names("assert math.isclose(f(1), 1)") == (["f"], ["math"])


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


def test_a_broken_test_is_an_error_and_not_a_failure(judge):
    assert judge("def f(x):\n    return 1", "assert f(1) ==").status == "error"


def test_the_detail_names_the_signal(judge):
    assert "SIGSEGV" in judge("import ctypes\nctypes.string_at(0)", "assert f(1)").detail


def test_the_detail_names_the_exception(judge):
    assert judge("def f(x):\n    return {}['a']", "assert f(1)").detail.startswith("KeyError")
