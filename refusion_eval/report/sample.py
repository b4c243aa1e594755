"""One sample of a run: how it is found, how it was decoded, and what the page holds of it."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal

from refusion_eval.benchmarks import is_sealed, shown_answer
from refusion_eval.errors import ConfigError, StoreError
from refusion_eval.report.frames import Frame, frames, sentence
from refusion_eval.report.replay import Change, Replay, Spell, Speller, Step, final_pieces, replay_of
from refusion_eval.report.states import state_frames
from refusion_eval.store.records import PASSED, Sample, ScoreRow
from refusion_eval.store.run_store import Run, RunReader
from refusion_eval.types import Trace

WITHHELD = "Withheld: the authors of GPQA ask that its questions, and texts about them, appear nowhere in plain text."
_WITHHELD_SIGN = "▪"
_MOST_NAMED = 8


def find_sample(
    run_dir: str | os.PathLike[str],
    task: str | None = None,
    item: str | None = None,
    number: int | None = None,
    *,
    needs: Literal["text", "trace", "steps"] = "trace",
) -> tuple[Run, Sample]:
    """The first sample that fits and has what is needed, and its run; steps are those of a trace, or a server's states.

    Raises:
        ConfigError: none fits.
        StoreError: none of those has what is needed.
    """
    with RunReader.open(run_dir) as reader:
        samples = list(reader.samples(traces=False))
        if not samples:
            raise StoreError(f"{run_dir} has no samples yet; run its command again")
        of_task = [sample for sample in samples if task is None or task in (sample.key.task, sample.benchmark)]
        if not of_task:
            names = _some([sample.key.task for sample in samples], task)
            raise ConfigError(f"{run_dir} has no task {task!r}; it has {names}")
        of_item = [sample for sample in of_task if item is None or sample.item_id == item]
        if not of_item:
            names = _some([sample.item_id for sample in of_task], item)
            raise ConfigError(f"{run_dir}: no item {item!r}; for example {names}")
        keys = {sample.key for sample in of_item if number is None or sample.key.sample == number}
        if not keys:
            what = "no item has a" if item is None else f"item {item!r} has no"
            last = max(sample.key.sample for sample in of_item)
            raise ConfigError(f"{run_dir}: {what} sample {number}; its samples are 0 to {last}")
        for sample in reader.samples():
            if sample.key in keys and sample.trace is not None:
                sample.events()  # here the error names the run
                return reader.run, sample
            has_it = sample.error is None if needs == "text" else needs == "steps" and states_of(sample)
            if sample.key in keys and has_it:
                return reader.run, sample
    no_trace = "no trace is recorded of what fits, so it cannot be replayed"
    lacks = "what fits could not be decoded" if needs == "text" else no_trace
    raise StoreError(f"{run_dir}: {lacks}; name another sample")


def _some(names: Sequence[str], wanted: str | None) -> str:
    """A few of the names, those that are most like the wanted one first."""
    different = list(dict.fromkeys(names))
    listed = list(dict.fromkeys([*get_close_matches(wanted or "", different, n=3), *different]))
    return ", ".join(listed[:_MOST_NAMED]) + (", ..." if len(listed) > _MOST_NAMED else "")


def states_of(sample: Sample) -> Sequence[Sequence[Any]]:
    """The states that the text of a server went through, as `Sample.server` has them."""
    return (sample.server or {}).get("states", ())


def sample_frames(sample: Sample, spell: Callable[[], Spell | None]) -> Iterator[Frame]:
    """How a sample was decoded: by its trace, or by the states of its text, which need no tokenizer (`spell`)."""
    if sample.trace is None and (states := states_of(sample)):
        return state_frames(states, _WITHHELD_SIGN if is_sealed(sample.key.task, sample.benchmark) else "")
    return frames(sample_replay(sample), speller_of(sample, spell()))


def sample_replay(sample: Sample, trace: Trace | None = None) -> Replay:
    num_kept = sample.num_tokens if sample.tokens is not None else None
    return replay_of(trace or sample.events(), slot_size=sample.slot_size or 1, num_kept=num_kept)


def is_withheld(sample: Sample) -> bool:
    """Whether a replay may show positions and times but no text: sealed questions, whose records have no tokens."""
    return sample.tokens is None or is_sealed(sample.key.task, sample.benchmark)


def speller_of(sample: Sample, spell: Spell | None) -> Speller:
    """Spells the tokens of a sample; all tokens of a sealed sample are the same sign."""
    return Speller((lambda tokens: _WITHHELD_SIGN * len(tokens)) if is_withheld(sample) else spell)


def list_row(sample: Sample, scores: Mapping[str, ScoreRow], sealed: bool) -> dict[str, Any]:
    """A sample in the list of its task; `state` is right, wrong, error or unscored."""
    verdict = scores.get(PASSED)
    extracted = _extracted(verdict, sealed)
    judged = "unscored" if verdict is None else "right" if verdict.value > 0 else "wrong"
    return {
        "item_id": sample.item_id,
        "number": sample.key.sample,
        "state": judged if sample.error is None else "error",
        "tokens": sample.num_tokens,
        "forwards": sample.num_forwards,
        "seconds": rounded(sample.seconds),
        "extracted": extracted and extracted[:48],
    }


def body(
    sample: Sample, scores: Mapping[str, ScoreRow], sealed: bool, speller: Speller, trace: Trace | None
) -> dict[str, Any]:
    """Everything about a sample except its question; a sealed task has no texts, and its replay no words."""
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
            [name, "none" if value is None else str(value), str(sample.settings_source.get(name, ""))]
            for name, value in sorted(sample.settings.items())
        ],
        "stop": sample.stop,
        "promptTokens": sample.prompt_num_tokens,
        "batchSize": sample.batch_size,
        "warm": sample.warm,
        "created": sample.created,
        "process": sample.process_id,
        "replay": None if trace is None else _encoded_replay(sample, speller, trace),
    }


def rounded(value: float) -> float | None:
    """Six significant digits; None for NaN and infinities, which JSON does not have."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _extracted(verdict: ScoreRow | None, sealed: bool) -> str | None:
    if verdict is None or verdict.extracted is None:
        return None
    return shown_answer(verdict.extracted) if sealed else verdict.extracted


