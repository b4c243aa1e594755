"""Sentences about the embedded family that compare systems answer by answer, made from single verdicts.

Each maker is like those of `generated_tables`. A difference of accuracies is the mean of paired differences of the
tasks, with the interval that `refusion-eval compare` prints, and a single task is named only where Holm's correction
over all tasks leaves its p value below 5 %.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas
import yaml
from generated_common import AR, AR_SFT, REFUSION, RESULTS, ROOT, WITH_VERIFIER, interval, listed, table_of, title

from refusion_eval.metrics import Interval, Statistic, bootstrap, mean_of_intervals, paired_difference, scaled
from refusion_eval.results.compare import holm, mcnemar

LEVEL = 0.05


class Pair(NamedTuple):
    """Two systems on the same items: the mean difference over tasks in points, and the tasks that Holm leaves."""

    mean: Interval
    lower: Sequence[str]
    higher: Sequence[str]


def verdicts() -> pandas.DataFrame:
    """The single answers of the family."""
    return pandas.read_csv(RESULTS / "verdicts.csv", dtype={"item": str})


def compared(answers: pandas.DataFrame, system: str, reference: str) -> Pair:
    """The accuracy of a system minus that of a reference, paired by item."""
    tables = answers.pivot(index=["task", "item"], columns="system", values="right")[[reference, system]].dropna()
    tasks = {task: (part[reference].to_numpy(), part[system].to_numpy()) for task, part in tables.groupby("task")}
    changes = {task: after - before for task, (before, after) in tasks.items()}
    left = _left(changes)
    return Pair(
        scaled(mean_of_intervals([paired_difference(*each) for each in tasks.values()]), 100),
        [title(task) for task in left if changes[task].sum() < 0],
        [title(task) for task in left if changes[task].sum() > 0],
    )


def _left(changes: Mapping[str, Any]) -> list[str]:
    """The names of the paired changes of verdicts that Holm's correction of McNemar's p values leaves."""
    values = [mcnemar(int((each > 0).sum()), int((each < 0).sum())) for each in changes.values()]
    return [name for name, value in zip(changes, holm(values), strict=True) if value < LEVEL]


def spelled(value: Interval) -> str:
    return interval(value.value, value.low, value.high)


def differences(answers: pandas.DataFrame, systems: Sequence[str], reference: str = AR_SFT) -> str:
    """The differences of systems from a reference, the largest first, with the tasks that differ."""
    pairs = {system: compared(answers, system, reference) for system in systems}
    parts = []
    for system, pair in sorted(pairs.items(), key=lambda entry: -entry[1].mean.value):
        named = (("lower", pair.lower), ("higher", pair.higher))
        where = [f"{word} on {listed(tasks)}" for word, tasks in named if tasks]
        parts.append(f"{system} {spelled(pair.mean)} ({', '.join(where) or 'on no task'})")
    return "; ".join(parts)


def front(systems: Sequence[str], tpf: Mapping[str, float]) -> str:
    """What a table of these systems shows beside AR-SFT; `tpf` is that over all tasks."""
    answers = verdicts()
    others = [system for system in systems if system != AR_SFT]
    return (
        f"Of these, {max(others, key=tpf.__getitem__)} has the highest TPF over all tasks. The accuracies differ from "
        f"that of AR-SFT, in points over all {answers.task.nunique()} tasks and paired by item, as follows: "
        f"{differences(answers, others)}. A task is named if Holm's correction leaves its difference at 5 %.\n"
    )


def paired(_: Sequence[str]) -> str:
    """Accuracies of the family against AR-SFT and the backbone, and the rows that the systems computed."""
    answers = verdicts()
    others = [system for system in answers.system.unique() if system != AR_SFT]
    totals = answers.groupby("system")[["rows", "tokens"]].sum()
    rows = (totals["rows"] / totals.tokens).sort_values()
    return (
        "Paired by item (`results/embedded/verdicts.csv`), the accuracy over all tasks differs from that of AR-SFT, "
        f"in points, as follows: {differences(answers, others)}. A task is named if Holm's correction over the "
        f"{answers.task.nunique()} tasks leaves its difference at 5 %. {_alike(answers)}\n\n"
        "A forward computes one or many rows. The query rows of all forwards by all tokens, the prompt's rows "
        f"included, are {listed([f'{value:.1f} for {system}' for system, value in rows.items()])}.\n"
    )


def _alike(answers: pandas.DataFrame) -> str:
    """The tasks on which the backbone is as good as AR-SFT, and the systems that are told from AR-SFT there."""
    right = answers.pivot_table(index="task", columns="system", values="right", aggfunc="mean") * 100
    tasks = [task for task, row in right.iterrows() if abs(row[AR_SFT] - row[AR]) <= 1]
    told = set[str]()
    for task in tasks:
        by_system = answers[answers.task == task].pivot(index="item", columns="system", values="right")
        told |= set(_left({name: by_system[name] - by_system[AR_SFT] for name in by_system if name != AR_SFT}))
    found = f"{listed(sorted(told))} alone" if told else "no other system"
    return (
        f"On {listed([title(task) for task in tasks])} the backbone has the accuracy of AR-SFT within one point, "
        "although AR-SFT was trained for four courses more, and Holm's correction over the systems tells "
        f"{found} from AR-SFT. These tasks do not show which of the others is better."
    )


def tasks_alike(_: Sequence[str]) -> str:
    """The tasks on which accuracies of the shipped family can hardly differ."""
    return f"{_alike(verdicts())}\n"


def equal_accuracy(_: Sequence[str]) -> str:
    """Forwards and rows a token of the causal diffusion models at an accuracy that all of them reach."""
    answers = pandas.read_csv(RESULTS / "equal_accuracy.csv")
    systems = list(answers.system.unique())
    lines, best = [], dict.fromkeys(systems, 0)
    for task, found in answers.groupby("task", sort=False):
        totals = found.groupby("system")[["tokens", "forwards", "rows"]].sum()
        needed = totals.forwards / totals.tokens
        fewest = needed.idxmin()
        near = [fewest, *ties(found, fewest, systems)]
        best |= {system: best[system] + 1 for system in near}
        cells = [f"**{needed[system]:.2f}**" if system in near else f"{needed[system]:.2f}" for system in systems]
        rows = [f"{totals.loc[system, 'rows'] / totals.loc[system, 'tokens']:.1f}" for system in systems]
        lines.append((title(f"mini_{task}"), f"{found.reached.iloc[0]:.0f}", *cells, *rows))
    columns = ("Task", "Accuracy at least, %", *systems, *(f"rows: {system}" for system in systems))
    counted = [f"{system} on {number}" for system, number in best.items()]
    return (
        f"{table_of(columns, lines)}\nForwards a token, and behind them query rows a token with those of the "
        "prompt. Bold: the fewest forwards, and those that the 95 % interval of the paired difference does not tell "
        f"from them: {listed(counted)} of {len(lines)} tasks.\n"
    )


def ties(found: pandas.DataFrame, fewest: str, systems: Sequence[str]) -> list[str]:
    """The other systems that are not told from the one with the fewest forwards a token."""
    return [system for system in systems if system != fewest and not _apart(found, fewest, system)]


def _apart(found: pandas.DataFrame, fewest: str, other: str) -> bool:
    """Whether the interval of the difference of forwards a token, resampled by draw, leaves out 0."""
    columns = [
        found[found.system == system].sort_values(["task", "item"])[name].to_numpy(dtype=float)
        for system in (fewest, other)
        for name in ("forwards", "tokens")
    ]

    def difference(*drawn: np.ndarray) -> np.ndarray:
        forwards, tokens, other_forwards, other_tokens = (column.sum(axis=1) for column in drawn)
        return other_forwards / other_tokens - forwards / tokens

    return bootstrap([Statistic(columns, difference)])[0].interval().low > 0


def _pooled(rows: pandas.DataFrame) -> str:
    """The gain of the verifier over several tasks: mean difference, items gained and lost, and their p value."""
    parts = [Interval(*row) for row in rows[["difference", "difference_ci_low", "difference_ci_high", "n"]].to_numpy()]
    mean, gained, lost = mean_of_intervals(parts), int(rows.gained.sum()), int(rows.lost.sum())
    return f"{spelled(mean)} points ({gained} items gained, {lost} lost, p = {mcnemar(gained, lost):.2g})"


def verifier_gain(_: Sequence[str]) -> str:
    """Where the verifier's token helps: by task, and by training."""
    rows = pandas.read_csv(RESULTS / "verifier.csv")
    last = rows[rows.samples == rows.samples.max()]
    tasks = last[(last["items"] == "test items") & (last.task != "mean")]
    left = tasks[np.array(holm(tasks.p_value.tolist())) < LEVEL]
    named = [f"{title(f'mini_{row.task}')} ({row.gained} gained, {row.lost} lost)" for row in left.itertuples()]
    story = "gsm8k"
    others = {
        f"{samples:,} samples, {kind}": _pooled(part[(part.task != "mean") & (part.task != story)])
        for (samples, kind), part in rows.groupby(["samples", "items"], sort=False)
    }
    means = rows[rows.task == "mean"]
    falls = [
        f"{' to '.join(f'{value:.1f}' for value in part.difference)} on {kind}"
        for kind, part in means.groupby("items", sort=False)
        if len(part) > 1
    ]
    return (
        "On the test items of the shipped checkpoint, Holm's correction over the tasks leaves "
        f"{listed(named)}. Without {title(f'mini_{story}')} the gain over the other tasks is as follows: "
        f"{'; '.join(f'{name}: {gain}' for name, gain in others.items())}. The gain over all tasks, from the first "
        f"checkpoint to the last, is {'; '.join(falls)}; whether it changes was not tested.\n"
    )


