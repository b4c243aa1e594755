"""Programs in frames that nobody listed: an own grammar of fences, markup, prose, corrections and thoughts.

The program that is read must do what the one in the text does, whether that is right or wrong. Nothing here comes from
the rules under test.
"""

import builtins
import contextlib
import io
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.benchmarks import BENCHMARKS
from tests.examples import examples

HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """ Sum of the list.\n'
    '    >>> total([1, 2])\n    3\n    """\n',
    "entry_point": "total",
}
MBPP = {"task_id": "1", "text": "Write a function to sum a list.", "test_list": ["assert total([1, 2]) == 3"]}
# Ways to write the function; {op} makes it right or wrong.
FUNCTIONS = {
    "plain": "def total(xs):\n    result = 0\n    for x in xs:\n        result = result {op} x\n    return result\n",
    "imports": "from functools import reduce\nimport operator\n\n\ndef total(xs):\n"
    "    return reduce(lambda a, b: a {op} b, xs, 0)\n",
    "helper": "START = 0\n\n\ndef add(a, b):\n    return a {op} b\n\n\ndef total(xs):\n    result = START\n"
    "    for x in xs:\n        result = add(result, x)\n    return result\n",
    "class": "class Adder:\n    def __init__(self):\n        self.value = 0\n\n    def add(self, x):\n"
    "        self.value = self.value {op} x\n\n\ndef total(xs):\n    adder = Adder()\n    for x in xs:\n"
    "        adder.add(x)\n    return adder.value\n",
    "documented": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Add them.\n\n'
    '    Example: total([1, 2]) gives 3.\n    """\n    result = 0  # the start\n    for x in xs:\n'
    "        result {op}= x\n    return result\n",
    "tabs": "def total(xs: list[int]) -> int:\n\tresult = 0\n\tfor x in xs:\n"
    "\t\tresult = result {op} x\n\treturn result\n",
}
# Programs that read lines of numbers and print their sums.
PROGRAMS = {
    "input": "n = int(input())\nfor _ in range(n):\n    result = 0\n    for x in map(int, input().split()):\n"
    "        result = result {op} x\n    print(result)\n",
    "main": "def main():\n    n = int(input())\n    for _ in range(n):\n        result = 0\n"
    "        for x in map(int, input().split()):\n            result {op}= x\n        print(result)\n\n\n"
    'if __name__ == "__main__":\n    main()\n',
}


def quoted(text: str) -> str:
    return "".join(f"> {line}" for line in text.splitlines(True))


def typed(code: str) -> str:
    """As Python's terminal shows what was typed."""
    inner = (" ", "\t", "\n")
    return "".join(f"{'...' if line.startswith(inner) else '>>>'} {line}" for line in code.splitlines(True))


def python(code: str, word: str = "python") -> str:
    return f"```{word}\n{code}```"


