"""Runs -> measurements: one for each run, task and metric, and for each mean over tasks; equal for equal records."""

import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from refusion_eval import metrics
from refusion_eval.benchmarks.extract.formulas import normal_form
from refusion_eval.errors import DataError, StoreError
from refusion_eval.metrics import RESAMPLES, Bootstrap
from refusion_eval.results.cautions import Conditions, that_hold
from refusion_eval.results.collapse import SIGNS
from refusion_eval.results.facts import RunFacts, SampleFacts, TaskFacts, digest, on_common_items, read_each
from refusion_eval.results.measurement import AVERAGE, MEAN_TASK, OF_LOOPS, VARIES, ByItem, Measurement
from refusion_eval.results.metric_list import (
    ACCURACY,
    AVG_AT,
    BY_NAME,
    MAJORITY_AT,
    METRICS,
    PASS_AT,
    PASS_AT_1,
    PERCENT,
    SCORES,
    SPEED_METRICS,
    UNSTATED,
    Samples,
    place_of,
)
from refusion_eval.results.published import system_key
from refusion_eval.results.results_file import read_csv, read_json
from refusion_eval.store.records import BY_FILTER, PASSED, STATED, STOCK_GENERATE, ScoreRow
from refusion_eval.store.run_store import Run

AUTOREGRESSIVE = "autoregressive"
_NUM_NAMED = 5  # items in a note

# Those of which a mean over tasks is all tokens / all forwards, so that a task weighs as much as it has forwards.
_POOLED = ("tpf", "tpf_decoder", "tpf_canvas")
# Metrics that systems are compared by; those of many points would need too much memory for all metrics.
_COMPARED = (*SCORES, "tps", "latency_mean", "tpf", "tokens_mean")


class Measure(NamedTuple):
    """One metric of one task: its value and replicates, the samples they rest on, and what a reader must know."""

    metric: str
    unit: str
    bootstrap: Bootstrap
    samples: Sequence[SampleFacts]
    note: str = ""
    scores: ArrayLike = ()  # share of right samples of each item, [items]
    by_sample: Sequence[float] = ()  # of a score of several samples: that of each sample number over all items


def read_measurements(
    sources: Iterable[str | os.PathLike[str]], *, baseline: str | None = None, hash_records: bool = False
) -> list[Measurement]:
    """The measurements of run directories, results files (CSV) and exports (JSON); StoreError for unreadable ones.

    Those that are NaN are left out, except where the samples are still to come.
    """
    paths = [Path(source) for source in sources]
    files = [path for path in paths if path.is_file()]
    measurements = [entry for path in files for entry in (read_json if path.suffix == ".json" else read_csv)(path)]
    directories = [path for path in paths if not path.is_file()]
    if directories:
        measurements += run_measurements(directories, baseline=baseline, hash_records=hash_records)
    return [entry for entry in measurements if entry.unfinished or not math.isnan(entry.value)]


def run_measurements(
    run_dirs: Iterable[str | os.PathLike[str]],
    *,
    baseline: str | None = None,
    hash_records: bool = False,
    common_items: bool = False,
) -> list[Measurement]:
    """`measurements_of` for directories, on the items that all have judged if those are asked for.

    Raises StoreError also if a directory cannot be read.
    """
    runs = read_each(run_dirs, hash_records=hash_records)
    return measurements_of(on_common_items(runs) if common_items else runs, baseline=baseline)


def measurements_of(runs: Sequence[RunFacts], *, baseline: str | None = None) -> list[Measurement]:
    """Every measurement of some runs; StoreError if two have the same name, or the baseline is not among them."""
    names = [facts.run.run_id for facts in runs]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise StoreError(f"two run directories are called {doubled[0]}; name each once, and rename one if they differ")
    if baseline is not None and baseline not in names:
        listed = ", ".join(sorted(names))
        raise StoreError(f"the baseline {baseline!r} is none of the runs ({listed}); add it or pick one")
    measurements = [entry for facts in runs for entry in _measurements_of_run(facts, runs, baseline)]
    return sorted(measurements, key=_sort_key)


