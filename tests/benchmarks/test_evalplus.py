"""HumanEval+ and MBPP+: references pass, and verdicts are those of EvalPlus itself."""

import gzip
import importlib.util
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refusion_eval.benchmarks import BENCHMARKS, Row, get_task
from refusion_eval.benchmarks.evalplus import BASE
from refusion_eval.benchmarks.extract.programs import fenced
from refusion_eval.benchmarks.rows import find_rows
from refusion_eval.errors import DataError
from refusion_eval.sandbox import Program, check_programs
from refusion_eval.scoring.judge import judge_texts
from refusion_eval.scoring.score import score_texts
from tests.sandbox.unit.test_mutants import mutant

NAMES = ["humaneval_plus_v0_1_10", "mbpp_plus_v0_1_0"]

SAMPLED = 20  # tasks of each benchmark, each with its reference and two mutants

# EvalPlus never counts the inputs of HumanEval/32 as run, so every program for it is wrong there, its reference too.
MISCOUNTED = "HumanEval/32"

# EvalPlus reads its variables when it is imported. Its limits are in wall-clock seconds; a busy machine needs more.
EVALPLUS = """
import json, sys
from evalplus.data import get_human_eval_plus, get_mbpp_plus
from evalplus.eval import MBPP_OUTPUT_NOT_NONE_TASKS, PASS, untrusted_check
from evalplus.gen.util import trusted_exec
dataset = sys.argv[1]
read = {"humaneval": get_human_eval_plus, "mbpp": get_mbpp_plus}[dataset]
problems, verdicts = read(err_incomplete=False), []
for task, program in json.load(sys.stdin):
    problem, passed = problems[task], []
    name = problem["entry_point"]
    for kind in ("base_input", "plus_input"):
        is_there = dataset == "mbpp" and name in MBPP_OUTPUT_NOT_NONE_TASKS
        reference = problem["prompt"] + problem["canonical_solution"]
        expected, seconds = trusted_exec(reference, problem[kind], name, record_time=True, output_not_none=is_there)
        status, _ = untrusted_check(
            dataset, program, problem[kind], name, expected, problem["atol"], seconds,
            fast_check=True, min_time_limit=10,
        )
        passed.append(status == PASS)
    verdicts.append([passed[0], all(passed)])
print("verdicts", json.dumps(verdicts))
"""


def row(**changes: Any) -> dict[str, Any]:
    published = {
        "task_id": "HumanEval/0",
        "prompt": 'def half(x):\n    """Half of x."""\n',
        "canonical_solution": "    return x / 2\n",
        "entry_point": "half",
        "base_input": [[4], [1]],
        "plus_input": [[3], [float("inf")]],
        "atol": 0,
    }
    return {**published, **changes}


def verdicts(name: str, published: Row, program: str) -> tuple[str, str]:
    """On the base inputs, and on all."""
    benchmark = BENCHMARKS[name]
    assert benchmark.prompts.normalise is not None
    item = (benchmark.prompts.normalise(published, 0), fenced(program))
    base, every = (judge_texts(benchmark, [item], filter_name=one)[0] for one in (BASE, "first"))
    return base.verdict, every.verdict


@pytest.mark.parametrize(
    ("body", "base", "every"),
    [
        ("return x / 2", "correct", "correct"),
        ("return x / 2 + 1e-8", "correct", "correct"),
        ("return x / 2 + 1e-3", "wrong", "wrong"),
        ("return x // 2", "wrong", "wrong"),  # of another type where it is equal, and unequal elsewhere
        ("return x / 2 if x != 3 else 1.4", "correct", "wrong"),
        ("return x / 2 if x < 100 else 1e300", "correct", "wrong"),
        ("return str(x / 2)", "wrong", "wrong"),
        ("return [x / 2]", "wrong", "wrong"),
    ],
)
@pytest.mark.usefixtures("isolation")
def test_results_are_compared_with_those_of_the_reference(body: str, base: str, every: str) -> None:
    assert verdicts(NAMES[0], row(), f"def half(x):\n    {body}\n") == (base, every)


@pytest.mark.usefixtures("isolation")
def test_a_program_that_knows_the_names_of_the_test_gains_nothing() -> None:
    program = (
        "def evalplus_compare(*_):\n    pass\n\nevalplus_base_input = evalplus_plus_input = '[]'\n\n"
        "def evalplus_reference(x):\n    return 0\n\ndef half(x):\n    return 0\n"
    )
    assert verdicts(NAMES[0], row(), program) == ("wrong", "wrong")


