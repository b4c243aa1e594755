"""Means over runs that differ in their seed only, with the spread over the seeds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from refusion_eval.results.cautions import Conditions
from refusion_eval.results.measurement import Measurement, RowKey
from refusion_eval.results.metric_list import SPEED_METRICS

_NUMBERS = ("samples", "num_unscored", "tokens", "forwards")


def means_over_seeds(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The mean of every metric over runs whose texts nothing but the seed made differ, one run for each seed.

    Args:
        measurements: of runs; those of files, which do not say all that decided the texts, have no mean.
    """
    groups: dict[tuple, dict[str, Measurement]] = {}
    repeated: set[tuple] = set()
    for entry in measurements:
        # NaN where nothing could be computed, for example because all samples failed.
        if math.isnan(entry.value) or not entry.all_but_seed:
            continue
        of_item = math.ceil(entry.samples / entry.n) if entry.n else 0  # samples; scores of more have a smaller spread
        machine = entry.hardware if entry.metric in SPEED_METRICS else ""  # speeds of two machines have no mean
        key = (entry.all_but_seed, entry.batch_size, _row(entry), entry.metric, of_item, machine)
        if groups.setdefault(key, {}).setdefault(entry.settings.get("seed", ""), entry) is not entry:
            repeated.add(key)  # a run of the same seed again, so that not only seeds differ
    averaged = [
        of_seeds
        for key, of_seeds in groups.items()
        if len(of_seeds) > 1 and key not in repeated and len(set(_runs(of_seeds))) == len(of_seeds)
    ]
    names = _names(averaged)
    return [_mean(of_seeds, names[_runs(of_seeds)]) for of_seeds in averaged]


def _row(entry: Measurement) -> RowKey:
    """The row that the mean over the seeds stands in."""
    settings = tuple((name, value) for name, value in entry.row.settings if name != "seed")
    return entry.row._replace(settings=settings, settings_hash="")


def _runs(of_seeds: dict[str, Measurement]) -> tuple[str, ...]:
    return tuple(entry.run_id for entry in of_seeds.values())


def _names(averaged: Iterable[dict[str, Measurement]]) -> dict[tuple[str, ...], str]:
    """What stands for the run id of the mean of some runs: it names them where other runs have a mean in its row."""
    in_row: dict[tuple, set[tuple[str, ...]]] = {}
    for of_seeds in averaged:
        first = next(iter(of_seeds.values()))
        in_row.setdefault((first.label, _row(first), len(of_seeds)), set()).add(_runs(of_seeds))
    names = {runs: f"mean of {len(runs)} seeds" for of_row in in_row.values() for runs in of_row}
    alike = {runs for of_row in in_row.values() if len(of_row) > 1 for runs in of_row}
    return names | {runs: f"{names[runs]}: {', '.join(runs)}" for runs in alike}


def _mean(of_seeds: dict[str, Measurement], run_id: str) -> Measurement:
    entries = list(of_seeds.values())
    values = [entry.value for entry in entries]
    first, runs = entries[0], ", ".join(_runs(of_seeds))
    shared = [note for note in first.notes if all(note in entry.notes for entry in entries)]
    own = [f"{entry.run_id}: {note}" for entry in entries for note in entry.notes if note not in shared]
    numbers = {name: [getattr(entry, name) for entry in entries] for name in _NUMBERS}
    totals: dict[str, Any] = {name: None if None in of_all else sum(of_all) for name, of_all in numbers.items()}
    return replace(
        first,
        **Conditions.joined(entries),
        **totals,
        run_id=run_id,
        value=fmean(values),
        ci_low=math.nan,
        ci_high=math.nan,
        num_seeds=len(entries),
        seed_sd=stdev(values),
        by_item=None,
        settings={name: value for name, value in first.settings.items() if name != "seed"},
        settings_hash="",
        scored=all(entry.scored for entry in entries),
        seconds=math.fsum(entry.seconds for entry in entries),
        same_decode_as="",
        records="",
        command="",
        notes=(f"mean over the seeds {', '.join(of_seeds)} ({runs})", *shared, *own),
    )
