"""`refusion-eval rescore`: the recorded texts of runs, judged with another answer filter, get further score rows."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console

from refusion_eval.benchmarks import BENCHMARKS, Row, Task, find_task, is_mini
from refusion_eval.benchmarks.rows import redact, texts_of
from refusion_eval.config import check_keys
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError, DataError, StoreError
from refusion_eval.metrics import Interval, accuracy
from refusion_eval.results.cautions import MINI_SENTENCE, UNISOLATED
from refusion_eval.results.compare import ItemChange
from refusion_eval.results.measured import seed_of
from refusion_eval.results.render import Table, csv_text, interval_text
from refusion_eval.runs.job import Detokenizer, doc_hash, response
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.terminal import ProgressDisplay
from refusion_eval.scoring.filters import OURS, AnswerFilter, per_text_rule
from refusion_eval.scoring.judge import ERROR, Verdict, judge_extractions
from refusion_eval.scoring.score import VerdictFile
from refusion_eval.store.atomic_write import prepare_output, write_output
from refusion_eval.store.records import BY_FILTER, NO_ISOLATION, PASSED, Sample, ScoreRow
from refusion_eval.store.run_store import Run, RunReader, RunStore
from refusion_eval.untrusted import visible

if TYPE_CHECKING:
    from refusion_eval.runs.system import System

FOLDER = "rescored"

_MOST_SHOWN = 5

_COLUMNS = (
    "task", "settings", "doc_id", "sample", "extracted", "verdict", "correct",
    "recorded_extracted", "recorded_verdict", "recorded_correct", "tier", "reason",
)  # fmt: skip


class RecordedText(NamedTuple):
    """A record, what the filter reads of it (None where it does not hold that), and the run's own verdict, if any."""

    sample: Sample
    text: str | None
    recorded: ScoreRow | None


RowsOf = Callable[[Task], Mapping[str, Row]]  # the rows of a task by the hash that records hold of their document
# The texts of a run by task, version of the task, and settings.
Groups = dict[tuple[str, str, str], list[RecordedText]]


class RescoredTask(NamedTuple):
    run: Run
    task: str
    settings: str
    scores: Sequence[tuple[ScoreRow, ScoreRow | None]]  # by the filter, and the recorded one
    notes: Sequence[str]

    def accuracy(self, scores: Iterable[ScoreRow]) -> Interval | None:
        """Percent of right texts, with the interval of the tables: by item, with the task's own seed."""
        items: dict[str, list[bool]] = {}
        for score in scores:
            items.setdefault(score.key.doc_hash, []).append(score.value > 0)
        means = [np.mean(items[item]) for item in sorted(items)]
        return accuracy(means, seed=seed_of(self.task)).scaled(100).interval() if means else None


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
    """Judges recorded texts; returns for how many the filter `OURS` does not give what is recorded, 0 for others."""

    def echo(text: str) -> None:
        console.print(visible(text), markup=False, highlight=False, soft_wrap=True)

    selected = _read_runs(run_dirs, answer_filter, tasks)
    folders = [run_dir / FOLDER if out is None else out / run_dir.resolve().name for run_dir in selected]
    if len(set(folders)) < len(folders):
        raise ConfigError(f"--out {out}: two of the runs have folders of one name; rescore them one by one")
    if links := [folder for folder in folders if folder.is_symlink()]:
        raise StoreError(f"{links[0]} is a symbolic link, which may lead anywhere; name another folder with --out")
    file_name = re.sub(r"[^\w.-]", "_", answer_filter.name) + ".csv"
    paths = [prepare_output(folder / file_name) for folder in folders]
    kept = [VerdictFile(path, f"filter {answer_filter.name} sandbox {sandbox}") for path in paths]
    rows_of = cache(partial(rows_by_hash, data_dir=data))
    results: list[RescoredTask] = []
    differing: list[str] = []
    for (run_dir, (run, groups)), path, verdicts in zip(selected.items(), paths, kept, strict=True):
        judge = partial(judge_extractions, workers=workers, sandbox=sandbox, kept=verdicts)
        rescored, left_out = _rescore_run(run, groups, answer_filter, rows_of, judge)
        if not rescored:
            why = "; ".join(f"{task}: {reason}" for task, reason in left_out.items()) or "no text is recorded yet"
            raise DataError(f"{run_dir}: filter {answer_filter.name} has nothing to score: {why}")
        write_output(path, csv_text(_COLUMNS, (_cells(*scores) for task in rescored for scores in task.scores)))
        for why in dict.fromkeys(left_out.values()):
            echo(f"{run.run_id}: left out, as {why}: {', '.join(task for task, of in left_out.items() if of == why)}")
        if answer_filter.name == OURS:
            sentences = _differing_texts(rescored)
            for sentence in sentences[:_MOST_SHOWN]:
                echo(sentence)
            differing += sentences
        else:
            try:
                with RunStore.open(run_dir) as store:
                    store.append_scores([score for task in rescored for score, _ in task.scores])
            except StoreError as problem:  # the lines are written all the same
                echo(f"{run.run_id}: table and compare will not show these scores: {problem}")
        results += rescored
    for verdicts in kept:  # only now: the same command, killed and run again, begins with the first run
        verdicts.remove()
    console.print(_summary_table(answer_filter.name, results).rich())
    for task in results:
        if task.notes:
            echo(f"{task.run.run_id} {task.task}: {'; '.join(task.notes)}")
    for path in paths:
        echo(f"one line a text: {path}")
    return len(differing)