def verifier_serial(_: Sequence[str]) -> str:
    """The best settings of the verifier beside one token a forward, on the draws."""
    rows = pandas.read_csv(RESULTS / "frontiers.csv")
    of = {
        "verifier": rows[rows.system == WITH_VERIFIER],
        "serial": rows[(rows.system == REFUSION) & rows.settings.str.contains('"serial": true')],
    }
    best = {name: part.groupby("task").accuracy.max().mean() for name, part in of.items()}
    tried = {name: part.settings.nunique() for name, part in of.items()}
    return (
        f"On the draws of `results/embedded/frontiers.csv`, the best of {tried['verifier']} settings of each task has "
        f"{best['verifier']:.1f} % in the mean with the verifier's tokens, and the best of {tried['serial']} settings "
        f"{best['serial']:.1f} % token by token (`serial=true`).\n"
    )


def verifier_choices(_: Sequence[str]) -> str:
    """On which tasks the settings that were chosen for the verifier have other slots or blocks than the paper's."""
    paper, own = (
        yaml.safe_load((ROOT / "tasks" / "settings" / f"{name}.yaml").read_text(encoding="utf-8"))["benchmarks"]
        for name in ("mini_refusion", "mini_refusion_verifier")
    )
    changes = {
        setting: {task: row[setting] - paper[task][setting] for task, row in own.items()}
        for setting in ("slot_size", "block_size")
    }
    parts = []
    for setting, by_task in changes.items():
        larger, smaller = ([title(task) for task, change in by_task.items() if change * sign > 0] for sign in (1, -1))
        parts.append(f"`{setting}` is larger on {listed(larger)} and smaller on {listed(smaller)}")
    return f"In the settings that are chosen for the verifier, {'; '.join(parts)}.\n"


