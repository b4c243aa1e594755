"""Scoring: texts in, verdicts out."""

import subprocess
import sys
import time
from typing import Any

import pytest

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.errors import DataError
from refusion_eval.scoring.judge import Judge, Verdict, judge_extractions, judge_texts
from refusion_eval.scoring.texts import score_texts

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
    return [score.verdict.verdict for score in score_texts(BENCHMARKS[benchmark], rows, texts, **more)]


def test_rows_without_an_id_are_named_by_their_number() -> None:
    scores = score_texts(
        BENCHMARKS["gsm8k"], WORD_PROBLEMS, {"1": ["The answer is 1000."], "0": ["The answer is 42.00."]}
    )
    assert [(score.id, score.verdict.passed, score.verdict.extracted) for score in scores] == [
        ("0", True, "42"),
        ("1", True, "1000"),
    ]


def test_right_wrong_unanswered_and_missing_are_told_apart() -> None:
    rows = [*WORD_PROBLEMS, *WORD_PROBLEMS]
    texts = {"0": ["The answer is 42."], "1": ["The answer is 7."], "2": ["no idea"]}
    assert verdicts("gsm8k", rows, texts) == ["correct", "wrong", "no_answer", "missing"]


def test_every_text_of_an_item_is_scored() -> None:
    scores = score_texts(BENCHMARKS["gsm8k"], WORD_PROBLEMS[:1], {"0": ["The answer is 42.", "The answer is 41."]})
    assert [(score.sample, score.verdict.passed) for score in scores] == [(0, True), (1, False)]


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
    assert [
        score.verdict.tier for score in score_texts(BENCHMARKS["mbpp"], [PROGRAM], texts, workers=1, sandbox="none")
    ] == ["none", ""]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_first_filter_is_the_default(name: str) -> None:
    assert BENCHMARKS[name].default_filter == ("first" if BENCHMARKS[name].kind == "code" else "last")


def test_gold_text_reads_as_the_prompt_asks() -> None:
    assert BENCHMARKS["gsm8k"].gold_text(WORD_PROBLEMS[0]) == "It is 42.\nThe answer is 42."
    assert BENCHMARKS["mbpp"].gold_text(PROGRAM) == "```python\ndef add(x):\n    return x + 1\n```"


def test_malformed_gold_is_refused() -> None:
    with pytest.raises(DataError, match="must end in '#### <number>'"):
        score_texts(BENCHMARKS["gsm8k"], [{"question": "q", "answer": "42"}], {"0": ["The answer is 42."]})


MATHS = {"problem": "p", "solution": "so \\boxed{x^2+1}", "level": "Level 1", "type": "Algebra"}
ADDS = "```python\ndef add(x):\n    return x + 1\n```"


def judged_one_by_one(judge: Judge) -> list[tuple[Verdict, Verdict]]:
    """The verdicts of a judge on texts of every kind, each beside the one that `judge_texts` reaches."""
    texts = [
        ("gsm8k", WORD_PROBLEMS[0], "The answer is 42."),
        ("math", MATHS, "\\boxed{1+x^2}"),
        ("math", MATHS, "\\boxed{x^3}"),
        ("mbpp", PROGRAM, ADDS),
        ("mbpp", PROGRAM, "Sorry."),
    ]
    futures = [judge.submit(BENCHMARKS[name], row, text) for name, row, text in texts]
    at_once = [judge_texts(BENCHMARKS[name], [(row, text)], sandbox="none")[0] for name, row, text in texts]
    return [(future.result(), verdict) for future, verdict in zip(futures, at_once, strict=True)]


def test_texts_that_are_submitted_one_by_one_get_the_same_verdicts() -> None:
    judge = Judge(sandbox="none", workers=2)
    for one_by_one, at_once in judged_one_by_one(judge):
        assert one_by_one == at_once
    judge.close()


def test_numbers_and_letters_are_judged_at_once() -> None:
    judge = Judge()
    assert judge.submit(BENCHMARKS["gsm8k"], WORD_PROBLEMS[0], "The answer is 42.").result(timeout=0).passed
    judge.close()


def test_a_judge_that_fails_says_so_in_its_verdict() -> None:
    judge = Judge(sandbox="docker")
    verdict = judge.submit(BENCHMARKS["mbpp"], PROGRAM, ADDS).result()
    assert (verdict.verdict, verdict.passed) == ("error", False)
    assert verdict.reason.startswith("SandboxError: sandbox='docker' is unknown")
    assert judge.submit(BENCHMARKS["gsm8k"], {"answer": "no number"}, "The answer is 1.").result().verdict == "error"
    judge.close()


def test_verdicts_are_told_as_they_come() -> None:
    told: dict[int, Verdict] = {}
    texts = ("\\boxed{1+x^2}", "nothing", "\\boxed{1+x^2}")
    extractions = [BENCHMARKS["math"].extract(text, MATHS) for text in texts]
    verdicts = judge_extractions(BENCHMARKS["math"], [MATHS] * 3, extractions, on_verdict=told.__setitem__)
    assert [told[number] for number in range(3)] == verdicts
    assert [verdict.verdict for verdict in verdicts] == ["correct", "no_answer", "correct"]


def test_a_process_that_ends_does_not_wait_for_a_program() -> None:
    script = """
import time
from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.scoring.judge import Judge
row = {"task_id": 7, "text": "t", "code": "", "test_list": ["f()"], "test_setup_code": ""}
judge = Judge(sandbox="none", workers=1)
endless = "```python\\ndef f():\\n    while True:\\n        pass\\n```"
futures = [judge.submit(BENCHMARKS["mbpp"], row, endless) for _ in range(3)]
while not futures[0].running():
    time.sleep(0.01)
judge.close()
assert [future.cancelled() for future in futures] == [False, True, True]
print(time.monotonic(), flush=True)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert time.monotonic() - float(done.stdout) < BENCHMARKS["mbpp"].test(PROGRAM).timeout_s / 2
