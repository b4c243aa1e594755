"""`refusion-eval score`: judges texts that were generated anywhere, by the same path as the tasks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from refusion_eval.benchmarks import Benchmark, Row, get_task
from refusion_eval.benchmarks.rows import json_lines
from refusion_eval.errors import DataError
from refusion_eval.metrics.accuracy import majority_passed, pass_at_k
from refusion_eval.metrics.bootstrap import Interval, bootstrap_mean
from refusion_eval.results.render import csv_text
from refusion_eval.scoring.judge import ERROR, MISSING, NO_ANSWER, Verdict, judge_texts
from refusion_eval.store.atomic_write import prepare_output, write_output
from refusion_eval.store.records import NO_ISOLATION

# In place of a file of outputs: the benchmark's own answers.
GOLD = "gold"

COLUMNS = ("id", "sample", "extracted", "verdict", "passed", "reason", "tier")


class Score(NamedTuple):
    """The verdict on one text.

    Attributes:
        id: the item.
        sample: which of the item's texts, from 0.
        verdict: the judgement; "missing" for an item without a text.
    """

    id: str
    sample: int
    verdict: Verdict


@dataclass(frozen=True)
class Summary:
    """The numbers of one scoring.

    Attributes:
        task: name of the benchmark, after "mini " for a look-alike.
        metric: name of `score`.
        filter_name: the extraction rule.
        num_rows: rows of the benchmark.
        num_scored: rows that the score is over.
        num_missing: rows without a text (in the score as wrong, unless partial scoring was asked for).
        num_texts: texts that were judged.
        num_nothing: texts without an answer in them.
        num_errors: texts whose judge failed; their rows are outside the score.
        num_unisolated: programs that ran without isolation.
        score: mean over rows of the share of right texts.
        pass_at: k -> pass@k, for more than one text an id.
        majority: share of rows whose most frequent answer is right, for more than one text an id; not for code.
    """

    task: str
    metric: str
    filter_name: str
    num_rows: int
    num_scored: int
    num_missing: int
    num_texts: int
    num_nothing: int
    num_errors: int
    num_unisolated: int
    score: Interval
    pass_at: dict[int, Interval]
    majority: Interval | None

    def lines(self, *, allow_partial: bool) -> list[str]:
        """The lines to print."""
        share = self.num_nothing / self.num_texts if self.num_texts else 0.0
        missing = "left out" if allow_partial else "counted as wrong (--allow-partial leaves them out)"
        lines = {
            f"{self.task} (filter {self.filter_name}): {self.metric} {_percent(self.score)} over {self.num_scored} of "
            f"{self.num_rows} rows": True,
            **{f"  pass@{k} {_percent(value)}": True for k, value in self.pass_at.items()},
            f"  majority vote {_percent(self.majority)}": self.majority is not None,
            f"  nothing extracted from {self.num_nothing} of {self.num_texts} texts ({share:.1%})": True,
            f"  {self.num_missing} rows have no text: {missing}": self.num_missing,
            f"  {self.num_unisolated} programs ran without isolation, so their verdicts can be forged": (
                self.num_unisolated
            ),
            f"  {self.num_errors} texts could not be judged and are left out: run again, or see `doctor`": (
                self.num_errors
            ),
        }
        return [line for line, is_shown in lines.items() if is_shown]


def score_command(
    task: str,
    outputs: str,
    *,
    data: str | Path | None = None,
    split: str | None = None,
    csv_path: str | Path | None = None,
    filter_name: str | None = None,
    allow_partial: bool = False,
    workers: int | None = None,
    sandbox: str = "auto",
    echo: Callable[[str], None] = print,
) -> Summary:
    """Judges a file of texts, prints the score, and writes one CSV line a text.

    Args:
        task: "gsm8k", "refusion_gsm8k" or "mini_gsm8k", and so for the other benchmarks.
        outputs: JSON lines `{"id": ..., "text": ...}` (`.gz` too), an id as often as it has texts; or "gold" for the
            benchmark's own answers.
        data: directory with the rows, see `Task.rows`.
        split: another split than the one that is evaluated.
        csv_path: where to write the columns `COLUMNS`; `default_csv_path` if None.
        filter_name: another extraction rule than the benchmark's first.
        allow_partial: score only the rows that have a text, instead of counting the others as wrong.
        workers: processes for code and for formulas.
        sandbox: "auto", or "none" for no isolation.
        echo: receives each line to be printed.

    Raises:
        DataError: unknown task or filter, or rows or outputs are malformed (with file and line).
        SandboxError: code cannot be run in isolation here.
        StoreError: the CSV cannot be written; known before anything is judged.
    """
    known = get_task(task)
    benchmark, rows = known.benchmark, known.rows(data, split)
    benchmark.check_gold(rows)
    ids = index_rows(benchmark, rows)
    texts = gold_texts(benchmark, rows) if outputs == GOLD else read_outputs(Path(outputs), set(ids))
    target = prepare_output(csv_path if csv_path is not None else default_csv_path(task, outputs))
    scores = score_texts(benchmark, rows, texts, filter_name=filter_name, workers=workers, sandbox=sandbox)
    write_output(target, _csv(scores))
    name = f"mini {benchmark.name}" if known.mini else benchmark.name
    summary = summarise(name, benchmark, scores, filter_name or benchmark.default_filter, allow_partial)
    for line in summary.lines(allow_partial=allow_partial):
        echo(line)
    echo(f"  one line a text: {target}")
    return summary


def score_texts(
    benchmark: Benchmark,
    rows: Sequence[Row],
    texts: Mapping[str, Sequence[str]],
    *,
    filter_name: str | None = None,
    workers: int | None = None,
    sandbox: str = "auto",
) -> list[Score]:
    """Judges every text of every row.

    Args:
        benchmark: as in `judge_texts`, like the arguments that are not named here.
        rows: dataset rows, as `Task.rows` returns them.
        texts: item id -> its texts; items without a text are scored "missing".
        filter_name: another extraction rule than the benchmark's first.
        workers: processes for code and for formulas.
        sandbox: "auto" or "none".

    Returns:
        Scores in the order of the rows, then of the texts.

    Raises:
        DataError: unknown filter, an id that no row has, an id that two rows have, malformed gold.
        SandboxError: code cannot be run in isolation on this machine.
    """
    by_id = index_rows(benchmark, rows)
    unknown = [key for key in texts if key not in by_id]
    if unknown:
        raise DataError(f"{len(unknown)} ids are not in the {benchmark.name} rows, the first is {unknown[0]!r}")
    items = [(row, text) for key, row in by_id.items() for text in texts.get(key, ())]
    verdicts = iter(judge_texts(benchmark, items, filter_name=filter_name, workers=workers, sandbox=sandbox))
    missing = Verdict(None, MISSING, "no text for this item")
    return [
        Score(key, sample, next(verdicts) if texts.get(key) else missing)
        for key in by_id
        for sample in range(len(texts.get(key, ())) or 1)
    ]


def index_rows(benchmark: Benchmark, rows: Sequence[Row]) -> dict[str, Row]:
    """Returns id -> row, in row order.

    Raises:
        DataError: two rows have the same id.
    """
    by_id: dict[str, Row] = {}
    for number, row in enumerate(rows):
        key = benchmark.id_of(row, number)
        if key in by_id:
            where = f"{benchmark.name}: two rows have the id {key!r}"
            raise DataError(f"{where} (the second is row {number}); ids must differ")
        by_id[key] = row
    return by_id


def default_csv_path(task: str, outputs: str) -> Path:
    """Where the scores go unless the user says otherwise: beside the outputs; for gold answers, the current folder."""
    if outputs == GOLD:
        return Path(f"{task}.gold.csv")
    path = Path(outputs)
    return path.with_name(Path(path.name.removesuffix(".gz")).stem + ".scores.csv")


def gold_texts(benchmark: Benchmark, rows: Sequence[Row]) -> dict[str, list[str]]:
    """Returns id -> the row's own answer, written as a model would write it."""
    return {benchmark.id_of(row, number): [benchmark.gold_text(row)] for number, row in enumerate(rows)}


