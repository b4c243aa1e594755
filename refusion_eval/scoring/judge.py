"""Scores texts: extraction, then the judge of the benchmark's kind. A function of rows and texts alone.

The same function serves the lm-eval tasks, the records of a run and texts that were generated elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from refusion_eval.benchmarks import BENCHMARKS, Benchmark, Extraction, Row
from refusion_eval.benchmarks.extract import answers as extract
from refusion_eval.errors import DataError
from refusion_eval.sandbox import Program, Verdict, check_programs
from refusion_eval.scoring import math_judge

CORRECT, WRONG, NO_ANSWER, MISSING, ERROR = "correct", "wrong", "no_answer", "missing", "error"

_VERDICT_OF_STATUS = {"passed": CORRECT, "failed": WRONG, "timed_out": "timed_out", "killed": "killed", "error": ERROR}


@dataclass(frozen=True)
class Score:
    """The outcome of one text.

    Attributes:
        id: the item.
        sample: which of the item's texts, from 0.
        extracted: the answer that was judged, or None.
        passed: whether it is right.
        verdict: "correct", "wrong", "no_answer" (nothing extracted), "missing" (no text for the item); for code also
            "timed_out", "killed" and "error" (the sandbox failed: says nothing about the text, never counts as wrong).
        reason: what decided, in words.
        tier: of code, the isolation it ran under: "A", "B", "C" or "none"; else empty.
    """

    id: str
    sample: int
    extracted: str | None
    passed: bool
    verdict: str
    reason: str
    tier: str = ""


class Outcome(NamedTuple):
    """What a judge says about one extracted answer."""

    verdict: str
    reason: str
    tier: str = ""


class Judged(NamedTuple):
    """What was extracted from one text and what the judge says; the words are those of `Score`."""

    extracted: str | None
    verdict: str
    reason: str
    tier: str = ""

    @property
    def passed(self) -> bool:
        """Whether the text is right."""
        return self.verdict == CORRECT


class _Attempt(NamedTuple):
    """One extracted answer and the row it belongs to."""

    row: Row
    answer: str


def score_texts(
    benchmark: str,
    rows: Sequence[Row],
    texts: Mapping[str, Sequence[str]],
    *,
    filter_name: str | None = None,
    workers: int | None = None,
    sandbox: str = "auto",
    on_done: Callable[[], None] | None = None,
) -> list[Score]:
    """Scores every text of every row.

    Args:
        benchmark: a key of `BENCHMARKS`.
        rows: dataset rows, as `Task.rows` returns them.
        texts: item id -> its texts; items without a text are scored "missing".
        filter_name: another extraction rule than the benchmark's first.
        workers: processes for code and for mathematics; the number of processors if None.
        sandbox: "auto", or "none" for no isolation (code of people you trust only).
        on_done: called after each answer whose judgement took a process.

    Returns:
        Scores in the order of the rows, then of the texts.

    Raises:
        DataError: unknown benchmark or filter, an id that no row has, an id that two rows have, malformed gold.
        SandboxError: code cannot be run in isolation on this machine.
    """
    if benchmark not in BENCHMARKS:
        raise DataError(f"unknown benchmark {benchmark!r}; known: {', '.join(BENCHMARKS)}")
    bench = BENCHMARKS[benchmark]
    by_id = index_rows(bench, rows)
    unknown = [key for key in texts if key not in by_id]
    if unknown:
        raise DataError(f"{len(unknown)} ids are not in the {benchmark} rows, the first is {unknown[0]!r}")
    keys = [(key, sample) for key in by_id for sample in range(len(texts.get(key, ())))]
    items = [(by_id[key], texts[key][sample]) for key, sample in keys]
    judged = judge_texts(bench, items, filter_name=filter_name, workers=workers, sandbox=sandbox, on_done=on_done)
    scores = {
        (key, sample): Score(key, sample, it.extracted, it.passed, it.verdict, it.reason, it.tier)
        for (key, sample), it in zip(keys, judged, strict=True)
    }
    result: list[Score] = []
    for key in by_id:
        given = [scores[key, sample] for sample in range(len(texts.get(key, ())))]
        result.extend(given or [Score(key, 0, None, False, MISSING, "no text for this item")])
    return result


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


def judge_texts(
    bench: Benchmark,
    items: Sequence[tuple[Row, str]],
    *,
    filter_name: str | None = None,
    workers: int | None = None,
    sandbox: str = "auto",
    on_done: Callable[[], None] | None = None,
) -> list[Judged]:
    """Extracts and judges texts, all at once: code and mathematics go through pools of processes.

    Args:
        bench: the benchmark.
        items: (row, text).
        filter_name: another extraction rule than the benchmark's first.
        workers: processes for code and for mathematics.
        sandbox: "auto" or "none".
        on_done: called after each answer whose judgement took a process.

    Returns:
        One outcome an item, in order.
    """
    found = [bench.extract(text, row, filter_name) for row, text in items]
    return judge_found(bench, [row for row, _ in items], found, workers=workers, sandbox=sandbox, on_done=on_done)


def judge_found(
    bench: Benchmark,
    rows: Sequence[Row],
    found: Sequence[Extraction],
    *,
    workers: int | None = None,
    sandbox: str = "auto",
    on_done: Callable[[], None] | None = None,
) -> list[Judged]:
    """Judges what any rule extracted; `found` goes with `rows`, all else is as in `judge_texts`."""
    attempts = [_Attempt(row, it.answer) for row, it in zip(rows, found, strict=True) if it.answer is not None]
    if bench.kind == "code":
        outcomes = iter(_judge_code(bench, attempts, workers, sandbox, on_done))
    elif bench.kind == "mathematics":
        outcomes = iter(_judge_mathematics(bench, attempts, workers, on_done))
    else:
        outcomes = iter([_judge_value(bench, attempt) for attempt in attempts])
    return [Judged(None, NO_ANSWER, it.how) if it.answer is None else _judged(it, next(outcomes)) for it in found]


def _judged(found: Extraction, outcome: Outcome) -> Judged:
    return Judged(found.answer, outcome.verdict, f"{found.how}; {outcome.reason}", outcome.tier)


def _judge_value(bench: Benchmark, attempt: _Attempt) -> Outcome:
    gold = bench.gold(attempt.row)
    if bench.kind == "number":
        is_right = extract.parse_number(attempt.answer) == extract.parse_number(gold)
    else:
        is_right = attempt.answer == gold
    return Outcome(CORRECT if is_right else WRONG, f"expected {gold}")


def _judge_mathematics(
    bench: Benchmark, attempts: Sequence[_Attempt], workers: int | None, on_done: Callable[[], None] | None
) -> list[Outcome]:
    golds = [bench.gold(attempt.row) for attempt in attempts]
    pairs = [(gold, attempt.answer) for gold, attempt in zip(golds, attempts, strict=True)]
    compared = math_judge.compare_all(pairs, workers=workers, on_done=on_done)
    return [
        Outcome(CORRECT if comparison.equal else WRONG, f"expected {gold}: {comparison.reason}")
        for gold, comparison in zip(golds, compared, strict=True)
    ]


def _judge_code(
    bench: Benchmark,
    attempts: Sequence[_Attempt],
    workers: int | None,
    sandbox: str,
    on_done: Callable[[], None] | None,
) -> list[Outcome]:
    if bench.test is None:
        raise DataError(f"{bench.name} is a code benchmark without tests")
    tests = [bench.test(attempt.row) for attempt in attempts]
    programs = [
        Program(candidate=attempt.answer, test=test.test, helpers=test.helpers, timeout_s=test.timeout_s)
        for attempt, test in zip(attempts, tests, strict=True)
    ]

    def report(_index: int, _verdict: Verdict) -> None:
        if on_done is not None:
            on_done()

    verdicts = check_programs(programs, workers=workers, sandbox=sandbox, on_done=report)
    return [
        Outcome(_VERDICT_OF_STATUS[verdict.status], f"{verdict.reason} {verdict.detail}".strip(), verdict.tier)
        for verdict in verdicts
    ]
