"""The plain baseline: the same decoders on transformers' own model, executed in the style of the public releases.

Every forward computes the logits of all its rows and a softmax over the whole vocabulary. Slots under completion form a
batch, for which the cache is copied once per slot. Committed rows are sliced and concatenated. Loop, control flow and
tokens are the engine's, so the ratio between the two measures the execution of a forward alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3ForCausalLM

from refusion_eval.engine.engine import Engine
from refusion_eval.errors import DecodeError
from refusion_eval.models.cache import KVCache
from refusion_eval.types import Attention, Forward, Read, Readout

KeysValues = list[tuple[Tensor, Tensor]]  # one pair per layer, each [batch, key-value heads, rows, head width]


class _PlainCache(KVCache):
    """Keys and values of one sequence, as transformers keeps them."""

    only_counts = True
    committed: KeysValues
    last: KeysValues

    def clear(self, sequence: int) -> None:
        super().clear(sequence)
        self.committed, self.last = [], []

    @torch.inference_mode()
    def commit(self, sequence: int, rows: Sequence[int], keep: int | None = None) -> None:
        if list(rows) != list(range(len(rows))) or keep is not None:
            raise DecodeError(f"the plain baseline commits leading rows only, not {list(rows)}")
        start = self.lengths[sequence]
        super().commit(sequence, rows)
        if not rows:
            return
        committed: KeysValues = []
        for layer, (keys, values) in enumerate(self.last):
            flat = [part[:, :, start:].transpose(0, 1).flatten(1, 2)[None, :, : len(rows)] for part in (keys, values)]
            old = [(part,) for part in self.committed[layer]] if self.committed else [(), ()]
            committed.append((torch.cat((*old[0], flat[0]), 2), torch.cat((*old[1], flat[1]), 2)))
        self.committed = committed


class PlainEngine(Engine):
    """Runs a decoder, one request at a time; its forwards have causal rows or equal groups, so they are not fused."""

    cache_class = _PlainCache

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        super().__init__(model, "sdpa")  # type: ignore[arg-type] # it has the device and the vocabulary that a loop needs

    @torch.inference_mode()
    def _compute(self, cache: KVCache, forwards: Sequence[Forward], _sequences: Sequence[int]) -> list[Readout]:
        assert isinstance(cache, _PlainCache)
        (forward,) = forwards
        num_groups, device = _num_groups(forward.attention), self.model.device
        tokens = torch.tensor(forward.tokens, device=device).view(num_groups, -1)
        positions = torch.tensor(forward.positions, device=device).view(num_groups, -1)
        past = DynamicCache()
        for layer, (keys, values) in enumerate(cache.committed):
            past.update(keys.repeat(num_groups, 1, 1, 1), values.repeat(num_groups, 1, 1, 1), layer)
        # Without a mask, transformers would read jumps in the position ids as borders between packed texts.
        mask = torch.ones(num_groups, cache.lengths[0] + tokens.shape[1], dtype=torch.long, device=device)
        model: Any = self.model
        output = model(
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=past, use_cache=True
        )
        cache.last = [(layer.keys, layer.values) for layer in output.past_key_values.layers]
        logits_QV = output.logits.flatten(0, 1).float()
        probs_QV = logits_QV.softmax(dim=-1)
        return [_read(read, logits_QV, probs_QV) for read in forward.reads]


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
