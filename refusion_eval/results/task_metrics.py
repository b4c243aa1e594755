"""Every metric one task of one run can give, each with its bootstrap by item and the samples it rests on."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from refusion_eval.benchmarks import BENCHMARKS
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

# Benchmarks whose answer is a program: their accuracy is called pass@1.
CODE_BENCHMARKS = tuple(name for name, benchmark in BENCHMARKS.items() if benchmark.kind == "code")

_PASS_KS = (2, 5, 10, 20, 50, 100)
_PERCENT = "percent"


@dataclass(frozen=True, slots=True)
class Measure:
    """One metric of one task.

    Attributes:
        metric: its name in tables.
        unit: its unit.
        bootstrap: value and replicates.
        samples: what it was computed from.
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


@dataclass(frozen=True, slots=True)
class Reference:
    """The same task of a run that speed-ups are relative to.

    Attributes:
        run_id: of that run.
        facts: its task.
        metric: what the ratio is called.
    """

    run_id: str
    facts: TaskFacts
    metric: str = SPEEDUP


def measure_task(facts: TaskFacts, references: Sequence[Reference] = ()) -> TaskMeasures:
    """Everything a task's samples say; samples with errors are counted, and in no metric.

    Args:
        facts: the task.
        references: what its speed-ups are relative to.
    """
    result = TaskMeasures()
    if not facts.finished:
        result.notes.append(
            f"{HALF_WRITTEN}: {len(facts.samples)} of {facts.num_expected} samples are there, run its command again"
        )
    if facts.num_errors:
        total = facts.num_errors + len(facts.samples)
        result.notes.append(f"{facts.num_errors} of {total} samples are errors and in no figure")
    if not facts.samples:
        name = PASS_AT_1 if facts.benchmark in CODE_BENCHMARKS else ACCURACY
        undefined = Bootstrap(math.nan, np.full(RESAMPLES, np.nan), 0)
        result.measures.append(Measure(name, _PERCENT, undefined, []))
        return result
    if facts.num_unscored:
        result.notes.append(f"{facts.num_unscored} of {len(facts.samples)} {NOT_SCORED}")
    if not facts.isolated:
        result.notes.append(UNISOLATED)
    result.measures += [*_accuracy(facts), *_other_scores(facts)]
    _add_speed(result, facts, references)
    result.measures += _counts(facts)
    return result


def seed_of(task: str) -> int:
    """Seed of a task's resampling: different tasks draw independently, a task draws the same in every run."""
    return zlib.crc32(task.encode("utf-8", "backslashreplace"))


def _accuracy(facts: TaskFacts) -> Iterator[Measure]:
    scored = [sample for sample in facts.samples if sample.verdict is not None]
    if not scored:
        return
    items = facts.by_item(scored)
    verdicts = [[sample.scores[PASSED] for sample in samples] for samples in items]
    passed = [[verdict.value > 0 for verdict in of_item] for of_item in verdicts]
    answers = [[verdict.extracted for verdict in of_item] for of_item in verdicts]
    scorers = sorted({verdict.scorer for of_item in verdicts for verdict in of_item})
    note = f"judged by {len(scorers)} scorers ({', '.join(scorers)}); score again" if len(scorers) > 1 else ""
    is_code = facts.benchmark in CODE_BENCHMARKS

    def percent(metric: str, values: ArrayLike) -> Measure:
        return Measure(metric, _PERCENT, _mean(facts, values, 100), scored, note)

    yield percent(PASS_AT_1 if is_code else ACCURACY, [np.mean([v.value for v in of_item]) for of_item in verdicts])
    yield percent("extracted", [np.mean([answer is not None for answer in of_item]) for of_item in answers])
    num_samples = min(map(len, items))
    if is_code:
        for k in (k for k in _PASS_KS if k <= num_samples):
            yield percent(f"pass@{k}", pass_at_k([len(p) for p in passed], [sum(p) for p in passed], k))
    elif num_samples > 1:
        votes = [majority_passed(a[:num_samples], p[:num_samples]) for a, p in zip(answers, passed, strict=True)]
        yield percent(f"majority@{num_samples}", votes)