def _score_range(step: Step) -> str:
    scores = [f"{score:.3f}" for score in sorted(step.scores.values()) if math.isfinite(score)]
    if len(scores) < 2:
        return f" (score {scores[0]})" if scores else ""
    return f" (scores {scores[0]} to {scores[-1]})"


def _encoded_replay(sample: Sample, speller: Speller, trace: Trace) -> dict[str, Any]:
    """A replay as the page reads it. Each text is stored once and named by its index; withheld texts are not there."""
    replay = sample_replay(sample, trace)
    shows_text = not is_withheld(sample)
    final = final_pieces(replay, speller) if shows_text else {}
    table: dict[str, int] = {}

    def encoded(change: Change) -> list[Any]:
        if not shows_text or not change.tokens:
            return [change.state, change.positions, []]
        is_final = change.state == "fixed"
        texts = map(final.__getitem__, change.positions) if is_final else map(speller.piece, change.tokens)
        return [change.state, change.positions, [table.setdefault(text, len(table)) for text in texts]]

    steps = []
    for step in replay.steps:
        scores = [[position, rounded(score)] for position, score in step.scores.items()]
        text = sentence(step).removesuffix(".") + _score_range(step) + "."
        steps.append([step.action, step.forward, [*map(encoded, step.changes)], scores, text, step.num_fixed])
    return {
        "positions": replay.num_positions,
        "forwards": replay.forwards,
        "kept": len(replay.kept),
        "steps": steps,
        "pieces": list(table),
    }