def read_outputs(path: Path, known: set[str]) -> dict[str, list[str]]:
    """Reads texts to be judged.

    Args:
        path: JSON lines, each an object with exactly the keys id (text or integer) and text.
        known: the benchmark's ids.

    Raises:
        DataError: names file and line of what is wrong, or says that the file is empty.
    """
    texts: dict[str, list[str]] = {}
    for number, row in json_lines(path):
        where = f"{path}, line {number}"
        if not isinstance(row, dict):
            raise DataError(f'{where}: expected an object {{"id": ..., "text": ...}}, found {type(row).__name__}')
        if set(row) != {"id", "text"}:
            raise DataError(f"{where}: expected the keys id and text, found {', '.join(sorted(row)) or 'none'}")
        item_id, text = row["id"], row["text"]
        if isinstance(item_id, bool) or not isinstance(item_id, str | int):
            raise DataError(f"{where}: id must be a text or an integer, found {item_id!r}")
        if not isinstance(text, str):
            raise DataError(f"{where}: text must be a text, found {type(text).__name__}")
        if str(item_id) not in known:
            raise DataError(
                f"{where}: no row has the id {item_id!r}; an id is the row's own id column, else its row number from 0"
            )
        texts.setdefault(str(item_id), []).append(text)
    if not texts:
        raise DataError(f'{path} is empty; expected lines {{"id": ..., "text": ...}}')
    return texts


