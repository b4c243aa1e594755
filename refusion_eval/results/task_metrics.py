"""Every metric that a task of a run has, each with its bootstrap by item and the samples it rests on."""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from refusion_eval.errors import DataError
from refusion_eval.metrics.accuracy import majority_passed, pass_at_k
from refusion_eval.metrics.bootstrap import RESAMPLES, Bootstrap, bootstrap, mean_statistic
from refusion_eval.metrics.parallelism import tpf
from refusion_eval.metrics.roofline import mbu, one_token_share
from refusion_eval.metrics.speed import (
    forward_rate,
    latency,
    mean_latency,
    mean_tps,
    measured,
    rate,
    speedup,
    total_tps,
)
from refusion_eval.results.facts import SampleFacts, TaskFacts
from refusion_eval.results.figure import ACCURACY, HALF_WRITTEN, NOT_SCORED, PASS_AT_1, SPEEDUP, UNISOLATED
from refusion_eval.store.records import PASSED

_PASS_KS = (2, 5, 10, 20, 50, 100)
_PERCENT = "percent"


class Measure(NamedTuple):
    """One metric of one task.

    Attributes:
        metric: name in tables.
        unit: unit of the value.
        bootstrap: value and replicates.
        samples: samples that it was computed from.
        note: what a reader of this figure must know.
    """

    metric: str
    unit: str
    bootstrap: Bootstrap
    samples: Sequence[SampleFacts]
    note: str = ""


