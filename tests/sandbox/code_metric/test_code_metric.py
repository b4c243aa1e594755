"""pass@k through the `evaluate` library, with the interface of its code_eval."""

import pytest

from refusion_eval.errors import SandboxError
from refusion_eval.paths import code_metric_path
from refusion_eval.sandbox import pool, probe
from refusion_eval.sandbox.result import result_of

evaluate = pytest.importorskip("evaluate")
_METRIC = code_metric_path()


@pytest.fixture
def metric(tmp_path, monkeypatch):
    if probe().tier == "D":
        pytest.skip("programs cannot be isolated here")
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return evaluate.load(str(_METRIC), cache_dir=str(tmp_path))


def test_pass_at_k_is_the_unbiased_estimate(metric):
    right, wrong = "def add(a, b):\n    return a + b", "def add(a, b):\n    return a - b"
    pass_at_k, _ = metric.compute(
        references=["assert add(2, 3) == 5"], predictions=[[right, wrong, wrong, wrong]], k=[1, 2, 10]
    )
    assert pass_at_k == {"pass@1": pytest.approx(0.25), "pass@2": pytest.approx(0.5)}


def test_results_say_what_became_of_each_candidate(metric):
    right, slow = "def f():\n    return 1", "import time\ndef f():\n    time.sleep(60)"
    _, results = metric.compute(
        references=["assert f() == 1"], predictions=[[right, slow]], k=[1], num_workers=2, timeout=0.5
    )
    assert results[0][0] == (0, {"task_id": 0, "passed": True, "result": "passed", "completion_id": 0})
    assert results[0][1][1]["result"] == "timed out"


def test_a_candidate_that_no_sandbox_can_judge_counts_as_failed_and_is_named(metric, caplog):
    pass_at_k, results = metric.compute(references=["assert f("], predictions=[["def f():\n    return 1"]], k=[1])
    assert pass_at_k == {"pass@1": 0.0}
    assert results[0][0][1]["result"].startswith("failed: sandbox_error")
    assert "problem 0, candidate 0 counts as failed" in caplog.text


def test_a_candidate_that_got_no_time_ends_the_metric(metric, monkeypatch):
    got_none = result_of("no_time", "the machine was too busy", 1.0, "A")
    monkeypatch.setattr(pool, "check_all", lambda programs, *given: [got_none for _ in programs])
    with pytest.raises(SandboxError, match="the machine was too busy; run the same command again"):
        metric.compute(references=["assert f()"], predictions=[["def f():\n    return 1"]], k=[1])