def _other_scores(facts: TaskFacts) -> Iterator[Measure]:
    """Metrics that scorers name themselves; those that are only ever 0 or 1 are shares."""
    for metric in sorted({name for sample in facts.samples for name in sample.scores} - {PASSED}):
        judged = [sample for sample in facts.samples if metric in sample.scores]
        is_share = {sample.scores[metric].value for sample in judged} <= {0.0, 1.0}
        values = [np.mean([one.scores[metric].value for one in samples]) for samples in facts.by_item(judged)]
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
    bandwidths = {sample.copy_bytes_per_second for sample in alone}
    if len(bandwidths) == 1 and (bandwidth := bandwidths.pop()) and all(sample.bytes_read for sample in alone):
        items = facts.by_item(alone)
        traffic = [sum(sample.bytes_read or 0.0 for sample in samples) for samples in items]
        seconds = [sum(sample.timing.seconds for sample in samples) for samples in items]
        result.measures.append(Measure("mbu", _PERCENT, mbu(traffic, seconds, bandwidth, seed=seed).scaled(100), alone))
        weights = alone[0].weight_bytes
        if weights and all(sample.weight_bytes == weights for sample in alone):
            share = one_token_share(timings, weights, bandwidth, seed=seed).scaled(100)
            result.measures.append(Measure("one_token_share", _PERCENT, share, alone))


def _phases(facts: TaskFacts, alone: list[SampleFacts]) -> Iterator[Measure]:
    """Time of the first forward, which reads the prompt, and speed of all behind it, where that was recorded."""
    if any(sample.prefill_seconds is None or sample.tokens_first is None for sample in alone):
        return
    items, seed = facts.by_item(alone), seed_of(facts.task)
    prefill = [[sample.prefill_seconds or 0.0 for sample in of_item] for of_item in items]
    yield Measure("prefill_seconds", "s", _mean(facts, [np.mean(of_item) for of_item in prefill], 1), alone)
    seconds = [sum(s.timing.seconds for s in of_item) - sum(p) for of_item, p in zip(items, prefill, strict=True)]
    tokens = [sum(s.timing.tokens - (s.tokens_first or 0) for s in of_item) for of_item in items]
    if any(tokens) and any(seconds):
        yield Measure("decode_tps", "tokens/s", rate(tokens, seconds, seed=seed), alone)


def _counts(facts: TaskFacts) -> Iterator[Measure]:
    samples, items = facts.samples, facts.by_item()
    tokens = [sum(sample.timing.tokens for sample in of_item) for of_item in items]
    forwards = [sum(sample.timing.forwards for sample in of_item) for of_item in items]
    if sum(forwards):
        yield Measure("tpf", "tokens/forward", tpf(tokens, forwards, seed=seed_of(facts.task)), samples)
    release = [[sample.tpf_release for sample in of_item if sample.tpf_release is not None] for of_item in items]
    if sum(map(len, release)) == len(samples):
        values = [float(np.mean(of_item)) for of_item in release]
        yield Measure("tpf_release", "tokens/forward", _mean(facts, values, 1), samples)
    no_eos = [sum(sample.tokens_no_eos for sample in of_item) for of_item in items]
    averaged = [("tokens", "tokens", tokens), ("tokens_no_eos", "tokens", no_eos), ("forwards", "forwards", forwards)]
    if all(sample.tokens_canvas is not None for sample in samples):
        canvas = [sum(sample.tokens_canvas or 0 for sample in of_item) for of_item in items]
        averaged.append(("tokens_canvas", "tokens", canvas))
        if sum(forwards):
            yield Measure("tpf_canvas", "tokens/forward", tpf(canvas, forwards, seed=seed_of(facts.task)), samples)
    for name, unit, totals in averaged:
        values = [total / len(of_item) for total, of_item in zip(totals, items, strict=True)]
        yield Measure(f"{name}_mean", unit, _mean(facts, values, 1), samples)


def _mean(facts: TaskFacts, values: ArrayLike, factor: float) -> Bootstrap:
    return bootstrap([values], mean_statistic, seed=seed_of(facts.task)).scaled(factor)