def _measurements_of_run(facts: RunFacts, runs: Sequence[RunFacts], baseline: str | None) -> Iterator[Measurement]:
    references = {
        "speedup": _reference_run(facts, runs, AUTOREGRESSIVE, baseline),
        "speedup_stock": _reference_run(facts, runs, STOCK_GENERATE),
    }
    measured_tasks: list[tuple[TaskFacts, list[Measure]]] = []
    for task in facts.tasks:
        notes = _notes(task)
        if facts.run.manifest.attention == "flash":
            notes.append("flash-attn computed causal forwards and torch's attention the others")
        try:
            alone = _timed(task)
        except DataError as error:
            notes += [f"no speed: {error}"] if task.samples else []
            alone = []
        decoded = [sample for sample in task.samples if sample.forwards != 0]
        # A text without a thinking block spends no token in one, where others of its task have one.
        thinking = task.samples if any(sample.thinks for sample in task.samples) else []
        measures = [*_scores(task), *_speed(task, alone), *_from_list("decoded", task, decoded)]
        measures += [*_from_list("thoughts", task, thinking), *_collapse(task, decoded), *_unstated(task)]
        measures += _by_instruction(task)
        for metric, (reference, _) in references.items():
            if reference is not None and alone and not any(sample.apart for sample in alone):
                try:
                    measures += _speedup(metric, task, alone, facts.run, reference)
                except DataError as error:
                    notes.append(f"no {metric} over {reference.run.run_id}: {error}")
        notes += [refusal for _, refusal in references.values() if refusal]
        measured_tasks.append((task, measures))
        for measure in measures:
            yield _measurement(facts.run, [task], [measure], [*notes, measure.note])
    asked = [part for part in measured_tasks if not (part[0].extent.missing or part[0].is_control)]
    for kind in dict.fromkeys(task.row.kind for task, _ in asked):
        others = [task for task, _ in asked if task.row.kind != kind]
        waiting = [task for task in others if not task.asked and task.mini == kind[0]]
        yield from _mean_measurements(facts.run, [part for part in asked if part[0].row.kind == kind], waiting)


def _mean_measurements(
    run: Run, part: Sequence[tuple[TaskFacts, list[Measure]]], waiting: Sequence[TaskFacts]
) -> Iterator[Measurement]:
    """Means over tasks, of the metrics that every task has; pass@1 of a code task is its accuracy.

    They are unweighted but for tokens a forward, which are all tokens of the tasks by all forwards. Tasks that wait for
    their first sample are in no mean, and each mean says so.
    """
    tasks = [task for task, _ in part]
    if len(tasks) < 2 or len({task.task for task in tasks}) < len(tasks):
        return  # one task needs no mean; a task under two settings has no single score
    by_name = [{_mean_name(measure.metric): measure for measure in measures} for _, measures in part]
    for metric in by_name[0]:
        if all(metric in measures for measures in by_name):
            over = "all tokens by all forwards of" if metric in _POOLED else "unweighted mean over"
            of_what = f"{over} {len(tasks)} tasks ({', '.join(task.task for task in tasks)})"
            yield _measurement(run, tasks, [measures[metric] for measures in by_name], [of_what], waiting)


def _measurement(
    run: Run,
    tasks: Sequence[TaskFacts],
    measures: Sequence[Measure],
    notes: Sequence[str],
    waiting: Sequence[TaskFacts] = (),
) -> Measurement:
    """One metric of one task, or of the mean of several tasks."""
    manifest = run.manifest
    if len(tasks) > 1 and measures[0].metric in _POOLED:
        strata = [(measure.samples, seed_of(task.task)) for task, measure in zip(tasks, measures, strict=True)]
        combined = metrics.pooled_rate(strata, *BY_NAME[measures[0].metric].of)
    else:
        combined = metrics.mean_of([measure.bootstrap for measure in measures])
    interval = combined.interval()
    samples = [sample for measure in measures for sample in measure.samples]
    forwards, tokens = ([getattr(sample, name) for sample in samples] for name in ("forwards", "tokens"))
    settings = _common_settings(tasks)
    is_mean, hashes = len(tasks) > 1, [task.records for task in tasks]
    together = Conditions.joined([task.conditions(run) for task in tasks])
    for name in ("unfinished", "limited"):
        texts = {task.task: getattr(task.extent, name) for task in (*tasks, *waiting)}
        together[name] = "|".join(f"{task} {text}" if len(texts) > 1 else text for task, text in texts.items() if text)
    together["num_rounds"] = max(1, together["num_rounds"])
    columns = [measure.by_sample for measure in measures]
    are_even = len(set(map(len, columns))) == 1  # tasks may have other numbers of samples
    by_sample = [fmean(scores) for scores in zip(*columns, strict=True)] if are_even else []
    return Measurement(
        origin="measured",
        system=system_key(manifest.system, manifest.backbone, settings, loop=OF_LOOPS.get(manifest.decoder, "")),
        label=manifest.system,
        **{name: getattr(manifest, name) for name in ("backbone", "decoder", "dtype", "device", "attention")},
        benchmark=AVERAGE if is_mean else tasks[0].benchmark or tasks[0].task,
        task=MEAN_TASK if is_mean else tasks[0].task,
        task_version="|".join(sorted({task.task_version for task in tasks})),
        mini=tasks[0].mini,
        num_tasks=len(tasks),
        metric=_mean_name(measures[0].metric) if is_mean else measures[0].metric,
        value=interval.value,
        ci_low=interval.low,
        ci_high=interval.high,
        unit=measures[0].unit,
        n=interval.n,
        samples=len(samples),
        **together,
        missing="" if is_mean else tasks[0].extent.missing,
        command=run.command_for(next((task for task in tasks if task.extent.unfinished), tasks[0]).task),
        scored=not any(task.num_unscored for task in tasks),
        counts_encoder=measures[0].metric in ("tpf", "forwards_mean")
        and any(sample.decoder_forwards is not None for task in tasks for sample in task.samples),
        num_unscored=sum(task.num_unscored for task in tasks),
        num_seeds=max(1, len(by_sample)) if measures[0].metric.startswith(AVG_AT) else 1,
        seed_sd=stdev(by_sample) if by_sample else 0.0,
        batch_size="|".join(map(str, sorted({sample.batch_size for sample in samples}))),
        forwards=None if None in forwards else sum(forwards),
        tokens=None if None in tokens else sum(tokens),
        seconds=math.fsum(sample.seconds for sample in samples),
        settings=settings,
        run_id=run.run_id,
        items=digest(task.items for task in tasks),
        all_but_seed=digest(task.all_but_seed for task in tasks),
        records=digest(hashes) if is_mean and any(hashes) else hashes[0],
        settings_hash="" if is_mean else tasks[0].row.settings_hash,
        by_item=_by_item(tasks, measures, combined) if measures[0].metric in _COMPARED else None,
        notes=tuple(note for sentence in notes for note in sentence.split("; ") if note),
    )


