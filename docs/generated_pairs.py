"""Sentences about the embedded family that compare systems answer by answer, made from single verdicts.

Each maker is like those of `generated_tables`. A difference of accuracies is the mean of paired differences of the
tasks, with the interval that `refusion-eval compare` prints, and a single task is named only where Holm's correction
over all tasks leaves its p value below 5 %.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas
import yaml
from generated_common import AR, AR_SFT, REFUSION, RESULTS, ROOT, WITH_VERIFIER, interval, listed, table_of, title

from miniature.equal_start import ANSWERS, SETTINGS, SYSTEMS, VARIANTS
from miniature.infilling import table
from miniature.seeds import over_seeds, summary
from refusion_eval.metrics import Interval, Statistic, bootstrap, mean_of_intervals, paired_difference, scaled
from refusion_eval.results.compare import holm, mcnemar
from refusion_eval.training.run import RUN_FILE

LEVEL = 0.05
COURSES = RESULTS / "courses"
TWO_SEEDS = "; two seeds leave one degree of freedom, so that they are wide where the seeds differ"
PROGRAMS = ("humaneval", "mbpp")


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
    values = [mcnemar(int((each > 0).sum()), int((each < 0).sum())) for each in changes.values()]
    left = [task for task, value in zip(changes, holm(values), strict=True) if value < LEVEL]
    return Pair(
        scaled(mean_of_intervals([paired_difference(*each) for each in tasks.values()]), 100),
        [title(task) for task in left if changes[task].sum() < 0],
        [title(task) for task in left if changes[task].sum() > 0],
    )


def _spelled(value: Interval) -> str:
    return interval(value.value, value.low, value.high)


def differences(answers: pandas.DataFrame, systems: Sequence[str], reference: str = AR_SFT) -> str:
    """The differences of systems from a reference, the largest first, with the tasks that differ."""
    pairs = {system: compared(answers, system, reference) for system in systems}
    parts = []
    for system, pair in sorted(pairs.items(), key=lambda entry: -entry[1].mean.value):
        named = (("lower", pair.lower), ("higher", pair.higher))
        where = [f"{word} on {listed(tasks)}" for word, tasks in named if tasks]
        parts.append(f"{system} {_spelled(pair.mean)} ({', '.join(where) or 'on no task'})")
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
    """The tasks on which the backbone is as good as AR-SFT."""
    right = answers.pivot_table(index="task", columns="system", values="right", aggfunc="mean") * 100
    tasks = [title(task) for task, row in right.iterrows() if abs(row[AR_SFT] - row[AR]) <= 1]
    return (
        f"On {listed(tasks)} the backbone has the accuracy of AR-SFT within one point, although AR-SFT was trained for "
        "four courses more. These tasks do not tell a better model from a good one."
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
        near = [fewest, *_ties(found, fewest, systems)]
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


def _ties(found: pandas.DataFrame, fewest: str, systems: Sequence[str]) -> list[str]:
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


def _courses() -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """The answers of all courses, and the settings that were chosen for them."""
    return pandas.read_csv(COURSES / ANSWERS), pandas.read_csv(COURSES / SETTINGS)


def equal_start(words: Sequence[str]) -> str:
    """What systems reach that continue one model on the same samples.

    The words are "tasks" for the table by task, "front" for fewer columns, or none.
    """
    answers, settings = _courses()
    answers = answers[~answers.model.isin(VARIANTS)]
    systems = [system for system in answers.system.unique() if system != AR_SFT]
    if words == ["tasks"]:
        return _by_task(answers, systems)
    found = summary(answers, settings, AR_SFT)
    missing = [system.name for system in SYSTEMS if system.name not in set(found.system)]
    seeds = [
        f"There {'are' if number > 1 else 'is'} {number} training seed{'s' * (number > 1)} for "
        f"{listed(list(part.system))}."
        for number, part in found.groupby("seeds")
    ]
    is_front = words == ["front"]
    numbers = answers.groupby("task").item.nunique()
    known = answers[~answers.task.isin(PROGRAMS)]
    return (
        f"{' '.join(reversed(seeds))}{f' Not trained yet: {listed(missing)}.' if missing else ''}"
        f"{'' if is_front else trained_in(settings[~settings.model.isin(VARIANTS)])} "
        f"Over {len(numbers)} tasks with {numbers.sum():,} items in all, {_against_ar_sft(answers, systems)}. Without "
        f"{listed([title(f'mini_{task}') for task in PROGRAMS])}, whose programs the start cannot write, "
        f"{_against_ar_sft(known, systems)}. "
        f"{_fastest(answers, found)} "
        "Intervals are over items and, where a system has several, over training seeds"
        f"{TWO_SEEDS if found.seeds.max() == 2 else ''}.\n\n"
        f"{_shown(found, with_training=not is_front)}"
    )


def _against_ar_sft(answers: pandas.DataFrame, systems: Sequence[str]) -> str:
    """The systems whose accuracy Holm's correction leaves below or above that of AR-SFT; of others, the difference."""
    estimates = {system: over_seeds(answers, system, AR_SFT) for system in systems}
    p_values = holm([estimate.p_value() for estimate in estimates.values()])
    left = [system for system, value in zip(systems, p_values, strict=True) if value < LEVEL]
    below = [system for system in left if estimates[system].value < 0]
    above = [system for system in left if system not in below]
    rest = [f"{system} {_spelled(estimates[system].interval())}" for system in systems if system not in left]
    return (
        f"Holm's correction over the systems leaves an accuracy below that of {AR_SFT} for "
        f"{listed(below) if rest or above else 'each of them'}{f', and above it for {listed(above)}' if above else ''}"
        f"{f'; the differences of the others, in points, are {listed(rest)}' if rest else ''}"
    )