def processors(_: Sequence[str]) -> str:
    """What changes where the family is decoded as on a processor with fewer instructions."""
    rows = pandas.read_csv(RESULTS / "processors.csv")
    totals = rows.groupby("variant", sort=False)[["items", "changed"]].sum()
    lesser = totals.drop(index="own")
    elsewhere = pandas.read_csv(RESULTS / "verdicts_elsewhere.csv", dtype={"item": str})
    both = elsewhere.merge(verdicts(), on=["task", "item", "system"], suffixes=("", "_of_tables"))
    counts = ("right", "tokens", "forwards")
    num_changed = sum(both[count] != both[f"{count}_of_tables"] for count in counts).astype(bool).sum()
    machines, others = (listed(list(both[name].unique())) for name in ("hardware_of_tables", "hardware"))
    changed = [
        f"{changed:,} of {items:,} responses under `{variant}`" for variant, items, changed in lesser.itertuples()
    ]
    return (
        "`python performance/processors.py` decodes the items of all mini tasks with "
        f"{listed(list(rows.system.unique()))} once more, with the kernels, the compiled code and the order of sums of "
        "a processor with fewer instructions. "
        f"Other tokens or forwards come out for {listed(changed)} (`results/embedded/processors.csv`).\n\n"
        f"The tables were measured on {machines}. On {others}, {num_changed:,} of {len(both):,} responses of "
        f"{listed(list(both.system.unique()))} differ in verdict, tokens or forwards "
        "(`results/embedded/verdicts_elsewhere.csv`).\n"
    )


PAIRED = {
    "processors": processors,
    "paired": paired,
    "tasks_alike": tasks_alike,
    "equal_accuracy": equal_accuracy,
    "verifier_gain": verifier_gain,
    "verifier_serial": verifier_serial,
    "verifier_choices": verifier_choices,
}
