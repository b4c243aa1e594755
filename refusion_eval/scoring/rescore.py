"""`refusion-eval rescore`: judges the recorded texts of runs with another answer filter. No record is changed.

A record holds the text and the hash of its document. The document itself, with the right answer or the tests, comes
from the benchmark's rows, and is the one that was asked if its hash is the recorded one.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console

from refusion_eval.benchmarks import BENCHMARKS, Extraction, Row, Task, find_task
from refusion_eval.benchmarks.rows import redact, texts_of
from refusion_eval.config import check_keys
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError, DataError, StoreError
from refusion_eval.runs.job import Detokenizer, doc_hash, response
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.system import System
from refusion_eval.runs.terminal import ProgressDisplay
from refusion_eval.scoring.filters import OURS, AnswerFilter, per_text_rule
from refusion_eval.scoring.judge import Verdict, judge_extractions
from refusion_eval.scoring.rescored import (
    RecordedText,
    RescoredTask,
    differing_texts,
    notes,
    rescored_table,
    summary_csv,
    texts_csv,
)
from refusion_eval.scoring.verdict_file import VerdictFile
from refusion_eval.store.atomic_write import prepare_output, write_output
from refusion_eval.store.records import PASSED, Sample
from refusion_eval.store.run_reader import Run, RunReader
from refusion_eval.untrusted import visible

FOLDER = "rescored"

_MOST_SHOWN = 5

# A task -> its rows by the hash that records hold of their document.
RowsOf = Callable[[Task], Mapping[str, Row]]


def rescore_command(
    run_dirs: Sequence[Path],
    answer_filter: AnswerFilter,
    *,
    tasks: Sequence[str] = (),
    data: Path | None = None,
    out: Path | None = None,
    workers: int | None = None,
    sandbox: str = "auto",
    console: Console,
) -> int:
    """Judges recorded texts with a filter, prints the summary and writes it beside the records, with one line a text.

    The arguments are those of the command. `tasks` names tasks or benchmarks, none for all; without `out` the results
    of each run go into its own folder `FOLDER`. Returns the number of texts for which the filter `OURS` does not give
    what is recorded; 0 for any other filter. Killed and called again, it judges only what has no verdict yet.

    Raises:
        ConfigError: unknown task, or two runs of one name for one folder.
        StoreError: not a run directory, or the results cannot be written.
        DataError: rows are missing, or a run has nothing that the filter can judge.
        SandboxError: code cannot be run in isolation here.
    """

    def echo(text: str) -> None:
        console.print(visible(text), markup=False, highlight=False, soft_wrap=True)

    selected = _select_tasks(run_dirs, tasks)
    name = re.sub(r"[^\w.-]", "_", answer_filter.name)
    folders = {run_dir: run_dir / FOLDER if out is None else out / run_dir.resolve().name for run_dir in selected}
    if len(set(folders.values())) < len(folders):
        raise ConfigError(f"--out {out}: two of the runs have folders of one name; rescore them one by one")
    if links := [folder for folder in folders.values() if folder.is_symlink()]:
        raise StoreError(f"{links[0]} is a symbolic link, which may lead anywhere; name another folder with --out")
    paths = {run_dir: (folder / f"{name}.csv", folder / f"{name}.summary.csv") for run_dir, folder in folders.items()}
    for path in (path for pair in paths.values() for path in pair):
        prepare_output(path)
    rows_of = cache(partial(rows_by_hash, data_dir=data))
    kept = {path: VerdictFile(path, f"filter {answer_filter.name} sandbox {sandbox}") for path, _ in paths.values()}
    results: list[RescoredTask] = []
    num_differing = 0
    for run_dir, names in selected.items():
        texts_path, summary_path = paths[run_dir]
        judge = partial(judge_extractions, workers=workers, sandbox=sandbox, kept=kept[texts_path])
        rescored, left_out = _rescore_run(run_dir, answer_filter, names, rows_of, judge)
        write_output(texts_path, texts_csv(rescored))
        write_output(summary_path, summary_csv(rescored, answer_filter.name))
        run_id = rescored[0].run.run_id
        for why in dict.fromkeys(left_out.values()):
            echo(f"{run_id}: left out, as {why}: {', '.join(task for task, of in left_out.items() if of == why)}")
        if answer_filter.name == OURS:
            differing = differing_texts(rescored)
            num_differing += len(differing)
            for sentence in differing[:_MOST_SHOWN]:
                echo(sentence)
        results += rescored
    for verdicts in kept.values():  # only now: the same command, run again, begins with the first run
        verdicts.remove()
    console.print(rescored_table(answer_filter.name, results).rich())
    for task in results:
        if task.notes:
            echo(f"{task.run.run_id} {task.task}: {'; '.join(task.notes)}")
    for path in kept:
        echo(f"one line a text: {path}")
    return num_differing


def _select_tasks(run_dirs: Sequence[Path], names: Sequence[str]) -> dict[Path, set[str]]:
    """The tasks of each run that a user means by names of tasks and benchmarks; no name means all of all runs."""
    recorded: dict[Path, dict[str, str]] = {}
    for run_dir in run_dirs:
        with RunReader.open(run_dir) as reader:
            recorded[run_dir] = {sample.key.task: sample.benchmark for sample in reader.samples(traces=False)}
    check_keys(names, {name for tasks in recorded.values() for pair in tasks.items() for name in pair}, "", what="task")
    selected = {
        run_dir: {task for task, benchmark in tasks.items() if not names or {task, benchmark} & set(names)}
        for run_dir, tasks in recorded.items()
    }
    return {run_dir: tasks for run_dir, tasks in selected.items() if tasks or not names}


def _rescore_run(
    run_dir: Path, answer_filter: AnswerFilter, names: set[str], rows_of: RowsOf, judge: Callable[..., list[Verdict]]
) -> tuple[list[RescoredTask], dict[str, str]]:
    """The tasks of a run by name, and why the filter says nothing about the others."""
    groups: dict[tuple[str, str, str], list[RecordedText]] = {}
    with RunReader.open(run_dir) as reader:
        run = reader.run
        recorded = {score.key: score for score in reader.scores() if score.metric == PASSED}
        reads_canvas = answer_filter.reads == "canvas"
        detokenizer = recorded_system(run).detokenizer if reads_canvas else None
        for sample in reader.samples(traces=reads_canvas):
            key = sample.key
            if key.task in names:
                text = response(sample) if detokenizer is None else canvas_text(sample, detokenizer)
                text = None if sample.error is not None else text
                group = groups.setdefault((key.task, key.task_version, key.settings_hash), [])
                group.append(RecordedText(sample, text, recorded.get(key)))
    rescored: list[RescoredTask] = []
    left_out: dict[str, str] = {}
    with ProgressDisplay(f"{answer_filter.name} {run_dir.name}", _totals(groups)) as progress:
        for (name, _, settings), texts in sorted(groups.items()):
            judged = _judge_task(
                texts, answer_filter, rows_of, partial(judge, on_verdicts=partial(progress.scored, name))
            )
            if isinstance(judged, str):
                left_out[name] = judged
            else:
                rescored.append(RescoredTask(run, name, settings, judged, notes(texts, judged)))
    if not rescored:
        why = "; ".join(f"{task}: {reason}" for task, reason in left_out.items()) or "no text is recorded yet"
        raise DataError(f"{run_dir}: filter {answer_filter.name} has nothing to score: {why}")
    return rescored, left_out


def _totals(groups: Mapping[tuple[str, str, str], Sequence[RecordedText]]) -> dict[str, int]:
    """Number of texts of each task."""
    return dict(Counter(task for (task, _, _), texts in groups.items() for _ in texts))


def _judge_task(
    texts: Sequence[RecordedText], answer_filter: AnswerFilter, rows_of: RowsOf, judge: Callable[..., list[Verdict]]
) -> list[dict[str, Any]] | str:
    """Judges the texts of a task whose documents are among the rows; or says why the filter cannot."""
    first, usable = texts[0].sample, [text for text in texts if text.text is not None]
    if first.benchmark not in BENCHMARKS:
        return "it belongs to none of the benchmarks that can be scored here"
    if first.benchmark not in answer_filter.rules:
        return "the filter does not apply"
    if all(text.sample.error is not None for text in texts):
        return f"no text is recorded: all {len(texts)} attempts failed"
    if not usable:
        return "its records hold no tokens, which this filter reads"
    task = find_task(first.key.task) or Task(BENCHMARKS[first.benchmark])
    documents = rows_of(task)
    found = [text for text in usable if text.sample.key.doc_hash in documents]
    if not found:
        return f"none of its documents is among the rows of {first.benchmark} here"
    rows = [documents[text.sample.key.doc_hash] for text in found]
    # A filter finds and compares answers in its own way, except that of the task, which is that of its prompts.
    is_own = answer_filter.name == OURS
    benchmark = task.benchmark if is_own else BENCHMARKS[first.benchmark]
    rule = per_text_rule(benchmark.extract) if is_own else answer_filter.rules[first.benchmark]
    extractions = rule.find([(row, str(text.text)) for row, text in zip(rows, found, strict=True)])
    if task.sealed:
        extractions = [_redacted(row, extraction) for row, extraction in zip(rows, extractions, strict=True)]
    verdicts = judge(benchmark, rows, extractions, is_right=rule.is_right)
    return [text.judged(verdict) for text, verdict in zip(found, verdicts, strict=True)]


def _redacted(row: Row, extraction: Extraction) -> Extraction:
    """Withholds what a filter quotes of a sealed question. An answer that quotes is no letter, and stays wrong."""
    answer = extraction.answer
    return extraction if answer is None else replace(extraction, answer=redact(answer, texts_of(row, "")))


def rows_by_hash(task: Task, data_dir: str | Path | None) -> dict[str, Row]:
    """Rows of a task by the hash that records hold of their document. Raises DataError if they are not found."""
    # The hash is of the item's row, which holds markers in place of sealed questions.
    return {doc_hash(item.row): row for item, row in zip(task.items(data_dir), task.rows(data_dir), strict=True)}


def canvas_text(sample: Sample, detokenizer: Detokenizer) -> str | None:
    """The text of every token that was fixed, in order, without special tokens.

    Returns:
        The text, or None where the record has no trace, or one without its tokens (sealed questions).
    """
    if sample.tokens is None or sample.trace is None:
        return None
    fixed = sample.events().fixed_tokens()
    return detokenizer.text([fixed[position] for position in sorted(fixed)])


def recorded_system(run: Run) -> System:
    """The checkpoint that a run names, for its tokenizer: no weights are loaded.

    A record never makes this process import code: a decoder that is none of this project's is not looked for.

    Raises:
        ConfigError: the checkpoint does not fit the decoder any more.
        CheckpointError: its files are not at hand.
    """
    manifest = run.manifest
    decoder = manifest.decoder if manifest.decoder in DECODERS else "autoregressive"
    names: dict[str, Any] = {"pretrained": manifest.checkpoint, "decoder": decoder, "device": "cpu"}
    names["enable_thinking"] = manifest.settings.get("enable_thinking", True)
    return System(parse_model_args({**names, "revision": manifest.checkpoint_revision or None}))
