"""What whole benchmarks cost on many machines: projected from a pilot run's samples, or from what is published.

Responses differ tenfold in length, so how work is shared matters: static shards wait for the slowest, workers that pull
the next request wait for one response at most.
"""

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike

import numpy as np

from refusion_eval.benchmarks import BENCHMARKS, is_mini
from refusion_eval.errors import StoreError
from refusion_eval.metrics.bootstrap import Interval, bootstrap_mean
from refusion_eval.results.published import read_published
from refusion_eval.results.render import Table, csv_text
from refusion_eval.store.run_reader import RunReader

HOUR = 3600.0
# Tables of published.csv with throughput; together they have every system of the paper once.
SPEED_TABLES = ("table1", "table2")
RETRAINED_ONLY = ("bd3lm+retrained",)
LATENCY_TABLE = "table9_v2"
# Systems of which no seconds are printed, and whose responses theirs are taken to be as long as: that of the same
# weights; of the same data; and the other autoregressive model.
STAND_INS = {
    "llama3": "qwen3",
    "fast_dllm_llada": "llada",
    "d2f_llada": "llada",
    "fast_dllm_dream": "dream",
    "d2f_dream": "dream",
    "bd3lm+retrained": "refusion",
}


@dataclass(frozen=True, kw_only=True)
class Share:
    """Hours that a number of workers take.

    Attributes:
        workers: how many, each with one request at a time.
        pulled: each takes the next request when it is free.
        sharded: each has every `workers`-th request from the start, as lm-eval shares them out.
    """

    workers: int
    pulled: float
    sharded: float


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One system on one whole benchmark.

    Attributes:
        system: its name.
        run_id: the pilot.
        hardware: where the pilot ran.
        task: of the pilot.
        n: samples of the pilot.
        items: of the whole benchmark.
        seconds: a sample, with its 95% bootstrap interval.
        shares: by number of workers.
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
    """How long the last worker takes, under both ways of sharing.

    Args:
        seconds: of each request, in order.
        workers: >= 1.
    """
    busy = min(workers, len(seconds)) or 1
    free_at = [0.0] * busy
    for one in seconds:
        heapq.heapreplace(free_at, free_at[0] + one)
    sharded = max(sum(seconds[start::workers]) for start in range(busy))
    return Share(workers=workers, pulled=max(free_at) / HOUR, sharded=sharded / HOUR)


def projected(run_dirs: Sequence[str | PathLike[str]], workers: Sequence[int], seed: int = 0) -> list[Cost]:
    """Costs of the benchmarks that runs have a part of; a look-alike stands for as many items as its benchmark has.

    The samples of a whole benchmark are drawn, with replacement, from the pilot's.

    Args:
        run_dirs: runs with samples decoded alone.
        workers: numbers of workers.
        seed: of the draws.

    Raises:
        StoreError: a run cannot be read, or has no sample of a benchmark that was decoded alone.
    """
    found = []
    for run_dir in run_dirs:
        with RunReader.open(run_dir) as reader:
            seconds: dict[tuple[str, str, str], list[float]] = defaultdict(list)
            for sample in reader.samples(traces=False):
                if sample.error is None and sample.batch_size == 1 and sample.warm and sample.benchmark in BENCHMARKS:
                    hardware = reader.run.hardware(sample.process_id).label()
                    seconds[sample.key.task, sample.benchmark, hardware].append(sample.seconds)
            if not seconds:
                raise StoreError(
                    f"{run_dir} has no sample of the seven benchmarks that was decoded alone, after a warm-up; run "
                    "some with --batch-size 1, or with --tps-samples"
                )
            system, run_id = reader.run.manifest.system, reader.run.run_id
        for (task, benchmark, hardware), pilot in sorted(seconds.items()):
            items = BENCHMARKS[benchmark].source.num_rows
            drawn = np.random.default_rng(seed).choice(pilot, items).tolist()
            shares = [share_out(drawn, count) for count in workers]
            mean = bootstrap_mean(pilot)
            found.append(
                Cost(
                    system=system,
                    run_id=run_id,
                    hardware=hardware,
                    task=task,
                    n=len(pilot),
                    items=items,
                    seconds=mean,
                    shares=shares,
                )
            )
    return found