@dataclass(slots=True)
class TaskMeasures:
    """All metrics of one task, and what must be said about the task as a whole."""

    measures: list[Measure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Reference(NamedTuple):
    """The same task of a run that speed-ups are relative to.

    Attributes:
        run_id: name of that run.
        facts: the task in that run.
        metric: name of the ratio.
    """

    run_id: str
    facts: TaskFacts
    metric: str = SPEEDUP


def measure_task(facts: TaskFacts, references: Sequence[Reference] = ()) -> TaskMeasures:
    """Everything that a task's samples say. Samples with errors are counted, and in no metric.

    Args:
        facts: the task.
        references: the same task in the runs that its speed-ups are relative to.
    """
    result = TaskMeasures()
    num_samples = len(facts.samples)
    if not facts.finished:
        result.notes.append(
            f"{HALF_WRITTEN}: {num_samples} of {facts.num_expected} samples are there, run its command again"
        )
    if facts.num_errors:
        result.notes.append(
            f"{facts.num_errors} of {facts.num_errors + num_samples} samples are errors and in no figure"
        )
    if not facts.samples:
        undefined = Bootstrap(math.nan, np.full(RESAMPLES, np.nan), 0)
        result.measures.append(Measure(_score_name(facts), _PERCENT, undefined, []))
        return result
    if facts.num_unscored:
        result.notes.append(f"{facts.num_unscored} of {num_samples} {NOT_SCORED}")
    if not facts.isolated:
        result.notes.append(UNISOLATED)
    result.measures += [*_scores(facts), *_other_scores(facts)]
    _add_speed(result, facts, references)
    result.measures += _counts(facts)
    return result


def seed_of(task: str) -> int:
    """Seed of a task's resampling: different tasks draw independently, a task draws the same in every run."""
    return zlib.crc32(task.encode("utf-8", "backslashreplace"))


def _score_name(facts: TaskFacts) -> str:
    return PASS_AT_1 if facts.is_code else ACCURACY


def _mean(facts: TaskFacts, values: ArrayLike, factor: float = 1) -> Bootstrap:
    """Mean of one value for each item."""
    return bootstrap([values], mean_statistic, seed=seed_of(facts.task)).scaled(factor)


def _sums(items: Sequence[Sequence[SampleFacts]], value: Callable[[SampleFacts], float | None]) -> list[float]:
    """Sum over the samples of each item; a missing value counts as 0."""
    return [sum(value(sample) or 0 for sample in samples) for samples in items]


def _scores(facts: TaskFacts) -> Iterator[Measure]:
    scored = [sample for sample in facts.samples if sample.verdict is not None]
    if not scored:
        return
    verdicts = [[sample.scores[PASSED] for sample in samples] for samples in facts.by_item(scored)]
    passed = [[verdict.value > 0 for verdict in item] for item in verdicts]
    answers = [[verdict.extracted for verdict in item] for item in verdicts]
    scorers = sorted({verdict.scorer for item in verdicts for verdict in item})
    note = f"judged by {len(scorers)} scorers ({', '.join(scorers)}); score again" if len(scorers) > 1 else ""

    def percent(metric: str, values: ArrayLike) -> Measure:
        return Measure(metric, _PERCENT, _mean(facts, values, 100), scored, note)

    yield percent(_score_name(facts), [np.mean([verdict.value for verdict in item]) for item in verdicts])
    yield percent("extracted", [np.mean([answer is not None for answer in item]) for item in answers])
    num_samples = min(map(len, verdicts))
    if facts.is_code:
        for k in (k for k in _PASS_KS if k <= num_samples):
            yield percent(f"pass@{k}", pass_at_k([len(item) for item in passed], [sum(item) for item in passed], k))
    elif num_samples > 1:
        votes = [majority_passed(a[:num_samples], p[:num_samples]) for a, p in zip(answers, passed, strict=True)]
        yield percent(f"majority@{num_samples}", votes)


def _other_scores(facts: TaskFacts) -> Iterator[Measure]:
    """Metrics that scorers name themselves. Those that are only ever 0 or 1 are shares."""
    for metric in sorted({name for sample in facts.samples for name in sample.scores} - {PASSED}):
        judged = [sample for sample in facts.samples if metric in sample.scores]
        is_share = {sample.scores[metric].value for sample in judged} <= {0.0, 1.0}
        values = [np.mean([sample.scores[metric].value for sample in samples]) for samples in facts.by_item(judged)]
        yield Measure(metric, _PERCENT if is_share else "", _mean(facts, values, 100 if is_share else 1), judged)


def _add_speed(result: TaskMeasures, facts: TaskFacts, references: Sequence[Reference]) -> None:
    """Adds what can be timed, or says why nothing can."""
    seed, timings = seed_of(facts.task), facts.timings
    try:
        measured(timings)
    except DataError as error:
        result.notes.append(f"no speed: {error}")
        return
    alone = [sample for sample in facts.samples if sample.timing.counts]
    if not alone:
        result.notes.append("no speed: no sample was decoded alone after the warm-up")
        return
    if any(sample.timing.seconds == 0 for sample in alone):
        result.notes.append("no speed: a sample has no recorded time")
        return
    result.measures += [
        Measure("tps", "tokens/s", total_tps(timings, seed=seed), alone),
        Measure("tps_mean", "tokens/s", mean_tps(timings, seed=seed), alone),
        Measure("latency_mean", "s", mean_latency(timings, seed=seed), alone),
        Measure("latency_p50", "s", latency(timings, 0.5, seed=seed), alone),
        Measure("latency_p95", "s", latency(timings, 0.95, seed=seed), alone),
        Measure("forwards_per_second", "forwards/s", forward_rate(timings, seed=seed), alone),
        *_phases(facts, alone),
        *_bandwidth(facts, alone),
    ]
    for reference in references:
        try:
            ratio, num_left_out = speedup(timings, reference.facts.timings, seed=seed)
        except DataError as error:
            result.notes.append(f"no {reference.metric} over {reference.run_id}: {error}")
        else:
            note = f"over {reference.run_id}, {ratio.n} common items"
            note += f", {num_left_out} others left out" if num_left_out else ""
            result.measures.append(Measure(reference.metric, "x", ratio, alone, note))


def _phases(facts: TaskFacts, alone: Sequence[SampleFacts]) -> Iterator[Measure]:
    """Time of the first forward, which reads the prompt, and speed of all forwards after it, where recorded."""
    if any(sample.prefill_seconds is None or sample.tokens_first is None for sample in alone):
        return
    items = facts.by_item(alone)
    prefill = [[sample.prefill_seconds or 0.0 for sample in samples] for samples in items]
    yield Measure("prefill_seconds", "s", _mean(facts, [np.mean(seconds) for seconds in prefill]), alone)
    totals = _sums(items, lambda sample: sample.timing.seconds)
    seconds = [total - sum(first) for total, first in zip(totals, prefill, strict=True)]
    tokens = _sums(items, lambda sample: sample.timing.tokens - (sample.tokens_first or 0))
    if any(tokens) and any(seconds):
        yield Measure("decode_tps", "tokens/s", rate(tokens, seconds, seed=seed_of(facts.task)), alone)


def _bandwidth(facts: TaskFacts, alone: Sequence[SampleFacts]) -> Iterator[Measure]:
    """Shares of the device's bandwidth and of its limit, where one device was measured."""
    bandwidths = {sample.copy_bytes_per_second for sample in alone}
    bandwidth = bandwidths.pop()
    if bandwidths or not bandwidth or not all(sample.bytes_read for sample in alone):
        return
    items, seed = facts.by_item(alone), seed_of(facts.task)
    traffic = _sums(items, lambda sample: sample.bytes_read)
    seconds = _sums(items, lambda sample: sample.timing.seconds)
    yield Measure("mbu", _PERCENT, mbu(traffic, seconds, bandwidth, seed=seed).scaled(100), alone)
    weights = alone[0].weight_bytes
    if weights and all(sample.weight_bytes == weights for sample in alone):
        share = one_token_share(facts.timings, weights, bandwidth, seed=seed)
        yield Measure("one_token_share", _PERCENT, share.scaled(100), alone)


def _counts(facts: TaskFacts) -> Iterator[Measure]:
    """Tokens and forwards, and tokens per forward by every definition."""
    samples, items, seed = facts.samples, facts.by_item(), seed_of(facts.task)
    forwards = _sums(items, lambda sample: sample.timing.forwards)
    totals = {
        "tokens": _sums(items, lambda sample: sample.timing.tokens),
        "tokens_no_eos": _sums(items, lambda sample: sample.tokens_no_eos),
        "forwards": forwards,
    }
    if all(sample.tokens_canvas is not None for sample in samples):
        totals["tokens_canvas"] = _sums(items, lambda sample: sample.tokens_canvas)
    for name, values in totals.items():
        means = [total / len(item) for total, item in zip(values, items, strict=True)]
        yield Measure(f"{name}_mean", "forwards" if name == "forwards" else "tokens", _mean(facts, means), samples)
    if sum(forwards):
        for metric, name in (("tpf", "tokens"), ("tpf_canvas", "tokens_canvas")):
            if name in totals:
                yield Measure(metric, "tokens/forward", tpf(totals[name], forwards, seed=seed), samples)
    release = [[sample.tpf_release for sample in item if sample.tpf_release is not None] for item in items]
    if sum(map(len, release)) == len(samples):
        yield Measure("tpf_release", "tokens/forward", _mean(facts, [np.mean(item) for item in release]), samples)
