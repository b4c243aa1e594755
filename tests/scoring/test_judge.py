"""Scoring: texts in, verdicts out."""

import subprocess
import sys
import time
from functools import partial
from typing import Any

import pytest

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.errors import DataError, SandboxError
from refusion_eval.scoring.judge import Judge, Verdict, judge_extractions, judge_texts
from refusion_eval.scoring.score import score_texts

WORD_PROBLEMS = [
    {"question": "a", "answer": "It is <<40+2=42>>42.\n#### 42"},
    {"question": "b", "answer": "#### 1,000"},
]
PROGRAM = {
    "task_id": 7,
    "text": "Add one.",
    "code": "def add(x):\r\n    return x + 1",
    "test_list": ["assert add(1) == 2"],
    "test_setup_code": "",
}


def verdicts(benchmark: str, rows: list[dict[str, Any]], texts: dict[str, list[str]], **more: Any) -> list[str]:
    return [score.verdict for score in score_texts(BENCHMARKS[benchmark], rows, texts, **more)]


def test_rows_without_an_id_are_named_by_their_number() -> None:
    scores = score_texts(
        BENCHMARKS["gsm8k"], WORD_PROBLEMS, {"1": ["The answer is 1000."], "0": ["The answer is 42.00."]}
    )
    assert [(score.item_id, score.value, score.extracted) for score in scores] == [
        ("0", True, "42"),
        ("1", True, "1000"),
    ]


def test_right_wrong_unanswered_and_missing_are_told_apart() -> None:
    rows = [*WORD_PROBLEMS, *WORD_PROBLEMS]
    texts = {"0": ["The answer is 42."], "1": ["The answer is 7."], "2": ["no idea"]}
    assert verdicts("gsm8k", rows, texts) == ["correct", "wrong", "no_answer", "missing"]


def test_every_text_of_an_item_is_scored() -> None:
    scores = score_texts(BENCHMARKS["gsm8k"], WORD_PROBLEMS[:1], {"0": ["The answer is 42.", "The answer is 41."]})
    assert [(score.key.sample, score.value) for score in scores] == [(0, True), (1, False)]


def test_another_filter_may_be_chosen_and_a_wrong_name_is_refused() -> None:
    texts = {"0": ["The answer is 42. The answer is 43."]}
    assert verdicts("gsm8k", WORD_PROBLEMS[:1], texts, filter_name="first") == ["correct"]
    with pytest.raises(DataError, match="no filter 'second'; it has last, first, strict"):
        score_texts(BENCHMARKS["gsm8k"], WORD_PROBLEMS, texts, filter_name="second")


def test_two_rows_with_one_id_are_refused() -> None:
    with pytest.raises(DataError, match="two rows have the id '7'"):
        score_texts(BENCHMARKS["mbpp"], [PROGRAM, PROGRAM], {})


def test_arc_answers_are_letters_by_position_whatever_the_labels() -> None:
    row = {"id": "x", "question": "q", "choices": {"text": list("abc"), "label": list("123")}, "answerKey": "2"}
    assert verdicts("arc_challenge", [row], {"x": ["The answer is (B)."]}) == ["correct"]


def test_where_mmlu_pro_contradicts_itself_the_letter_wins() -> None:
    row = {"question_id": 3983, "question": "q", "options": list("abcd"), "answer": "C", "answer_index": 1}
    assert verdicts("mmlu_pro", [row], {"3983": ["The answer is (C)."]}) == ["correct"]


def test_mathematics_is_compared_as_mathematics() -> None:
    row = {"problem": "p", "solution": "so \\boxed{\\frac{1}{2}}", "level": "Level 1", "type": "Algebra"}
    texts = {"0": ["\\boxed{0.5}", "\\boxed{2}", "none"]}
    assert verdicts("math", [row], texts, workers=1) == ["correct", "wrong", "no_answer"]


def test_code_is_run_against_its_tests() -> None:
    right, wrong = "```python\ndef add(x):\n    return x + 1\n```", "```python\ndef add(x):\n    return x\n```"
    assert verdicts("mbpp", [PROGRAM], {"7": [right, wrong, "Sorry."]}, workers=1) == ["correct", "wrong", "no_answer"]


def test_a_verdict_on_code_says_which_isolation_it_ran_under() -> None:
    texts = {"7": ["```python\ndef add(x):\n    return x + 1\n```", "Sorry."]}
    assert [score.tier for score in score_texts(BENCHMARKS["mbpp"], [PROGRAM], texts, workers=1, sandbox="none")] == [
        "none",
        "",
    ]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_first_filter_is_the_default(name: str) -> None:
    expected = (
        "lines" if name == "parts" else {"code": "first", "instructions": "strict"}.get(BENCHMARKS[name].kind, "last")
    )
    assert BENCHMARKS[name].default_filter == expected


def test_gold_text_reads_as_the_prompt_asks() -> None:
    assert BENCHMARKS["gsm8k"].prompts.gold_text(WORD_PROBLEMS[0]) == "It is 42.\nThe answer is 42."
    assert BENCHMARKS["mbpp"].prompts.gold_text(PROGRAM) == "```python\ndef add(x):\n    return x + 1\n```"


