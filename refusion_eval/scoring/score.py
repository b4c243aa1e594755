"""`refusion-eval score`: texts that were generated anywhere become score rows, and these a summary."""

import contextlib
import math
from collections import Counter, UserDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from refusion_eval.benchmarks import BENCHMARKS, Benchmark, Row
from refusion_eval.benchmarks.extract.formulas import normal_form
from refusion_eval.errors import DataError, StoreError
from refusion_eval.metrics import Interval, accuracy, majority_passed, pass_at_k, reported_ks
from refusion_eval.scoring.judge import ERROR, MISSING, NO_ANSWER, Verdict, judge_texts
from refusion_eval.store.atomic_write import append_line
from refusion_eval.store.records import NO_ISOLATION, SampleKey, ScoreRow, dump
from refusion_eval.untrusted import parse_json, read_plain
from refusion_eval.version import __version__

GOLD = "gold"  # in place of a file of outputs: the benchmark's own answers

_NUM_NAMED = 5  # texts that could not be judged; the CSV names them all
COLUMNS = ("id", "sample", "extracted", "verdict", "passed", "reason", "tier")


class VerdictFile(UserDict[str, Verdict]):
    """Verdicts by key, each written as soon as it is put in, so that a command that is killed and run again has it."""

    # The file lies beside the command's result until that is written. Verdicts of another rule (what they depend on
    # besides their keys) or of another version are not read.
    def __init__(self, result: Path, rule: str) -> None:
        super().__init__()
        self._path = result.with_name(f"{result.name}.partial")
        self._scorer = f"{rule} {__version__}"
        try:
            if self._path.is_symlink():
                raise OSError("it is a symbolic link, not a plain file")
            lines = read_plain(self._path).splitlines()
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(f"{self._path} cannot be read ({error.strerror or error}); remove it") from error
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):  # a part of a line, left by a killed process
                scorer, key, (extracted, *words) = parse_json(line)
                if scorer == self._scorer and isinstance(extracted, str | None) and {str} >= set(map(type, words)):
                    self.data[key] = Verdict(extracted, *words)

    def __setitem__(self, key: str, verdict: Verdict) -> None:
        if verdict.verdict != ERROR:  # which says nothing about the text, so that it is judged again
            append_line(self._path, dump([self._scorer, key, verdict]))
        self.data[key] = verdict

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)  # the result holds the verdicts now


def score_texts(
    benchmark: Benchmark, rows: Sequence[Row], texts: Mapping[str, Sequence[str]], **options: Any
) -> list[ScoreRow]:
    """Judges every text of every row by its id, in order; items without a text are scored 'missing'."""
    by_id = index_rows(benchmark, rows)
    items = [(row, text) for item, row in by_id.items() for text in texts.get(item, ())]
    verdicts = iter(judge_texts(benchmark, items, **options))
    missing = Verdict(None, MISSING, "no text for this item")
    version = benchmark.prompts.version
    scorer = f"{benchmark.name}/{options.get('filter_name') or benchmark.default_filter} {version}"
    return [
        (next(verdicts) if texts.get(item) else missing).score(
            SampleKey(benchmark.name, version, item, "", number, ""), item, scorer
        )
        for item in by_id
        for number in range(len(texts.get(item, ())) or 1)
    ]


def index_rows(benchmark: Benchmark, rows: Sequence[Row]) -> dict[str, Row]:
    """Returns id -> row, in row order. Raises DataError where two rows have the same id."""
    ids = [benchmark.id_of(row, number) for number, row in enumerate(rows)]
    if twice := [item for item, count in Counter(ids).items() if count > 1]:
        raise DataError(f"{benchmark.name}: two rows have the id {twice[0]!r}; ids must differ")
    return dict(zip(ids, rows, strict=True))


def default_csv_path(task: str, outputs: str) -> Path:
    path = Path(outputs)
    stem = Path(path.name.removesuffix(".gz")).stem
    return Path(f"{task}.gold.csv") if outputs == GOLD else path.with_name(f"{stem}.scores.csv")


def scored_items(scores: Sequence[ScoreRow], *, allow_partial: bool) -> list[list[ScoreRow]]:
    """The scores of each row, whose mean is the score; rows without a text are left out if asked for."""
    items: dict[str, list[ScoreRow]] = {}
    for score in scores:
        if not (allow_partial and score.verdict == MISSING):
            items.setdefault(score.item_id, []).append(score)
    return list(items.values())


def right(of_item: Sequence[ScoreRow]) -> int:
    return sum(score.value > 0 for score in of_item)


