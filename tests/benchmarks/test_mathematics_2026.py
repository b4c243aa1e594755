"""MATH-500 and AIME: every right answer counts, and verdicts are those of math-verify but for named differences."""

import json
from pathlib import Path

import pytest
from math_verify import parse, verify

from refusion_eval.benchmarks import BENCHMARKS, get_task
from refusion_eval.benchmarks.rows import read_rows
from refusion_eval.scoring.score import score_texts, summary_lines

MATH = BENCHMARKS["math_500"]


def verdict_of_math_verify(right: str, text: str) -> bool:
    gold, answer = (parse(whole, parsing_timeout=None) for whole in (rf"\boxed{{{right}}}", text))
    return bool(verify(gold, answer, timeout_seconds=None))


@pytest.fixture(scope="module")
def rows(reference_data: Path) -> list[dict]:
    return get_task("math_500").rows(reference_data / "benchmarks")


def test_every_solution_of_math_500_is_right(rows: list[dict]) -> None:
    scores = score_texts(MATH, rows, {row["unique_id"]: [row["solution"]] for row in rows})
    assert len(scores) == 500
    assert [score for score in scores if not score.value] == []


def test_verdicts_on_math_500_are_those_of_math_verify(rows: list[dict]) -> None:
    """Right and wrong answers to every tenth problem; both judges get the same text."""
    some = rows[::10]
    others = [*some[1:], some[0]]
    texts = {
        row["unique_id"]: [
            f"So the answer is $\\boxed{{{row['answer']}}}$.",
            f"So the answer is $\\boxed{{{other['answer']}}}$.",
            f"\\boxed{{{row['answer']}+1}}",
            "I do not know.",
        ]
        for row, other in zip(some, others, strict=True)
    }
    scores = score_texts(MATH, some, texts)
    right = {row["unique_id"]: row["answer"] for row in some}
    expected = [verdict_of_math_verify(right[item], text) for item, made in texts.items() for text in made]
    assert [bool(score.value) for score in scores] == expected
    assert sum(expected) == 51  # of two neighbours the answers are the same


@pytest.fixture(params=[("aime_2024", "Problem", "Answer", "ID"), ("aime_2025", "problem", "answer", "id")])
def aime(request: pytest.FixtureRequest, reference_data: Path, tmp_path: Path):
    """An AIME with invented problems and the real answers."""
    name, problem, answer, item = request.param
    answers = read_rows(reference_data / "benchmarks" / name / "answers.jsonl")
    rows = [
        {item: row["id"], problem: f"Which number is invented problem {number}?", answer: row["answer"]}
        for number, row in enumerate(answers)
    ]
    split = BENCHMARKS[name].source.split
    (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return BENCHMARKS[name], get_task(name).rows(tmp_path), item, answer


def test_every_answer_of_aime_is_right_as_a_number_with_or_without_its_unit(aime) -> None:
    benchmark, rows, item, answer = aime
    number = {row[item]: row[answer].removesuffix(r"^\circ") for row in rows}
    texts = {
        row[item]: [benchmark.prompts.gold_text(row), f"\\boxed{{{int(number[row[item]]):03d}}}", "\\boxed{1000}"]
        for row in rows
    }
    scores = score_texts(benchmark, rows, texts)
    assert [score.value for score in scores] == [1, 1, 0] * 30
    assert all(value.isdigit() and 0 <= int(value) <= 999 for value in number.values())


def test_several_samples_of_a_problem_give_avg_at_k(aime) -> None:
    benchmark, rows, item, _ = aime
    texts = {row[item]: [benchmark.prompts.gold_text(row), "\\boxed{1000}"] for row in rows}
    texts[rows[0][item]] = ["\\boxed{1000}"] * 2
    lines = summary_lines(benchmark.name, benchmark, score_texts(benchmark, rows, texts), allow_partial=False)
    assert lines[0].startswith(f"{benchmark.name}: acc 48.33%")
    assert lines[0].endswith("over 30 of 30 rows (avg@2)")
    assert any(line.startswith("  pass@2 96.67%") for line in lines)