def summarise(
    task: str, benchmark: Benchmark, scores: Sequence[Score], filter_name: str, allow_partial: bool
) -> Summary:
    """Condenses scores.

    Args:
        task: name to print.
        benchmark: names the metric.
        scores: the score of every text, and of every item without one.
        filter_name: the extraction rule that they come from.
        allow_partial: whether items without a text are left out, instead of counted as wrong.

    Raises:
        DataError: the judge failed on every text.
    """
    kinds = [score.verdict.verdict for score in scores]
    items: dict[str, list[Verdict]] = {}
    for score, kind in zip(scores, kinds, strict=True):
        if kind != ERROR and not (allow_partial and kind == MISSING):
            items.setdefault(score.id, []).append(score.verdict)
    if not items:
        raise DataError(f"{task}: nothing could be scored; the judge failed on every text: {scores[0].verdict.reason}")
    counts = [len(verdicts) for verdicts in items.values()]
    num_right = [sum(verdict.passed for verdict in verdicts) for verdicts in items.values()]
    votes = [
        float(majority_passed([verdict.extracted for verdict in verdicts], [verdict.passed for verdict in verdicts]))
        for verdicts in items.values()
    ]
    return Summary(
        task=task,
        metric=benchmark.metric,
        filter_name=filter_name,
        num_rows=len({score.id for score in scores}),
        num_scored=len(items),
        num_missing=kinds.count(MISSING),
        num_texts=len(kinds) - kinds.count(MISSING),
        num_nothing=kinds.count(NO_ANSWER),
        num_errors=kinds.count(ERROR),
        num_unisolated=sum(score.verdict.tier == NO_ISOLATION for score in scores),
        score=bootstrap_mean([right / count for right, count in zip(num_right, counts, strict=True)]),
        pass_at={k: bootstrap_mean(pass_at_k(counts, num_right, k)) for k in _powers(min(counts))},
        majority=None if min(counts) < 2 or benchmark.kind == "code" else bootstrap_mean(votes),
    )


def _powers(largest: int) -> list[int]:
    """The k to report: none for single texts, else 2, 5, 10, 20, 50, ... up to the number of texts, and that number."""
    ks = {k for k in (2, 5, 10, 20, 50, 100, 200, 500, 1000) if k <= largest}
    return sorted(ks | {largest}) if largest > 1 else []


def _percent(interval: Interval | None) -> str:
    if interval is None:
        return ""
    if math.isnan(interval.low):
        return f"{100 * interval.value:.2f}% (one row gives no interval)"
    return f"{100 * interval.value:.2f}% (95% interval {100 * interval.low:.2f} to {100 * interval.high:.2f})"


def _csv(scores: Sequence[Score]) -> str:
    rows = [
        (
            score.id,
            score.sample,
            score.verdict.extracted,
            score.verdict.verdict,
            int(score.verdict.passed),
            score.verdict.reason,
            score.verdict.tier,
        )
        for score in scores
    ]
    return csv_text(COLUMNS, rows, line_end="\r\n")  # as the csv module writes it, and this file always did
