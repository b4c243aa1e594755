"""Run directories -> content of the page: figures by task, lists of samples, and chunks of everything else."""

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from refusion_eval.benchmarks import is_sealed
from refusion_eval.report.assemble import ChunkWriter
from refusion_eval.report.frames import LOOKS
from refusion_eval.report.replay import Spell, Speller
from refusion_eval.report.sample import body, list_row, rounded
from refusion_eval.results.cautions import FEWER, FEWER_SENTENCE, Caution, that_hold
from refusion_eval.results.facts import RunFacts, natural_order, read_each
from refusion_eval.results.measured import measurements_of
from refusion_eval.results.measurement import MEAN_TASK, Measurement, RowKey, have_fewer, notes_of
from refusion_eval.results.metric_list import BY_NAME, SPEED_METRICS, is_cost, place_of
from refusion_eval.results.published import system_key
from refusion_eval.results.steps import HEADINGS, NOTES, Tally
from refusion_eval.store.records import Sample, ScoreRow
from refusion_eval.store.run_store import Run
from refusion_eval.types import Trace

log = logging.getLogger(__name__)

# The colour, marker (matplotlib's name) and dashes of a system, by its key and its decoder, as the page reads them.
Look = Callable[[str, str], dict[str, Any]]
_LONGEST_QUESTION, _LONGEST_GOLD = 140, 48  # characters of a list


def no_look(key: str, decoder: str) -> dict[str, Any]:
    return {"colour": "#7f7f7f", "marker": "o", "dashes": []}


class Asked(NamedTuple):
    prompt: str | None
    gold: str | None
    note: str = ""


class Sources(Protocol):
    """Finds what records do not hold: questions, right answers and tokenizers."""

    def asked(self, run: Run, sample: Sample) -> Asked:
        """The question of a sample. The prompt of a sealed task is never shown."""

    def spell(self, run: Run) -> Spell | None:
        """Gives the text of token ids of the run, None if its tokenizer is not at hand."""


# Chunk and index of a question there, and its number in the list of its task.
Place = tuple[tuple[str, int], int]


@dataclass(slots=True)
class _TaskQuestions:
    """The questions of a task; `shared` is what all prompts begin with, an instruction or the chat template."""

    shared: str | None = None
    prompts: list[str] = field(default_factory=list)
    golds: list[str] = field(default_factory=list)

    def add(self, prompt: str, gold: str) -> int:
        shared = prompt if self.shared is None else self.shared
        self.shared = os.path.commonprefix([shared, prompt])  # noqa: RUF071, of characters and not of folders
        # The shared part only gets shorter, so the shown part of the prompt is within what is kept.
        self.prompts.append(prompt[: len(self.shared) + _LONGEST_QUESTION])
        self.golds.append(_short(gold, _LONGEST_GOLD))
        return len(self.golds) - 1

    def as_list(self) -> dict[str, list[str]]:
        start = (self.shared or "").rfind("\n") + 1
        return {"question": [_short(prompt[start:], _LONGEST_QUESTION) for prompt in self.prompts], "gold": self.golds}


def _short(text: str, longest: int) -> str:
    return " ".join(text.split())[:longest]


class Questions:
    """Collects the questions of all runs; one that several runs asked is stored once."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._whole, self._lists = ChunkWriter("q"), ChunkWriter("l")
        self._places: dict[tuple[str, str, str], Place] = {}
        self._tasks: dict[str, _TaskQuestions] = {}

    def add(self, run: Run, sample: Sample, sealed: bool) -> Place:
        """The place of a sample's question, which is left out if the task is sealed."""
        identity = (sample.key.task, sample.key.doc_hash, sample.key.prompt_hash)
        if identity not in self._places:
            asked = self._sources.asked(run, sample)
            asked = Asked(None, asked.gold) if sealed else asked
            of_task = self._tasks.setdefault(sample.key.task, _TaskQuestions())
            number = of_task.add(asked.prompt or "", asked.gold or "")
            self._places[identity] = self._whole.add(asked._asdict()), number
        return self._places[identity]

    def finish(self) -> tuple[dict[str, str], dict[str, str]]:
        """All chunks, and the name of the chunk with the list of each task."""
        names = {}
        for task, questions in self._tasks.items():
            names[task], _ = self._lists.add(questions.as_list())
            self._lists.flush()
        self._whole.flush()
        return self._whole.chunks | self._lists.chunks, names


def encoded_marks(cautions: Iterable[Caution]) -> list[dict[str, Any]]:
    """Cautions as the page reads them: the mark of a row, the sentence and advice, and whether it is of speeds only."""
    return [
        {
            "kind": caution.kind,
            "label": caution.label,
            "amount": caution.amount,
            "sentence": caution.sentence + (f" To continue it: {caution.advice}" if caution.advice else ""),
            "advice": caution.advice,
            "of_speed": caution.scope == "speed",
        }
        for caution in dict.fromkeys(cautions)
    ]


