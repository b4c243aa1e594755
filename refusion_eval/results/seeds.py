"""Means over runs that differ in their seed only, with the spread over the seeds."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from refusion_eval.results.measurement import Measurement
from refusion_eval.results.metric_list import SPEED_METRICS

_SAME = (
    "label",
    "backbone",
    "decoder",
    "dtype",
    "device",
    "attention",
    "batch_size",
    "prompts",
    "mini",
    "items",
    "protocol",
)


def means_over_seeds(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The mean of every metric over runs of one system on the same items and samples of each, one for each seed."""
    groups: dict[tuple, dict[str, Measurement]] = {}
    repeated: set[tuple] = set()
    for entry in measurements:
        settings = tuple(sorted((name, value) for name, value in entry.settings.items() if name != "seed"))
        same = tuple(getattr(entry, name) for name in _SAME)
        of_item = math.ceil(entry.samples / entry.n) if entry.n else 0  # samples; scores of more have a smaller spread
        machine = entry.hardware if entry.metric in SPEED_METRICS else ""  # speeds of two machines have no mean
        key = (*same, entry.task, entry.task_version, entry.metric, settings, of_item, machine)
        if groups.setdefault(key, {}).setdefault(entry.settings.get("seed", ""), entry) is not entry:
            repeated.add(key)  # a run of the same seed again, so that not only seeds differ
    return [
        _mean(of_seeds)
        for key, of_seeds in groups.items()
        if len(of_seeds) > 1 and key not in repeated and len({one.run_id for one in of_seeds.values()}) == len(of_seeds)
    ]


def _mean(of_seeds: dict[str, Measurement]) -> Measurement:
    entries = list(of_seeds.values())
    values = [entry.value for entry in entries]
    first, runs = entries[0], ", ".join(entry.run_id for entry in entries)
    shared = [note for note in first.notes if all(note in entry.notes for entry in entries)]
    own = [f"{entry.run_id}: {note}" for entry in entries for note in entry.notes if note not in shared]

    def total(name: str) -> int:
        return sum(getattr(entry, name) for entry in entries)

    def joined(name: str, separator: str = "|") -> str:
        return separator.join(
            sorted({part for entry in entries for part in getattr(entry, name).split(separator) if part})
        )

    summed: dict[str, Any] = {
        name: total(name) for name in ("samples", "errors", "num_refused", "num_unscored", "num_cut")
    }
    summed["tokens"] = None if any(entry.tokens is None for entry in entries) else total("tokens")
    together: dict[str, Any] = {name: joined(name) for name in ("unfinished", "limited", "slowed_by", "server_notes")}
    together |= {name: joined(name, " | ") for name in ("hardware", "card")} | summed
    return replace(
        first,
        **together,
        run_id=f"mean of {len(entries)} seeds",
        value=fmean(values),
        ci_low=math.nan,
        ci_high=math.nan,
        num_seeds=len(entries),
        seed_sd=stdev(values),
        by_item=None,
        settings={name: value for name, value in first.settings.items() if name != "seed"},
        scored=all(entry.scored for entry in entries),
        isolated=all(entry.isolated for entry in entries),
        num_rounds=min(entry.num_rounds for entry in entries),
        forwards=None if any(entry.forwards is None for entry in entries) else total("forwards"),
        seconds=math.fsum(entry.seconds for entry in entries),
        same_decode_as="",
        records="",
        command="",
        notes=(f"mean over the seeds {', '.join(of_seeds)} ({runs})", *shared, *own),
    )
