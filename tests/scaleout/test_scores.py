"""Log-likelihoods of several processes are those of one."""

import json
import math
import threading

import pytest

from refusion_eval.engine.scoring import TokenScore
from refusion_eval.errors import ConfigError, ScaleOutError
from refusion_eval.runs.system import System, fit, scores
from tests.scaleout.launched_processes import PYTHON, finish, ranks, run_checked
from tests.scaleout.two_processes import jobs_of

PARTS = [[[[5, 6, 7 + number], [8, 9]], [[5], [20 + number]]] for number in range(6)]

# Tasks in stock form: choices by log-likelihood, and whole texts in windows.
SCRIPT = """
import json, sys
from lm_eval.api.instance import Instance
from refusion_eval.lm_eval_plugin.adapter import RefusionLM

lm = RefusionLM.create_from_arg_obj({"pretrained": "embedded", "decoder": "autoregressive", "batch_size": 2})
pairs = [(f"Question {number}: what is {number} plus 1?", f" {answer}") for number in range(4) for answer in "234"]
choices = lm.loglikelihood([Instance("loglikelihood", {}, pair, 0, ("x", 0, 1)) for pair in pairs])
texts = ["How many apples are left? " * count for count in (3, 1, 700)]
rolling = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0, ("x", 0, 1)) for text in texts])
print(json.dumps([choices, rolling]))
lm.close()
"""


def gate(monkeypatch, runner, *, driver_waits):
    """Makes one of the two sides wait before it scores until the other has scored a part."""
    passed = threading.Event()
    score_part = System.score_part

    def scored(system, part):
        if (system is runner._system) == driver_waits:
            assert passed.wait(60)
        result = score_part(system, part)
        passed.set()
        return result

    monkeypatch.setattr(System, "score_part", scored)


@pytest.mark.parametrize("driver_waits", [True, False])
def test_both_processes_score_and_their_scores_are_those_of_one(processes, monkeypatch, driver_waits):
    runner = processes.runner()
    alone = dict(System(processes.system.args).score(PARTS))
    gate(monkeypatch, runner, driver_waits=driver_waits)
    result = list(runner.score(PARTS))
    assert sorted(number for number, _ in result) == list(range(len(PARTS)))
    assert dict(result) == alone
    assert all(isinstance(score, TokenScore) and math.isfinite(score.log_prob) for _, part in result for score in part)
    assert list(runner.score([])) == []


def test_decoding_and_scoring_take_turns_with_the_same_worker(processes):
    runner = processes.runner()
    jobs = jobs_of(processes.system, 3)
    first = dict(runner.score(PARTS))
    assert len(list(runner.run(jobs))) == 3
    assert dict(runner.score(PARTS)) == first
    assert processes.status() == 0


def test_scores_of_a_round_that_was_given_up_are_not_taken_for_those_of_the_next(processes):
    runner = processes.runner()
    abandoned = runner.score(PARTS)
    next(abandoned)
    abandoned.close()
    result = list(runner.score(PARTS[:3]))
    assert sorted(number for number, _ in result) == [0, 1, 2]
    assert dict(result) == dict(processes.system.score(PARTS[:3]))


def test_a_worker_that_cannot_score_ends_the_run(processes, monkeypatch):
    failed = threading.Event()
    runner = processes.runner()

    def fail_elsewhere(system, part):
        if system is not runner._system:
            failed.set()
            raise ConfigError("no room for this")
        assert failed.wait(60)
        return [TokenScore(0.0, True)] * len(part)

    monkeypatch.setattr(System, "score_part", fail_elsewhere)
    with pytest.raises(ScaleOutError, match="process 1 gave up: no room for this"):
        list(runner.score(PARTS))


def test_pairs_keep_their_numbers_whatever_the_parts_and_their_order():
    class Backwards:
        def score(self, parts):
            for number in reversed(range(len(parts))):
                yield number, [TokenScore(-float(continuation[0]), False) for _, continuation in parts[number]]

    pairs = [([1], [number] if number % 4 else []) for number in range(11)]
    for size in (1, 2, 3, 100):
        result = dict(scores(Backwards().score, pairs, size))
        assert result == {
            number: TokenScore(-float(number), False) if number % 4 else TokenScore(0.0, True) for number in range(11)
        }


def test_a_text_that_is_too_long_loses_its_beginning():
    assert fit([1, 2, 3], [4, 5], longest=9) == ([1, 2, 3], [4, 5])
    assert fit([1, 2, 3], [4, 5], longest=3) == ([3], [4, 5])
    with pytest.raises(ConfigError, match="a continuation of 2 tokens is too long to be scored: it may have 1"):
        fit([1, 2, 3], [4, 5], longest=2)


@pytest.mark.slow
def test_processes_of_a_launcher_score_for_lm_eval(tmp_path):
    (tmp_path / "scored.py").write_text(SCRIPT)
    alone = run_checked([*PYTHON, tmp_path / "scored.py"])
    driver, worker = map(finish, ranks([str(tmp_path / "scored.py")]))
    assert (driver.status, worker.status) == (0, 0), driver.err + worker.err
    assert json.loads(driver.out) == json.loads(alone.out)
    assert worker.out == ""
    choices, rolling = json.loads(driver.out)
    assert len(choices) == 12
    assert len(rolling) == 3
    assert rolling[2] < rolling[0] < rolling[1] < 0
