"""The plain baseline: the same decoders on transformers' own model, executed in the style of the public releases.

Every forward computes the logits of all its rows and a softmax over the whole vocabulary. Slots under completion form a
batch, for which the cache is copied once per slot. Committed rows are sliced and concatenated. Control flow and tokens
equal those of the engine, so the ratio between the two measures the execution alone.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3ForCausalLM

from refusion_eval.errors import DecodeError
from refusion_eval.models.device import synchronize
from refusion_eval.types import Attention, Commit, Decode, Decoded, Forward, Read, Readout, Trace

KeysValues = list[tuple[Tensor, Tensor]]  # one pair per layer, each [batch, key-value heads, rows, head width]


class PlainEngine:
    """Runs a decoder, one request at a time."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self.model = model
        self._committed: KeysValues = []
        self._last: KeysValues = []

    def run(self, decode: Decode, prompt: Sequence[int], settings: Any) -> Decoded:
        """Decodes one prompt.

        Raises:
            DecodeError: a forward needs more than causal rows or equal groups, for example because it is fused.
        """
        self._committed, self._last = [], []
        synchronize(self.model.device)
        started = time.perf_counter()
        trace = Trace()
        decoding = decode(prompt, settings, trace)
        forward = next(decoding)
        while True:
            self._commit(forward.commit)
            trace.forward(forward.kind, len(forward.tokens), self._num_committed())
            readouts = self._compute(forward)
            try:
                forward = decoding.send(readouts)
            except StopIteration as stop:
                synchronize(self.model.device)
                seconds = time.perf_counter() - started
                return Decoded(stop.value.tokens, stop.value.stop, trace.num_forwards, seconds, trace)

    def _num_committed(self) -> int:
        return int(self._committed[0][0].shape[2]) if self._committed else 0

    def _commit(self, commit: Commit) -> None:
        """Appends the first rows of the last forward to the cache, group by group."""
        if not commit.rows:
            return
        if list(commit.rows) != list(range(len(commit.rows))) or commit.replace is not None:
            raise DecodeError(f"the plain baseline commits leading rows only, not {list(commit.rows)}")
        start = self._num_committed()
        committed: KeysValues = []
        for layer, (keys, values) in enumerate(self._last):
            flat = [rows[:, :, start:].transpose(0, 1).flatten(1, 2)[None] for rows in (keys, values)]
            new_keys, new_values = (rows[:, :, : len(commit.rows)] for rows in flat)
            if self._committed:
                old_keys, old_values = self._committed[layer]
                new_keys, new_values = torch.cat((old_keys, new_keys), 2), torch.cat((old_values, new_values), 2)
            committed.append((new_keys, new_values))
        self._committed = committed

    @torch.inference_mode()
    def _compute(self, forward: Forward) -> tuple[Readout, ...]:
        num_groups = _num_groups(forward.attention)
        device = self.model.device
        tokens = torch.tensor(forward.tokens, device=device).view(num_groups, -1)
        positions = torch.tensor(forward.positions, device=device).view(num_groups, -1)
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(self._committed):
            cache.update(keys.repeat(num_groups, 1, 1, 1), values.repeat(num_groups, 1, 1, 1), layer)
        # Without a mask, transformers would read jumps in the position ids as borders between packed texts.
        mask = torch.ones(num_groups, self._num_committed() + tokens.shape[1], dtype=torch.long, device=device)
        output = self.model(
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        )
        self._last = [(layer.keys, layer.values) for layer in output.past_key_values.layers]
        logits_QV = output.logits.flatten(0, 1).float()
        probs_QV = logits_QV.softmax(dim=-1)
        return tuple(_read(read, logits_QV, probs_QV) for read in forward.reads)


def _num_groups(attention: Attention) -> int:
    sizes = {segment.size for segment in attention}
    if len(sizes) > 1 or any(segment.sees or not segment.causal for segment in attention):
        raise DecodeError("the plain baseline supports causal rows and equal groups only; decode with fuse=False")
    return len(attention)


def _read(read: Read, logits_QV: Tensor, probs_QV: Tensor) -> Readout:
    if read.temperature > 0 or read.entropy or read.margin:
        raise DecodeError("the plain baseline is greedy and reads tokens and probabilities only")
    rows = list(read.rows)
    allowed_NV = logits_QV[rows]
    if read.suppress:
        allowed_NV[:, list(read.suppress)] = float("-inf")
    tokens_N = allowed_NV.argmax(dim=-1)
    probs_NV = probs_QV[rows]
    given = None
    if read.given is not None:
        given = probs_NV.gather(1, torch.tensor(list(read.given), device=probs_NV.device)[:, None])[:, 0].cpu().numpy()
    return Readout(tokens_N.cpu().numpy(), probs_NV.gather(1, tokens_N[:, None])[:, 0].cpu().numpy(), given)
