"""Programs found in model text."""

import ast

import pytest

from refusion_eval.benchmarks.extract.programs import fenced_blocks, function_code, module_code, parsable_prefix

ROW = {
    "entry_point": "twice",
    "prompt": 'import math\n\ndef one():\n    return 1\n\ndef twice(x):\n    """Doubles."""\n',
}
WHOLE = "def twice(x):\n    return 2 * x\n"


def value(program: str | None) -> object:
    """Runs a harmless program of this file."""
    assert program is not None
    names: dict[str, object] = {}
    exec(compile(program, "program", "exec"), names)
    return names["twice"](21)  # type: ignore[operator]


@pytest.mark.parametrize(
    "text",
    [
        f"Here you are:\n```python\n{WHOLE}```\nIt doubles.",
        f"```\n{WHOLE}```",
        f"```py\n{WHOLE}",
        f"1. Like this:\n   ```python\n   {WHOLE.replace(chr(10), chr(10) + '   ')}\n   ```",
        WHOLE,
        f"Sure!\n{WHOLE}\nThis works because it doubles.",
        "    return 2 * x\n",
        "return 2 * x",
        "```python\n    return 2 * x\n```",
        "    return 2 * x\n\nExplanation: it doubles",
        f"```bash\npip install it\n```\n```python\n{WHOLE}```",
        f"```python\nprint(twice(1))\n```\nwith\n```python\n{WHOLE}```",
        "```python\ndef twice(x):\n    return 2 * x\n\nassert twice(\n```",
        WHOLE.replace("\n", "\r\n"),
    ],
)
def test_the_function_is_found_in_every_form_a_model_may_choose(text: str) -> None:
    assert value(function_code(text, ROW).answer) == 42


def test_helpers_and_imports_of_the_prompt_stay() -> None:
    program = function_code("```python\ndef twice(x):\n    return math.floor(2 * x) * one()\n```", ROW).answer
    assert value(program) == 42


def test_the_solutions_own_helpers_stay() -> None:
    text = "```python\ndef half(x):\n    return x\n\ndef twice(x):\n    return half(x) + half(x)\n```"
    assert value(function_code(text, ROW).answer) == 42


@pytest.mark.parametrize("text", ["", "I cannot do that.", "\ud800", "\0", "(" * 1000])
def test_text_without_code_gives_no_program(text: str) -> None:
    assert function_code(text, ROW).answer is None
    assert module_code(text).answer is None


def test_the_first_block_that_defines_something_is_the_module() -> None:
    assert (
        module_code("```python\nf(1)\n```\n```python\ndef f(x):\n    return x\n```").answer
        == "def f(x):\n    return x\n"
    )


def test_a_python_block_is_preferred_to_others() -> None:
    assert fenced_blocks("```text\nhello\n```\n```python\nx = 1\n```") == ["x = 1\n"]


def test_an_unclosed_block_counts() -> None:
    assert fenced_blocks("```python\nx = 1") == ["x = 1\n"]


def test_what_follows_the_program_is_cut_where_it_stops_parsing() -> None:
    assert parsable_prefix("x = 1\ny = 2\nand so on") == "x = 1\ny = 2"
    assert parsable_prefix("and so on") == ""


@pytest.mark.parametrize(
    "piece", ["x = 1\n", "def f():\n", "```\n", "(", "-", "1+", '"""\n', "x=1\n)\n", "    " * 50 + "\n"]
)
def test_no_text_of_100_kilobytes_breaks_the_search(piece: str) -> None:
    text = piece * (100_000 // len(piece))
    for answer in (function_code(text, ROW).answer, module_code(text).answer):
        assert answer is None or isinstance(answer, str)


def test_a_program_found_in_prose_parses() -> None:
    found = module_code("Let me think.\ndef f(x):\n    return x\n\nHope it helps!")
    assert found.answer is not None
    assert isinstance(ast.parse(found.answer), ast.Module)
