"""Texts that were generated anywhere: read, judged by the same path as the tasks, and summed up."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

from refusion_eval.benchmarks import Benchmark, Row
from refusion_eval.errors import DataError
from refusion_eval.metrics import accuracy, majority_passed, pass_at_k, reported_ks
from refusion_eval.results.render import csv_text
from refusion_eval.scoring.judge import ERROR, MISSING, NO_ANSWER, Verdict, judge_texts
from refusion_eval.store.records import NO_ISOLATION

# In place of a file of outputs: the benchmark's own answers.
GOLD = "gold"

_NUM_NAMED = 5  # texts that could not be judged; the CSV names them all
COLUMNS = ("id", "sample", "extracted", "verdict", "passed", "reason", "tier")


class Score(NamedTuple):
    """The item's id, which of its texts (from 0), and the verdict on it ("missing" for an item without a text)."""

    id: str
    sample: int
    verdict: Verdict


def score_texts(
    benchmark: Benchmark,
    rows: Sequence[Row],
    texts: Mapping[str, Sequence[str]],
    *,
    filter_name: str | None = None,
    workers: int | None = None,
    sandbox: str = "auto",
    kept: MutableMapping[str, Verdict] | None = None,
) -> list[Score]:
    """Judges every text of every row; options and errors are those of `judge_texts` and of `index_rows`.

    `texts` maps an item's id to its texts; items without a text are scored "missing". The scores are in the order of
    the rows, then of the texts.
    """
    by_id = index_rows(benchmark, rows)
    items = [(row, text) for key, row in by_id.items() for text in texts.get(key, ())]
    judged = judge_texts(benchmark, items, filter_name=filter_name, workers=workers, sandbox=sandbox, kept=kept)
    verdicts = iter(judged)
    missing = Verdict(None, MISSING, "no text for this item")
    return [
        Score(key, sample, next(verdicts) if texts.get(key) else missing)
        for key in by_id
        for sample in range(len(texts.get(key, ())) or 1)
    ]


def index_rows(benchmark: Benchmark, rows: Sequence[Row]) -> dict[str, Row]:
    """Returns id -> row, in row order. Raises DataError where two rows have the same id."""
    by_id: dict[str, Row] = {}
    for number, row in enumerate(rows):
        key = benchmark.id_of(row, number)
        if key in by_id:
            raise DataError(
                f"{benchmark.name}: two rows have the id {key!r} (the second is row {number}); ids must differ"
            )
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
    return {benchmark.id_of(row, number): [benchmark.prompts.gold_text(row)] for number, row in enumerate(rows)}


def summary_lines(name: str, benchmark: Benchmark, scores: Sequence[Score], *, allow_partial: bool) -> list[str]:
    """The lines to print: the score, and what a reader must know of it.

    Every row counts alike: the score is the mean over rows of the share of right texts. A text whose judge failed is
    left out. Where every row has more than one text, pass@k follows, and, but for code, the share of rows whose most
    frequent answer is right.
    """
    counts = Counter(score.verdict.verdict for score in scores)
    num_texts, num_missing = len(scores) - counts[MISSING], counts[MISSING]
    items: dict[str, list[Verdict]] = {}
    for item_id, _, verdict in scores:
        if not (allow_partial and verdict.verdict == MISSING):
            items.setdefault(item_id, []).append(verdict)
    drawn = [len(verdicts) for verdicts in items.values()]
    right = [sum(verdict.passed for verdict in verdicts) for verdicts in items.values()]
    score = _percent(one / count for one, count in zip(right, drawn, strict=True))
    num_rows = len({score.id for score in scores})
    lines = [f"{name}: {benchmark.metric} {score} over {len(items)} of {num_rows} rows"]
    fewest = min(drawn)
    ks = sorted({*reported_ks(fewest), fewest} - {1})
    lines += [f"  pass@{k} {_percent(pass_at_k(drawn, right, k))}" for k in ks]
    if fewest > 1 and benchmark.kind != "code":
        votes = (majority_passed([one.extracted for one in of], [one.passed for one in of]) for of in items.values())
        lines.append(f"  majority vote {_percent(map(float, votes))}")
    share = counts[NO_ANSWER] / num_texts if num_texts else 0.0
    lines.append(f"  nothing extracted from {counts[NO_ANSWER]} of {num_texts} texts ({share:.1%})")
    if fewest != max(drawn):
        lines.append(f"  rows have {fewest} to {max(drawn)} texts each; every row counts alike")
    if num_missing:
        how = "left out" if allow_partial else "counted as wrong (--allow-partial leaves them out)"
        lines.append(f"  {num_missing} rows have no text: {how}")
    if num_unisolated := sum(score.verdict.tier == NO_ISOLATION for score in scores):
        lines.append(f"  {num_unisolated} programs ran without isolation, so their verdicts can be forged")
    if unjudged := [score for score in scores if score.verdict.verdict == ERROR]:
        named = ", ".join(f"{score.id} ({score.verdict.reason})" for score in unjudged[:_NUM_NAMED])
        more = f" and {len(unjudged) - _NUM_NAMED} more" if len(unjudged) > _NUM_NAMED else ""
        lines.append(f"  {len(unjudged)} texts could not be judged and count as wrong: {named}{more}")
    return lines


def scores_csv(scores: Sequence[Score], *, allow_partial: bool = False) -> str:
    """A line for each text, and for each row without one unless `allow_partial`; it ends as those of the csv module."""
    return csv_text(COLUMNS, score_cells(scores, allow_partial=allow_partial), line_end="\r\n")


def score_cells(scores: Sequence[Score], *, allow_partial: bool = False) -> list[tuple]:
    """The values of `COLUMNS` for each text, and for each row without one unless `allow_partial`."""
    return [
        (item_id, sample, verdict.extracted, verdict.verdict, int(verdict.passed), verdict.reason, verdict.tier)
        for item_id, sample, verdict in scores
        if not (allow_partial and verdict.verdict == MISSING)
    ]


def _percent(shares: Iterable[float]) -> str:
    """The mean over rows with its interval."""
    mean = accuracy(list(shares)).interval()
    if math.isnan(mean.low):
        return f"{100 * mean.value:.2f}% (one row gives no interval)"
    return f"{100 * mean.value:.2f}% (95% interval {100 * mean.low:.2f} to {100 * mean.high:.2f})"
