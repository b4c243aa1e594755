"""Verdicts reach the run store one by one, once, and whatever happens to the judge."""

import logging
import threading

import pytest

from refusion_eval import __version__
from refusion_eval.benchmarks import Task, get_task
from refusion_eval.errors import StoreError
from refusion_eval.scoring import judge
from refusion_eval.scoring.judge import ScoreWriter
from refusion_eval.store.records import PASSED, STATED
from refusion_eval.store.run_store import RunReader, RunStore
from tests.store.conftest import make_manifest, make_sample

GSM8K = Task(get_task("gsm8k").benchmark, mini=True)
MBPP = Task(get_task("mbpp").benchmark, mini=True)
QUESTION = {"question": "How many?", "answer": "#### 7"}
PROGRAM = {"task_id": 7, "text": "t", "code": "", "test_list": ["assert f() == 1"], "test_setup_code": ""}


@pytest.fixture
def store(tmp_path):
    with RunStore.open(tmp_path / "run", make_manifest()) as store:
        yield store


def sample(store, item, text, *, task="mini_mbpp", **changes):
    made = make_sample(item, task=task, text=text, **changes)
    store.append(made)
    return made


def program(value):
    return f"```python\ndef f():\n    return {value}\n```"


def recorded(store):
    """What another process sees on the disk."""
    with RunReader.open(store.directory) as reader:
        return [(score.item_id, score.metric, score.verdict) for score in reader.scores()]


def test_the_score_on_the_base_inputs_is_recorded_beside_that_on_all(store):
    task = get_task("humaneval_plus_v0_1_10")
    row = {"task_id": "1", "prompt": "def f(x):\n", "canonical_solution": "    return x\n", "entry_point": "f"}
    row |= {"base_input": "[[1]]", "plus_input": "[[2]]", "atol": 0.0}
    text = "```python\ndef f(x):\n    return 1\n```"
    with ScoreWriter(store, sandbox="none", waits=False) as writer:
        writer.judge(task, row, sample(store, 1, text, task=task.name))
    scores = {score.metric: (score.value, score.verdict) for score in store.scores()}
    assert scores == {PASSED: (0.0, "wrong"), "accuracy by base": (1.0, "")}


def test_a_verdict_says_what_judged_it_and_how(store):
    with ScoreWriter(store, sandbox="none", waits=False) as writer:
        writer.judge(MBPP, PROGRAM, sample(store, 1, program(1)))
        writer.judge(GSM8K, QUESTION, sample(store, 2, "It is 7.", task="mini_gsm8k"))
    by_metric = {(score.item_id, score.metric): score for score in store.scores()}
    of_program, of_number = by_metric["1", PASSED], by_metric["2", PASSED]
    assert (of_program.scorer, of_program.verdict, of_program.tier) == (
        f"mini_mbpp/first {MBPP.benchmark.prompts.version} {__version__}",
        "correct",
        "none",
    )
    scorer = f"mini_gsm8k/last {GSM8K.benchmark.prompts.version} {__version__}"
    assert (of_number.scorer, of_number.extracted, of_number.value) == (scorer, "7", 1.0)
    assert by_metric["2", "strict"].value == 0.0
    assert ("1", "strict") not in by_metric
    assert writer.num_unscored == 0


def test_a_rule_that_takes_any_formula_has_the_rule_of_this_project_beside_it(store):
    maths = get_task("refusion_math_release")
    row = {"problem": "p", "solution": "It is $\\boxed{2}$."}
    with ScoreWriter(store, sandbox="none", waits=False) as writer:
        for item, text in enumerate(["noise 2", "\\boxed{2}", "\\boxed{3}"]):
            writer.judge(maths, row, sample(store, item, text, task=maths.name))
    verdicts = {(score.item_id, score.metric): (score.value, score.extracted) for score in store.scores()}
    assert [verdicts[item, PASSED] for item in "012"] == [(1.0, "2"), (1.0, "2"), (0.0, "3")]
    assert [verdicts[item, STATED] for item in "012"] == [(0.0, None), (1.0, "2"), (0.0, "3")]


