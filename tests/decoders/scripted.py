"""Runs a decoder without a model: an answer function plays the engine."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from refusion_eval.types import Forward, Read, Readout, Response, RowScores, Trace, draw_key

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


def answer_by_place(mask_id: int, most: float = math.inf) -> Answer:
    """Tokens, confidences and entropies of a position are the same at every forward; `most` cuts confidences."""

    def answer(forward: Forward, read: Read) -> Readout:
        keys = [draw_key(7, forward.positions[row]) for row in read.rows]
        scores = np.array([min(most, (key >> 20) % 128 / 100) for key in keys], dtype=np.float32)
        return replace(readout([key % mask_id for key in keys], scores), entropy=scores if read.entropy else None)

    return answer


@st.composite
def blocks(draw: st.DrawFn, shortest: int = 1, most: int = 4) -> dict[str, int]:
    """Lengths of a response and of its blocks, up to `most` of at least `shortest` tokens."""
    block_length, num_blocks = draw(st.integers(shortest, 8)), draw(st.integers(1, most))
    return {"gen_length": block_length * num_blocks, "block_length": block_length}


def readout(tokens: Sequence[int], probs: Sequence[float] | float, given: Sequence[float] | None = None) -> Readout:
    """A Readout from plain numbers; one probability may serve all rows."""
    return Readout(
        np.asarray(tokens, dtype=np.int64),
        np.broadcast_to(np.asarray(probs, dtype=np.float32), len(tokens)),
        None if given is None else np.asarray(given, dtype=np.float32),
    )