def test_malformed_gold_is_refused() -> None:
    with pytest.raises(DataError, match="must end in '#### <number>'"):
        score_texts(BENCHMARKS["gsm8k"], [{"question": "q", "answer": "42"}], {"0": ["The answer is 42."]})


MATHS = {"problem": "p", "solution": "so \\boxed{x^2+1}", "level": "Level 1", "type": "Algebra"}
ADDS = "```python\ndef add(x):\n    return x + 1\n```"


TEXTS = [
    ("gsm8k", WORD_PROBLEMS[0], "The answer is 42."),
    ("math", MATHS, "\\boxed{1+x^2}"),
    ("math", MATHS, "\\boxed{x^3}"),
    ("mbpp", PROGRAM, ADDS),
    ("mbpp", PROGRAM, "Sorry."),
]


def submit(judge: Judge, name: str, row: dict[str, Any], text: str, verdicts: list[Verdict], **more: Any) -> None:
    judge.submit(BENCHMARKS[name], row, partial(BENCHMARKS[name].extract, text, row), verdicts.append, **more)


def test_texts_that_are_submitted_one_by_one_get_the_same_verdicts() -> None:
    told: list[list[Verdict]] = [[] for _ in TEXTS]
    with Judge(sandbox="none", workers=2) as judge:
        for text, verdicts in zip(TEXTS, told, strict=True):
            submit(judge, *text, verdicts)
    at_once = [judge_texts(BENCHMARKS[name], [(row, text)], sandbox="none") for name, row, text in TEXTS]
    assert told == at_once
    assert [verdict.verdict for (verdict,) in told] == ["correct", "correct", "wrong", "correct", "no_answer"]


def test_numbers_and_letters_are_judged_at_once() -> None:
    verdicts: list[Verdict] = []
    with Judge() as judge:
        submit(judge, "gsm8k", WORD_PROBLEMS[0], "The answer is 42.", verdicts)
        assert [verdict.passed for verdict in verdicts] == [True]


def test_a_judge_that_fails_ends_the_block_or_says_so_to_its_caller() -> None:
    verdicts: list[Verdict] = []
    failures: list[Exception] = []
    malformed = {"answer": "no number"}
    with pytest.raises(SandboxError, match="sandbox='docker' is unknown"), Judge(sandbox="docker") as judge:
        submit(judge, "mbpp", PROGRAM, ADDS, verdicts)
    with pytest.raises(DataError), Judge() as judge:
        submit(judge, "gsm8k", malformed, "The answer is 1.", verdicts)
    with Judge(sandbox="docker") as judge:
        submit(judge, "mbpp", PROGRAM, ADDS, verdicts, on_failure=failures.append)
        judge.wait()
        submit(judge, "gsm8k", malformed, "The answer is 1.", verdicts, on_failure=failures.append)
    assert verdicts == []
    assert [type(failure) for failure in failures] == [SandboxError, DataError]


def test_a_program_that_no_sandbox_can_judge_is_wrong_and_named(monkeypatch) -> None:
    verdicts: list[Verdict] = []
    with Judge() as judge:
        submit(judge, "mbpp", {**PROGRAM, "test_list": ["import no_such_module"]}, ADDS, verdicts)
    assert [(verdict.verdict, verdict.passed) for verdict in verdicts] == [("error", False)]
    assert "no_such_module" in verdicts[0].reason


def test_verdicts_are_kept_as_they_come_and_decide_about_all_equal_texts() -> None:
    kept: dict[str, Verdict] = {}
    numbers: list[int] = []
    texts = ("\\boxed{1+x^2}", "nothing", "\\boxed{1+x^2}")
    extractions = [BENCHMARKS["math"].extract(text, MATHS) for text in texts]

    def judge() -> list[Verdict]:
        more = {"kept": kept, "on_verdicts": numbers.append}
        return judge_extractions(BENCHMARKS["math"], [MATHS] * 3, extractions, **more)

    verdicts = judge()
    assert [verdict.verdict for verdict in verdicts] == ["correct", "no_answer", "correct"]
    assert sorted(numbers) == [1, 2]
    assert set(kept.values()) == set(verdicts)
    kept |= {key: verdict._replace(reason="kept") for key, verdict in kept.items()}
    assert {verdict.reason for verdict in judge()} == {"kept"}
    assert sum(numbers) == 6


def test_a_process_that_ends_does_not_wait_for_a_program() -> None:
    script = """
import threading
import time
from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.scoring.judge import Judge
row = {"task_id": 7, "text": "t", "code": "", "test_list": ["f()"], "test_setup_code": ""}
endless = "```python\\ndef f():\\n    while True:\\n        pass\\n```"
begun, told = threading.Event(), []
def extract():
    begun.set()
    return BENCHMARKS["mbpp"].extract(endless, row)
try:
    with Judge(sandbox="none", workers=1) as judge:
        for _ in range(3):
            judge.submit(BENCHMARKS["mbpp"], row, extract, told.append)
        begun.wait()
        raise KeyboardInterrupt
except KeyboardInterrupt:
    assert told == []
    print(time.monotonic(), flush=True)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert time.monotonic() - float(done.stdout) < BENCHMARKS["mbpp"].test(PROGRAM).timeout_s / 2