def _by_item(tasks: Sequence[TaskFacts], measures: Sequence[Measure], combined: Bootstrap) -> ByItem:
    timed = measures[0].metric in SPEED_METRICS
    parts = list(zip(tasks, measures, strict=True))
    items = digest(
        f"{task.task} {sample.item} {sample.round if timed else ''}" for task, part in parts for sample in part.samples
    )
    scores = {task.task: np.asarray(part.scores) for task, part in parts if np.size(part.scores)}
    samples = [sample for measure in measures for sample in measure.samples] if timed else ()
    return ByItem(items, combined.replicates, scores, samples)


def _reference_run(
    facts: RunFacts, runs: Sequence[RunFacts], decoder: str, baseline: str | None = None
) -> tuple[RunFacts | None, str]:
    """The run that speed-ups over a decoder are relative to, or None and, if that needs saying, why."""
    manifest = facts.run.manifest

    def differing(other: RunFacts, *names: str) -> list[str]:
        return [name for name in names if getattr(manifest, name) != getattr(other.run.manifest, name)]

    if facts.run.run_id == baseline or (baseline is None and manifest.decoder == decoder):
        return None, ""
    if baseline is not None:
        reference = next(other for other in runs if other.run.run_id == baseline)
        names = differing(reference, "dtype", "device")
        return (None, f"no speed-up over {baseline}: {' and '.join(names)} differ") if names else (reference, "")
    # Without a named baseline it is the one run of the decoder among them, if there is exactly one.
    comparable = ("backbone", "dtype", "device")
    of_decoder = [other for other in runs if other.run.manifest.decoder == decoder]
    candidates = [other for other in of_decoder if not differing(other, *comparable)]
    if len(candidates) > 1:
        run_ids = ", ".join(sorted(other.run.run_id for other in candidates))
        return None, f"no speed-up: several {decoder} runs could be the baseline ({run_ids}); name one"
    if not candidates and len(runs) > 1 and decoder == AUTOREGRESSIVE:
        return None, f"no speed-up: no autoregressive run of the same {', '.join(comparable)} lies beside this one"
    return (candidates[0] if candidates else None), ""


def _common_settings(tasks: Sequence[TaskFacts]) -> dict[str, str]:
    """Settings of the tasks as text; `VARIES` where the tasks differ."""
    tables = [dict(task.row.settings) for task in tasks]
    values = {name: {table.get(name) for table in tables} for name in sorted(set().union(*tables))}
    return {name: tables[0].get(name, "") if len(texts) == 1 else VARIES for name, texts in values.items()}


def _mean_name(metric: str) -> str:
    return ACCURACY if metric == PASS_AT_1 else metric


def _sort_key(measurement: Measurement) -> tuple:
    place = (measurement.label, measurement.run_id, measurement.mini, measurement.is_mean, measurement.task)
    return *place, sorted(measurement.settings.items()), measurement.protocol, *place_of(measurement.metric)


