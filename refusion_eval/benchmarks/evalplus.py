"""What HumanEval+ and MBPP+ share: rows of EvalPlus, and its comparison of two programs on many inputs.

The rows have inputs and a reference program, and no results. The test runs the reference, then the program under test,
on each input, and compares the results as EvalPlus 0.3.1 does (`evalplus/eval/__init__.py`, `unsafe_execute`).
"""

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refusion_eval.benchmarks import Benchmark, CodeTest, Extractor, Prompts
from refusion_eval.benchmarks.extract.programs import fenced
from refusion_eval.benchmarks.rows import ID, TEXT, ColumnType, Row, Source
from refusion_eval.errors import DataError
from refusion_eval.untrusted import parse_python

BASE, PLUS = "base", "plus"  # kinds of inputs; `BASE` is also the filter whose texts are judged on these alone

# A list of inputs, each a list of arguments. MBPP+ v0.1.0 has an empty object for a task without plus inputs.
_INPUTS = ColumnType(lambda value: isinstance(value, list) or value == {}, "a list of inputs")
_NUMBER = ColumnType(
    lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9,
    "a number from 0 on",
)
COLUMNS: Mapping[str, ColumnType] = {
    "task_id": ID,
    **dict.fromkeys(("prompt", "entry_point", "canonical_solution"), TEXT),
    **dict.fromkeys(("base_input", "plus_input"), _INPUTS),
    "atol": _NUMBER,
}

# EvalPlus gives up a program after 60 s of base inputs or 60 s of plus inputs. Here both are one check, in which the
# reference runs too, and the time for which a busy machine lets the check wait does not count.
_TIMEOUT_S = 120.0

# The sandbox has no numpy. What numpy cannot compare, such as texts, is a TypeError here too. In EvalPlus the tolerance
# that a result of floats brings about holds for all later inputs; a list inside a result is no tuple here. The program
# gets a copy of the arguments, which an oracle may read behind it. No program defines names like these.
_COMPARISON = """
import copy as evalplus_copy
import json as evalplus_json
import math as evalplus_math


def evalplus_has_floats(value):
    if isinstance(value, (list, tuple)) and value:
        return all(isinstance(part, float) for part in value)
    return isinstance(value, float)


def evalplus_is_close(value, expected, tolerance):
    if isinstance(expected, (list, tuple)):
        if type(value) is not type(expected) or len(value) != len(expected):
            return False
        return all([evalplus_is_close(*pair, tolerance) for pair in zip(value, expected)])
    if expected in (evalplus_math.inf, -evalplus_math.inf):
        return value == expected
    return abs(value - expected) <= tolerance + 1e-07 * abs(expected)


def evalplus_compare(program, inputs, tolerance):
    for arguments in map(evalplus_convert, evalplus_json.loads(inputs)):
        expected = evalplus_expected(evalplus_reference(*evalplus_copy.deepcopy(arguments)))
        value = program(*evalplus_copy.deepcopy(arguments))
        is_right = evalplus_oracle(value, expected, arguments, tolerance)
        if tolerance == 0 and evalplus_has_floats(expected):
            tolerance = 1e-06
        if not is_right and tolerance and evalplus_close_is_right:
            assert type(value) is type(expected)
            is_right = evalplus_is_close(value, expected, tolerance)
        assert is_right
"""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How the results of one task are compared, as source of expressions; `value` is what the program gave.

    Attributes:
        arguments: of `arguments`, an input as JSON has it: the input as it is meant.
        expected: of `result`, what the reference gave: what the program is expected to give.
        oracle: of `value, expected, arguments, tolerance`: whether the value is right.
        close_is_right: whether a value that the oracle refuses is right if its numbers are close to the expected ones.
    """

    arguments: str = "arguments"
    expected: str = "result"
    oracle: str = "value == expected"
    close_is_right: bool = True


def as_read(row: Row, number: int) -> dict[str, Any]:
    """The row with its inputs as JSON, because the values of one column of a table are of one type."""
    inputs = {name: json.dumps(row[name] or []) for name in ("base_input", "plus_input")}
    return {**{name: row[name] for name in COLUMNS}, **inputs, "atol": float(row["atol"])}


def program_of(row: Row) -> str:
    return f"{row['prompt']}{row['canonical_solution']}"


def code_test(row: Row, comparison: Comparison, kinds: Sequence[str] = (BASE, PLUS)) -> CodeTest:
    """The test of a row as `as_read` gives it; DataError if its reference is no Python."""
    helpers = (
        _COMPARISON,
        _reference(row),
        f"evalplus_convert = lambda arguments: {comparison.arguments}",
        f"evalplus_expected = lambda result: {comparison.expected}",
        f"evalplus_oracle = lambda value, expected, arguments, tolerance: {comparison.oracle}",
        f"evalplus_close_is_right = {comparison.close_is_right}",
        *(f"evalplus_{kind}_input = {row[f'{kind}_input']!r}" for kind in kinds),
    )
    checks = (f"evalplus_compare({row['entry_point']}, evalplus_{kind}_input, {row['atol']!r})\n" for kind in kinds)
    # The reference is a helper, because it may use what a test may not, such as `eval`.
    return CodeTest(test="".join(checks), helpers="\n".join(helpers), timeout_s=_TIMEOUT_S)


def _reference(row: Row) -> str:
    """The reference inside a function, so that it defines no name that the program under test has to define."""
    try:
        program = parse_python(program_of(row))
        module = parse_python(f"def evalplus_make_reference():\n    return {row['entry_point']}")
    except SyntaxError as problem:
        raise DataError(f"{row['task_id']}: the reference is no Python ({problem}); correct the row") from problem
    make = module.body[0]
    assert isinstance(make, ast.FunctionDef)
    make.body = [*program.body, *make.body]
    return f"{ast.unparse(module)}\nevalplus_reference = evalplus_make_reference()"


def plus_benchmark(
    original: str,
    *,
    title: str,
    release: str,
    version: str,
    num_rows: int,
    user: Callable[[Row], str],
    extract: Extractor,
    comparison: Callable[[Row], Comparison],
    normalise: Callable[[Row, int], dict[str, Any]] = as_read,
    **more: Any,
) -> Benchmark:
    """The benchmark `original` on the inputs of a version of EvalPlus, in a file that begins with `release`."""
    return Benchmark(
        name=f"{original}_plus_{version.replace('.', '_')}",
        title=f"{title} {version}",
        kind="code",
        source=Source(
            hub=release_file(release, version), split=f"evalplus_{version}", num_rows=num_rows, columns=COLUMNS
        ),
        gold=program_of,
        ours=Prompts(
            user=user,
            gold_text=lambda row: fenced(program_of(row)),
            filters={"first": extract, BASE: extract},
            normalise=normalise,
            version="1.1",
        ),
        id_column="task_id",
        test=lambda row: code_test(row, comparison(row)),
        rows_of=f"{original}_plus",
        settings_of=original,
        other_tests={BASE: lambda row: code_test(row, comparison(row), [BASE])},
        **more,
    )


def release_file(name: str, version: str) -> str:
    """The address of the file that EvalPlus publishes, which `evalplus.data` downloads too."""
    return f"https://github.com/evalplus/{name.lower()}_release/releases/download/{version}/{name}.jsonl.gz"
