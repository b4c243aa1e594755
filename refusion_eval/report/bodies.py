"""One sample as the page holds it: a row in the list of its task, and the body that is read when it is opened."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from refusion_eval.report.find import is_withheld, sample_replay
from refusion_eval.report.pieces import Speller, final_pieces
from refusion_eval.report.replay import Change, Replay, Step
from refusion_eval.store.records import PASSED, Sample, ScoreRow

WITHHELD = "Withheld: the authors of GPQA ask that its questions, and texts about them, appear nowhere in plain text."

# An answer to a sealed question that cannot be a quotation.
_LETTER = re.compile(r"\(?[A-Za-z]\)?")


class ListRow(NamedTuple):
    """What the list of a task shows of a sample.

    Attributes:
        item_id: the benchmark's name for the item.
        number: number of the sample among those of the item.
        state: `right`, `wrong`, `error` or `unscored`.
        tokens: tokens kept.
        forwards: model calls.
        seconds: decoding time.
        extracted: the answer that was found, cut short.
    """

    item_id: str
    number: int
    state: str
    tokens: int
    forwards: int
    seconds: float | None
    extracted: str | None


def list_row(sample: Sample, scores: Mapping[str, ScoreRow], sealed: bool) -> ListRow:
    """The row of a sample."""
    verdict = scores.get(PASSED)
    extracted = _extracted(verdict, sealed)
    return ListRow(
        item_id=sample.item_id,
        number=sample.key.sample,
        state=_state(sample, verdict),
        tokens=sample.num_tokens,
        forwards=sample.num_forwards,
        seconds=_rounded(sample.seconds),
        extracted=None if extracted is None else extracted[:48],
    )


def body(sample: Sample, scores: Mapping[str, ScoreRow], sealed: bool, speller: Speller) -> dict[str, Any]:
    """Everything about a sample except its question.

    A sealed task has no texts, and its replay shows positions and times only.
    """
    verdict = scores.get(PASSED)
    return {
        "output": None if sealed else sample.text,
        "withheld": WITHHELD if sealed else "",
        "error": None if sample.error is None else ("The attempt failed." if sealed else sample.error),
        "extracted": _extracted(verdict, sealed),
        "verdict": None if verdict is None else verdict.verdict,
        "reason": "" if verdict is None or sealed else verdict.reason,
        "scorer": "" if verdict is None else verdict.scorer,
        "tier": "" if verdict is None else verdict.tier,
        "scores": {name: score.value for name, score in sorted(scores.items()) if name != PASSED},
        "settings": [
            [name, value if isinstance(value, str) else _shown(value), str(sample.settings_source.get(name, ""))]
            for name, value in sorted(sample.settings.items())
        ],
        "stop": sample.stop,
        "promptTokens": sample.prompt_num_tokens,
        "batchSize": sample.batch_size,
        "warm": sample.warm,
        "created": sample.created,
        "process": sample.process_id,
        "replay": _replay(sample, speller),
    }


def encoded(replay: Replay, speller: Speller | None) -> dict[str, Any]:
    """A replay for the page. Each text is stored once and named by its index. Without a speller there are no texts."""
    table: dict[str, int] = {}
    final = {} if speller is None else final_pieces(replay, speller)

    def texts(change: Change) -> list[int]:
        if speller is None or not change.tokens:
            return []
        pairs = zip(change.positions, change.tokens, strict=True)
        if change.state == "fixed":
            return [table.setdefault(final[position], len(table)) for position, _ in pairs]
        return [table.setdefault(speller.piece(token), len(table)) for _, token in pairs]

    steps = [_encoded_step(step, [texts(change) for change in step.changes]) for step in replay.steps]
    return {
        "positions": replay.num_positions,
        "forwards": replay.forwards,
        "kept": len(replay.kept),
        "steps": steps,
        "pieces": list(table),
    }


def _encoded_step(step: Step, texts: Sequence[list[int]]) -> list[Any]:
    changes = [
        [change.state, list(change.positions), numbers] for change, numbers in zip(step.changes, texts, strict=True)
    ]
    scores = [[position, _rounded(score)] for position, score in step.scores.items()]
    return [step.action, step.forward, changes, step.num_candidates, scores, step.reason]


def _replay(sample: Sample, speller: Speller) -> dict[str, Any] | None:
    if sample.trace is None:
        return None
    return encoded(sample_replay(sample), None if is_withheld(sample) else speller)


def _extracted(verdict: ScoreRow | None, sealed: bool) -> str | None:
    if verdict is None or verdict.extracted is None:
        return None
    if sealed and not _LETTER.fullmatch(verdict.extracted):
        return "[withheld]"
    return verdict.extracted


def _state(sample: Sample, verdict: ScoreRow | None) -> str:
    if sample.error is not None:
        return "error"
    if verdict is None:
        return "unscored"
    return "right" if verdict.value > 0 else "wrong"


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def _rounded(value: float) -> float | None:
    """Six significant digits; None for NaN and infinities, which JSON does not have."""
    return float(f"{value:.6g}") if value == value and abs(value) != float("inf") else None