def _fastest(answers: pandas.DataFrame, found: pandas.DataFrame) -> str:
    """The system with most tokens a forward, and those that are not told from it."""
    tpf = found.set_index("system").TPF.drop(AR_SFT)
    items = answers.groupby(["system", "task", "item"], as_index=False)[["tokens", "forwards"]].mean()
    first = tpf.idxmax()
    ties = _ties(items, first, list(tpf.index))
    tied = f"; the interval of the paired difference does not tell it from that of {listed(ties)}" if ties else ""
    return f"{first} has the highest TPF, {tpf.max():.1f}{tied}."


def equal_start_programs(_: Sequence[str]) -> str:
    """What AR-SFT reaches on the mini programs after the course and before it, and the backbone."""
    answers, _ = _courses()

    def scores(model: str) -> str:
        means = 100 * answers[answers.model == model].groupby("task").right.mean()
        return " and ".join(f"{means[task]:.1f} % on {title(f'mini_{task}')}" for task in PROGRAMS)

    return (
        f"{AR_SFT} has {scores('autoregressive_sft')} after the course. Before it, {AR_SFT} has {scores('start')}, and "
        f"the backbone has {scores('backbone')}.\n"
    )


def _shown(found: pandas.DataFrame, *, with_training: bool = True) -> str:
    """The table of a `summary`, with or without the rows that were trained."""
    minus = next(column for column in found.columns if column.startswith("minus "))
    shown = found.assign(**{"million rows trained": (found["trained rows"] / 1e6).round(1)})
    trained = ["million rows trained"] * with_training
    shown = shown[["system", *trained, "accuracy, %", minus, "TPF", "rows a token"]]
    return table_of(list(shown.columns), shown.to_numpy().tolist())


def controls(words: Sequence[str]) -> str:
    """What courses reach that differ from the ordinary one in one thing; the words are names of `VARIANTS`."""
    answers, settings = _courses()
    tables = []
    for name in words:
        for system in answers[answers.model == name].system.unique():
            ordinary = system.removesuffix(f", {VARIANTS[name].label}")
            found = summary(answers[answers.system.isin((ordinary, system))], settings, ordinary)
            tables.append(found.rename(columns={f"minus {ordinary}": "minus the ordinary course"}))
    return _shown(pandas.concat(tables))