FRAMES: dict[str, Callable[[str], str]] = {
    **{
        f"fence {word}": partial(python, word=word) for word in ("python", "Python", "py3", "", "{.python}", "{python}")
    },
    "attributes": partial(python, word='python title="solution.py" linenums="1"'),
    "four backquotes": lambda code: f"````python\n{code}````",
    "tildes": lambda code: f"~~~python\n{code}~~~",
    "unclosed": lambda code: f"```python\n{code}",
    "bare": lambda code: code,
    "indented": lambda code: f"Solution:\n\n{textwrap.indent(code, '    ')}\nDone.",
    "list item": lambda code: f"1. First write it:\n\n{textwrap.indent(python(code), '   ')}\n\n2. Then use it.",
    "quote": lambda code: quoted(f"{python(code)}\n"),
    "quote without fence": quoted,
    "pre": lambda code: f'<pre><code class="language-python">\n{code}</code></pre>',
    "code": lambda code: f"<code>\n{code}</code>",
    "answer": lambda code: f"<answer>\n{python(code)}\n</answer>",
    "answer without fence": lambda code: f"<answer>\n{code}</answer>",
    "details": lambda code: f"<details>\n<summary>Solution</summary>\n\n{python(code)}\n\n</details>",
    "verbatim": lambda code: f"\\begin{{verbatim}}\n{code}\\end{{verbatim}}",
    "minted": lambda code: f"\\begin{{minted}}{{python}}\n{code}\\end{{minted}}",
    "listing": lambda code: f"\\begin{{lstlisting}}[language=Python]\n{code}\\end{{lstlisting}}",
    "reStructuredText": lambda code: f".. code-block:: python\n\n{textwrap.indent(code, '    ')}",
    "org": lambda code: f"#+BEGIN_SRC python\n{code}#+END_SRC",
    "asciidoc": lambda code: f"[source,python]\n----\n{code}----",
    "jira": lambda code: f"{{code:python}}\n{code}{{code}}",
    "square brackets": lambda code: f"[code]\n{code}[/code]",
    "heading": lambda code: f"## Solution\n\n### Code\n{python(code)}\n### Complexity\nO(n)",
    "done": lambda code: f"[BEGIN]\n{code}[DONE]",
    "other line ends": lambda code: python(code).replace("\n", "\r\n"),
    "byte order mark": lambda code: f"\ufeff{code}",
    "no-break spaces": lambda code: python(code.replace("    ", "\xa0\xa0\xa0\xa0")),
    "output behind": lambda code: f"{python(code)}\nOutput:\n```\n3\n```",
    "shell in front": lambda code: f"```bash\npip install numpy\n```\n{python(code)}",
    "two languages": lambda code: f"```javascript\nfunction total(xs) {{ return 5; }}\n```\n{python(code)}",
}
# Frames of functions alone: a program without a definition does not stand out from other text there.
OF_FUNCTIONS: dict[str, Callable[[str], str]] = {
    "terminal": typed,
    "example behind": lambda code: f"{python(code)}\nUse it so:\n```python\nprint(total([1, 2]))\n```",
    "main behind": lambda code: python(f'{code}\nif __name__ == "__main__":\n    print(total([1, 2]))\n'),
}
BEFORE = ["", "Here is the solution:\n\n", "下面是代码:\n\n", "Let us think. We add all numbers.\n\n"]
BEHIND = ["", "\n\nIt takes linear time.", "<|im_end|>", "\n\n说明：它把所有数相加。", "\n\nI hope this helps!"]
THOUGHTS = [
    "", "<think>We could write def total(xs): return 0</think>\n",
    "<think>\n```python\ndef total(xs):\n    return 99\n```\n</think>\n\n",
    "<|channel|>analysis<|message|>I write it.<|end|><|start|>assistant<|channel|>final<|message|>",
]  # fmt: skip
CORRECTION = "{}\n\nWait, that is wrong. Fixed:\n\n{}"


def of_function(program: str) -> object:
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(program, "program.py", "exec"), names)
        return names["total"]([1, 2, 4])


def of_program(program: str) -> str:
    given, printed = iter(["2", "1 2 4", "5"]), io.StringIO()
    names = {"__name__": "__main__", "input": lambda: next(given), "__builtins__": builtins}
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "program.py", "exec"), names)
    return printed.getvalue()


KINDS: dict[str, tuple[dict[str, Any], dict[str, str], dict[str, Callable[[str], str]], Callable[[str], object]]] = {
    "humaneval": (HUMANEVAL, FUNCTIONS, {**FRAMES, **OF_FUNCTIONS}, of_function),
    "mbpp": (MBPP, FUNCTIONS, {**FRAMES, **OF_FUNCTIONS}, of_function),
    "livecodebench_v6_2025_02_2025_05": ({"func_name": ""}, PROGRAMS, FRAMES, of_program),
}


@pytest.mark.parametrize("name", KINDS)
@examples(200)
@given(data=st.data())
def test_a_program_in_any_frame_does_what_it_does_alone(name, data):
    row, programs, frames, outcome = KINDS[name]
    code = data.draw(st.sampled_from(list(programs.values()))).format(op=data.draw(st.sampled_from("+-")))
    text = data.draw(st.sampled_from(list(frames.values())))(code)
    # Without a fence, prose directly behind code may continue it.
    text = data.draw(st.sampled_from(BEFORE)) + text + data.draw(st.sampled_from(BEHIND))
    text = data.draw(st.sampled_from(THOUGHTS)) + text
    found = BENCHMARKS[name].extract(text, row).answer
    assert found is not None, text
    assert outcome(found) == outcome(code), text


@pytest.mark.parametrize("name", KINDS)
@examples(60)
@given(data=st.data())
def test_the_last_program_counts_where_a_text_corrects_itself(name, data):
    row, programs, _, outcome = KINDS[name]
    right, wrong = data.draw(st.permutations("+-"))
    code = data.draw(st.sampled_from(list(programs.values()))).format(op=right)
    former = data.draw(st.sampled_from(list(programs.values()))).format(op=wrong)
    text = CORRECTION.format(python(former), python(code)) + data.draw(st.sampled_from(BEHIND))
    found = BENCHMARKS[name].extract(text, row).answer
    assert found is not None
    assert outcome(found) == outcome(code), text
