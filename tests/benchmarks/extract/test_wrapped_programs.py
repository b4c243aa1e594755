"""Reference programs are found in every form in which chat models wrap them.

Nothing is run: the program that is extracted must hold the reference's statements, compared as syntax trees, and the
last definition of the tested function must be the reference's.
"""

import ast
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from refusion_eval.benchmarks import BENCHMARKS, Row, get_task
from refusion_eval.benchmarks.rows import json_lines

# Docstrings of HumanEval hold escapes that Python does not know.
pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")


@dataclass(frozen=True)
class Reference:
    """A right program, the function that its tests call, that function's signature, and the row that it answers."""

    benchmark: str
    row: Row
    program: str
    name: str

    @cached_property
    def statements(self) -> list[ast.stmt]:
        return ast.parse(self.program).body

    @property
    def stub(self) -> str:
        """The tested function with its docstring alone, as prompts show it."""
        function = self.function
        lines = self.program.split("\n")[function.lineno - 1 : function.body[0].lineno - 1]
        signature = "\n".join(lines) if lines else self.program.split("\n")[function.lineno - 1].split(":")[0] + ":"
        return f'{signature}\n    """Does what was asked."""\n'

    @cached_property
    def function(self) -> ast.FunctionDef:
        found = [one for one in self.statements if isinstance(one, ast.FunctionDef) and one.name == self.name]
        return found[-1]

    @property
    def wrong(self) -> str:
        return f"def {self.name}(*arguments):\n    return 'a first try'\n"

    def source(self, statement: ast.stmt) -> str:
        decorators = [one.lineno for one in getattr(statement, "decorator_list", ())]
        start = min([statement.lineno, *decorators]) - 1
        return "\n".join(self.program.split("\n")[start : statement.end_lineno])

    @property
    def helpers(self) -> list[str]:
        return [self.source(one) for one in self.statements if one is not self.function]


def fence(code: str, info: str = "python") -> str:
    return f"```{info}\n{code.strip(chr(10))}\n```"


PROSE = "From what was asked we get this.\nfrom the left to the right\nimport the numbers and add them\n\n"

WRAPPERS: dict[str, Callable[[Reference], str]] = {
    "corrected": lambda r: f"First:\n{fence(r.wrong)}\nThat is wrong. Corrected:\n{fence(r.program)}\nDone.",
    "restated first": lambda r: f"You ask for\n{fence(r.stub)}\nwhich is\n{fence(r.program)}",
    "restated last": lambda r: f"{fence(r.program)}\nThis completes\n{fence(r.stub + '    pass')}",
    "ellipsis last": lambda r: f"{fence(r.program)}\nas in\n{fence(r.stub + '    ...')}",
    "not implemented first": lambda r: f"{fence(r.stub + '    raise NotImplementedError')}\n{fence(r.program)}",
    "usage last": lambda r: f"{fence(r.program)}\nFor example:\n{fence(f'print({r.name}(1))')}",
    "result last": lambda r: f"{fence(r.program)}\nFor example:\n{fence(f'result = {r.name}(1){chr(10)}result')}",
    "overwritten last": lambda r: f"{fence(r.program)}\nFor example:\n{fence(f'{r.name} = {r.name}(1)')}",
    "import last": lambda r: f"{fence(r.program)}\nUse:\n{fence(f'from solution import {r.name}{chr(10)}{r.name}(1)')}",
    "usage first": lambda r: f"We want\n{fence(f'>>> {r.name}(1)')}\nso\n{fence(r.program)}",
    "unfinished last": lambda r: f"{fence(r.program)}\nOr:\n```python\n{r.wrong}    x = (1,",
    "helpers apart": lambda r: "\nThen\n".join(map(fence, [*r.helpers, r.source(r.function)])),
    "helpers behind": lambda r: "\nwith\n".join(map(fence, [r.source(r.function), *r.helpers])),
    "helpers in a first version": lambda r: (
        f"{fence(chr(10).join([*r.helpers, r.wrong]))}\nBetter:\n{fence(r.source(r.function))}"
    ),
    "on the fence line": lambda r: f"Sure:\n```python {r.program.lstrip()}\n```",
    "right behind the fence": lambda r: f"Sure:\n```{r.program.lstrip()}\n```\nDone.",
    "prose behind the fence": lambda r: f"{fence(r.program)} This works.\nIt returns `{r.name}`.",
    "prose behind an unmarked fence": lambda r: f"{fence(r.program, '')} This works as\nexpected.",
    "attributes": lambda r: f'```python title="solution.py"\n{r.program}\n```',
    "unmarked beside python": lambda r: f"{fence(r.program, '')}\nUse:\n{fence(f'print({r.name}(1))')}",
    "fence in a list": lambda r: "1. So:\n   " + fence(r.program).replace("\n", "\n   "),
    "never closed": lambda r: f"Here:\n```python\n{r.program}",
    "unfenced": lambda r: r.program,
    "unfenced in prose": lambda r: f"{PROSE}{r.program}\n\nThis works because it's simple.",
    "unfenced before a mark": lambda r: f"[BEGIN]\n{r.program}\n[DONE]\nThe end.",
    "unfenced, corrected": lambda r: f"{r.wrong}\nThat's wrong. Corrected:\n\n{r.program}\nThis is right.",
    "unfenced, usage fenced": lambda r: f"{r.program}\nUse it like this:\n{fence(f'print({r.name}(1))')}",
    "after a thought": lambda r: f"<think>\n{fence(r.wrong)}\n</think>\n{fence(r.program)}",
    "before a thought": lambda r: f"{fence(r.program)}\n<think>\n{fence(r.wrong)}",
    "quoted": lambda r: "> " + fence(r.program).replace("\n", "\n> "),
    "in an answer tag": lambda r: f"<answer>{r.program.strip()}</answer>",
    "in tags of code": lambda r: f"<pre><code>{r.program.strip()}</code></pre>",
    "behind a control token": lambda r: f"<|python_tag|>{r.program.lstrip()}",
    "language inside the fence": lambda r: f"```\npython\n{r.program.strip()}\n```",
    "indented in prose": lambda r: f"Sure:\n\n{textwrap.indent(r.program.strip(), '    ')}\n\nDone.",
    "carriage returns": lambda r: f"Sure:\n{fence(r.program)}\n".replace("\n", "\r\n"),
}


