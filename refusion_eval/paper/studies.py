"""Figures for the claims about sweeps, locality and single decodings, which formulas pick through `Reader.points`.

A point of a sweep is a system of its own, `refusion@tau_slot=0.7`, and so is a masking ratio,
`llada@masking_ratio=0.2`; `qwen3@tau_slot` is the baseline that a sweep of that setting measured beside its points.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from refusion_eval.benchmarks import RELEASE, is_mini
from refusion_eval.errors import DataError
from refusion_eval.paper.names import benchmark_of
from refusion_eval.paper.points import read_sweep
from refusion_eval.paper.rows import first_line, read_records
from refusion_eval.results.measurement import Measurement
from refusion_eval.store.records import Sample
from refusion_eval.store.run_store import RunReader
from refusion_eval.types import Fix, Select

SWEPT_BENCHMARK = "mbpp"  # of the paper's sweeps; the synthetic ones may be of any
# Stands in for it in the sweeps of the embedded family. On mini MBPP all settings answer nearly the same items right.
GRADED = "parts"
CHOSEN = "Mini Parts was chosen for these sweeps, because settings decide there whether ReFusion is better than AR."
FRONTIER = "frontier_of_"

CASE_STUDY_SYSTEM = "refusion@case_study"
# Settings of the paper's case study (caption of Figure 5), and what is counted in decodings with them.
CASE_STUDY = {"slot_size": 4, "block_size": 16, "tau_slot": 0.6, "tau_token": 0.3}
MOST_SLOTS, MOST_TOKENS = "most_slots_together", "most_tokens_of_a_slot"
DIVERGENCE_NEAR, DIVERGENCE_FAR = "divergence_near", "divergence_far"
# Metrics that are not about every item of a benchmark.
OF_SOME_ITEMS = {MOST_SLOTS, MOST_TOKENS, DIVERGENCE_NEAR, DIVERGENCE_FAR}

# Distances in tokens that count as near and as far.
NEAR, FAR = range(1, 3), range(16, 129)


def sort_sources(sources: Iterable[Path]) -> tuple[list[Path], list[Measurement]]:
    """Separates runs and results files, which are returned first, from sweeps and locality files, which are read.

    Raises DataError if a file of a sweep, or a locality file, is damaged.
    """
    results: list[Path] = []
    measurements: list[Measurement] = []
    for source in sources:
        is_sweep = (source / "points.csv").is_file()
        if is_sweep or (source.is_file() and "masking_ratio" in first_line(source)):
            try:
                measurements += (sweep_measurements if is_sweep else locality_measurements)(source)
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                raise DataError(f"{source} is damaged ({type(error).__name__}: {error}); make it again") from error
        elif source.is_dir() and (counts := list(case_study_measurements(source))):
            measurements += counts  # its settings are none of the paper's tables
        else:
            results.append(source)
    return results, measurements


def sweep_measurements(folder: Path) -> Iterator[Measurement]:
    """The measurements of a sweep, each of a system that names setting and value; those of a frontier are its own."""
    records, measurements = read_sweep(folder)
    rows = {(row["run_id"], row["task"]): row for row in records}
    pairs: dict[tuple[str, str], set[str]] = {key: set() for key in rows}  # several where points share a run
    for row in records:
        pairs[row["run_id"], row["task"]].add(_pair(row))
    settings = {pair.partition("=")[0] for pair in set().union(*pairs.values()) if pair}
    for measurement in measurements:
        key = (measurement.run_id, measurement.task)
        if key not in rows or not (measurement.mini or measurement.benchmark == SWEPT_BENCHMARK):
            continue
        if rows[key]["decoder"] == "autoregressive":
            names = set(settings)
        elif "" not in pairs[key]:
            names = pairs[key]
        else:  # the operating point is a point of every setting, unless another run names the same value
            values = {name: measurement.settings.get(name.removeprefix(FRONTIER)) for name in settings}
            own = set().union(
                *(
                    of_run
                    for other, of_run in pairs.items()
                    if other[0] != measurement.run_id and rows[other]["system"] == rows[key]["system"]
                )
            )
            names = {f"{name}={value}" for name, value in values.items() if value is not None} - own
        for name in sorted(names):
            yield replace(measurement, system=f"{measurement.system}@{name}")


def _pair(row: Mapping[str, str]) -> str:
    """Setting and value of a point; empty for the operating point."""
    return f"{FRONTIER if row['origin'] == 'frontier' and row['varied'] else ''}{row['varied']}"


def locality_measurements(path: Path) -> Iterator[Measurement]:
    """The mean divergence at near and at far positions for each masking ratio; bounds are means of bounds."""
    groups: dict[tuple[str, str, bool, str, str], list[Mapping[str, str]]] = {}
    for _, row in read_records(path, {}):
        for part, distances in ((DIVERGENCE_NEAR, NEAR), (DIVERGENCE_FAR, FAR)):
            if abs(int(row["distance"])) in distances and row["ci_low"]:
                key = (row["decoder"], row["masking_ratio"], row["mini"] == "yes", row["dataset"], part)
                groups.setdefault(key, []).append(row)
    for (system, ratio, mini, dataset, part), rows in groups.items():
        weights = [float(row["n_pairs"]) for row in rows]
        value, low, high = (
            float(np.average([float(row[name]) for row in rows], weights=weights))
            for name in ("jsd_mean", "ci_low", "ci_high")
        )
        yield Measurement(
            origin="measured",
            system=f"{system}@masking_ratio={ratio}",
            label=system,
            benchmark=benchmark_of(dataset),
            task=dataset,
            mini=mini,
            metric=part,
            value=value,
            ci_low=low,
            ci_high=high,
            unit="nats",
            n=max(int(float(row["n_responses"])) for row in rows),
            run_id=path.name,
            prompts=RELEASE,  # the texts are gold answers, so no prompt of the paper is at issue
        )


def case_study_measurements(run_dir: Path) -> Iterator[Measurement]:
    """Counts of the decodings with the settings of the case study: slots and tokens that are accepted together."""
    most: Counter[str] = Counter()
    with RunReader.open(run_dir) as reader:
        if not any(map(_is_case_study, reader.samples(traces=False))):
            return
        for sample in filter(_is_case_study, reader.samples()):
            if sample.trace is None:
                continue
            most["samples"] += 1
            trace = sample.events()
            slots = [len(event.chosen) for event in trace.of(Select) if event.unit == "slot"]
            fixed = Counter(
                (event.forward, at // sample.settings["slot_size"]) for event in trace.of(Fix) for at in event.positions
            )
            most[MOST_SLOTS] = max(most[MOST_SLOTS], *slots, 0)
            most[MOST_TOKENS] = max(most[MOST_TOKENS], *fixed.values(), 0)
            last = sample
    for metric in (MOST_SLOTS, MOST_TOKENS) if most else ():
        yield Measurement(
            origin="measured",
            system=CASE_STUDY_SYSTEM,
            label="ReFusion",
            benchmark=last.benchmark,
            task=last.key.task,
            mini=is_mini(last.key.task),
            metric=metric,
            value=most[metric],
            prompts=last.prompts,
            n=most["samples"],
            run_id=run_dir.name,
        )


def _is_case_study(sample: Sample) -> bool:
    return all(sample.settings.get(name) == value for name, value in CASE_STUDY.items())
