"""`refusion-eval score`: scores texts that were generated anywhere, by the same path as the tasks."""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from refusion_eval.benchmarks import Benchmark, Row, get_task
from refusion_eval.benchmarks.rows import json_lines
from refusion_eval.errors import DataError
from refusion_eval.metrics.accuracy import Interval, bootstrap_mean, majority_passed, pass_at_k
from refusion_eval.scoring.judge import ERROR, MISSING, NO_ANSWER, OnVerdict, Verdict, judge_texts
from refusion_eval.store.atomic_write import prepare_output, write_output
from refusion_eval.store.records import NO_ISOLATION

# As `outputs`: the benchmark's own answers.
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
        task: the task as the user named it, "mini" included.
        metric: what `score` is called.
        filter_name: the extraction rule.
        num_rows: rows of the benchmark.
        num_scored: rows the score is over.
        num_missing: rows without a text (in the score as wrong, unless partial scoring was asked for).
        num_texts: texts scored.
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
    on_verdict: OnVerdict | None = None,
) -> Summary:
    """Scores a file of texts, prints the score, and writes one CSV line a text.

    Args:
        task: "gsm8k", "refusion_gsm8k" or "mini_gsm8k", and so for the other benchmarks.
        outputs: JSON lines `{"id": ..., "text": ...}` (`.gz` too), an id as often as it has texts; or "gold" for the
            benchmark's own answers.
        data: directory with the rows, see `Task.rows`.
        split: another split than the one that is evaluated.
        csv_path: where to write the columns `COLUMNS`; `default_csv_path` if None.
        filter_name: another extraction rule than the benchmark's first.
        allow_partial: score only the rows that have a text, instead of counting the others as wrong.
        workers: processes for code and mathematics.
        sandbox: "auto", or "none" for no isolation.
        echo: receives each line to be printed.
        on_verdict: as in `judge_texts`.

    Raises:
        DataError: unknown task, or rows or outputs are malformed (with file and line).
        SandboxError: code cannot be run in isolation here.
        StoreError: the CSV cannot be written; known before anything is scored.
    """
    asked = get_task(task)
    bench, benchmark, is_mini = asked.benchmark, asked.benchmark.name, asked.mini
    rows = asked.rows(data, split)
    bench.check_gold(rows)
    ids = index_rows(bench, rows)
    texts = gold_texts(bench, rows) if outputs == GOLD else read_outputs(Path(outputs), set(ids))
    target = prepare_output(csv_path if csv_path is not None else default_csv_path(task, outputs))
    scores = score_texts(
        bench, rows, texts, filter_name=filter_name, workers=workers, sandbox=sandbox, on_verdict=on_verdict
    )
    write_csv(target, scores)
    counted = [score for score in scores if score.verdict.verdict != MISSING] if allow_partial else scores
    name = f"mini {benchmark}" if is_mini else benchmark
    summary = summarise(name, bench, scores, counted, filter_name or bench.default_filter)
    for line in report(summary, allow_partial=allow_partial):
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
    on_verdict: OnVerdict | None = None,
) -> list[Score]:
    """Scores every text of every row.

    Args:
        benchmark: as in `judge_texts`, like all that is not named here.
        rows: dataset rows, as `Task.rows` returns them.
        texts: item id -> its texts; items without a text are scored "missing".
        filter_name: another extraction rule than the benchmark's first.
        workers: processes for code and for formulas.
        sandbox: "auto" or "none".
        on_verdict: called with each verdict.

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
    items = [(by_id[key], text) for key in by_id for text in texts.get(key, ())]
    verdicts = iter(
        judge_texts(benchmark, items, filter_name=filter_name, workers=workers, sandbox=sandbox, on_verdict=on_verdict)
    )
    missing = Verdict(None, MISSING, "no text for this item")
    return [
        Score(key, sample, next(verdicts) if texts.get(key) else missing)
        for key in by_id
        for sample in range(len(texts.get(key, ())) or 1)
    ]


def index_rows(bench: Benchmark, rows: Sequence[Row]) -> dict[str, Row]:
    """Returns id -> row, in row order.

    Raises:
        DataError: two rows have the same id.
    """
    by_id: dict[str, Row] = {}
    for number, row in enumerate(rows):
        key = bench.id_of(row, number)
        if key in by_id:
            raise DataError(f"{bench.name}: two rows have the id {key!r} (the second is row {number}); ids must differ")
        by_id[key] = row
    return by_id


def default_csv_path(task: str, outputs: str) -> Path:
    """Where the scores go unless the user says otherwise: beside the outputs; for gold answers, the current folder."""
    if outputs == GOLD:
        return Path(f"{task}.gold.csv")
    path = Path(outputs)
    return path.with_name(Path(path.name.removesuffix(".gz")).stem + ".scores.csv")


def gold_texts(bench: Benchmark, rows: Sequence[Row]) -> dict[str, list[str]]:
    """Returns id -> the row's own answer, written as a model would write it."""
    return {bench.id_of(row, number): [bench.gold_text(row)] for number, row in enumerate(rows)}