def _read_runs(
    run_dirs: Sequence[Path], answer_filter: AnswerFilter, names: Sequence[str]
) -> dict[Path, tuple[Run, Groups]]:
    """The texts of the tasks that a user means by names of tasks and benchmarks; no name means all of all runs."""
    selected: dict[Path, tuple[Run, Groups]] = {}
    recorded_names: set[str] = set()
    reads_canvas = answer_filter.reads == "canvas"
    for run_dir in run_dirs:
        groups: Groups = {}
        with RunReader.open(run_dir) as reader:
            recorded = {score.key: score for score in reader.scores() if score.metric == PASSED}
            detokenizer = recorded_system(reader.run).backend.detokenizer if reads_canvas else None
            for sample in reader.samples(traces=reads_canvas):
                key = sample.key
                recorded_names |= {key.task, sample.benchmark}
                if names and not {key.task, sample.benchmark} & set(names):
                    continue
                text = response(sample) if detokenizer is None else canvas_text(sample, detokenizer)
                text = None if sample.error is not None else text
                group = groups.setdefault((key.task, key.task_version, key.settings_hash), [])
                group.append(RecordedText(replace(sample, trace=None), text, recorded.get(key)))
            if groups or not names:
                selected[run_dir] = reader.run, groups
    check_keys(names, recorded_names, "", what="task")
    return selected


def _rescore_run(
    run: Run, groups: Groups, answer_filter: AnswerFilter, rows_of: RowsOf, judge: Callable[..., list[Verdict]]
) -> tuple[list[RescoredTask], dict[str, str]]:  # the second: why the filter says nothing about a task
    rescored: list[RescoredTask] = []
    left_out: dict[str, str] = {}
    totals = Counter(task for (task, _, _), texts in groups.items() for _ in texts)
    with ProgressDisplay(f"{answer_filter.name} {run.run_id}", totals) as progress:
        for (name, _, settings), texts in sorted(groups.items()):
            judge_and_show = partial(judge, on_verdicts=partial(progress.scored, name))
            scores = _judge_task(texts, answer_filter, rows_of, judge_and_show)
            if isinstance(scores, str):
                left_out[name] = scores
            else:
                rescored.append(RescoredTask(run, name, settings, scores, _notes(texts, scores)))
    return rescored, left_out


def _judge_task(
    texts: Sequence[RecordedText], answer_filter: AnswerFilter, rows_of: RowsOf, judge: Callable[..., list[Verdict]]
) -> list[tuple[ScoreRow, ScoreRow | None]] | str:
    """Judges the texts of a task whose documents are among the rows; or says why the filter cannot."""
    first, usable = texts[0].sample, [text for text in texts if text.text is not None]
    if first.benchmark not in BENCHMARKS:
        return "it belongs to none of the benchmarks that can be scored here"
    filter_rule = answer_filter.rule_of(first.benchmark)
    if filter_rule is None:
        return "the filter does not apply"
    if all(text.sample.error is not None for text in texts):
        return f"no text is recorded: all {len(texts)} attempts failed"
    if not usable:
        return "its records hold no tokens, which this filter reads"
    task = find_task(first.key.task) or Task(BENCHMARKS[first.benchmark])
    documents = rows_of(task)
    asked = [text for text in usable if text.sample.key.doc_hash in documents]
    if not asked:
        return f"none of its documents is among the rows of {first.benchmark} here"
    rows = [documents[text.sample.key.doc_hash] for text in asked]
    # A filter finds and compares answers in its own way, except that of the task, which is that of its prompts.
    is_ours = answer_filter.name == OURS
    benchmark = task.benchmark if is_ours else BENCHMARKS[first.benchmark]
    rule = per_text_rule(benchmark.extract) if is_ours else filter_rule
    extractions = rule.find([(row, str(text.text)) for row, text in zip(rows, asked, strict=True)])
    if task.sealed:
        # What a filter quotes of a question is withheld. An answer that quotes is not a letter, and stays wrong.
        extractions = [
            replace(extraction, answer=extraction.answer and redact(extraction.answer, texts_of(row, "")))
            for row, extraction in zip(rows, extractions, strict=True)
        ]
    verdicts = judge(benchmark, rows, extractions, is_right=rule.is_right)
    scorer = f"{first.key.task}/{answer_filter.name} {benchmark.prompts.version}"
    metric = BY_FILTER + answer_filter.name
    return [
        (verdict.score(text.sample.key, text.sample.item_id, scorer, metric), text.recorded)
        for text, verdict in zip(asked, verdicts, strict=True)
    ]


