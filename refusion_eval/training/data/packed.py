"""Attention in a packed batch: each example attends to itself, and no mask spans two of them.

transformers' models call an attention function by name and hand it the keyword arguments of their forward. The one
registered here, "refusion_packed", finds the examples' lengths there and goes from one to the next. Without them it is
transformers' "sdpa", so that a model that was trained with it generates and scores as before.

Shapes: T rows of all examples, H query heads, K key-value heads, W head width, D hidden.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from refusion_eval.errors import ConfigError
from refusion_eval.training.data.collate import PackedBatch

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

ATTENTION = "refusion_packed"


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What attention has to know of a packed batch, made once for all layers.

    Attributes:
        lengths: rows of each example.
        causal: whether each example's attention is causal.
        masks: [1, 1, length, length], to be added to the scores of an example; None where it is causal or full.
        ends: [examples + 1] int32 on the device, sums of lengths from 0 to T.
    """

    lengths: tuple[int, ...]
    causal: tuple[bool, ...]
    masks: tuple[torch.Tensor | None, ...]
    ends: torch.Tensor

    @classmethod
    def of(cls, batch: PackedBatch, dtype: torch.dtype) -> "Packing":
        """That of a batch; masks are numbers of `dtype`."""
        masks: list[torch.Tensor | None] = []
        for sight in batch.sights:
            if isinstance(sight, str):
                masks.append(None)
            else:
                visible = sight.mask()
                mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
                masks.append(mask.masked_fill_(~visible, float("-inf"))[None, None])
        ends = torch.tensor([0, *accumulate(batch.lengths)], dtype=torch.int32, device=batch.tokens_T.device)
        return cls(
            lengths=batch.lengths,
            causal=tuple(sight == "causal" for sight in batch.sights),
            masks=tuple(masks),
            ends=ends,
        )


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls.

    Args:
        module: the attention layer.
        query: [1, H, T, W].
        key: [1, K, T, W].
        value: [1, K, T, W].
        attention_mask: of use without a packing only.
        dropout: as SDPA.
        scaling: as SDPA.
        packing: keyword argument of the model's forward; None makes this "sdpa".
        kwargs: what else transformers hands over.

    Returns:
        [1, T, H, W], and no attention weights.

    Raises:
        ConfigError: an example is longer than the layer's sliding window.
    """
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    window = kwargs.get("sliding_window")
    if window is not None and max(packing.lengths) > window:
        raise ConfigError(
            f"an example of {max(packing.lengths)} tokens is longer than the model's sliding window of {window}; "
            "training lets examples see themselves whole, so drop longer samples or set use_sliding_window=false in "
            "config.json"
        )
    dtype = computing_dtype(query)
    fits_flash = query.is_cuda and dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256
    if flash_attn_varlen_func is not None and fits_flash and all(packing.causal):
        return _flash(query.to(dtype), key.to(dtype), value.to(dtype), dropout, scaling, packing), None
    # One split, whose gradient is one concatenation; the gradient of a slice would be as long as the batch.
    parts = (tensor.split(packing.lengths, dim=2) for tensor in (query, key, value))
    outputs = [
        sdpa_attention_forward(module, q, k, v, mask, dropout, scaling, is_causal=causal)[0]
        for q, k, v, mask, causal in zip(*parts, packing.masks, packing.causal, strict=True)
    ]
    return torch.cat(outputs, dim=1), None


def computing_dtype(tensor: torch.Tensor) -> torch.dtype:
    """What matrix products with a tensor are computed in: autocast's choice, or its own."""
    device_type = tensor.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else tensor.dtype


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    scaling: float | None,
    packing: Packing,
) -> torch.Tensor:
    """All causal examples in one kernel, whose heads may share keys."""
    query_THW, key_TKW, value_TKW = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    longest = max(packing.lengths)
    output_THW = flash_attn_varlen_func(
        query_THW,
        key_TKW,
        value_TKW,
        cu_seqlens_q=packing.ends,
        cu_seqlens_k=packing.ends,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=True,
    )
    return output_THW[None]


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def hidden_states(model: PreTrainedModel, batch: PackedBatch) -> torch.Tensor:
    """[T, D], what the model's last layer says of each row of a batch.

    Sets the model's attention to `ATTENTION` and leaves it so: activation checkpointing runs layers again in backward.

    Args:
        model: a causal language model of transformers whose layers call attention by name (Qwen3, Qwen2, Llama, ...).
        batch: on the model's device.
    """
    if model.config._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    output = model.get_decoder()(
        input_ids=batch.tokens_T[None],
        position_ids=batch.positions_T[None],
        # Four axes say "made by the caller": without them transformers makes a mask of T x T.
        attention_mask=batch.tokens_T.new_zeros(1, 1, 1, 1),
        use_cache=False,
        packing=Packing.of(batch, model.dtype),
    )
    return output.last_hidden_state[0]