# HumanEval's prompts end inside the function, so that its body alone is an answer too.
BODY_WRAPPERS: dict[str, Callable[[str, str], str]] = {
    "plain": lambda body, name: body,
    "in prose": lambda body, name: f"The body is\n\n{body}\n\nIt returns what was asked.",
    "fenced": lambda body, name: f"So:\n{fence(body)}",
    "usage last": lambda body, name: f"So:\n{fence(body)}\nFor example\n{fence(f'print({name}(1))')}",
    "without its indentation": lambda body, name: fence(textwrap.dedent(body)),
    "after a thought": lambda body, name: f"<think>\nreturn 1\n</think>\n{fence(body)}",
}


def humaneval(rows: list[Row]) -> Iterator[Reference]:
    for row in rows:
        yield Reference("humaneval", row, row["prompt"] + row["canonical_solution"], row["entry_point"])


def mbpp(rows: list[Row], programs: list[str]) -> Iterator[Reference]:
    for row, program in zip(rows, programs, strict=True):
        called = [
            node.func.id if isinstance(node.func, ast.Name) else ""
            for test in row["test_list"]
            for node in ast.walk(ast.parse(test.strip()))
            if isinstance(node, ast.Call)
        ]
        called += [node.id for test in row["test_list"] for node in ast.walk(ast.parse(test)) if hasattr(node, "id")]
        program = program.replace("\r\n", "\n").replace("\t", "    ")
        defined = [one.name for one in ast.parse(program).body if isinstance(one, ast.FunctionDef)]
        yield Reference("mbpp", row, program, next(name for name in called if name in defined))


def recorded(shared: Path, name: str) -> list[dict[str, Any]]:
    return [item for _, item in json_lines(shared / "verdicts" / name)]


@pytest.fixture(scope="module")
def sample(shared: Path) -> list[Reference]:
    """HumanEval's own solutions, and programs of a model that passed, of the sample in the repository."""
    solved = [item for item in recorded(shared, "mbpp.jsonl") if item["outputs"][0]["recorded"]]
    return [
        *humaneval([item["row"] for item in recorded(shared, "humaneval.jsonl")]),
        *mbpp([item["row"] for item in solved], [item["outputs"][0]["text"] for item in solved]),
    ]


@pytest.fixture(scope="module")
def references(reference_data: Path) -> list[Reference]:
    rows = {name: get_task(name).rows(reference_data / "benchmarks") for name in ("humaneval", "mbpp")}
    return [*humaneval(rows["humaneval"]), *mbpp(rows["mbpp"], [row["code"] for row in rows["mbpp"]])]


def is_found(reference: Reference, text: str) -> bool:
    """Whether the extracted program holds the reference, as far as its tested function needs it."""
    answer = BENCHMARKS[reference.benchmark].extract(text, reference.row).answer
    try:
        found = ast.parse(answer or "").body
    except SyntaxError:
        return False
    defined = [dump(one) for one in found if isinstance(one, ast.FunctionDef) and one.name == reference.name]
    if defined[-1:] != [dump(reference.function)]:
        return False
    dumps = {dump(one) for one in found}
    words = {one: set(re.findall(r"\w+", reference.source(one))) for one in reference.statements}
    tests = set(re.findall(r"\w+", str(reference.row.get("test_list"))))
    return all(
        dump(one) in dumps
        for one in reference.statements
        if bound_names(one) & tests.union(*(used for other, used in words.items() if other is not one))
    )


def dump(statement: ast.stmt) -> str:
    """The syntax tree, without blanks on otherwise blank lines of docstrings."""
    return re.sub(r" +(?=\\n)", "", ast.dump(statement))


def bound_names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_programs_of_the_sample_are_found(sample: list[Reference], wrapper: str) -> None:
    assert len(sample) == 90
    lost = [reference.row["task_id"] for reference in sample if not is_found(reference, WRAPPERS[wrapper](reference))]
    assert lost == []


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_all_reference_programs_are_found(references: list[Reference], wrapper: str) -> None:
    assert len(references) == 664
    lost = [
        reference.row["task_id"] for reference in references if not is_found(reference, WRAPPERS[wrapper](reference))
    ]
    assert lost == []


@pytest.mark.parametrize("wrapper", BODY_WRAPPERS)
def test_bodies_of_functions_are_found(sample: list[Reference], wrapper: str) -> None:
    wrapped = BODY_WRAPPERS[wrapper]
    lost = [
        one.row["task_id"]
        for one in sample
        if one.benchmark == "humaneval" and not is_found(one, wrapped(one.row["canonical_solution"], one.name))
    ]
    assert lost == []