@pytest.mark.parametrize(
    ("number", "entry_point", "reference", "inputs", "program", "verdict"),
    [
        # Any order; and tuples, which JSON has as lists.
        (2, "similar_elements", "return a + b", [[[1], [2]]], "return b + a", "correct"),
        (2, "similar_elements", "return a + b", [[[1], [2]]], "return [*b, *a]", "correct"),
        (2, "similar_elements", "return a + b", [[[1], [2]]], "return a", "wrong"),
        (2, "similar_elements", "return a + b", [[[1], [2]]], "return a + (2,)", "correct"),
        # Whether there is a result.
        (285, "text_match_three", "return __import__('re').search(b, a)", [["x", "x"]], "return 'Found'", "correct"),
        (285, "text_match_three", "return __import__('re').search(b, a)", [["x", "x"]], "return False", "wrong"),
        # Other readings of the sentence.
        (164, "are_equivalent", "return True", [[36, 57]], "return False", "correct"),
        (295, "sum_div", "return a + b", [[1, 2]], "return 0", "correct"),
        (558, "digit_distance_nums", "return abs(a - b)", [[1, 23]], "return 2 + 2", "correct"),
        (558, "digit_distance_nums", "return abs(a - b)", [[1, 23]], "return 3", "wrong"),
        (581, "surface_Area", "return 33", [[3, 4]], "return 35", "correct"),
        (581, "surface_Area", "return 33", [[3, 4]], "return 34", "wrong"),
        (124, "angle", "return b.imag", [["0.5", "1j"]], "return b.imag if isinstance(a, float) else 0", "correct"),
        (580, "deep", "return a, b", [[[1, [2]], 3]], "return (1, (2,)), 3", "correct"),
        (580, "deep", "return a, b", [[[1, [2]], 3]], "return [1, [2]], 3", "wrong"),
    ],
)
@pytest.mark.usefixtures("isolation")
def test_tasks_of_mbpp_have_their_exceptions(
    number: int, entry_point: str, reference: str, inputs: list[Any], program: str, verdict: str
) -> None:
    published = row(
        task_id=f"Mbpp/{number}",
        prompt='"""\nWrite it.\nassert True\n"""\n',
        canonical_solution=f"def {entry_point}(a, b):\n    {reference}\n",
        entry_point=entry_point,
        base_input=inputs,
        plus_input={},
    )
    assert verdicts(NAMES[1], published, f"def {entry_point}(a, b):\n    {program}\n") == (verdict, verdict)


@pytest.mark.parametrize(("root", "verdict"), [("-0.5", "correct"), ("-1.0", "wrong")])
@pytest.mark.usefixtures("isolation")
def test_any_zero_of_the_polynomial_is_right(root: str, verdict: str) -> None:
    published = row(
        prompt="def find_zero(xs):\n",
        canonical_solution="    return -2.0\n",
        entry_point="find_zero",
        base_input=[[[1, 2]]],
        plus_input=[],
        atol=1e-4,
    )
    assert verdicts(NAMES[0], published, f"def find_zero(xs):\n    return {root}\n") == (verdict, verdict)


@pytest.mark.usefixtures("isolation")
def test_a_program_that_empties_its_arguments_gains_nothing() -> None:
    published = row(
        prompt="def find_zero(xs):\n",
        canonical_solution="    return -0.5\n",
        entry_point="find_zero",
        base_input=[[[1, 2]]],
        plus_input=[],
        atol=1e-4,
    )
    for change in ("clear()", "__setitem__(slice(None), [0.0, 0.0])"):
        assert verdicts(NAMES[0], published, f"def find_zero(xs):\n    xs.{change}\n    return 0.0\n")[1] == "wrong"


_EMPTY = "class Empty(list):\n    __iter__ = lambda self: iter(())\n"


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        ("[[x / 2 + 1e-9], [x / 2]]", "correct"),
        ("[(x / 2 + 1e-9,), [x / 2]]", "wrong"),
        ("[[x / 2 + 1e-9], [x / 2, 1.0]]", "wrong"),
        ("[[], []]", "wrong"),
        ("[Empty([x / 2 + 1]), Empty([x / 2 + 1])]", "wrong"),
        ("[range(1), range(1)]", "wrong"),
        ("{0: [x / 2], 1: [x / 2]}", "wrong"),
    ],
)
@pytest.mark.usefixtures("isolation")
def test_lists_inside_a_result_are_compared_as_the_whole(result: str, verdict: str) -> None:
    published = row(canonical_solution="    return [[x / 2], [x / 2]]\n", plus_input=[], atol=1e-6)
    assert verdicts(NAMES[0], published, f"{_EMPTY}def half(x):\n    return {result}\n")[1] == verdict