class Counts(NamedTuple):
    """The rows and texts that a score rests on, and the texts of which something must be known."""

    num_rows: int
    num_texts: int
    num_missing: int  # rows without a text
    num_unanswered: int  # texts that nothing was extracted from
    num_unjudged: int  # they count as wrong
    num_unisolated: int  # programs whose verdicts can be forged
    num_unstated: int  # texts without a box or a stated answer, under a rule that reads any formula; else 0
    num_right_unstated: int  # those of them that are right

    @classmethod
    def of(cls, scores: Sequence[ScoreRow], stated: Sequence[ScoreRow]) -> Self:
        """The counts of some scores and of those of the same texts by `stated_scores`."""
        verdicts = Counter(score.verdict for score in scores)
        unstated = [score for score, other in zip(scores, stated, strict=bool(stated)) if other.verdict == NO_ANSWER]
        return cls(
            num_rows=len({score.item_id for score in scores}),
            num_texts=len(scores) - verdicts[MISSING],
            num_missing=verdicts[MISSING],
            num_unanswered=verdicts[NO_ANSWER],
            num_unjudged=verdicts[ERROR],
            num_unisolated=sum(score.tier == NO_ISOLATION for score in scores),
            num_unstated=len(unstated),
            num_right_unstated=right(unstated),
        )


def stated_scores(
    benchmark: Benchmark, rows: Sequence[Row], texts: Mapping[str, Sequence[str]], **options: Any
) -> list[ScoreRow]:
    """The scores by this project's rule beside a rule that takes any formula in a text, as in runs; else none."""
    if not benchmark.prompts.reads_solution:
        return []
    return score_texts(BENCHMARKS[benchmark.name], rows, texts, **options)


def mean_score(scores: Sequence[ScoreRow], *, allow_partial: bool) -> Interval:
    """The mean over rows of the share of right texts, in percent."""
    items = scored_items(scores, allow_partial=allow_partial)
    return mean_percent(right(of_item) / len(of_item) for of_item in items)


def summary_lines(
    name: str,
    benchmark: Benchmark,
    scores: Sequence[ScoreRow],
    stated: Sequence[ScoreRow] = (),
    *,
    allow_partial: bool,
) -> list[str]:
    """The lines to print: the score and its limits; `stated` are those of `stated_scores`."""
    counts = Counts.of(scores, stated)
    items = scored_items(scores, allow_partial=allow_partial)
    drawn, num_right = list(map(len, items)), list(map(right, items))
    share_right = _in_words(mean_score(scores, allow_partial=allow_partial))
    fewest = min(drawn)
    average = f" (avg@{fewest})" if fewest == max(drawn) > 1 else ""
    lines = [f"{name}: {benchmark.metric} {share_right} over {len(items)} of {counts.num_rows} rows{average}"]
    if stated:
        by_rule = _in_words(mean_score(stated, allow_partial=allow_partial))
        lines.append(f"  {by_rule} if the last box or stated answer counts (this project's rule), not any formula")
    if counts.num_unstated:
        lines.append(
            f"  warning: {counts.num_unstated} of {counts.num_texts} texts have neither a box nor a stated answer; "
            f"{counts.num_right_unstated} of them count as right by another formula"
        )
    lines += [f"  pass@{k} {_percent(pass_at_k(drawn, num_right, k))}" for k in reported_ks(fewest)]
    if benchmark.kind == "instructions":
        flags = [flag for texts in items for score in texts for flag in score.followed]
        lines.append(f"  by instruction {mean_percent(flags).value:.2f}% over {len(flags)} instructions")
    elif fewest > 1 and benchmark.kind != "code":
        answers = ([normal_form(benchmark.kind, score.extracted) for score in texts] for texts in items)
        votes = map(majority_passed, answers, ([score.value > 0 for score in texts] for texts in items))
        lines.append(f"  majority vote {_percent(map(float, votes))}")
    share = counts.num_unanswered / counts.num_texts if counts.num_texts else 0.0
    lines.append(f"  nothing extracted from {counts.num_unanswered} of {counts.num_texts} texts ({share:.1%})")
    if fewest != max(drawn):
        lines.append(f"  rows have {fewest} to {max(drawn)} texts each; every row counts alike")
    if counts.num_missing:
        how = "left out" if allow_partial else "counted as wrong (--allow-partial leaves them out)"
        lines.append(f"  {counts.num_missing} rows have no text: {how}")
    if counts.num_unisolated:
        lines.append(f"  {counts.num_unisolated} programs ran without isolation, so their verdicts can be forged")
    if unjudged := [f"{score.item_id} ({score.reason})" for score in scores if score.verdict == ERROR]:
        more = f" and {len(unjudged) - _NUM_NAMED} more" if len(unjudged) > _NUM_NAMED else ""
        named = ", ".join(unjudged[:_NUM_NAMED])
        lines.append(f"  {len(unjudged)} texts could not be judged and count as wrong: {named}{more}")
    return lines


def score_cells(scores: Sequence[ScoreRow], *, allow_partial: bool = False) -> list[tuple]:
    return [
        (score.item_id, score.key.sample, score.extracted, score.verdict, int(score.value), score.reason, score.tier)
        for score in scores
        if not (allow_partial and score.verdict == MISSING)
    ]


def mean_percent(shares: Iterable[float]) -> Interval:
    return accuracy(list(shares)).scaled(100).interval()


def _percent(shares: Iterable[float]) -> str:
    return _in_words(mean_percent(shares))


def _in_words(mean: Interval) -> str:
    if math.isnan(mean.low):
        return f"{mean.value:.2f}% (one row gives no interval)"
    return f"{mean.value:.2f}% (95% interval {mean.low:.2f} to {mean.high:.2f})"
