"""What tables need of a run, task by task: samples reduced to numbers, joined with their scores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from refusion_eval.benchmarks import is_mini
from refusion_eval.metrics.parallelism import tpf_release
from refusion_eval.metrics.roofline import bytes_read
from refusion_eval.metrics.speed import Timing
from refusion_eval.store.records import NO_ISOLATION, PASSED, Sample, ScoreRow
from refusion_eval.store.run_reader import Run, RunReader
from refusion_eval.trace import Draft, Trace


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """One good sample.

    Attributes:
        item_id: the benchmark's own name for the item.
        prompt_hash: hash of the rendered prompt.
        sample: its number among the samples of the item.
        timing: its cost; `timing.item` is the hash of the item, equal across runs on the same data.
        tokens_canvas: positions that became final, those behind the first EOS included; None without a trace.
        tokens_no_eos: tokens without the EOS that ends them.
        tpf_release: the release's TPF, None where it does not exist.
        bytes_read: bytes its forwards had to read, None if not known.
        copy_bytes_per_second: measured bandwidth of its device, None if not known.
        scores: metric -> judgement; empty if it was not scored.
        weight_bytes: bytes of the weights that one forward reads, None if not known.
        prefill_seconds: part of its time that the first forward took, which reads the prompt; None if not known.
        tokens_first: tokens kept that the first forward fixed; None without a trace.
    """

    item_id: str
    prompt_hash: str
    sample: int
    timing: Timing
    tokens_canvas: int | None
    tokens_no_eos: int
    tpf_release: float | None
    bytes_read: float | None
    copy_bytes_per_second: float | None
    scores: Mapping[str, ScoreRow]
    weight_bytes: float | None = None
    prefill_seconds: float | None = None
    tokens_first: int | None = None

    @property
    def verdict(self) -> ScoreRow | None:
        """The judgement whether the answer is right."""
        return self.scores.get(PASSED)


@dataclass(slots=True)
class TaskFacts:
    """All samples of one task under one set of settings, in canonical order.

    Attributes:
        task: name of the task.
        task_version: its version.
        benchmark: what it belongs to.
        settings: the decoder settings in force.
        samples: the good ones.
        num_errors: attempts that failed and were not made good since.
        hardware: labels of the machines the samples come from.
        num_expected: samples that were asked for; 0 if the run does not say.
    """

    task: str
    task_version: str
    benchmark: str
    settings: Mapping[str, Any]
    samples: list[SampleFacts] = field(default_factory=list)
    num_errors: int = 0
    hardware: set[str] = field(default_factory=set)
    num_expected: int = 0

    @property
    def mini(self) -> bool:
        """Whether this is a synthetic look-alike of the benchmark."""
        return is_mini(self.task)

    @property
    def finished(self) -> bool:
        """Whether every sample that was asked for is there, failed ones not counted."""
        return len(self.samples) >= self.num_expected

    @property
    def num_unscored(self) -> int:
        """Good samples without a verdict."""
        return sum(sample.verdict is None for sample in self.samples)

    @property
    def isolated(self) -> bool:
        """Whether no program ran without isolation, so that no verdict can be forged."""
        return not any(sample.verdict is not None and sample.verdict.tier == NO_ISOLATION for sample in self.samples)

    @property
    def timings(self) -> list[Timing]:
        """Cost of every good sample."""
        return [sample.timing for sample in self.samples]

    def by_item(self, samples: list[SampleFacts] | None = None) -> list[list[SampleFacts]]:
        """Samples (default: all good ones) grouped by item, in a fixed order of items."""
        groups: dict[Any, list[SampleFacts]] = {}
        for sample in self.samples if samples is None else samples:
            groups.setdefault(sample.timing.item, []).append(sample)
        return [sorted(groups[item], key=lambda one: one.sample) for item in sorted(groups)]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """One run: what it is, and its tasks ordered by name."""

    run: Run
    tasks: list[TaskFacts]


def read_facts(run_dir: str | os.PathLike[str]) -> RunFacts:
    """Reads a run directory. Raises StoreError if it holds no readable run."""
    with RunReader.open(run_dir) as reader:
        run = reader.run
        scores = reader.scores_by_sample()
        tasks: dict[tuple[str, str, str], TaskFacts] = {}
        for sample in reader.samples():
            identity = (sample.key.task, sample.key.task_version, sample.key.settings_hash)
            if identity not in tasks:
                tasks[identity] = TaskFacts(*identity[:2], sample.benchmark, sample.settings)
            facts = tasks[identity]
            facts.hardware.add(run.hardware(sample.process_id).label())
            if sample.error is not None:
                facts.num_errors += 1
            else:
                facts.samples.append(_reduced(sample, run, scores.get(sample.key, {})))
    names = [facts.task for facts in tasks.values()]
    for facts in tasks.values():
        if names.count(facts.task) == 1:  # of a task under two settings it is not known how many each should have
            facts.num_expected = run.expected.get(facts.task, 0)
    return RunFacts(run, [tasks[identity] for identity in sorted(tasks)])


def _reduced(sample: Sample, run: Run, scores: Mapping[str, ScoreRow]) -> SampleFacts:
    timing = Timing(
        item=sample.key.doc_hash,
        tokens=sample.num_tokens,
        forwards=sample.num_forwards,
        seconds=sample.seconds,
        batch_size=sample.batch_size,
        warm=sample.warm,
        hardware=run.hardware(sample.process_id).fingerprint(),
    )
    canvas, release, traffic, bandwidth, weights, first = None, None, None, None, None, None
    if sample.trace is not None:
        trace = Trace.from_json([event for event in sample.trace if event[0] != Draft.tag])
        fixed_at = trace.fixed_at()
        canvas = len(fixed_at)
        first = sum(forward == 0 for position, forward in fixed_at.items() if position < sample.num_tokens)
        if "slot_size" in sample.settings:
            release = tpf_release(trace, int(sample.settings["slot_size"]))
        if roofline := run.processes[sample.process_id].get("roofline"):
            sizes = {name: roofline[name] for name in ("weight_bytes", "cache_bytes_per_row")}
            traffic, bandwidth = bytes_read(trace, **sizes), roofline["copy_bytes_per_second"]
            weights = roofline["weight_bytes"]
    no_eos = sample.num_tokens - (sample.stop == "eos")
    return SampleFacts(
        item_id=sample.item_id,
        prompt_hash=sample.key.prompt_hash,
        sample=sample.key.sample,
        timing=timing,
        tokens_canvas=canvas,
        tokens_no_eos=no_eos,
        tpf_release=release,
        bytes_read=traffic,
        copy_bytes_per_second=bandwidth,
        scores=scores,
        weight_bytes=weights,
        prefill_seconds=sample.prefill_seconds,
        tokens_first=first,
    )
