"""Runs a decoder without any KV cache: the oracle for decoders and engine alike.

Every row that was ever fed is kept with the rows that it saw. A forward recomputes all of them under that visibility
as a dense mask, so nothing depends on cache handling. Slow and obviously right.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from refusion_eval.types import DROP_ALL, Attention, Decoding, Forward, Read, Readout, Response, Trace, causal


def visible_rows(attention: Attention) -> list[list[int]]:
    """For each query row the query rows that it sees, written as plainly as possible."""
    visible: list[list[int]] = []
    start = 0
    for segment in attention:
        for row in range(start, start + segment.size):
            own = range(start, row + 1) if segment.causal else range(start, start + segment.size)
            visible.append([r for first, end in segment.sees for r in range(first, end)] + list(own))
        start += segment.size
    return visible


class OracleEngine:
    """One sequence on a causal language model that is called as those of transformers are."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, decode: Any, prompt: Sequence[int], settings: Any) -> tuple[Response, Trace]:
        trace = Trace()
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.sees: list[list[int]] = []
        committed: list[int] = []
        previous: range = range(0)
        decoding: Decoding = decode(prompt, settings, trace)
        forward = next(decoding)
        while True:
            rows = [previous[row] for row in forward.commit.rows]
            committed = committed[: forward.commit.keep] + rows
            trace.forward(forward.kind, len(forward.tokens), len(committed))
            previous = range(len(self.tokens), len(self.tokens) + len(forward.tokens))
            readouts = self._compute(forward, committed, previous)
            try:
                forward = decoding.send(readouts)
            except StopIteration as stop:
                return stop.value, trace

    def _compute(self, forward: Forward, committed: list[int], rows: range) -> tuple[Readout, ...]:
        self.tokens.extend(forward.tokens)
        self.positions.extend(forward.positions)
        self.sees.extend(committed + [rows[r] for r in seen] for seen in visible_rows(forward.attention))
        mask = torch.full((len(self.tokens), len(self.tokens)), float("-inf"), dtype=self.model.dtype)
        for row, seen in enumerate(self.sees):
            mask[row, seen] = 0.0
        with torch.inference_mode():
            logits = self.model(
                input_ids=torch.tensor([self.tokens]),
                position_ids=torch.tensor([self.positions]),
                attention_mask=mask[None, None],
                use_cache=False,
            ).logits[0, rows.start :]
        return tuple(self._read(logits[list(read.rows)].double(), read) for read in forward.reads)

    def _read(self, logits: torch.Tensor, read: Read) -> Readout:
        assert read.temperature == 0, "the oracle is greedy"
        probs = logits.softmax(-1)
        allowed = logits.clone()
        allowed[:, list(read.suppress)] = float("-inf")
        tokens = allowed.argmax(-1)
        given = None
        if read.given is not None:
            given = probs[range(len(probs)), list(read.given)].numpy().astype(np.float32)
        chosen = probs[range(len(probs)), tokens].numpy().astype(np.float32)
        return Readout(tokens.numpy(), chosen, given)


def without_cache(decode: Any) -> Any:
    """A decoder of causal forwards that keeps nothing: rows that it would keep are fed again, before the others."""

    def decode_anew(prompt: Sequence[int], settings: Any, trace: Trace) -> Decoding:
        decoding: Decoding = decode(prompt, settings, trace)
        forward, kept, fed = next(decoding), [], []
        while True:
            kept = kept[: forward.commit.keep] + [fed[row] for row in forward.commit.rows]
            fed = list(zip(forward.tokens, forward.positions, strict=True))
            assert forward.attention == causal(len(fed))
            tokens, positions = zip(*kept, *fed, strict=True)
            reads = tuple(replace(read, rows=[len(kept) + row for row in read.rows]) for read in forward.reads)
            readouts = yield Forward(tokens, positions, causal(len(tokens)), reads, DROP_ALL, forward.kind)
            try:
                forward = decoding.send(readouts)
            except StopIteration as stop:
                return stop.value

    return decode_anew
