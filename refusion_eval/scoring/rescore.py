"""Scores the recorded texts of a run with another answer filter. Nothing is decoded, and no record is changed.

A record holds the text and the hash of its document; the document itself, with the right answer or the tests, comes
from the benchmark's rows, and is the one that was asked if its hash is the recorded one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from refusion_eval.benchmarks import BENCHMARKS, Benchmark, Extraction, Row, Task, is_mini
from refusion_eval.benchmarks.sealing import redact, texts_of
from refusion_eval.config import check_keys
from refusion_eval.errors import DataError
from refusion_eval.runs.job import doc_hash
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.system import System
from refusion_eval.runs.text import Detokenizer
from refusion_eval.scoring.filters import AnswerFilter, Rule
from refusion_eval.scoring.judge import CORRECT, ERROR, NO_ANSWER, WRONG, Verdict, judge_extractions
from refusion_eval.store.records import PASSED, Sample, SampleKey, ScoreRow
from refusion_eval.store.run_reader import Run, RunReader
from refusion_eval.trace import Trace

Rows = Callable[[str, bool], Mapping[str, Row]]

# Told of each answer whose judgement took a process: the task, and how many texts it has.
OnDone = Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Rescored:
    """One text under another filter, beside what the run recorded.

    Attributes:
        key: the sample.
        doc_id: the benchmark's own name for the item.
        judged: what the filter extracted, and the verdict on it.
        recorded: the run's own judgement, None if it made none.
    """

    key: SampleKey
    doc_id: str
    judged: Verdict
    recorded: ScoreRow | None

    @property
    def correct(self) -> bool | None:
        """Whether the text is right; None where the judge failed, which says nothing about the text."""
        return None if self.judged.verdict == ERROR else self.judged.passed

    @property
    def recorded_correct(self) -> bool | None:
        """What the run recorded; None if nothing."""
        return None if self.recorded is None else self.recorded.value > 0

    @property
    def differs(self) -> bool:
        """Whether a recorded judgement exists and answer or verdict are not the recorded ones."""
        if self.recorded is None:
            return False
        mine = (self.judged.extracted, self.judged.verdict)
        return mine != (self.recorded.extracted, self.recorded.verdict)


@dataclass(slots=True)
class TaskRescored:
    """The texts of one task under one set of settings.

    Attributes:
        task: its name.
        settings_hash: the settings they were generated with.
        samples: one a text, in the order of the records.
        notes: what is not in `samples`, and why.
    """

    task: str
    settings_hash: str
    samples: list[Rescored]
    notes: list[str]


@dataclass(slots=True)
class RunRescored:
    """All that one run has for one filter.

    Attributes:
        run: the run.
        tasks: ordered by name.
        left_out: task -> why the filter says nothing about it.
    """

    run: Run
    tasks: list[TaskRescored] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Text:
    """One recorded response; `text` is None where the filter needs what the record does not hold."""

    key: SampleKey
    benchmark: str
    doc_id: str
    text: str | None
    failed: bool


def select_tasks(run_dirs: Sequence[Path], names: Sequence[str]) -> dict[Path, set[str]]:
    """The tasks of each run that a user means.

    Args:
        run_dirs: run directories.
        names: tasks, or benchmarks for all their tasks; none for everything.

    Raises:
        StoreError: a directory holds no readable run.
        ConfigError: no run has a task of that name.
    """
    found: dict[Path, dict[str, str]] = {}
    for run_dir in run_dirs:
        with RunReader.open(run_dir) as reader:
            found[run_dir] = {sample.key.task: sample.benchmark for sample in reader.samples(traces=False)}
    known = {name for tasks in found.values() for pair in tasks.items() for name in pair}
    check_keys(names, known, "", what="task")
    return {
        run_dir: {task for task, benchmark in tasks.items() if not names or {task, benchmark} & set(names)}
        for run_dir, tasks in found.items()
    }


def rescore_run(
    run_dir: Path,
    answer_filter: AnswerFilter,
    tasks: Iterable[str],
    rows: Rows,
    *,
    workers: int | None = None,
    sandbox: str = "auto",
    on_done: OnDone | None = None,
) -> RunRescored:
    """Applies a filter to the recorded texts of a run, which may still be running.

    Args:
        run_dir: the run's directory.
        answer_filter: what to apply.
        tasks: names of the tasks to score.
        rows: gives document hash -> row for a benchmark and whether its mini form is meant; see `rows_by_hash`.
        workers: processes for code and mathematics.
        sandbox: "auto", or "none" to run model-written code without isolation.
        on_done: told of progress.

    Raises:
        StoreError: the directory holds no readable run.
        DataError: the rows of a task cannot be found, or no text of the run can be scored.
        SandboxError: code cannot be run in isolation on this machine.
    """
    groups: dict[tuple[str, str, str], list[_Text]] = {}
    chosen = set(tasks)
    with RunReader.open(run_dir) as reader:
        result = RunRescored(reader.run)
        recorded = {score.key: score for score in reader.scores() if score.metric == PASSED}
        reads_canvas = answer_filter.reads == "canvas"
        detokenizer = recorded_system(reader.run).detokenizer if reads_canvas else None
        for sample in reader.samples(traces=reads_canvas):
            if sample.key.task in chosen:
                key = sample.key
                groups.setdefault((key.task, key.task_version, key.settings_hash), []).append(
                    _text(sample, detokenizer)
                )
    for (task, _, settings_hash), texts in sorted(groups.items()):
        benchmark, mini = texts[0].benchmark, is_mini(task)
        usable = [text for text in texts if text.text is not None]
        if refusal := _refusal(answer_filter, benchmark, texts, usable):
            result.left_out[task] = refusal
            continue
        documents = rows(benchmark, mini)
        known = [text for text in usable if text.key.doc_hash in documents]
        if not known:
            result.left_out[task] = f"none of its documents is among the rows of {benchmark} here"
            continue
        items = [(documents[text.key.doc_hash], text.text or "") for text in known]
        report = None if on_done is None else partial(on_done, task, len(known))
        judged = _judge(BENCHMARKS[benchmark], answer_filter.rules[benchmark], items, workers, sandbox, report)
        if Task(BENCHMARKS[benchmark], mini).sealed:
            judged = [_redacted(row, outcome) for (row, _), outcome in zip(items, judged, strict=True)]
        samples = [
            Rescored(text.key, text.doc_id, outcome, recorded.get(text.key))
            for text, outcome in zip(known, judged, strict=True)
        ]
        result.tasks.append(TaskRescored(task, settings_hash, samples, _notes(texts, usable, known, samples)))
    if not result.tasks:
        why = "; ".join(f"{task}: {reason}" for task, reason in result.left_out.items()) or "no text is recorded yet"
        raise DataError(f"{run_dir}: filter {answer_filter.name} has nothing to score: {why}")
    return result


def rows_by_hash(benchmark: str, mini: bool, data_dir: str | Path | None) -> dict[str, Row]:
    """Rows of a benchmark by the hash that records hold of their document.

    Raises:
        DataError: the rows cannot be found.
    """
    task = Task(BENCHMARKS[benchmark], mini)
    # The hash is of the item's row, which holds markers in place of sealed questions.
    return {doc_hash(item.row): row for item, row in zip(task.items(data_dir), task.rows(data_dir), strict=True)}


def _text(sample: Sample, detokenizer: Detokenizer | None) -> _Text:
    text: str | None = sample.text
    if detokenizer is not None:
        text = canvas_text(sample, detokenizer)
    failed = sample.error is not None
    return _Text(sample.key, sample.benchmark, sample.item_id, None if failed else text, failed)


def canvas_text(sample: Sample, detokenizer: Detokenizer) -> str | None:
    """The text of every token that was fixed, in order, without special tokens.

    Returns:
        The text, or None where the record has no trace, or one without its tokens (sealed questions).
    """
    if sample.tokens is None or sample.trace is None:
        return None
    fixed = Trace.from_json(sample.trace).fixed_tokens()
    return detokenizer.text([fixed[position] for position in sorted(fixed)])


def recorded_system(run: Run) -> System:
    """The checkpoint that a run names under its decoder, for its tokenizer: no weights are loaded.

    Raises:
        ConfigError: the checkpoint does not fit the decoder any more.
        CheckpointError: its files are not at hand.
    """
    manifest = run.manifest
    names: dict[str, Any] = {"pretrained": manifest.checkpoint, "decoder": manifest.decoder, "device": "cpu"}
    return System(parse_model_args({**names, "revision": manifest.checkpoint_revision or None}))


def _refusal(answer_filter: AnswerFilter, benchmark: str, texts: Sequence[_Text], usable: Sequence[_Text]) -> str:
    """Why a filter says nothing about a task; empty if it does."""
    if benchmark not in BENCHMARKS:
        return "it belongs to none of the benchmarks that can be scored here"
    if benchmark not in answer_filter.rules:
        return "the filter does not apply"
    if all(text.failed for text in texts):
        return f"no text is recorded: all {len(texts)} attempts failed"
    if not usable:
        return "its records hold no tokens, which this filter reads"
    return ""


def _notes(
    texts: Sequence[_Text], usable: Sequence[_Text], known: Sequence[_Text], samples: Sequence[Rescored]
) -> list[str]:
    """What is not in the figures of a task."""
    num_failed = sum(text.failed for text in texts)
    counted = {
        "failed and have no text": num_failed,
        "hold no tokens, which this filter reads": len(texts) - num_failed - len(usable),
        "are about documents that are not among the rows here": len(usable) - len(known),
        "have no recorded verdict": sum(sample.recorded is None for sample in samples),
        "could not be judged; see `refusion-eval doctor`": sum(sample.correct is None for sample in samples),
    }
    return [f"{number} of {len(texts)} samples {what}" for what, number in counted.items() if number]


def _judge(
    bench: Benchmark,
    rule: Rule,
    items: Sequence[tuple[Row, str]],
    workers: int | None,
    sandbox: str,
    on_done: Callable[[], None] | None,
) -> list[Verdict]:
    found = rule.find(items)
    rows = [row for row, _ in items]
    if rule.is_right is None:
        return judge_extractions(
            bench,
            rows,
            found,
            workers=workers,
            sandbox=sandbox,
            on_verdict=None if on_done is None else lambda _index, _verdict: on_done(),
        )
    return [_compared(bench.gold(row), it, rule.is_right) for row, it in zip(rows, found, strict=True)]


def _compared(gold: str, found: Extraction, is_right: Callable[[str, str], bool]) -> Verdict:
    if found.answer is None:
        return Verdict(None, NO_ANSWER, found.how)
    verdict = CORRECT if is_right(gold, found.answer) else WRONG
    return Verdict(found.answer, verdict, f"{found.how}; expected {gold}")


def _redacted(row: Row, judged: Verdict) -> Verdict:
    """Withholds what a filter may have put of a sealed question into its answer."""
    if judged.extracted is None:
        return judged
    return judged._replace(extracted=redact(judged.extracted, texts_of(row, "")))
