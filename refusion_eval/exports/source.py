"""What an export writes: each task of a run with its figures, and its samples with what they were asked."""

import hashlib
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from refusion_eval.benchmarks import Task, find_task, is_sealed
from refusion_eval.report.collect import Asked, Sources
from refusion_eval.results.facts import TaskFacts, natural_order, read_each, setting_text
from refusion_eval.results.measured import measurements_of
from refusion_eval.results.measurement import Measurement, RowKey, notes_of
from refusion_eval.store.records import PASSED, RELEASE_LOOP, SERVER, STOCK_GENERATE, Sample, ScoreRow, checking, moment
from refusion_eval.store.run_store import Run
from refusion_eval.types import Trace

log = logging.getLogger(__name__)

_LONGEST_NAME = 150  # characters of a name of a file, which ends with those of its format


class JudgedSample(NamedTuple):
    """A sample that has a verdict, with its question and right answer, none of them sealed."""

    sample: Sample
    verdict: ScoreRow
    prompt: str
    gold: str


class ExportedTask(NamedTuple):
    """One row of a run: a task under one set of settings and one protocol.

    Attributes:
        samples: those with a verdict in canonical order; None for a sealed task, and where the rows of the benchmark,
            without which nobody knows what was asked, are not at hand.
        created: time of the last record.
    """

    run: Run
    facts: TaskFacts
    measurements: Sequence[Measurement]
    samples: Sequence[JudgedSample] | None
    created: datetime

    @property
    def known(self) -> Task | None:
        return find_task(self.facts.task)

    @property
    def settings(self) -> dict[str, str]:
        return {name: setting_text(value) for name, value in self.facts.settings.items() if value is not None}

    @property
    def engine(self) -> tuple[str, str]:
        """Name and version of the engine that decoded: this project's or another, or a server as it names itself."""
        manifest = self.run.manifest
        if manifest.decoder == SERVER:
            told = manifest.settings.get("server", {})
            return str(told.get("name") or "unknown server"), str(told.get("version") or "unknown")
        told = manifest.settings.get("release_loop", {})
        if manifest.decoder == RELEASE_LOOP and told.get("code"):
            return str(told.get("entry")), str(told["code"])[:12]
        others = (STOCK_GENERATE, RELEASE_LOOP)
        if manifest.decoder in others or manifest.arguments.get("backend") == "transformers":
            return "transformers", str(manifest.versions.get("transformers", "unknown"))
        return "refusion_eval", manifest.package_version

    @property
    def config(self) -> str | None:
        """The configuration of the dataset; None where there is no choice, and where rows of several were asked."""
        configs = self.known.benchmark.source.configs if self.known else ()
        return configs[0] if len(configs) == 1 else None

    @property
    def num_fewshot(self) -> int | None:
        """Examples before a question: none in this project's own tasks; of lm-eval's tasks no record says it."""
        return 0 if self.known is not None and self.known.name == self.facts.task else None

    @property
    def origin(self) -> dict[str, str]:
        """Where the numbers are from, as texts: the run, its protocol, the command that continues it, the records."""
        extent = self.facts.extent
        facts = {
            "run": self.run.run_id,
            "protocol": self.facts.protocol.replace("|", ", "),
            "records": self.facts.records,
            "command": self.run.command_for(self.facts.task),
            "limited": extent.limited,
            "unfinished": extent.unfinished,
            "notes": " ".join(notes_of(self.measurements)),
        }
        return {name: text for name, text in facts.items() if text}

    @property
    def model_id(self) -> str:
        """Name of the model as on the hub, OWNER/NAME; of a folder of this machine local/NAME-HASH, of its weights."""
        manifest = self.run.manifest
        if manifest.checkpoint_revision and manifest.checkpoint.count("/") == 1:
            return "/".join(map(safe_name, manifest.checkpoint.split("/")))
        name = manifest.checkpoint.rstrip("/").rpartition("/")[2]
        return f"local/{safe_name('-'.join(filter(None, (name, manifest.checkpoint_hash[:12]))))}"


def read_exported(
    run_dirs: Iterable[str | os.PathLike[str]], sources: Sources | None = None, *, baseline: str | None = None
) -> Iterator[ExportedTask]:
    """The tasks of some runs that have a sample; without `sources`, tasks have no samples of their own.

    Raises:
        StoreError: a directory holds no readable run, two have one name, or the baseline is not among them.
    """
    taken: dict[tuple[str, RowKey], list[tuple[Sample, Mapping[str, ScoreRow]]]] = {}
    created: dict[tuple[str, RowKey], str] = {}

    def take(run: Run, row: RowKey, sample: Sample, scores: Mapping[str, ScoreRow], trace: Trace | None) -> None:
        key = (run.run_id, row)
        created[key] = max(created.get(key, ""), sample.created)
        if sources is not None and sample.error is None and PASSED in scores:
            taken.setdefault(key, []).append((sample, scores))

    runs = read_each(run_dirs, take, hash_records=True)
    log.info("computing the figures and their intervals ...")
    measurements = measurements_of(runs, baseline=baseline)
    for run, tasks in runs:
        for task in tasks:
            key = (run.run_id, task.row)
            if key not in created:
                continue
            of_row = (entry for entry in measurements if (entry.run_id, entry.row) == key)
            own = [entry for entry in of_row if not math.isnan(entry.value)]
            samples = None if sources is None else _judged(run, task, taken.get(key, []), sources)
            with checking(f"{run.run_id}: the time of a sample of {task.task}"):
                last = moment(created[key])
            yield ExportedTask(run, task, own, samples, last)


def _judged(
    run: Run, task: TaskFacts, taken: Sequence[tuple[Sample, Mapping[str, ScoreRow]]], sources: Sources
) -> list[JudgedSample] | None:
    samples = []
    if is_sealed(task.task, task.benchmark):
        log.warning("%s: only the figures of %s leave, because its authors keep its texts back", run.run_id, task.task)
        return None
    for sample, scores in sorted(taken, key=lambda pair: (natural_order(pair[0].item_id), pair[0].key.sample)):
        asked: Asked = sources.asked(run, sample)
        if asked.prompt is None:
            log.warning("%s: %s is written without its samples. %s", run.run_id, task.task, asked.note)
            return None
        samples.append(JudgedSample(sample, scores[PASSED], plain(asked.prompt), plain(asked.gold or "")))
    return samples


def file_name(task: ExportedTask, tasks: Iterable[ExportedTask]) -> str:
    """The task's name, with those of version, settings and protocol that tell it from other rows of the task."""
    rows = [other.facts.row.names for other in tasks if other.facts.task == task.facts.task]
    told = [part for part, *others in zip(task.facts.row.names, *rows, strict=True) if len(set(others)) > 1]
    return safe_name("-".join(filter(None, (task.facts.task, *told))))


def runs_of(tasks: Iterable[ExportedTask]) -> dict[str, list[ExportedTask]]:
    by_run: dict[str, list[ExportedTask]] = {}
    for task in tasks:
        by_run.setdefault(task.run.run_id, []).append(task)
    return by_run


def plain(text: str) -> str:
    """The text with escapes for lone surrogates, which readers of other formats refuse."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def safe_name(text: str) -> str:
    """A text as the name of a file or folder on any system, never one that leads elsewhere."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-. ") or "unnamed"
    return name if len(name) <= _LONGEST_NAME else f"{name[:100]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
