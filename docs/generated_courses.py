"""Sentences and tables about the courses with an equal start (`miniature.equal_start`).

Each maker is like those of `generated_tables`. An estimate is over items and, where a system has several, over training
seeds (`miniature.seeds`).
"""

import json
from collections.abc import Mapping, Sequence

import pandas
from generated_common import AR_SFT, REFUSION, RESULTS, WITH_VERIFIER, listed, table_of, title
from generated_pairs import LEVEL, spelled, ties

from miniature.equal_start import ANSWERS, SETTINGS, SYSTEMS, VARIANTS
from miniature.infilling import table
from miniature.seeds import Estimate, over_seeds, summary
from refusion_eval.results.compare import holm
from refusion_eval.training.run import RUN_FILE

COURSES = RESULTS / "courses"
TWO_SEEDS = "; two seeds leave one degree of freedom, so that they are wide where the seeds differ"
PROGRAMS = ("humaneval", "mbpp")
_PROGRAM_TASKS = listed([title(f"mini_{task}") for task in PROGRAMS])
_WITHOUT_PROGRAMS = f"Without {_PROGRAM_TASKS}, whose programs the start cannot write"


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
        f"There {'are' if number > 1 else 'is'} {_seeds(number, listed(list(part.system)))}."
        for number, part in found.groupby("seeds")
    ]
    is_front = words == ["front"]
    numbers = answers.groupby("task").item.nunique()
    known = answers[~answers.task.isin(PROGRAMS)]
    return (
        f"{' '.join(reversed(seeds))}{f' Not trained yet: {listed(missing)}.' if missing else ''}"
        f"{trained_in(settings[~settings.model.isin(VARIANTS)], by_system=not is_front)} "
        f"Over {len(numbers)} tasks with {numbers.sum():,} items in all, {_against_ar_sft(answers, systems)}. "
        f"{_WITHOUT_PROGRAMS}, {_against_ar_sft(known, systems)}. "
        f"{_fastest(answers, found)} "
        "Intervals are over items and, where a system has several, over training seeds"
        f"{TWO_SEEDS if found.seeds.max() == 2 else ''}.\n\n"
        f"{_shown(found, AR_SFT, with_training=not is_front)}"
    )


def _against_ar_sft(answers: pandas.DataFrame, systems: Sequence[str]) -> str:
    """The systems whose accuracy Holm's correction leaves below or above that of AR-SFT; of others, the difference."""
    estimates = {system: over_seeds(answers, system, AR_SFT) for system in systems}
    left = _left(estimates)
    below = [system for system in left if estimates[system].value < 0]
    above = [system for system in left if system not in below]
    rest = [f"{system} {spelled(estimates[system].interval())}" for system in systems if system not in left]
    corrected = f"after Holm's correction for {len(systems)} comparisons"
    if len(below) == len(systems):
        return f"every other system is less accurate than {AR_SFT} {corrected}"
    parts = (
        (f"the systems that are less accurate than {AR_SFT} {corrected} are", below),
        ("those that are more accurate are", above),
        ("the differences of the others, in points, are", rest),
    )
    return "; ".join(f"{words} {listed(names)}" for words, names in parts if names)


def _left(estimates: Mapping[str, Estimate]) -> list[str]:
    """The names of the differences that Holm's correction leaves."""
    p_values = holm([estimate.p_value() for estimate in estimates.values()])
    return [name for name, value in zip(estimates, p_values, strict=True) if value < LEVEL]


def _fastest(answers: pandas.DataFrame, found: pandas.DataFrame) -> str:
    """The system with most tokens a forward, and those that are not told from it."""
    tpf = found.set_index("system").TPF.drop(AR_SFT)
    items = answers.groupby(["system", "task", "item"], as_index=False)[["tokens", "forwards"]].mean()
    first = tpf.idxmax()
    near = ties(items, first, list(tpf.index))
    untold = "; the interval of its paired difference, over items alone, includes 0 for"
    return f"{first} has the highest TPF, {tpf.max():.1f}{f'{untold} {listed(near)}' if near else ''}."


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


def _shown(found: pandas.DataFrame, reference: str, *, with_training: bool = True) -> str:
    """The table of a `summary`, with or without the rows that were trained."""
    shown = found.assign(**{"million rows trained": (found["trained rows"] / 1e6).round(1)})
    trained = ["million rows trained"] * with_training
    shown = shown[["system", *trained, "accuracy, %", f"minus {reference}", "TPF", "rows a token"]]
    return table_of(list(shown.columns), shown.to_numpy().tolist())


def _ordinary(answers: pandas.DataFrame, names: Sequence[str]) -> dict[str, str]:
    """Each system of these variants -> the same system after its ordinary course."""
    return {
        system: system.removesuffix(f", {VARIANTS[name].label}")
        for name in names
        for system in answers[answers.model == name].system.unique()
    }


def _seeds(number: int, of: str) -> str:
    return f"{number} training seed{'s' if number > 1 else ''} for {of}"


def controls(words: Sequence[str]) -> str:
    """What courses reach that differ from the ordinary one in one thing; the words are names of `VARIANTS`."""
    answers, settings = _courses()
    tables = []
    for system, ordinary in _ordinary(answers, words).items():
        found = summary(answers[answers.system.isin((ordinary, system))], settings, ordinary)
        tables.append(found.rename(columns={f"minus {ordinary}": "minus the ordinary course"}))
    return _shown(pandas.concat(tables), "the ordinary course")


