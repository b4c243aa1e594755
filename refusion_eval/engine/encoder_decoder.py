"""The engine over a model of an encoder, which writes keys and values, and a decoder, which only reads them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from refusion_eval.engine.engine import Engine
from refusion_eval.engine.readout import ReadPlan, read_out
from refusion_eval.errors import DecodeError
from refusion_eval.models.cache import KVCache
from refusion_eval.models.diffusion_gemma import EncoderDecoder
from refusion_eval.types import Forward, Readout, bidirectional, causal


class _Text:
    """What one sequence has: the encoder's cache, and of its last forward the rows written and the logits."""

    def __init__(self, encoded: Any) -> None:
        self.encoded, self.num_written = encoded, 0
        self.logits_NV: Tensor | None = None


class EncodedCache(KVCache):
    only_counts = True  # keys and values are in the caches of transformers

    def text(self, sequence: int) -> _Text | None:
        text = self.states[sequence]
        return text if isinstance(text, _Text) else None

    def commit(self, sequence: int, rows: Sequence[int], keep: int | None = None) -> None:
        """See `KVCache.commit`; DecodeError unless exactly the rows stay that the encoder wrote, or none at all."""
        if keep == 0 and not rows:
            self.clear(sequence)
            return
        text = self.text(sequence)
        num_written = 0 if text is None else text.num_written
        if keep not in (None, self.lengths[sequence]) or list(rows) != list(range(num_written)):
            raise DecodeError(
                f"commit of rows {list(rows)}, keep={keep}; an encoder keeps all of its {num_written} rows, and a "
                "decoder none"
            )
        super().commit(sequence, rows, keep)


class EncoderDecoderEngine(Engine):
    """Causal forwards are of the encoder and keep their rows; those with full attention are of the decoder.

    The forwards of a batch are computed one after the other: each is that of a request alone, to the last bit.
    """

    conditions_itself = True
    shares_prompts = False  # layers with a window have dropped some keys and values of a common beginning
    cache_class = EncodedCache

    def __init__(self, model: EncoderDecoder, kv_budget: int | None) -> None:
        super().__init__(model, "sdpa", kv_budget)  # type: ignore[arg-type] # the engine asks for sizes and device

    @torch.inference_mode()
    def _compute(self, cache: KVCache, forwards: Sequence[Forward], sequences: Sequence[int]) -> list[Readout]:
        assert isinstance(cache, EncodedCache)
        return [
            readout
            for sequence, forward in zip(sequences, forwards, strict=True)
            for readout in self._compute_one(cache, sequence, forward)
        ]

    def _compute_one(self, cache: EncodedCache, sequence: int, forward: Forward) -> list[Readout]:
        model: Any = self.model
        num_rows, text = len(forward.tokens), cache.text(sequence)
        if text is None:
            cache.states[sequence] = text = _Text(model.new_cache())
        is_read, conditioning = bool(forward.reads), forward.self_conditioning
        if not is_read and forward.attention == causal(num_rows):
            model.encode(forward.tokens, forward.positions, text.encoded)
            text.num_written, text.logits_NV = num_rows, None
            return []
        before_NV = None if conditioning is None or text.logits_NV is None else text.logits_NV / conditioning
        is_known = conditioning is None or (before_NV is not None and len(before_NV) == num_rows)
        if forward.attention != bidirectional(num_rows) or not is_known or forward.approximation is not None:
            raise DecodeError(
                f"{forward.kind}: the encoder takes causal rows of which none is read, and the decoder rows that see "
                "each other, conditioned on those of the forward before; decode with diffusion_gemma"
            )
        text.num_written = 0
        text.logits_NV = model.denoise(forward.tokens, forward.positions, text.encoded, before_NV)
        plan = ReadPlan.of([forward])
        return read_out(plan, text.logits_NV, Tensor.float, model.config.vocab_size, model.dtype)