@pytest.mark.parametrize("changes", [{"canonical_solution": "    return (\n"}, {"entry_point": "half it"}])
def test_a_reference_that_is_no_program_is_named(changes: dict[str, str]) -> None:
    with pytest.raises(DataError, match="HumanEval/0: the reference is no Python"):
        verdicts(NAMES[0], row(**changes), "def half(x):\n    return x / 2\n")


@pytest.mark.parametrize("tolerance", [10**400, float("inf"), float("nan"), -1, True])
def test_a_tolerance_that_no_float_is_or_that_no_result_has_is_refused(tolerance: float, tmp_path: Path) -> None:
    source = BENCHMARKS[NAMES[0]].source
    (tmp_path / f"{source.split}.jsonl").write_text(json.dumps(row(atol=tolerance)))
    with pytest.raises(DataError, match=r"column 'atol' is .*; it must be a number from 0 on"):
        get_task(NAMES[0]).items(tmp_path)


def test_a_published_file_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    source = BENCHMARKS[NAMES[0]].source
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row()).encode()))
    whole = datasets.DownloadManager.download_and_extract
    monkeypatch.setattr(
        datasets.DownloadManager,
        "download_and_extract",
        lambda self, url: whole(self, str(path)) if url == source.hub else None,
    )
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert find_rows("x", source, None, source.split, folder="x") == ([row()], source.hub)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_reference_is_right_on_the_base_inputs_and_on_all(name: str, reference_data: Path) -> None:
    benchmark, rows = BENCHMARKS[name], get_task(name).rows(reference_data / "benchmarks")
    texts = {row["task_id"]: [benchmark.prompts.gold_text(row)] for row in rows}
    assert len(texts) == benchmark.source.num_rows
    for filter_name, judged in (("first", rows), (BASE, rows[::10])):
        scores = score_texts(benchmark, judged, texts, filter_name=filter_name)
        assert [(score.item_id, score.reason) for score in scores if not score.value] == []
        assert len(scores) == len(judged)
    assert benchmark.test is not None
    for row in rows:  # what is right on all inputs is right on the base inputs, because their test comes first
        base, every = benchmark.other_tests[BASE](row), benchmark.test(row)
        assert (every.test.startswith(base.test), every.helpers.startswith(base.helpers)) == (True, True)
        assert "evalplus_base_input" in base.test


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_references_and_mutants_get_the_verdicts_of_evalplus(name: str, reference_data: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("evalplus") is None:
        pytest.skip("needs evalplus 0.3.1; CONTRIBUTING.md says how to install it")
    folder = reference_data / "benchmarks"
    benchmark, draws = BENCHMARKS[name], random.Random(0)
    rows = draws.sample(get_task(name).rows(folder), SAMPLED)
    programs = [(row, text) for row in rows for text in (benchmark.gold(row), *(_mutant(row, draws) for _ in range(2)))]
    ours = []
    for test_of in (benchmark.other_tests[BASE], benchmark.test):
        assert test_of is not None
        tests = [replace(test_of(row), timeout_s=20) for row, _ in programs]
        checks = [Program(candidate=text, **vars(test)) for (_, text), test in zip(programs, tests, strict=True)]
        ours.append([result.passed for result in check_programs(checks)])
    theirs = _evalplus(name, [(row["task_id"], program) for row, program in programs], folder, tmp_path)
    differing = [
        (row["task_id"], program, mine, other)
        for (row, program), *mine, other in zip(programs, *ours, theirs, strict=True)
        if mine != other and row["task_id"] != MISCOUNTED
    ]
    print(f"{name}: {len(programs)} programs, of which {sum(ours[0])} pass base and {sum(ours[1])} pass all")
    assert 0 < sum(ours[1]) < len(programs)
    assert differing == []


def _mutant(row: Row, draws: random.Random) -> str:
    helpers = row["prompt"] if row["task_id"].startswith("HumanEval") else ""
    return mutant(Program(candidate=f"{row['prompt']}{row['canonical_solution']}", test="", helpers=helpers), draws)


def _evalplus(name: str, programs: list[tuple[str, str]], folder: Path, tmp_path: Path) -> list[list[bool]]:
    source = BENCHMARKS[name].source
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(gzip.decompress((folder / BENCHMARKS[name].folder / f"{source.split}.jsonl.gz").read_bytes()))
    dataset = name.partition("_")[0]
    done = subprocess.run(
        [sys.executable, "-c", EVALPLUS, dataset],
        env={**os.environ, f"{dataset.upper()}_OVERRIDE_PATH": str(rows)},
        cwd=tmp_path,
        input=json.dumps(programs),
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[list[bool]] = json.loads(done.stdout.rpartition("verdicts")[2])
    return found
