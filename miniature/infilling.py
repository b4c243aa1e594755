"""`python -m miniature.infilling`: what the systems of the equal start make of a suffix.

    python -m miniature.infilling measure --courses W --runs R --out results/embedded/courses/infilling.csv
    python -m miniature.infilling table --out results/embedded/courses/infilling.csv

`measure` asks every trained model in W whose system fills gaps all tasks `mini_infill_*`, with their controls, and
continues runs that are there. The CSV has a row for each item, model and task; what it has of other systems and seeds
stays. `table` prints accuracy and forwards with the suffix, without it and with a wrong one, and the difference that
the suffix makes, over items and seeds.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas

from miniature.equal_start import trained
from miniature.gaps import KINDS
from miniature.verdicts import verdicts
from refusion_eval.benchmarks.suffixes import PREFIX_ONLY, WRONG_SUFFIX
from refusion_eval.cli.plans import carry_out, plan_of
from refusion_eval.metrics import mean_of_intervals, paired_difference, scaled

_SPOKEN = {"": "suffix", PREFIX_ONLY: "prefix only", WRONG_SUFFIX: "wrong suffix"}  # controls of tasks
COLUMNS = ("system", "seed", "task", "control", "item", "right", "tokens", "forwards", "rows")
BATCH_SIZE = 8


class System(NamedTuple):
    """A system that fills gaps: its name in tables, to which they add a variant, and stage, decoder and settings."""

    name: str
    stage: str
    decoder: str
    settings: Mapping[str, Any]


# The length of the gap is the response's, so blocks are as long as it is.
SYSTEMS = (
    System("AR-SFT, prefix only", "autoregressive_sft", "autoregressive", {}),
    System("ReFusion", "refusion", "refusion", {"fuse": False, "slot_size": 8}),
    System("ReFusion", "refusion", "refusion", {"fuse": False, "slot_size": 8, "completion": "verifier"}),
    System("LLaDA", "llada", "llada", {}),
    System("LLaDA w/ Fast-dLLM", "llada", "fast_dllm_llada", {"threshold": 0.9}),
)


def run(system: System, weights: Path, run_dir: Path, limit: int | None = None) -> Path:
    """Makes or continues the run of a model on all tasks with gaps, and returns its folder.

    A system that reads from left to right never sees a suffix, so that it is asked without one alone.
    """
    controls = (PREFIX_ONLY,) if system.decoder == "autoregressive" else tuple(_SPOKEN)
    options = {
        "model": str(weights),
        "decoder": system.decoder,
        "name": system.name,
        "tasks": ",".join(f"mini_infill_{kind}{control}" for kind in KINDS for control in controls),
        "settings": [f"{name}={value}" for name, value in system.settings.items()],
        "batch_size": BATCH_SIZE,
        "run_dir": str(run_dir),
    }
    status = carry_out(plan_of(options | ({} if limit is None else {"limit": limit})), with_tables=False)
    if status:
        raise SystemExit(status)
    return run_dir


def answers(run_dir: Path, seed: int) -> pandas.DataFrame:
    """The answers of a run, one row each, in `COLUMNS`."""
    found = verdicts([run_dir])
    parts = found.task.str.extract(rf"^mini_infill_({'|'.join(KINDS)})(.*)$")
    return found.assign(task=parts[0], control=parts[1], seed=seed)[list(COLUMNS)]


def measure(courses: Path, runs: Path, limit: int | None = None) -> pandas.DataFrame:
    """The answers of every trained model in a folder of courses."""
    found = [
        answers(run(system, weights, runs / f"{number}_{system.decoder}_{seed}", limit), seed)
        for (stage, seed), weights in trained(courses).items()
        for number, system in enumerate(SYSTEMS)
        if system.stage == stage
    ]
    return pandas.concat(found, ignore_index=True)


def table(found: pandas.DataFrame) -> pandas.DataFrame:
    """A row for each system and task: percent right and forwards a gap by control, and what the suffix adds."""
    rows = []
    for (system, task), part in found.groupby(["system", "task"], sort=False):
        by_control = dict(list(part.groupby("control")))
        row: dict[str, Any] = {"system": system, "task": task, "seeds": part.seed.nunique()}
        for control, name in _SPOKEN.items():
            if control in by_control:
                row[f"{name}, %"] = 100 * by_control[control].right.mean()
                row[f"{name}, forwards"] = by_control[control].forwards.mean()
        if "" in by_control:
            row["by the suffix"] = _difference(by_control[PREFIX_ONLY], by_control[""])
        rows.append(row)
    columns = [f"{name}, {what}" for name in _SPOKEN.values() for what in ("%", "forwards")]
    return pandas.DataFrame(rows, columns=["system", "task", "seeds", *columns, "by the suffix"])


def _difference(before: pandas.DataFrame, after: pandas.DataFrame) -> str:
    """The difference in points, paired by item, with an interval over the items of each seed."""
    pairs = before.merge(after, on=["seed", "item"], suffixes=("_before", "_after"))
    seeds = [paired_difference(part.right_before, part.right_after) for _, part in pairs.groupby("seed")]
    value = scaled(mean_of_intervals(seeds), 100)
    return f"{value.value:+.1f} [{value.low:+.1f}, {value.high:+.1f}]"


def main(words: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m miniature.infilling", description=__doc__.split("\n", 1)[0])
    parser.add_argument("action", choices=("measure", "table"))
    parser.add_argument("--courses", type=Path, help="measure: folder of the courses of `miniature.equal_start`")
    parser.add_argument("--runs", type=Path, help="measure: folder of the runs")
    parser.add_argument("--limit", type=int, help="measure: only the first items of each task")
    parser.add_argument("--out", type=Path, default=Path("results/embedded/courses/infilling.csv"), help="CSV")
    given = parser.parse_args(words)
    if given.action == "measure":
        if given.courses is None or given.runs is None:
            parser.error("measure needs --courses and --runs")
        found = measure(given.courses, given.runs, given.limit)
        if given.out.exists():
            former, named = pandas.read_csv(given.out, keep_default_na=False), ["system", "seed"]
            again = former.set_index(named).index.isin(found.set_index(named).index)
            found = pandas.concat([former[~again], found], ignore_index=True)
        found.to_csv(given.out, index=False)
    print(table(pandas.read_csv(given.out, keep_default_na=False)).to_string(index=False, float_format="%.1f"))


if __name__ == "__main__":
    main()