def mark_fewer(cells: Sequence[tuple[RowKey, dict[str, Any]]]) -> None:
    """Adds the mark to cells that have fewer items than another one of their source."""
    fewer = have_fewer((row.source, cell["items"]) for row, cell in cells)
    for (_, cell), has_fewer in zip(cells, fewer, strict=True):
        cell["marks"] += encoded_marks([Caution(FEWER, FEWER_SENTENCE)] * has_fewer)


def metrics_of(cells: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the page knows of the metrics of some cells, in their order."""
    names = sorted({name for cell in cells for name in cell["metrics"]}, key=place_of)
    return {
        "metrics": names,
        "labels": {name: BY_NAME[name].label for name in names if name in BY_NAME},
        "speed": list(SPEED_METRICS),
        "costs": [name for name in names if is_cost(name)],
    }


def warnings(cells: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Cautions about the table as a whole: columns whose figures are not of the same kind."""
    machines = sorted({label for run in runs for label in run["hardware"]})
    several = f"Speed was measured on {len(machines)} machines and must not be compared across them"
    sentences = {f"{several}: {' | '.join(machines)}.": len(machines) > 1}
    versions: dict[str, set[str]] = defaultdict(set)
    for cell in cells:
        if not cell["mean"]:
            versions[cell["task"]].add(cell["version"])
    for task, names in sorted(versions.items()):
        listed = ", ".join(sorted(names))
        sentences[f"{task} is here in versions {listed}, whose figures must not be compared."] = len(names) > 1
    return that_hold(sentences)


@dataclass(frozen=True, slots=True)
class ReportData:
    """Content of a page: the JSON value that it reads when it opens, and the parts that it reads later, by name.

    `notes` says in sentences what the page marks: cautions, runs that lack samples, limits and what slowed a machine.
    """

    index: dict[str, Any]
    chunks: Mapping[str, str]
    notes: Sequence[str]


@dataclass(slots=True)
class _Part:
    speller: Speller
    machines: Mapping[str, str]
    rows: dict[RowKey, list[dict[str, Any]]] = field(default_factory=dict)
    tallies: dict[RowKey, Tally] = field(default_factory=dict)  # of the recorded steps
    created: set[str] = field(default_factory=set)  # times of its samples
    seconds: float = 0.0


def collect(
    run_dirs: Sequence[str | os.PathLike[str]],
    sources: Sources,
    *,
    baseline: str | None = None,
    look: Look = no_look,
) -> ReportData:
    """Reads runs, finished or not. Raises StoreError for a directory without a readable run, or two of one name."""
    collector = _Collector(sources)
    facts = read_each(run_dirs, collector.take)
    log.info("computing the figures and their intervals ...")
    measurements = measurements_of(facts, baseline=baseline)
    runs, placed = [], list[tuple[RowKey, dict[str, Any]]]()
    for number, run_facts in enumerate(facts):
        run = run_facts.run
        own = [measurement for measurement in measurements if measurement.run_id == run.run_id]
        placed += [(row, {**cell, "run": number}) for row, cell in collector.cells(run_facts, own)]
        key = own[0].system if own else system_key(run.manifest.system, run.manifest.backbone, {}, loop="")
        runs.append(collector.about(run) | look(key, run.manifest.decoder))
    mark_fewer(placed)
    cells = [cell for _, cell in placed]
    chunks, questions = collector.chunks()
    warnings_of_table = warnings(cells, runs)
    index = {
        "title": "refusion_eval report",
        "runs": runs,
        "cells": cells,
        "questions": questions,
        **metrics_of(cells),
        "steps": {"headings": list(HEADINGS.values()), "notes": NOTES},
        "states": {state: look.name for state, look in LOOKS.items()},
        "warnings": [*warnings_of_table, *notes_of(measurements, marked=True)],
    }
    return ReportData(index, chunks, [*warnings_of_table, *notes_of(measurements)])


class _Collector:
    """Takes the samples of one run after the other into shared chunks."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._writer, self._questions = ChunkWriter("c"), Questions(sources)
        self._parts: dict[str, _Part] = {}

    def chunks(self) -> tuple[dict[str, str], dict[str, str]]:
        """All chunks, once every run has been finished, and the name of the chunk with the questions of each task."""
        self._writer.flush()
        questions, names = self._questions.finish()
        return self._writer.chunks | questions, names

    def take(self, run: Run, row: RowKey, sample: Sample, scores: Mapping[str, ScoreRow], trace: Trace | None) -> None:
        part = self._part(run)
        part.created.add(sample.created)
        part.seconds += sample.seconds
        if row not in part.rows:
            self._writer.flush()  # no chunk holds two tasks: readers mostly go on to another sample of the same one
        sealed = is_sealed(sample.key.task, sample.benchmark)
        whole = {**body(sample, scores, sealed, part.speller, trace), "machine": part.machines[sample.process_id]}
        asked, question = self._questions.add(run, sample, sealed)
        places = {"bodies": self._writer.add(whole), "asked": asked, "question": question}
        part.rows.setdefault(row, []).append(list_row(sample, scores, sealed) | places)
        part.tallies.setdefault(row, Tally(sample.settings)).add(sample, trace)

    def cells(self, facts: RunFacts, measurements: Sequence[Measurement]) -> Iterator[tuple[RowKey, dict[str, Any]]]:
        """The rows of a run whose samples were all taken, and the means over them, as in the index of the page."""
        part = self._part(facts.run)
        by_row: dict[RowKey, list[Measurement]] = defaultdict(list)
        for entry in measurements:
            by_row[entry.row].append(entry)
        label = next((entry.full_label for entry in measurements), facts.run.manifest.system)
        for task in facts.tasks:
            own = by_row[task.row]
            marks = encoded_marks(caution for entry in own for caution in entry.cautions)
            if task.row not in part.rows:
                known = {"task": task.task, "system": label, "version": task.task_version, "mini": task.mini}
                yield task.row, page_cell(**known, marks=marks)
                continue
            rows = sorted(part.rows[task.row], key=lambda row: (natural_order(row["item_id"]), row["number"]))
            self._writer.flush()
            chunk, _ = self._writer.add({name: [row[name] for row in rows] for name in rows[0]})
            self._writer.flush()
            settings = dict(task.row.settings) | of_protocol(task.protocol)
            cell = page_cell(
                **{name: getattr(task, name) for name in ("task", "benchmark", "mini")},
                system=own[0].full_label if own else label,
                version=task.task_version,
                sealed=is_sealed(task.task, task.benchmark),
                settings=settings,
                hardware=sorted(task.hardware),
                items=len(task.asked),
                samples=len(rows),
                marks=marks,
                metrics={entry.metric: encoded(entry) for entry in own},
                list=chunk,
            )
            if (tally := part.tallies[task.row]).forwards:
                cell["steps"] = tally.steps(facts.run, task.task).in_words()
            yield task.row, cell
        yield from _means(measurements)

    def about(self, run: Run) -> dict[str, Any]:
        manifest, part = run.manifest, self._part(run)
        names = ("system", "backbone", "decoder", "checkpoint", "dtype", "device", "attention", "seed", "warmup")
        return {
            "id": run.run_id,
            **{name: getattr(manifest, name) for name in names},
            "revision": manifest.checkpoint_revision or manifest.checkpoint_hash,
            "package": manifest.package_version,
            "commit": manifest.git_commit,
            "command": run.command,
            "hardware": sorted(set(part.machines.values())),
            "versions": dict(manifest.versions),
            "began": min(part.created, default=""),
            "ended": max(part.created, default=""),
            "seconds": rounded(part.seconds),
        }

    def _part(self, run: Run) -> _Part:
        if run.run_id not in self._parts:
            machines = {process_id: run.hardware(process_id).label() for process_id in run.processes}
            self._parts[run.run_id] = _Part(Speller(self._sources.spell(run)), machines)
        return self._parts[run.run_id]


def of_protocol(name: str) -> dict[str, str]:
    """The protocol among the settings of a cell, by which the page tells apart the rows of a task."""
    return {"protocol": name.replace("|", ", ")} if name else {}


def encoded(measurement: Measurement) -> dict[str, Any]:
    numbers = {"value": measurement.value, "low": measurement.ci_low, "high": measurement.ci_high}
    values: dict[str, Any] = {name: rounded(number) for name, number in numbers.items()}
    return values | {"unit": measurement.unit, "n": measurement.n, "note": measurement.note}


def page_cell(**facts: Any) -> dict[str, Any]:
    """A task of a run, or a mean over its tasks, as the index of the page holds it."""
    empty: dict[str, Any] = dict.fromkeys(("task", "system", "version", "benchmark"), "")
    empty |= {"mini": False, "sealed": False, "mean": False}
    empty |= {"settings": {}, "hardware": [], "items": 0, "samples": 0, "marks": [], "metrics": {}, "list": None}
    return empty | facts


def _means(entries: Sequence[Measurement]) -> Iterator[tuple[RowKey, dict[str, Any]]]:
    """Means over tasks, without samples."""
    means = [entry for entry in entries if entry.is_mean]
    rows = sorted({entry.row for entry in means})
    several = len({row.prompts for row in rows}) > 1
    for row in rows:
        own = [entry for entry in means if entry.row == row]
        cell = page_cell(
            task=MEAN_TASK,
            system=own[0].full_label,
            mini=row.mini,
            mean=True,
            settings=of_protocol(own[0].protocol) | ({"prompts": row.prompts} if several else {}),
            metrics={entry.metric: encoded(entry) for entry in own},
            items=own[0].n,
            samples=own[0].samples,
            marks=encoded_marks(caution for entry in own for caution in entry.cautions),
        )
        yield row, cell
