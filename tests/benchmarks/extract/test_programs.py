"""Programs found in model text."""

import ast

import pytest

from refusion_eval.benchmarks import Extraction
from refusion_eval.benchmarks.extract.programs import fenced_blocks, function_code, module_code, parsable_prefix

ROW = {
    "entry_point": "twice",
    "prompt": 'import math\n\ndef one():\n    return 1\n\ndef twice(x):\n    """Doubles."""\n',
}
CALLED = {"test_list": ["assert f(1) == 1"]}
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
        f"```\nPython\n{WHOLE}```",
        f'<pre><code class="language-python">{WHOLE.strip()}</code></pre>',
        f"<final_answer>{WHOLE.strip()}</final_answer>",
        "One may write `twice = lambda x: 2 * x`.",
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
    assert module_code(text, CALLED).answer is None


def test_the_function_that_the_tests_call_is_the_module() -> None:
    called, other = "def f(x):\n    return x\n", "def g(x):\n    return -x\n"
    text = f"```python\nf(1)\n```\n```python\n{called}```\n```python\n{other}```"
    assert module_code(text, CALLED).answer == called
    assert module_code(text, {"test_list": ["assert g(1) == -1"]}).answer == other
    assert module_code(text, {"test_list": ["assert h(1) == 1"]}).answer == other
    assert module_code("```python\nf(1)\n```", CALLED) == Extraction("f(1)\n", "code without a function")


def test_a_tested_function_may_have_the_name_of_a_builtin_or_use_what_the_setup_makes() -> None:
    total = "def sum(a, b):\n    return a + b\n"
    text = f"```python\n{total}```\nand\n```python\ndef main():\n    return sum(1, 2)\n```"
    assert module_code(text, {"test_list": ["assert sum(1, 2) == 3"]}).answer == total
    tree, height = "class Node:\n    pass\n", "def height(root):\n    return 0\n"
    text = f"```python\n{height}```\n```python\n{tree}```"
    row = {"test_list": ["assert height(root) == 0"], "test_setup_code": "root = Node()"}
    assert module_code(text, row).answer == f"{tree.rstrip()}\n{height}"


def test_future_imports_come_first() -> None:
    text = "```python\nfrom __future__ import annotations\n\ndef twice(x: Later):\n    return 2 * x\n```"
    assert value(function_code(text, ROW).answer) == 42


def test_a_stub_is_extracted_where_there_is_nothing_else() -> None:
    stub = "def twice(x):\n    pass\n"
    assert function_code(f"```python\n{stub}```", ROW).how == "code that does not complete the function"
    assert function_code("```python\n    result = []\n```", ROW).answer == f"{ROW['prompt']}result = []\n"


@pytest.mark.parametrize("text", ["    if x == 0: return 0\n    return 2 * x", "if x == 0: return 0\nreturn 2 * x"])
def test_a_body_of_several_statements_stays_in_the_function(text: str) -> None:
    assert value(function_code(f"```python\n{text}\n```", ROW).answer) == 42
    assert value(function_code(text, ROW).answer) == 42


@pytest.mark.parametrize("code", ["twice = lambda x: 2 * x", "def f(x):\n    return 2 * x\ntwice = f"])
def test_functions_may_be_assigned(code: str) -> None:
    assert value(function_code(f"```python\n{code}\n```\nUse:\n```python\ntwice = twice(1)\n```", ROW).answer) == 42


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
    for answer in (function_code(text, ROW).answer, module_code(text, CALLED).answer):
        assert answer is None or isinstance(answer, str)


def test_a_program_found_in_prose_parses() -> None:
    found = module_code("Let me think.\ndef f(x):\n    return x\n\nHope it helps!", CALLED)
    assert found.answer is not None
    assert isinstance(ast.parse(found.answer), ast.Module)