def _notes(task: TaskFacts) -> list[str]:
    """What is known of a task besides what its cautions say."""
    unjudged, rounds = task.unjudged, {sample.round for sample in task.samples}
    more = f" and {len(unjudged) - _NUM_NAMED} more" if len(unjudged) > _NUM_NAMED else ""
    sentences = {
        f"no verdict was possible, which counts as wrong: {', '.join(unjudged[:_NUM_NAMED])}{more}": unjudged,
        f"timed in {len(rounds)} rounds": len(rounds) > 1,
    }
    return that_hold(sentences)


def seed_of(task: str) -> int:
    """Seed of a task's resampling: different tasks draw independently, a task draws the same in every run."""
    return zlib.crc32(task.encode("utf-8", "backslashreplace"))


def _scores(task: TaskFacts) -> Iterator[Measure]:
    """Accuracy and what goes with it, then the metrics that scorers name themselves."""
    # An accuracy over the texts that happened to be judged would leave out those that a program kept from it.
    withheld = not task.extent.unfinished and 0 < task.num_unscored < len(task.samples)
    if not task.samples or withheld:  # a task with nothing but errors has a figure that says so
        undefined = Bootstrap(math.nan, np.full(RESAMPLES, np.nan), 0)
        yield Measure(task.score_name, PERCENT, undefined, task.samples)
    for metric in sorted({name for sample in task.samples for name in sample.scores} if not withheld else ()):
        judged = [sample for sample in task.samples if metric in sample.scores]
        scores = [[sample.scores[metric] for sample in samples] for samples in metrics.by_item(judged)]
        means = [float(np.mean([score.value for score in item])) for item in scores]
        if metric == PASSED:
            yield from _accuracy(task, judged, scores, means)
        else:  # what is only ever 0 or 1 is a share
            is_share = {score.value for item in scores for score in item} <= {0.0, 1.0}
            combined = (metrics.accuracy if is_share else metrics.bootstrap_mean)(means, seed=seed_of(task.task))
            combined = combined.scaled(100 if is_share else 1)
            yield Measure(metric, PERCENT if is_share else "", combined, judged)


def _percent(
    task: TaskFacts, samples: Sequence[SampleFacts], metric: str, values: ArrayLike, note: str = ""
) -> Measure:
    """The share of items, or the mean over items of the share of their samples, in percent; `values` are [items]."""
    share = metrics.accuracy(values, seed=seed_of(task.task)).scaled(100)
    return Measure(metric, PERCENT, share, samples, note, values)


def _accuracy(
    task: TaskFacts, judged: Sequence[SampleFacts], verdicts: Sequence[Sequence[ScoreRow]], means: ArrayLike
) -> Iterator[Measure]:
    passed = [[verdict.value > 0 for verdict in item] for item in verdicts]
    answers = [[normal_form(task.kind, verdict.extracted) for verdict in item] for item in verdicts]
    scorers = sorted({verdict.scorer for item in verdicts for verdict in item})
    note = f"judged by {len(scorers)} scorers ({', '.join(scorers)}); score again" if len(scorers) > 1 else ""
    percent = partial(_percent, task, judged, note=note)
    num_samples = min(map(len, verdicts))
    columns = np.array([item[:num_samples] for item in passed])
    by_sample = (100 * columns.mean(axis=0)).tolist() if num_samples > 1 else ()
    yield percent(task.score_name, means)._replace(by_sample=by_sample)
    yield percent("extracted", [np.mean([answer is not None for answer in item]) for item in answers])
    if num_samples == 1:
        return
    yield percent(f"{AVG_AT}{num_samples}", columns.mean(axis=1))._replace(by_sample=by_sample)
    sizes, hits = [len(item) for item in passed], [sum(item) for item in passed]
    for k in metrics.reported_ks(num_samples):
        yield percent(f"{PASS_AT}{k}", metrics.pass_at_k(sizes, hits, k))
    if not task.is_code and task.kind != "instructions":
        of_items = zip(answers, passed, strict=True)
        votes = [metrics.majority_passed(a[:num_samples], p[:num_samples]) for a, p in of_items]
        yield percent(f"{MAJORITY_AT}{num_samples}", votes)


def _collapse(task: TaskFacts, decoded: Sequence[SampleFacts]) -> Iterator[Measure]:
    """The shares of answers that were cut, that show any sign of collapse, and that show each of them."""
    names = ("cut", "collapsed", *SIGNS)
    shown = [
        [(sample.is_cut, bool(sample.signs), *(sign in sample.signs for sign in SIGNS)) for sample in item]
        for item in metrics.by_item(decoded)
    ]
    for place, name in enumerate(names if decoded else ()):
        yield _percent(task, decoded, name, [np.mean([of_sample[place] for of_sample in item]) for item in shown])


