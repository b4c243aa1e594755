"""Conditions on figures, for continuous integration: which of them hold, and so fail a run or a comparison."""

import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

from refusion_eval.benchmarks import find_task
from refusion_eval.config import check_keys
from refusion_eval.errors import ConfigError
from refusion_eval.results.compare import COMPARISON_COLUMNS
from refusion_eval.results.measurement import MEAN_TASK, Measurement, RowKey
from refusion_eval.results.metric_list import ACCURACY, BY_NAME, OF_SAMPLES, SCORES
from refusion_eval.store.records import BY_FILTER

_SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"
_CONDITION = re.compile(
    rf"\s*(?:(?P<task>[^\s:<>]+):\s*)?(?P<metric>[^:<>=()]*[^\s:<>=()])\s*(?P<sign>[<>]=?)\s*(?P<bound>{_NUMBER})\s*"
    rf"(?:\(\s*p\s*<\s*(?P<p>{_NUMBER})\s*\)\s*)?",
    re.IGNORECASE,
)
_DIFFERENCE = "difference"
# Short names of columns of two runs.
_OF_TWO_RUNS = {ACCURACY: _DIFFERENCE, "speed": "speed_ratio"}
_NO_NUMBERS = ("before", "after", "task", "told_apart_by", "mini", "no_speed")
_COLUMNS = [
    name for name in COMPARISON_COLUMNS if name not in _NO_NUMBERS and not name.startswith(("unfinished", "limited"))
]


class Condition(NamedTuple):
    """`[TASK:] METRIC < NUMBER [(p < NUMBER)]`: what fails a task, or, without a task, any of the tasks."""

    text: str
    task: str
    metric: str
    sign: str
    bound: float
    p: float | None

    def holds(self, value: float) -> bool:
        return bool(_SIGNS[self.sign](value, self.bound))


class Verdict(NamedTuple):
    """What became of a condition on one task."""

    condition: str
    task: str
    value: float | None  # None for a figure that is absent
    reason: str = ""  # why it fails; empty if it does not

    def __str__(self) -> str:
        return f"failed: {self.condition}: {f'{self.task}: ' if self.task else ''}{self.reason}"


def run_conditions(texts: Iterable[str]) -> list[Condition]:
    """Reads conditions on the figures of a run; ConfigError for one that cannot be understood."""
    conditions = []
    for condition in map(_read, texts):
        if condition.p is not None:
            raise ConfigError(f"--fail-if '{condition.text}': p is of two runs; leave it out, or use compare")
        if not condition.metric.startswith((*OF_SAMPLES, BY_FILTER)):
            check_keys([condition.metric], BY_NAME, f"--fail-if '{condition.text}'", what="metric")
        conditions.append(condition)
    return conditions


def comparison_conditions(texts: Iterable[str]) -> list[Condition]:
    """Reads conditions on what changed from one run to another; ConfigError for one that cannot be understood."""
    conditions = []
    for text in texts:
        given = _read(text)
        condition = given._replace(metric=_OF_TWO_RUNS.get(given.metric, given.metric))
        check_keys(
            [condition.metric], _COLUMNS, f"--fail-if '{text}'", what="metric", offered=[*_OF_TWO_RUNS, *_COLUMNS]
        )
        if condition.p is not None and condition.metric != _DIFFERENCE:
            raise ConfigError(f"--fail-if '{text}': p is that of a change of accuracy, and not of {given.metric}")
        conditions.append(condition)
    return conditions


def _read(text: str) -> Condition:
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--fail-if '{text}' is not understood: write [TASK:] METRIC < NUMBER, with <, <=, > or >=, such as "
            "'accuracy < 60', 'gsm8k: tps < 30'; of two runs also 'accuracy < -2 (p < 0.05)'"
        )
    part = found.groupdict()
    p = None if part["p"] is None else float(part["p"])
    return Condition(text, part["task"] or "", part["metric"], part["sign"], float(part["bound"]), p)