def test_the_running_score_counts_each_verdict_once_and_those_of_earlier_runs(store):
    first, second = (sample(store, item, program(item)) for item in (1, 2))
    with ScoreWriter(store, sandbox="none", waits=True) as writer:
        writer.judge(MBPP, PROGRAM, first)
        assert writer.running_score("mini_mbpp") == (1, 1)
        writer.judge(MBPP, PROGRAM, first)
        writer.judge(MBPP, PROGRAM, second)
        assert writer.running_score("mini_mbpp") == (1, 2)
    with ScoreWriter(store, sandbox="none", waits=True) as again:
        assert again.running_score("mini_mbpp") == (0, 0)
        again.judge(MBPP, PROGRAM, first)
        assert again.running_score("mini_mbpp") == (1, 1)
        assert again.running_score("mini_gsm8k") == (0, 0)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_where_requests_are_timed_the_next_one_waits_for_the_verdict(store, batch_size):
    with ScoreWriter(store, sandbox="none", waits=True) as writer:
        writer.judge(MBPP, PROGRAM, sample(store, 1, program(1), batch_size=batch_size))
        if batch_size == 1:
            assert recorded(store) == [("1", PASSED, "correct")]
    assert recorded(store) == [("1", PASSED, "correct")]


def test_elsewhere_a_verdict_is_written_while_the_caller_goes_on(store, monkeypatch):
    written = threading.Event()
    append = store.append_scores
    monkeypatch.setattr(store, "append_scores", lambda rows: (append(rows), written.set()))
    with ScoreWriter(store, sandbox="none", waits=False) as writer:
        writer.judge(MBPP, PROGRAM, sample(store, 1, program(2)))
        assert written.wait(60), "nothing is written before the end of the block"
        assert recorded(store) == [("1", PASSED, "wrong")]


def test_what_has_a_verdict_or_failed_is_not_judged(store, monkeypatch):
    judged = []
    check_program = judge.check_program

    def counted(*given, **more):
        judged.append(given)
        return check_program(*given, **more)

    monkeypatch.setattr(judge, "check_program", counted)
    first, failed = sample(store, 1, program(1)), sample(store, 2, "", tokens=[], num_tokens=0, error="made to fail")
    for _ in range(2):  # the second run continues the first
        with ScoreWriter(store, sandbox="none", waits=False) as writer:
            writer.judge(MBPP, PROGRAM, first)
            writer.judge(MBPP, PROGRAM, first)
            writer.judge(MBPP, PROGRAM, failed)
    assert len(judged) == 1
    assert recorded(store) == [("1", PASSED, "correct")]


def test_a_judge_that_fails_costs_one_verdict_which_the_next_run_reaches(store, monkeypatch, caplog):
    first = sample(store, 1, program(1))

    def fail(*given, **more):
        raise OSError("no processes left, by design")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(judge, "check_program", fail)
        with ScoreWriter(store, sandbox="none", waits=True) as writer:
            writer.judge(MBPP, PROGRAM, first)
    assert writer.num_unscored == 1
    assert "mini_mbpp item 1 is not scored: OSError: no processes left, by design" in caplog.text
    assert recorded(store) == []
    with ScoreWriter(store, sandbox="none", waits=True) as writer:
        writer.judge(MBPP, PROGRAM, first)
    assert recorded(store) == [("1", PASSED, "correct")]


def test_a_verdict_that_cannot_be_written_ends_the_run(store, monkeypatch):
    def fail(rows):
        raise StoreError("no space left, by design")

    monkeypatch.setattr(store, "append_scores", fail)
    with pytest.raises(StoreError, match="no space left"), ScoreWriter(store, sandbox="none", waits=False) as writer:
        writer.judge(MBPP, PROGRAM, sample(store, 1, program(1)))


def test_an_error_in_the_block_drops_what_is_not_judged_yet(store, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()

    def slow(*given, **more):
        begun.set()
        may_end.wait(60)
        return check_program(*given, **more)

    check_program = judge.check_program
    monkeypatch.setattr(judge, "check_program", slow)

    def interrupted():
        with ScoreWriter(store, sandbox="none", waits=False) as writer:
            for item in range(20):
                writer.judge(MBPP, PROGRAM, sample(store, item, program(1)))
            assert begun.wait(60)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    may_end.set()
    assert len(recorded(store)) < 20
