"""The task files in lm-eval: listed, loaded, scored, and safe to log."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import sanitize_list

from refusion_eval.benchmarks import BENCHMARKS, RELEASED, SUITE_TASKS, SUITES, Task, get_task
from refusion_eval.errors import SandboxError
from refusion_eval.lm_eval_plugin import hooks as task_hooks
from refusion_eval.paths import tasks_path
from refusion_eval.scoring import judge as score_module

TASKS = {Task(one).name for one in BENCHMARKS.values() if one.source.hub}
MINI = [name for name, one in BENCHMARKS.items() if one.has_mini]
TASKS |= {f"mini_{name}" for name in MINI}
TASKS |= {Task(benchmark).name for benchmark in RELEASED.values()}
QUESTION = "Which invented particle decays into two invented bosons when the moon of Zorb is full?"
GPQA_ROWS = [
    {
        "Record ID": f"rec{number}",
        "Question": f"{QUESTION} Item {number}.",
        "Correct Answer": "the zorbino of the second kind",
        "Incorrect Answer 1": "the anti-zorbino of the first kind",
        "Incorrect Answer 2": "none that can be named in this invented item",
        "Incorrect Answer 3": "the photon of the third invented kind",
        "High-level domain": "Invention",
    }
    for number in range(3)
]


class Scripted(LM):
    """Answers each request by a function of it."""

    def __init__(self, answer: Callable[[Instance], str]) -> None:
        super().__init__()
        self._answer = answer

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [self._answer(request) for request in requests]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise NotImplementedError


def manager(**metadata: Any) -> TaskManager:
    return TaskManager(include_path=str(tasks_path()), include_defaults=False, metadata=metadata)


def evaluate(task: str, answer: Callable[[Instance], str], **metadata: Any) -> dict[str, Any]:
    results = simple_evaluate(
        model=Scripted(answer),
        tasks=[task],
        task_manager=manager(**metadata),
        limit=3,
        confirm_run_unsafe_code=True,
        log_samples=True,
        bootstrap_iters=0,
    )
    assert results is not None
    return results


def test_every_task_and_group_is_listed() -> None:
    suites = {*SUITE_TASKS.values(), "refusion_suite_release", "mini_suite"}
    assert set(manager().all_tasks) == TASKS | suites


@pytest.mark.parametrize("suite", SUITES)
def test_a_group_of_lm_eval_has_the_tasks_of_its_suite(suite: str) -> None:
    content = yaml.safe_load((tasks_path() / f"{SUITE_TASKS[suite]}.yaml").read_text(encoding="utf-8"))
    assert content["task"] == [Task(benchmark).name for benchmark in SUITES[suite]]


def mini_gold(request: Instance) -> str:
    return get_task(request.task_name).benchmark.prompts.gold_text(request.doc)


@pytest.fixture(scope="module")
def mini_suite() -> dict[str, Any]:
    """Three items of every mini task, answered with their gold answers."""
    return evaluate("mini_suite", mini_gold)


@pytest.mark.parametrize("name", MINI)
def test_gold_answers_score_100_percent_through_lm_eval(mini_suite: dict[str, Any], name: str) -> None:
    numbers = mini_suite["results"][f"mini_{name}"]
    bench = BENCHMARKS[name]
    for metric in (bench.metric, "extracted", "scored"):
        assert numbers[f"{metric},{bench.default_filter}"] == 1.0


@pytest.mark.parametrize("name", MINI)
def test_the_prompt_is_the_shared_one(mini_suite: dict[str, Any], name: str) -> None:
    for sample in mini_suite["samples"][f"mini_{name}"]:
        assert sample["arguments"][0][0] == BENCHMARKS[name].prompts.user(sample["doc"])


def test_a_text_without_an_answer_lowers_the_extraction_rate() -> None:
    numbers = evaluate("mini_gsm8k", lambda _: "I do not know.")["results"]["mini_gsm8k"]
    assert (numbers["acc,last"], numbers["strict,last"], numbers["extracted,last"]) == (0.0, 0.0, 0.0)


def test_strict_is_its_own_column() -> None:
    numbers = evaluate("mini_gsm8k", lambda request: f"#### {BENCHMARKS['gsm8k'].gold(request.doc)}")["results"]
    assert (numbers["mini_gsm8k"]["acc,last"], numbers["mini_gsm8k"]["strict,last"]) == (1.0, 0.0)


def test_a_directory_of_the_user_is_read(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text('{"question": "q", "answer": "#### 5"}\n')
    results = evaluate("refusion_gsm8k", lambda _: "The answer is 5.", data_dir=str(tmp_path))
    assert results["n-samples"]["refusion_gsm8k"]["original"] == 1
    assert results["results"]["refusion_gsm8k"]["acc,last"] == 1.0


def test_a_sandbox_that_refuses_costs_no_texts_and_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise SandboxError("no isolation here")

    monkeypatch.setattr(score_module, "check_program", refuse)
    results = evaluate("mini_mbpp", mini_gold)
    numbers = results["results"]["mini_mbpp"]
    assert numbers["scored,first"] == 0.0
    assert "pass@1,first" not in numbers
    entry = results["samples"]["mini_mbpp"][0]["filtered_resps"][0][0]
    assert (entry["verdict"], entry["reason"]) == ("unscored", "SandboxError: no isolation here")


def test_a_text_that_no_sandbox_could_judge_counts_as_wrong_as_in_every_command() -> None:
    responses = [{"passed": True, "verdict": "correct", "extracted": "x"}]
    responses += [{"passed": False, "verdict": "error", "extracted": "y"}]
    assert task_hooks.code_metrics({}, [responses]) == {"scored": 0.5, "pass@1": 0.5, "extracted": 1.0}


def test_a_second_filter_that_judged_nothing_is_absent_and_not_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(*arguments: Any, filter_name: str | None, **options: Any) -> Any:
        if filter_name:
            raise SandboxError("no isolation here")
        return score_module.judge_texts(*arguments, filter_name=filter_name, **options)

    monkeypatch.setattr(task_hooks, "judge_texts", judge)
    docs = [{"question": "q", "answer": "#### 5"}]
    (responses,) = task_hooks.score_responses(BENCHMARKS["gsm8k"], [["The answer is 5."]], docs)
    assert task_hooks.answer_metrics(docs[0], [responses]) == {"scored": 1.0, "acc": 1.0, "extracted": 1.0}


def test_several_responses_are_averaged_over_the_document() -> None:
    docs = [{"question": "q", "answer": "#### 5"}]
    scored = task_hooks.score_responses(BENCHMARKS["gsm8k"], [["The answer is 5.", "The answer is 6."]], docs)
    assert task_hooks.answer_metrics(docs[0], scored)["acc"] == 0.5


def test_what_lm_eval_logs_of_a_response_is_json() -> None:
    docs = [{"question": "q", "answer": "#### 5"}]
    ((logged,),) = sanitize_list(task_hooks.score_responses(BENCHMARKS["gsm8k"], [["The answer is 5."]], docs))
    assert json.loads(logged).items() >= {"extracted": "5", "passed": True, "verdict": "correct"}.items()


def test_gpqa_questions_are_in_nothing_that_lm_eval_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *_args, **_kwargs: GPQA_ROWS)
    prompts: list[str] = []
    sealing = get_task("refusion_gpqa").items(None)[0].sealing

    def answer(request: Instance) -> str:
        prompts.append(sealing.unseal(request.args[0])[0])
        return f"The answer is ({request.doc['answer']})."

    results = evaluate("refusion_gpqa", answer)
    assert results["results"]["refusion_gpqa"]["acc,last"] == 1.0
    written = json.dumps(results, default=str)
    assert "rec0" in written
    for text in ("invented", "Zorb", "zorbino", "photon"):
        assert text not in written
    assert all(QUESTION in prompt and "B. " in prompt for prompt in prompts)
    assert all("the zorbino of the second kind" in prompt for prompt in prompts)
