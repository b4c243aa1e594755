"""Functions that the task files for lm-eval name: rows, prompts, gold answers, and the scoring of a whole task at once.

They are `<benchmark>_rows`, `_mini_rows`, `_prompt`, `_gold` and `_score`, and with the prompts of the release
`<benchmark>_release_rows` and so on; `answer_metrics` and `code_metrics` serve all benchmarks.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from refusion_eval.benchmarks import Benchmark, Row, Task, find_task
from refusion_eval.scoring.judge import ERROR, Verdict, judge_texts

LOG = logging.getLogger(__name__)

# "none" runs model-written code without isolation. A variable of the environment, because lm-eval calls a filter with
# texts and documents alone.
SANDBOX_VARIABLE = "REFUSION_EVAL_SANDBOX"

# The verdict on texts that nothing has judged yet. One that no sandbox could judge (ERROR) counts as wrong instead, in
# every command.
UNSCORED = "unscored"

Scored = list[list[dict[str, Any]]]


@contextmanager
def filters_in_sandbox(sandbox: str) -> Iterator[None]:
    """A block in which scores of tasks are computed with this isolation; the former one holds again afterwards."""
    former = {name: value for name, value in os.environ.items() if name == SANDBOX_VARIABLE}
    os.environ[SANDBOX_VARIABLE] = sandbox
    try:
        yield
    finally:
        del os.environ[SANDBOX_VARIABLE]
        os.environ.update(former)


def __getattr__(name: str) -> Callable[..., Any]:
    for role, make in _ROLES.items():
        task = find_task(f"refusion_{name.removesuffix(f'_{role}')}")
        if task is not None and f"{task.name}_{role}" == f"refusion_{name}":
            return make(task.benchmark)
    raise AttributeError(f"module {__name__} has no attribute {name!r}")


def _rows(task: Task, data_dir: str | Path | None = None, **_other: Any) -> Any:
    import datasets

    items = task.items(data_dir)
    rows = datasets.DatasetDict({"test": datasets.Dataset.from_list([dict(item.row) for item in items])})
    # lm-eval logs what it hands from a task to a model, documents and prompts; the task's dataset it does not log.
    rows.sealing = items[0].sealing
    return rows


_ROLES: Mapping[str, Callable[[Benchmark], Callable[..., Any]]] = {
    "rows": lambda benchmark: partial(_rows, Task(benchmark)),
    "mini_rows": lambda benchmark: partial(_rows, Task(benchmark, mini=True)),
    "prompt": lambda benchmark: benchmark.prompts.user,
    "gold": lambda benchmark: benchmark.gold,
    "score": lambda benchmark: partial(score_responses, benchmark),
}


class _Entry(dict[str, Any]):
    """The verdict on one response; lm-eval logs it by `str`, which is JSON here, for other tools to read."""

    def __str__(self) -> str:
        return json.dumps(self)


def score_responses(benchmark: Benchmark, resps: Iterable[Sequence[str]], docs: Iterable[Row]) -> Scored:
    """Scores a task's responses: for each document, for each response, the fields of its verdict.

    Code has `tier` too, the isolation that it ran under. A second filter (`strict`, ...) is one if it judged.
    """
    resps = list(resps)
    items = [(doc, text) for doc, texts in zip(docs, resps, strict=True) for text in texts]
    verdicts = _judge_guarded(benchmark, items, None)
    entries = [_Entry({"extracted": None, "passed": verdict.passed, **verdict._asdict()}) for verdict in verdicts]
    for entry in entries:
        if not entry["tier"]:
            del entry["tier"]
    if second := benchmark.second_filter:
        for entry, verdict in zip(entries, _judge_guarded(benchmark, items, second), strict=True):
            if verdict.verdict != UNSCORED:
                entry[second] = verdict.passed
    remaining = iter(entries)
    return [[next(remaining) for _ in texts] for texts in resps]


def _judge_guarded(bench: Benchmark, items: list[tuple[Row, str]], filter_name: str | None) -> list[Verdict]:
    try:
        sandbox = os.environ.get(SANDBOX_VARIABLE, "auto")
        return judge_texts(bench, items, filter_name=filter_name, sandbox=sandbox)
    except Exception as problem:  # lm-eval loses every text of a run if a filter raises
        what = " ".join(filter(None, (bench.name, filter_name)))
        LOG.exception("%s is not scored; its texts can be scored later with `refusion-eval score`", what)
        return [Verdict(None, UNSCORED, f"{type(problem).__name__}: {problem}")] * len(items)


# Functions, not partials: lm-eval copies what a task file names, and only a function is then still the same object.
def answer_metrics(doc: Row, results: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    return _metrics("acc", results[0])


def code_metrics(doc: Row, results: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    return _metrics("pass@1", results[0])


def _metrics(metric: str, responses: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the responses to one document: metric, second filter, extracted (an answer was found), scored."""
    scored = [entry for entry in responses if entry["verdict"] != UNSCORED]
    numbers = {"scored": sum(entry["verdict"] != ERROR for entry in scored) / len(responses)}
    if scored:
        numbers[metric] = fmean(entry["passed"] for entry in scored)
        numbers["extracted"] = fmean(entry["extracted"] is not None for entry in scored)
        for second in ("strict", "loose", "base"):
            if judged := [entry[second] for entry in scored if second in entry]:
                numbers[second] = fmean(judged)
    return numbers