def verifier_control(_: Sequence[str]) -> str:
    """The gain of the verifier's tokens after the ordinary course, and after one with half-filled slots."""
    answers = pandas.read_csv(COURSES / ANSWERS)
    variant = "refusion_half_filled"
    courses = {"the ordinary course": ("refusion", ""), "the control": (variant, f", {VARIANTS[variant].label}")}
    gains = []
    for course, (model, label) in courses.items():
        by_rule = answers[answers.model == model].pivot(
            index=["model", "seed", "task", "item"], columns="system", values="right"
        )
        gain = by_rule[f"{WITH_VERIFIER}{label}"] - by_rule[f"{REFUSION}{label}"]
        gains.append(gain.rename("right").reset_index().assign(system=course))
    of = pandas.concat(gains)
    ordinary, control = (over_seeds(of, course).interval() for course in courses)
    change = over_seeds(of, "the control", "the ordinary course")
    return (
        f"Over all {answers.task.nunique()} tasks the verifier's tokens gain {_spelled(ordinary)} points after the "
        f"ordinary course and {_spelled(control)} points after the control. The gain changes by "
        f"{_spelled(change.interval())} points (p = {change.p_value():.2g}). So after training on half-filled slots "
        f"{'the gain is still there' if control.low > 0 else 'no gain is shown'}.\n"
    )


def trained_in(settings: pandas.DataFrame, courses: Path = COURSES) -> str:
    """Which systems had a course that computed in another type than most courses, by the records of the courses."""
    systems: dict[str, list[str]] = {}
    for row in settings[["system", "model", "seed"]].drop_duplicates().itertuples():
        record = json.loads((courses / f"{row.model}_{row.seed}" / RUN_FILE).read_text(encoding="utf-8"))
        name = f"{row.system} (seed {row.seed})"
        systems.setdefault(record["identity"]["optimisation"]["compute_dtype"], []).append(name)
    most = max(systems, key=lambda dtype: len(systems[dtype]))
    others = [f"{listed(names)} in {dtype}" for dtype, names in systems.items() if dtype != most]
    return f" Trained in {most}, but {listed(others)}." if others else ""


def _by_task(answers: pandas.DataFrame, systems: Sequence[str]) -> str:
    """Accuracy of AR-SFT by task, and of each system the difference from it and TPF."""
    rows = []
    for task, part in answers.groupby("task", sort=False):
        cells = []
        for system in systems:
            value, of_system = over_seeds(part, system, AR_SFT).interval(), part[part.system == system]
            cells.append(f"{_spelled(value)} at {of_system.tokens.sum() / of_system.forwards.sum():.1f}")
        rows.append((title(f"mini_{task}"), f"{100 * over_seeds(part, AR_SFT).value:.1f}", *cells))
    return table_of(("Task", f"{AR_SFT}, %", *(f"{system}, points at TPF" for system in systems)), rows)


def infilling(_: Sequence[str]) -> str:
    """What the systems of the equal start make of a suffix."""
    found = table(pandas.read_csv(COURSES / "infilling.csv", keep_default_na=False))
    shown = found.map(lambda value: "" if value != value else f"{value:.1f}" if isinstance(value, float) else value)
    return table_of(list(shown.columns), shown.to_numpy().tolist(), num_left=2)


def _pooled(rows: pandas.DataFrame) -> str:
    """The gain of the verifier over several tasks: mean difference, items gained and lost, and their p value."""
    parts = [Interval(*row) for row in rows[["difference", "difference_ci_low", "difference_ci_high", "n"]].to_numpy()]
    mean, gained, lost = mean_of_intervals(parts), int(rows.gained.sum()), int(rows.lost.sum())
    return f"{_spelled(mean)} points ({gained} items gained, {lost} lost, p = {mcnemar(gained, lost):.2g})"


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
        f"{'; '.join(f'{name}: {gain}' for name, gain in others.items())}. The gain over all tasks changes with "
        f"training, from the first checkpoint to the last: {'; '.join(falls)}.\n"
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
    "equal_start": equal_start,
    "equal_start_programs": equal_start_programs,
    "controls": controls,
    "verifier_control": verifier_control,
    "infilling_family": infilling,
    "processors": processors,
    "paired": paired,
    "tasks_alike": tasks_alike,
    "equal_accuracy": equal_accuracy,
    "verifier_gain": verifier_gain,
    "verifier_serial": verifier_serial,
    "verifier_choices": verifier_choices,
}