def verdicts_of_run(conditions: Sequence[Condition], figures: Sequence[Measurement]) -> list[Verdict]:
    """A run fails by a figure of which a condition holds, and by a row that lacks the figure of a condition."""
    rows: dict[RowKey, list[Measurement]] = {}
    for figure in figures:
        rows.setdefault(figure.row, []).append(figure)
    tasks = dict.fromkeys(row.task for row in rows)
    verdicts = []
    for condition in conditions:
        wanted = SCORES if condition.metric == ACCURACY else (condition.metric,)
        about = _tasks(condition, tasks)
        for task, of_row in ((row.task, of_row) for row, of_row in rows.items() if row.task in about):
            there = {figure.metric: figure.value for figure in of_row if figure.value == figure.value}
            found = [value for metric, value in there.items() if metric in wanted]
            for value in found:
                reason = f"{condition.metric} is {value:.6g}" if condition.holds(value) else ""
                verdicts.append(Verdict(condition.text, task, value, reason))
            if not found:
                missing = next((figure.missing for figure in of_row if figure.missing), "")
                why = missing or f"there are {', '.join(there) or 'no figures'}"
                verdicts.append(Verdict(condition.text, task, None, f"{condition.metric} was not measured ({why})"))
        verdicts += _absent(condition, tasks)
    return verdicts


def verdicts_of_comparison(
    conditions: Sequence[Condition], rows: Sequence[Mapping[str, Any]], not_compared: Collection[str] = ()
) -> list[Verdict]:
    """As `verdicts_of_run`, of two runs: there is a verdict for every row, of which several may be means.

    Args:
        rows: with the columns `COMPARISON_COLUMNS`.
        not_compared: tasks that have no row, because not both runs have them. They fail every condition but one that
            names other tasks.
    """
    tasks = dict.fromkeys(str(row["task"]) for row in rows)
    verdicts = []
    for condition in conditions:
        about = _tasks(condition, tasks)
        for row in rows:
            if (task := str(row["task"])) not in about:
                continue
            value, reason = row[condition.metric], ""
            if value is None or value != value:
                why = row["no_speed"] if condition.metric.startswith("speed_ratio") else ""
                value, reason = None, f"{condition.metric} was not measured" + (f" ({why})" if why else "")
            elif condition.holds(value) and (condition.p is None or row["p_holm"] < condition.p):
                p = "" if condition.p is None else f", p (Holm) {row['p_holm']:.3g}"
                reason = f"{condition.metric} is {value:.6g}{p}"
            mark = f" ({row['told_apart_by']})" if reason and row["told_apart_by"] else ""
            verdicts.append(Verdict(condition.text, task, value, reason + mark))
        verdicts += _absent(condition, tasks, not_compared)
    return verdicts


def failed(verdicts: Iterable[Verdict]) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.reason]


def junit(verdicts: Iterable[Verdict]) -> str:
    """The conditions as test cases in JUnit's XML, one for each task that a condition is about, for CI to show."""
    cases: dict[tuple[str, str], str] = {}
    for verdict in verdicts:
        cases[verdict.condition, verdict.task] = verdict.reason or cases.get((verdict.condition, verdict.task), "")
    numbers = {"tests": str(len(cases)), "failures": str(sum(map(bool, cases.values())))}
    suite = ElementTree.Element("testsuite", {"name": "refusion-eval", **numbers})
    for (text, task), reason in cases.items():
        case = ElementTree.SubElement(suite, "testcase", classname=task or "all tasks", name=text)
        if reason:
            ElementTree.SubElement(case, "failure", message=reason)
    return f"{ElementTree.tostring(suite, encoding='unicode')}\n"


def _tasks(condition: Condition, tasks: Collection[str]) -> list[str]:
    """The tasks that a condition is about: those that it names, by task or by benchmark, else all but their mean."""
    if not condition.task:
        return [task for task in tasks if task != MEAN_TASK]
    return [
        task
        for task in tasks
        if condition.task == task or ((known := find_task(task)) and condition.task == known.benchmark.name)
    ]


def _absent(condition: Condition, tasks: Collection[str], lacking: Collection[str] = ()) -> Iterator[Verdict]:
    """Verdicts on the tasks that a condition is about and that have no figure; a mean is about all but controls."""
    of_mean = [task for task in lacking if not ((known := find_task(task)) and known.benchmark.is_control)]
    absent = of_mean if condition.task == MEAN_TASK else _tasks(condition, lacking)
    if not absent and not _tasks(condition, tasks):
        absent = [condition.task]
    there = ", ".join(tasks) or "none"
    for task in absent:
        what = f"there is no task {task}" if task else "there is no task"
        yield Verdict(condition.text, task, None, f"{what} (there are {there})")
