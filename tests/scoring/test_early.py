"""Programs judged while others are decoded: asked once, found by row and text, and judged again where that failed."""

import pytest

from refusion_eval.lm_eval_plugin.hooks import score_responses
from refusion_eval.scoring import early
from refusion_eval.scoring.early import EarlyVerdicts
from refusion_eval.scoring.judge import CORRECT, ERROR, WRONG, Judged

ROW = {"task_id": 7, "text": "t", "code": "", "test_list": ["assert f() == 1"], "test_setup_code": ""}
OTHER_ROW = {**ROW, "task_id": 8, "test_list": ["assert f() == 2"]}
RIGHT = "```python\ndef f():\n    return 1\n```"


class FakeJudge:
    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def submit(self, benchmark, row, text, sandbox):
        self.asked.append((benchmark, row["task_id"], text, sandbox))
        return lambda: self.answer


@pytest.fixture
def begun(monkeypatch):
    """Verdicts in force, of a judge that gives one answer."""
    monkeypatch.setenv(early.SANDBOX_VARIABLE, "none")
    kept = []

    def begin(answer):
        verdicts = EarlyVerdicts(FakeJudge(answer))
        early.keep(verdicts)
        kept.append(verdicts)
        return verdicts

    yield begin
    for verdicts in kept:
        early.forget(verdicts)


def verdict_of(*items):
    scored = score_responses("mbpp", [[text] for _, text in items], [row for row, _ in items])
    return [one["verdict"] for (one,) in scored]


def test_the_scoring_takes_what_was_judged_early_and_judges_the_rest(begun):
    verdicts = begun(Judged("told", "timed_out", "early", "A"))
    verdicts.begin("mini_mbpp", "mbpp", ROW, RIGHT)
    assert verdict_of((ROW, RIGHT), (OTHER_ROW, RIGHT)) == ["timed_out", WRONG]


@pytest.mark.parametrize("answer", [None, Judged(None, ERROR, "no sandbox there")])
def test_a_judge_that_failed_says_nothing_about_the_program(begun, answer):
    begun(answer).begin("mini_mbpp", "mbpp", ROW, RIGHT)
    assert verdict_of((ROW, RIGHT)) == [CORRECT]


def test_equal_texts_of_an_item_are_judged_once(begun):
    verdicts = begun(None)
    for _ in range(3):
        verdicts.begin("mini_mbpp", "mbpp", ROW, RIGHT)
    assert verdicts._judge.asked == [("mbpp", 7, RIGHT, "none")]


@pytest.mark.parametrize(("task", "benchmark"), [("mini_gsm8k", "gsm8k"), ("mbpp_plus", "mbpp"), ("mini_x", "x")])
def test_only_programs_of_own_tasks_are_judged_early(begun, task, benchmark):
    verdicts = begun(None)
    verdicts.begin(task, benchmark, ROW, RIGHT)
    assert not verdicts._judge.asked


def test_another_isolation_is_another_verdict(begun, monkeypatch):
    verdicts = begun(Judged("told", CORRECT, "with isolation", "A"))
    verdicts.begin("mini_mbpp", "mbpp", ROW, "not a program")
    monkeypatch.setenv(early.SANDBOX_VARIABLE, "auto")
    assert early.known_verdicts("mbpp", [(ROW, "not a program")], "auto") == [None]


def test_nothing_is_left_behind_when_a_run_has_ended(begun):
    verdicts = begun(Judged("told", "timed_out", "early", "A"))
    verdicts.begin("mini_mbpp", "mbpp", ROW, RIGHT)
    early.forget(verdicts)
    assert verdict_of((ROW, RIGHT)) == [CORRECT]