def _notes(texts: Sequence[RecordedText], scores: Sequence[tuple[ScoreRow, ScoreRow | None]]) -> list[str]:
    num_failed = sum(text.sample.error is not None for text in texts)
    num_usable = sum(text.text is not None for text in texts)
    counts = {
        "failed and have no text": num_failed,
        "hold no tokens, which this filter reads": len(texts) - num_failed - num_usable,
        "are about documents that are not among the rows here": num_usable - len(scores),
        "have no recorded verdict": sum(recorded is None for _, recorded in scores),
        "could not be judged and count as wrong": sum(score.verdict == ERROR for score, _ in scores),
    }
    notes = [f"{number} of {len(texts)} samples {what}" for what, number in counts.items() if number]
    key = texts[0].sample.key
    task = find_task(key.task)
    now = task.benchmark.prompts.version if task and key.task.startswith(task.name) else key.task_version
    judged_now = [f" {now} " in then.scorer for _, then in scores if then]  # by a run that went on with this version
    if key.task_version != now and not (judged_now and all(judged_now)):  # lm-eval's tasks have versions of their own
        notes.append(f"recorded by version {key.task_version} of the task, whose rules may differ from those of {now}")
    return [*notes, UNISOLATED] if any(score.tier == NO_ISOLATION for score, _ in scores) else notes


def _summary_table(filter_name: str, results: Sequence[RescoredTask]) -> Table:
    num_runs = Counter(system for system, _ in {(task.run.manifest.system, task.run.run_id) for task in results})
    num_settings = Counter((id(task.run), task.task) for task in results)  # folders of two runs may have one name
    rows = []
    for task in results:
        run_id, system = task.run.run_id, task.run.manifest.system
        name = f"{task.task} ({task.settings})" if num_settings[id(task.run), task.task] > 1 else task.task
        label = f"{system} ({run_id})" if num_runs[system] > 1 else system
        num_items = len({score.key.doc_hash for score, _ in task.scores})
        recorded_and_new = ([then for _, then in task.scores if then], [now for now, _ in task.scores])
        accuracies = (interval_text(task.accuracy(scores), 1, missing="-") for scores in recorded_and_new)
        pairs = [(then.value, now.value) for now, then in task.scores if then]
        changes = Counter(ItemChange("", *values, same_prompt=True).change for values in pairs)
        rows.append((name, label, str(num_items), *accuracies, str(changes["gained"]), str(changes["lost"])))
    return Table(
        title=f"filter {filter_name}",
        columns=("Task", "System", "n", "Recorded %", "Rescored %", "wrong to right", "right to wrong"),
        rows=rows,
        num_left=2,
        notes=["In brackets: 95% interval by item.", MINI_SENTENCE if any(is_mini(it.task) for it in results) else ""],
    )


def _differing_texts(tasks: Sequence[RescoredTask]) -> list[str]:
    return [
        f"{task.run.run_id}: {task.task} item {now.item_id} sample {now.key.sample}: now {now.verdict} ({now.reason}), "
        f"recorded {then.verdict} ({then.reason}) by {then.scorer}"
        for task in tasks
        for now, then in task.scores
        if then and (now.extracted, now.verdict) != (then.extracted, then.verdict)
    ]


def _cells(now: ScoreRow, then: ScoreRow | None) -> Iterable[Any]:
    recorded = (then.extracted, then.verdict, int(then.value > 0)) if then else (None, None, None)
    identity = (now.key.task, now.key.settings_hash, now.item_id, now.key.sample)
    return (*identity, now.extracted, now.verdict, int(now.value), *recorded, now.tier, now.reason)


def rows_by_hash(task: Task, data_dir: str | Path | None) -> dict[str, Row]:
    """Rows of a task by the hash that records hold of their document, which is the one that was asked."""
    # The hash is of the item's row, which holds markers in place of sealed questions.
    return {doc_hash(item.row): row for item, row in zip(task.items(data_dir), task.rows(data_dir), strict=True)}


def canvas_text(sample: Sample, detokenizer: Detokenizer) -> str | None:
    """The text of every token that was fixed, in order, without special tokens; None without a trace or its tokens."""
    if sample.tokens is None or sample.trace is None:
        return None
    tokens = sample.events().fixed_tokens()
    return detokenizer.text([tokens[position] for position in sorted(tokens)])


def recorded_system(run: Run) -> "System":
    """The checkpoint that a run names, for its tokenizer: no weights are loaded."""
    from refusion_eval.runs.system import System  # torch loads slowly, and few filters read tokens

    # A record never makes this process import code: only a decoder of this project is looked for.
    manifest = run.manifest
    decoder = manifest.decoder if manifest.decoder in DECODERS else "autoregressive"
    names: dict[str, Any] = {"pretrained": manifest.checkpoint, "decoder": decoder, "device": "cpu"}
    names["enable_thinking"] = manifest.settings.get("enable_thinking", True)
    return System(parse_model_args({**names, "revision": manifest.checkpoint_revision or None}))