def equal_rows(words: Sequence[str]) -> str:
    """Systems that trained about as many rows, and what fewer rows change; the words are names of `VARIANTS`."""
    answers, settings = _courses()
    pairs = _ordinary(answers, words)
    shown = answers[answers.system.isin((AR_SFT, REFUSION, WITH_VERIFIER, *pairs))]
    parts = [f"{pair[0]} {spelled(over_seeds(answers, *pair).interval())}" for pair in pairs.items()]
    return (
        f"The accuracies differ from those of the ordinary courses, in points, as follows: {listed(parts)}.\n\n"
        f"{_shown(summary(shown, settings, AR_SFT), AR_SFT)}"
    )


def verifier_control(_: Sequence[str]) -> str:
    """The gain of the verifier's tokens after the ordinary course, and after one with half-filled slots."""
    answers, settings = _courses()
    variant = "refusion_half_filled"
    ordinary, control = "the ordinary course", "the control"
    gains = []
    for course, model, label in ((ordinary, "refusion", ""), (control, variant, f", {VARIANTS[variant].label}")):
        by_rule = answers[answers.model == model].pivot(
            index=["model", "seed", "task", "item"], columns="system", values="right"
        )
        gain = by_rule[f"{WITH_VERIFIER}{label}"] - by_rule[f"{REFUSION}{label}"]
        gains.append(gain.rename("right").reset_index().assign(system=course))
    of = pandas.concat(gains)
    seeds = of.groupby("system").seed.nunique()
    numbers = [_seeds(seeds[course], course) for course in (ordinary, control)]
    trained = settings[settings.model.isin(["refusion", variant]) & ~settings.system.str.contains(WITH_VERIFIER)]

    def estimates(rows: pandas.DataFrame) -> list[Estimate]:
        return [over_seeds(rows, *pair) for pair in ((ordinary,), (control,), (control, ordinary))]

    def said(found: list[Estimate]) -> str:
        before, after, change = (spelled(estimate.interval()) for estimate in found)
        return (
            f"the verifier's tokens gain {before} points after {ordinary} and {after} points after {control}, "
            f"a change by {change} points (p = {found[-1].p_value():.2g})"
        )

    overall = estimates(of)
    tasks = {title(f"mini_{task}"): estimates(of[of.task == task]) for task in answers.task.unique()}
    changed = _left({task: found[-1] for task, found in tasks.items()})
    after, change = (estimate.interval() for estimate in overall[1:])
    size = "smaller" if change.high < 0 else "larger"
    shown = "includes 0" if change.low <= 0 <= change.high else f"shows a {size} gain"
    return (
        f"Over all {len(tasks)} tasks {said(overall)}. {_WITHOUT_PROGRAMS}, "
        f"{said(estimates(of[~of.task.isin(PROGRAMS)]))}. There are {listed(numbers)}.{trained_in(trained)} Over all "
        f"tasks, {'a gain is left' if after.low > 0 else 'no gain is shown'} after training on half-filled slots, and "
        f"the interval of the change {shown}. By task, Holm's correction leaves "
        f"{f'a change on {listed(changed)}' if changed else 'no change'}; the intervals are not adjusted:\n\n"
        + table_of(
            ("Task", f"gain after {ordinary}, points", f"gain after {control}, points", "change, points"),
            [(task, *(spelled(estimate.interval()) for estimate in found)) for task, found in tasks.items()],
        )
    )


def trained_in(settings: pandas.DataFrame, *, by_system: bool = True) -> str:
    """The types in which courses computed, by the records of the courses, where they are not one type."""
    systems: dict[str, list[str]] = {}
    for row in settings[["system", "model", "seed"]].drop_duplicates().itertuples():
        record = json.loads((COURSES / f"{row.model}_{row.seed}" / RUN_FILE).read_text(encoding="utf-8"))
        name = f"{row.system} (seed {row.seed})"
        systems.setdefault(record["identity"]["optimisation"]["compute_dtype"], []).append(name)
    if len(systems) == 1:
        return ""
    if not by_system:
        return f" The courses computed in {' or '.join(sorted(systems))}."
    most = max(systems, key=lambda dtype: len(systems[dtype]))
    others = [f"{listed(names)} in {dtype}" for dtype, names in systems.items() if dtype != most]
    return f" Trained in {most}, but {listed(others)}."


def _by_task(answers: pandas.DataFrame, systems: Sequence[str]) -> str:
    """Accuracy of AR-SFT by task, and of each system the difference from it and TPF."""
    rows = []
    for task, part in answers.groupby("task", sort=False):
        cells = []
        for system in systems:
            value, of_system = over_seeds(part, system, AR_SFT).interval(), part[part.system == system]
            cells.append(f"{spelled(value)} at {of_system.tokens.sum() / of_system.forwards.sum():.1f}")
        rows.append((title(f"mini_{task}"), f"{100 * over_seeds(part, AR_SFT).value:.1f}", *cells))
    return table_of(("Task", f"{AR_SFT}, %", *(f"{system}, points at TPF" for system in systems)), rows)


def infilling(_: Sequence[str]) -> str:
    """What the systems of the equal start make of a suffix."""
    found = table(pandas.read_csv(COURSES / "infilling.csv", keep_default_na=False))
    shown = found.map(lambda value: "" if value != value else f"{value:.1f}" if isinstance(value, float) else value)
    return table_of(list(shown.columns), shown.to_numpy().tolist(), num_left=2)


OF_COURSES = {
    "equal_start": equal_start,
    "equal_start_programs": equal_start_programs,
    "controls": controls,
    "equal_rows": equal_rows,
    "verifier_control": verifier_control,
    "infilling_family": infilling,
}
