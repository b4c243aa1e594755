"""Table 8 of the paper (appendix D.1): the answers of several systems to one problem, side by side."""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from refusion_eval.benchmarks import is_sealed
from refusion_eval.errors import ConfigError
from refusion_eval.report.sample import WITHHELD, find_sample
from refusion_eval.results.render import Section, Table, TableRow, markdown_text, text_cells
from refusion_eval.store.records import PASSED, Sample, ScoreRow
from refusion_eval.store.run_store import Run, RunReader

COLUMN_WIDTH = 48


class Answer(NamedTuple):
    run: Run
    sample: Sample
    scores: Mapping[str, ScoreRow]


def read_answers(run_dirs: Sequence[Path], task: str | None, item: str) -> list[Answer]:
    """The answers of several runs to one item. Raises ConfigError if the item is another problem in one of them."""
    answers: list[Answer] = []
    for run_dir in run_dirs:
        run, sample = find_sample(run_dir, task, item, needs="text")
        if answers and sample.key.doc_hash != answers[0].sample.key.doc_hash:
            raise ConfigError(
                f"{run_dir}: item {item!r} of {sample.key.task} is another problem than in {run_dirs[0]}; name runs of "
                "one task, and the task with --task"
            )
        with RunReader.open(run_dir) as reader:
            answers.append(Answer(run, sample, reader.scores_by_sample().get(sample.key, {})))
    return answers


def answers_table(answers: Sequence[Answer], problem: str | None, gold: str | None) -> Table:
    """One column for each answer, its text line by line, and the verdicts below."""
    first = answers[0].sample
    is_withheld = is_sealed(first.key.task, first.benchmark)
    texts = [_lines(WITHHELD if is_withheld else answer.sample.text) for answer in answers]
    rows: list[TableRow | Section] = [TableRow(cells=text_cells(*lines)) for lines in zip_longest(*texts, fillvalue="")]
    figures = []
    for answer in answers:
        counted = ((answer.sample.num_tokens, "tokens"), (answer.sample.num_forwards, "forwards"))
        counts = " in ".join(f"{number} {what}" for number, what in counted if number)
        figures.append("; ".join(filter(None, (_verdict(answer), counts))))
    rows.append(TableRow(cells=text_cells(*figures), begins_group=True))
    return Table(
        name="table8",
        title=f"Answers to item {first.item_id} of {first.key.task} (Table 8 of the paper)",
        columns=_names([answer.run for answer in answers]),
        num_left=len(answers),
        rows=rows,
        notes=[*_paragraphs("Problem", problem), *_paragraphs("Right answer", gold)],
        escape=markdown_text,
    )


def _names(runs: Sequence[Run]) -> list[str]:
    systems = [run.manifest.system for run in runs]
    if len(set(systems)) == len(systems):
        return systems
    return [f"{system} [{run.run_id}]" for system, run in zip(systems, runs, strict=True)]


def _paragraphs(heading: str, text: str | None) -> list[str]:
    return [f"{heading}:", *filter(None, _lines(text))] if text else []


def _lines(text: str) -> list[str]:
    """Lines of a column. Indentation becomes no-break spaces, which Markdown and LaTeX keep."""
    lines = []
    for line in text.strip().splitlines():
        indent = len(line) - len(line.lstrip())
        wrapped = textwrap.wrap(line.strip(), COLUMN_WIDTH - min(indent, COLUMN_WIDTH // 2)) or [""]
        lines += ["\u00a0" * indent + part for part in wrapped]
    return lines


def _verdict(answer: Answer) -> str:
    verdict = answer.scores.get(PASSED)
    if verdict is None:
        return "not scored"
    return "right" if verdict.value > 0 else "wrong"