def cost_table(costs: Sequence[Cost]) -> Table:
    """A row a run and task, and one for all tasks of each run."""
    runs = {cost.system: {other.run_id for other in costs if other.system == cost.system} for cost in costs}
    rows = []
    for (run_id, _), own in _by_run(costs).items():
        system = own[0].system if len(runs[own[0].system]) == 1 else f"{own[0].system} [{run_id}]"
        rows += [_row(system, cost.task, cost.n, cost.items, cost.seconds.value, cost.shares) for cost in own]
        if len(own) > 1:
            items = sum(cost.items for cost in own)
            mean = sum(cost.items * cost.seconds.value for cost in own) / items
            together = [_sum(shares) for shares in zip(*(cost.shares for cost in own), strict=True)]
            rows.append(_row(system, "all", sum(cost.n for cost in own), items, mean, together))
    notes = [
        "Hours until the last worker is done: pulled (each takes the next request when free) / static shards.",
        f"Seconds a sample on {'; '.join(sorted({cost.hardware for cost in costs}))}; loading and scoring not counted.",
    ]
    if any(is_mini(cost.task) for cost in costs):
        notes.append(
            "Mini tasks are synthetic look-alikes: their seconds, times the items of the real benchmark, show how work "
            "is shared out, not what the benchmark costs."
        )
    workers = [f"h on {share.workers}" for share in costs[0].shares]
    headings = ["System", "Task", "Pilot", "Items", "s/sample", *workers]
    return Table(title="Cost of whole benchmarks", columns=headings, rows=rows, num_left=2, notes=notes)


def _sum(shares: Sequence[Share]) -> Share:
    return Share(
        workers=shares[0].workers,
        pulled=sum(share.pulled for share in shares),
        sharded=sum(share.sharded for share in shares),
    )


def _by_run(costs: Sequence[Cost]) -> Mapping[tuple[str, str], Sequence[Cost]]:
    """Costs of each run and machine: the tasks of one system that follow one another."""
    groups: dict[tuple[str, str], list[Cost]] = defaultdict(list)
    for cost in costs:
        groups[cost.run_id, cost.hardware].append(cost)
    return groups


def _row(system: str, task: str, n: int, items: int, seconds: float, shares: Sequence[Share]) -> list[str]:
    hours = [f"{share.pulled:.3g} / {share.sharded:.3g}" for share in shares]
    return [system, task, str(n), f"{items:,}", f"{seconds:.3g}", *hours]


def cost_csv(costs: Sequence[Cost]) -> str:
    """A row a system, task and number of workers."""
    columns = ("run_id", "system", "task", "hardware", "n", "items", "seconds_per_sample", "ci_low", "ci_high")
    return csv_text(
        (*columns, "workers", "hours_pulled", "hours_sharded"),
        [
            [
                *(cost.run_id, cost.system, cost.task, cost.hardware, cost.n, cost.items),
                *(cost.seconds.value, cost.seconds.low, cost.seconds.high),
                *(share.workers, share.pulled, share.sharded),
            ]
            for cost in costs
            for share in cost.shares
        ],
    )


def published_table(workers: Sequence[int]) -> Table:
    """Hours that all seven benchmarks take with each of the paper's systems, by its own seconds a response.

    Of four systems it prints them; of the others, seconds are the tokens of the most similar of these four over the
    throughput that is printed.

    Args:
        workers: numbers of GPUs; work is taken to be shared evenly.
    """
    items = {name: benchmark.source.num_rows for name, benchmark in BENCHMARKS.items()}
    labels = _published_labels()
    rows, totals = [], [0.0] * len(workers)
    for system, label in labels.items():
        seconds = sum(count * _published_seconds(system, task) for task, count in items.items())
        hours = [seconds / HOUR / count for count in workers]
        totals = [total + one for total, one in zip(totals, hours, strict=True)]
        source = f"tokens of {labels[STAND_INS[system]]} / TPS" if system in STAND_INS else "printed"
        rows.append([label, source, f"{seconds / sum(items.values()):.3g}", *(f"{one:.3g}" for one in hours)])
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


def _published_labels() -> dict[str, str]:
    """Key -> label of every system that the paper compares."""
    return {
        row["system"]: row["label"]
        for table in SPEED_TABLES
        for row in read_published("published.csv")
        if row["artefact"] == table and (table == SPEED_TABLES[0] or row["system"] in RETRAINED_ONLY)
    }


def _published_seconds(system: str, task: str) -> float:
    """Mean seconds of a response."""
    if system not in STAND_INS:
        return _printed(system, task, "latency_mean")
    return _printed(STAND_INS[system], task, "tokens_mean") / _printed(system, task, "tps")


def _printed(system: str, task: str, metric: str) -> float:
    return next(
        float(row["value"])
        for row in read_published("published.csv")
        if (row["system"], row["task"], row["metric"]) == (system, task, metric)
        and row["artefact"] in (*SPEED_TABLES, LATENCY_TABLE)
    )
