"""Runs a decoder without a model: an answer function plays the engine."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from refusion_eval.types import Forward, Read, Readout, Response, RowScores, Trace

Answer = Callable[[Forward, Read], Readout]


def run_scripted(
    decode: Any, prompt: Sequence[int], settings: Any, answer: Answer
) -> tuple[Response, Trace, list[Forward]]:
    """Drives the generator; checks on the way what the engine would rely on."""
    trace, forwards = Trace(), []
    decoding = decode(prompt, settings, trace)
    cached = previous = 0
    forward = next(decoding)
    while True:
        assert all(0 <= row < previous for row in forward.commit.rows)
        if forward.commit.keep is not None:
            assert forward.commit.keep <= cached
            cached = forward.commit.keep
        before = forwards[-1].approximation if forwards else None
        is_thinned = isinstance(before, RowScores) and len(forward.commit.rows) > 0
        cached += before.best if is_thinned else len(forward.commit.rows)
        previous = len(forward.tokens)
        assert previous == len(forward.positions) == sum(segment.size for segment in forward.attention) > 0
        assert all(0 <= row < previous for read in forward.reads for row in read.rows)
        forwards.append(forward)
        trace.forward(forward.kind, previous, cached)
        try:
            forward = decoding.send(tuple(answer(forward, read) for read in forward.reads))
        except StopIteration as stop:
            return stop.value, trace, forwards


def readout(tokens: Sequence[int], probs: Sequence[float] | float, given: Sequence[float] | None = None) -> Readout:
    """A Readout from plain numbers; one probability may serve all rows."""
    return Readout(
        np.asarray(tokens, dtype=np.int64),
        np.broadcast_to(np.asarray(probs, dtype=np.float32), len(tokens)),
        None if given is None else np.asarray(given, dtype=np.float32),
    )
