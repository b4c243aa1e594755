"""What whole benchmarks cost on many machines, projected from a pilot run's samples or from what the paper prints.

Responses differ tenfold in length, so it matters how work is shared. Static shards wait for the slowest worker; workers
that pull the next request when they are free wait for one response at most.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from os import PathLike
from typing import NamedTuple

import numpy as np

from refusion_eval.benchmarks import BENCHMARKS, is_mini
from refusion_eval.errors import StoreError
from refusion_eval.metrics import Interval, bootstrap_mean
from refusion_eval.results.measurement import TASKS, published_measurements
from refusion_eval.results.render import Table, csv_text
from refusion_eval.store.run_reader import RunReader

HOUR = 3600.0
# Tables of published.csv with throughput. Together they have every system of the paper once.
SPEED_TABLES = ("table1", "table2")
RETRAINED_ONLY = {("table2", "bd3lm+retrained")}
LATENCY_TABLE = "table9_v2"
# The paper prints no seconds for these systems. Their responses are taken to be as long as those of a similar system:
# one of the same weights, of the same data, or the other autoregressive model.
STAND_INS = {
    "llama3": "qwen3",
    "fast_dllm_llada": "llada",
    "d2f_llada": "llada",
    "fast_dllm_dream": "dream",
    "d2f_dream": "dream",
    "bd3lm+retrained": "refusion",
}


class Share(NamedTuple):
    """Hours until the last of some workers is done, each with one request at a time.

    Attributes:
        sharded: hours if each has every `workers`-th request from the start, as lm-eval shares them out.
    """

    workers: int
    pulled: float
    sharded: float


class Cost(NamedTuple):
    """One system on one whole benchmark, projected from the `n` samples that a pilot run has of a task of it.

    Attributes:
        seconds: mean seconds a sample.
    """

    system: str
    run_id: str
    hardware: str
    task: str
    n: int
    items: int
    seconds: Interval
    shares: Sequence[Share]


def share_out(seconds: Sequence[float], workers: int) -> Share:
    """How long the last worker takes, under both ways of sharing."""
    busy = min(workers, len(seconds))
    free_at = [0.0] * busy
    for duration in seconds:
        heapq.heapreplace(free_at, free_at[0] + duration)
    sharded = max(sum(seconds[start::workers]) for start in range(busy))
    return Share(workers, max(free_at) / HOUR, sharded / HOUR)


def projected(run_dirs: Sequence[str | PathLike[str]], workers: Sequence[int]) -> list[Cost]:
    """Costs of the benchmarks that runs have a part of; a look-alike stands for as many items as its benchmark has.

    The samples of a whole benchmark are drawn, with replacement, from those of the run that were decoded alone.

    Raises:
        StoreError: a run cannot be read, or has no sample of a benchmark that was decoded alone.
    """
    costs = []
    for run_dir in run_dirs:
        pilots: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        with RunReader.open(run_dir) as reader:
            run = reader.run
            for sample in reader.samples(traces=False):
                if sample.error is None and sample.batch_size == 1 and sample.warm and sample.benchmark in BENCHMARKS:
                    hardware = run.hardware(sample.process_id).label()
                    pilots[sample.key.task, sample.benchmark, hardware].append(sample.seconds)
        if not pilots:
            raise StoreError(
                f"{run_dir} has no sample of the seven benchmarks that was decoded alone, after a warm-up; run "
                "some with --batch-size 1, or with --tps-samples"
            )
        for (task, benchmark, hardware), pilot in sorted(pilots.items()):
            items = BENCHMARKS[benchmark].source.num_rows
            drawn = np.random.default_rng(0).choice(pilot, items).tolist()
            shares = [share_out(drawn, count) for count in workers]
            identity = (run.manifest.system, run.run_id, hardware, task, len(pilot), items)
            costs.append(Cost(*identity, bootstrap_mean(pilot).interval(), shares))
    return costs


def cost_table(costs: Sequence[Cost]) -> Table:
    """A row for each run and task, and one for all tasks of each run."""
    runs: dict[tuple[str, str], list[Cost]] = defaultdict(list)
    for cost in costs:
        runs[cost.run_id, cost.hardware].append(cost)
    rows = []
    for (run_id, _), group in runs.items():
        system = group[0].system
        if any(cost.run_id != run_id for cost in costs if cost.system == system):
            system = f"{system} [{run_id}]"
        if len(group) > 1:
            group.append(_total(group))
        for cost in group:
            hours = [f"{share.pulled:.3g} / {share.sharded:.3g}" for share in cost.shares]
            rows.append([system, cost.task, str(cost.n), f"{cost.items:,}", f"{cost.seconds.value:.3g}", *hours])
    notes = [
        "Hours until the last worker is done: pulled (each takes the next request when free) / static shards.",
        f"Seconds a sample on {'; '.join(sorted({cost.hardware for cost in costs}))}; loading and scoring not counted.",
    ]
    if any(is_mini(cost.task) for cost in costs):
        notes.append(
            "Mini tasks are synthetic look-alikes: their seconds, times the items of the real benchmark, show how work "
            "is shared out, not what the benchmark costs."
        )
    columns = ["System", "Task", "Pilot", "Items", "s/sample", *(f"h on {share.workers}" for share in costs[0].shares)]
    return Table(title="Cost of whole benchmarks", columns=columns, rows=rows, num_left=2, notes=notes)


def _total(costs: Sequence[Cost]) -> Cost:
    """All tasks of a run, one after the other."""
    items = sum(cost.items for cost in costs)
    mean = sum(cost.items * cost.seconds.value for cost in costs) / items
    hours = np.sum([[(share.pulled, share.sharded) for share in cost.shares] for cost in costs], axis=0)
    shares = [Share(share.workers, *both) for share, both in zip(costs[0].shares, hours, strict=True)]
    seconds = Interval(mean, math.nan, math.nan, items)
    return costs[0]._replace(task="all", n=sum(cost.n for cost in costs), items=items, seconds=seconds, shares=shares)


def cost_csv(costs: Sequence[Cost]) -> str:
    """A row for each system, task and number of workers."""
    columns = ("run_id", "system", "task", "hardware", "n", "items", "seconds_per_sample", "ci_low", "ci_high")
    rows = [
        [
            *(cost.run_id, cost.system, cost.task, cost.hardware, cost.n, cost.items),
            *(cost.seconds.value, cost.seconds.low, cost.seconds.high, *share),
        ]
        for cost in costs
        for share in cost.shares
    ]
    return csv_text((*columns, "workers", "hours_pulled", "hours_sharded"), rows)


def published_table(workers: Sequence[int]) -> Table:
    """Hours that all seven benchmarks take with each of the paper's systems, on each number of GPUs."""
    items = {name: BENCHMARKS[name].source.num_rows for name in TASKS}
    labels: dict[str, str] = {}
    printed: dict[tuple[str, str, str], float] = {}
    for measurement in published_measurements((*SPEED_TABLES, LATENCY_TABLE)):
        printed.setdefault(measurement.key, measurement.value)  # of several tables the first one counts
        if measurement.artefact == SPEED_TABLES[0] or (measurement.artefact, measurement.system) in RETRAINED_ONLY:
            labels[measurement.system] = measurement.label
    rows, totals = [], np.zeros(len(workers))
    for system, label in labels.items():
        similar = STAND_INS.get(system)
        seconds = 0.0
        for task, count in items.items():
            if similar is None:
                seconds += count * printed[system, task, "latency_mean"]
            else:
                seconds += count * (printed[similar, task, "tokens_mean"] / printed[system, task, "tps"])
        hours = seconds / HOUR / np.asarray(workers)
        totals += hours
        source = f"tokens of {labels[similar]} / TPS" if similar else "printed"
        rows.append([label, source, f"{seconds / sum(items.values()):.3g}", *(f"{value:.3g}" for value in hours)])
    rows.append(["all", "", "", *(f"{total:.3g}" for total in totals)])
    return Table(
        title="Hours of the seven benchmarks on A100s",
        columns=["System", "Seconds", "s/response", *(f"h on {count}" for count in workers)],
        rows=rows,
        num_left=2,
        notes=[
            f"{sum(items.values()):,} responses, batch 1: mean seconds a response of each benchmark as the paper "
            "prints them (second version, Table 9), or the mean tokens of a similar system over the printed throughput "
            "(an assumption). A projection, not a measurement; work is taken to be shared evenly."
        ],
    )