def read_outputs(path: Path, known: set[str]) -> dict[str, list[str]]:
    """Reads texts to be scored.

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


def write_csv(path: Path, scores: Sequence[Score]) -> None:
    """Writes one line a text. What is not valid Unicode is written as an escape.

    Raises:
        StoreError: the file cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for score in scores:
        it = score.verdict
        extracted = "" if it.extracted is None else it.extracted.replace("\0", "\\0")
        writer.writerow((score.id, score.sample, extracted, it.verdict, int(it.passed), it.reason, it.tier))
    write_output(path, text.getvalue())


def summarise(
    task: str, bench: Benchmark, scores: Sequence[Score], counted: Sequence[Score], filter_name: str
) -> Summary:
    """Condenses scores.

    Args:
        task: name to print.
        bench: the benchmark.
        scores: all of them.
        counted: those that the score is over.
        filter_name: the extraction rule they come from.
    """
    groups: dict[str, list[Score]] = {}
    for score in counted:
        if score.verdict.verdict != ERROR:
            groups.setdefault(score.id, []).append(score)
    if not groups:
        raise DataError(f"{task}: nothing could be scored; the judge failed on every text: {scores[0].verdict.reason}")
    items = list(groups.values())
    smallest = min(map(len, items))
    return Summary(
        task=task,
        metric=bench.metric,
        filter_name=filter_name,
        num_rows=len({score.id for score in scores}),
        num_scored=len(items),
        num_missing=sum(score.verdict.verdict == MISSING for score in scores),
        num_texts=sum(score.verdict.verdict != MISSING for score in scores),
        num_nothing=sum(score.verdict.verdict == NO_ANSWER for score in scores),
        num_errors=sum(score.verdict.verdict == ERROR for score in scores),
        num_unisolated=sum(score.verdict.tier == NO_ISOLATION for score in scores),
        score=bootstrap_mean([sum(it.verdict.passed for it in item) / len(item) for item in items]),
        pass_at={k: _pass_at(items, k) for k in _powers(smallest)},
        majority=None if smallest < 2 or bench.kind == "code" else bootstrap_mean([_vote(item) for item in items]),
    )


def report(summary: Summary, *, allow_partial: bool) -> list[str]:
    """The lines to print."""
    s = summary
    lines = [
        f"{s.task} (filter {s.filter_name}): {s.metric} {_percent(s.score)} over {s.num_scored} of {s.num_rows} rows"
    ]
    lines.extend(f"  pass@{k} {_percent(value)}" for k, value in s.pass_at.items())
    if s.majority is not None:
        lines.append(f"  majority vote {_percent(s.majority)}")
    share = s.num_nothing / s.num_texts if s.num_texts else 0.0
    lines.append(f"  nothing extracted from {s.num_nothing} of {s.num_texts} texts ({share:.1%})")
    if s.num_missing:
        what = "left out" if allow_partial else "counted as wrong (--allow-partial leaves them out)"
        lines.append(f"  {s.num_missing} rows have no text: {what}")
    if s.num_unisolated:
        lines.append(f"  {s.num_unisolated} programs ran without isolation, so their verdicts can be forged")
    if s.num_errors:
        lines.append(f"  {s.num_errors} texts could not be judged and are left out: run again, or see `doctor`")
    return lines


def _pass_at(items: Sequence[Sequence[Score]], k: int) -> Interval:
    counts = [len(item) for item in items]
    return bootstrap_mean(pass_at_k(counts, [sum(it.verdict.passed for it in item) for item in items], k))


def _powers(largest: int) -> list[int]:
    """The k to report: none for single texts, else 2, 5, 10, 20, 50, ... up to the number of texts, and that number."""
    ks = {k for k in (2, 5, 10, 20, 50, 100, 200, 500, 1000) if k <= largest}
    return sorted(ks | {largest}) if largest > 1 else []


def _vote(item: Sequence[Score]) -> float:
    return float(majority_passed([it.verdict.extracted for it in item], [it.verdict.passed for it in item]))


def _percent(interval: Interval) -> str:
    if math.isnan(interval.low):
        return f"{100 * interval.value:.2f}% (one row gives no interval)"
    return f"{100 * interval.value:.2f}% (95% interval {100 * interval.low:.2f} to {100 * interval.high:.2f})"
