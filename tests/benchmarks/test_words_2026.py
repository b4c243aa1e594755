"""MMLU-Redux and BBH: which rows are asked, and every right answer counts."""

from collections import Counter
from pathlib import Path

import pytest

from refusion_eval.benchmarks import BENCHMARKS, get_task
from refusion_eval.benchmarks.rows import read_rows
from refusion_eval.errors import DataError
from refusion_eval.scoring.score import score_texts


def made(name: str, rows: list[dict]) -> dict[str, list[str]]:
    benchmark = BENCHMARKS[name]
    return {benchmark.id_of(row, number): [benchmark.prompts.gold_text(row)] for number, row in enumerate(rows)}


@pytest.mark.parametrize(
    ("name", "num_asked"),
    [("mmlu_redux_ok", 5330), ("mmlu_redux_corrected", 5432), ("mmlu_redux_as_is", 5700), ("bbh", 6511)],
)
def test_every_right_answer_counts(name: str, num_asked: int, reference_data: Path) -> None:
    rows = get_task(name).rows(reference_data / "benchmarks")
    scores = score_texts(BENCHMARKS[name], rows, made(name, rows))
    assert len(scores) == num_asked
    assert [score.item_id for score in scores if not score.value] == []


def test_corrections_change_answers_of_rows_with_a_wrong_one_only(reference_data: Path) -> None:
    folder = reference_data / "benchmarks"
    as_is = {row["id"]: row["answer"] for row in get_task("mmlu_redux_as_is").rows(folder)}
    corrected = {row["id"]: row["answer"] for row in get_task("mmlu_redux_corrected").rows(folder)}
    marks = [row["error_type"] for row in read_rows(folder / "mmlu_redux" / "test.jsonl.gz")]
    changed = Counter(marks[int(item)] for item, answer in corrected.items() if answer != as_is[item])
    assert changed == {"wrong_groundtruth": 101}  # of row 1713 the annotators name the same answer again
    assert Counter(marks[int(item)] for item in corrected) == {"ok": 5330, "wrong_groundtruth": 102}


def test_a_file_of_marked_rows_only_is_refused(tmp_path: Path) -> None:
    row = '{"question": "q", "choices": ["a", "b", "c", "d"], "answer": 1, "error_type": "expert"}\n'
    (tmp_path / "test.jsonl").write_text(row)
    assert len(get_task("mmlu_redux_as_is").rows(tmp_path)) == 1
    with pytest.raises(DataError, match="no row that mmlu_redux_ok asks"):
        get_task("mmlu_redux_ok").rows(tmp_path)


@pytest.mark.parametrize(
    ("target", "text", "is_right"),
    [
        ("(B)", "The answer is (B).", True),
        ("(B)", "The answer is B.", True),
        ("(B)", "The answer is (A).", False),
        ("True", "So the answer is **True**.", True),
        ("no", "The answer is no, because a puck is not a ball.", True),
        ("invalid", "The argument is valid. The answer is invalid.", True),
        ("invalid", "The answer is valid.", False),
        ("Yes", "Yes and no.", False),
        ("24", "3 + 21 = 24. The answer is 24 stoves.", True),
        ("-8", "The answer is 8.", False),
        ("] ) }", "The answer is ])}.", True),
        ("] ) }", "The answer is `] )`.", False),
        ("barn dot guru", "The answer is: barn, dot, guru.", True),
        ("barn dot guru", "The answer is barn guru dot.", False),
    ],
)
def test_answers_of_bbh_are_read_in_the_form_of_the_right_one(target: str, text: str, is_right: bool) -> None:
    row = {"input": "Which?\nOptions:\n(A) one\n(B) two", "target": target}
    (score,) = score_texts(BENCHMARKS["bbh"], [row], {"0": [text]})
    assert bool(score.value) == is_right