def _unstated(task: TaskFacts) -> Iterator[Measure]:
    """The share of texts that count as right and state no answer, where a rule takes any formula for the answer."""
    judged = [sample for sample in task.samples if {PASSED, STATED} <= sample.scores.keys()]
    if judged:
        means = [
            np.mean([s.scores[PASSED].value > 0 and s.scores[STATED].extracted is None for s in item])
            for item in metrics.by_item(judged)
        ]
        yield _percent(task, judged, UNSTATED, means)


def _by_instruction(task: TaskFacts) -> Iterator[Measure]:
    """The shares of all instructions that were followed, by the strict and by the loose rule."""
    if task.kind != "instructions":
        return
    loose = f"{BY_FILTER}loose"
    for metric, name in ((PASSED, f"{BY_FILTER}instruction"), (loose, f"{BY_FILTER}instruction, loose")):
        if judged := [sample for sample in task.samples if metric in sample.scores]:
            flags = [[flag for s in item for flag in s.scores[metric].followed] for item in metrics.by_item(judged)]
            share = metrics.bootstrap_ratio(list(map(sum, flags)), list(map(len, flags)), seed=seed_of(task.task))
            yield Measure(name, PERCENT, share.scaled(100), judged)


def _timed(task: TaskFacts) -> list[SampleFacts]:
    """The samples that speed is computed from. Raises DataError if there are none, with the reason."""
    if all(sample.forwards == 0 for sample in task.samples):
        raise DataError("texts were scored by their log-likelihoods, and none was decoded")
    alone = metrics.measured(task.samples)
    if not alone:
        raise DataError("no sample was decoded alone after the warm-up")
    if any(sample.seconds == 0 for sample in alone):
        raise DataError("a sample has no recorded time")
    return alone


def _speed(task: TaskFacts, alone: Sequence[SampleFacts]) -> Iterator[Measure]:
    """Throughput, latency, and the use of the bandwidth where that of one device is known."""
    if not alone:
        return
    apart = any(sample.apart for sample in alone)
    yield from _from_list("apart" if apart else "timed", task, alone, timed=True)
    yield from _from_list("told", task, alone, timed=True)
    quantiles = metrics.latencies(alone, (0.5, 0.95), seed=seed_of(task.task))
    for name, quantile in zip(("latency_p50", "latency_p95"), quantiles, strict=True):
        yield Measure(f"server_{name}" if apart else name, "s", quantile, alone)


def _from_list(
    of: Samples, task: TaskFacts, samples: Sequence[SampleFacts], *, timed: bool = False
) -> Iterator[Measure]:
    """The metrics of the list that these samples have; intervals of timed ones cover rounds as well as items."""
    measurable: dict[str, tuple[str, ...]] = {}
    for metric in (metric for metric in METRICS if metric.samples == of):
        columns = [[getattr(sample, name) for sample in samples] for name in metric.of]
        # Tokens per second of later forwards mean nothing where the first forward fixed all tokens.
        divided = columns if metric.name == "decode_tps" else columns[1:]
        if any(None in column for column in columns) or not all(map(any, divided)) or not samples:
            continue
        measurable[metric.name] = metric.of
    if measurable:
        combined = metrics.resampled(samples, list(measurable.values()), seed=seed_of(task.task), timed=timed)
        for name, bootstrap in zip(measurable, combined, strict=True):
            unit = BY_NAME[name].unit
            yield Measure(name, unit, bootstrap.scaled(100 if unit == PERCENT else 1), samples)


def _speedup(
    metric: str, task: TaskFacts, alone: Sequence[SampleFacts], run: Run, reference: RunFacts
) -> list[Measure]:
    """TPS over that of a reference run, if it has the task in this version once. Raises DataError without a ratio."""
    same = [other for other in reference.tasks if (other.task, other.task_version) == (task.task, task.task_version)]
    if len(same) > 1:
        same = [other for other in same if other.protocol == task.protocol]
    if len(same) != 1:
        return []
    ratio, num_left_out = metrics.speedup(task.samples, same[0].samples, seed=seed_of(task.task))
    note = f"over {reference.run.run_id}, {ratio.n} common items"
    note += f", {num_left_out} others left out" if num_left_out else ""
    here, there = run.manifest.attention, reference.run.manifest.attention
    note += f", attention by other kernels ({here} against {there})" if here != there else ""
    return [Measure(metric, "x", ratio, alone, note)]
