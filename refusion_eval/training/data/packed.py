"""Attention in a packed batch: each example attends to itself only, without a mask over the whole batch.

Models of transformers call an attention function by its name and pass it the keyword arguments of their forward. The
function "refusion_packed" takes the lengths of the examples from there and computes one example at a time. Without them
it is the "sdpa" of transformers, so that a trained model generates and scores as before. In the same way the last layer
computes its MLP only for the rows whose output is read.

Shapes: T rows of all examples, R rows that are read, H query heads, K key-value heads, W head width, D hidden.
"""

import contextlib
from dataclasses import dataclass
from itertools import accumulate
from types import MethodType
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


@dataclass(frozen=True)
class Packing:  # computed once for all layers
    lengths: tuple[int, ...]  # number of rows of each example
    causal: tuple[bool, ...]  # whether the attention of each example is causal
    masks: tuple[torch.Tensor | None, ...]  # [1, 1, length, length], added to the scores; None for causal and full
    ends: torch.Tensor  # [examples + 1] int32 on the device, cumulative lengths from 0 to T
    rows_R: torch.Tensor | None  # rows whose output is read; None for all

    @classmethod
    def of(cls, batch: PackedBatch, dtype: torch.dtype, rows_R: torch.Tensor | None = None) -> "Packing":
        masks = tuple(
            None if isinstance(sight, str) else torch.where(sight.mask(), 0.0, float("-inf")).to(dtype)[None, None]
            for sight in batch.sights
        )
        ends = torch.tensor([0, *accumulate(batch.lengths)], dtype=torch.int32, device=batch.tokens_T.device)
        return cls(batch.lengths, tuple(sight == "causal" for sight in batch.sights), masks, ends, rows_R)


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
    """[1, T, H, W] from query [1, H, T, W], key and value [1, K, T, W], and no attention weights."""
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    window, longest = kwargs.get("sliding_window"), max(packing.lengths)
    if window is not None and longest > window:
        raise ConfigError(
            f"an example of {longest} tokens is longer than the model's sliding window of {window}; drop "
            "longer samples, or set use_sliding_window=false in config.json for full attention"
        )
    dtype = computing_dtype(query)
    fits_flash = query.is_cuda and dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256
    if flash_attn_varlen_func is not None and fits_flash and all(packing.causal):
        return _flash(query.to(dtype), key.to(dtype), value.to(dtype), dropout, scaling, packing), None
    # On a CPU, torch takes three times as long for the gradient of attention in bfloat16 as in float32.
    in_float32 = query.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    tensors = (tensor.float() if in_float32 else tensor for tensor in (query, key, value))
    # The gradient of one split is one concatenation; the gradient of a slice would be as large as the batch.
    parts = (tensor.split(packing.lengths, dim=2) for tensor in tensors)
    with torch.autocast("cpu", enabled=False) if in_float32 else contextlib.nullcontext():
        outputs = [
            sdpa_attention_forward(module, q, k, v, mask, dropout, scaling, is_causal=causal)[0]
            for q, k, v, mask, causal in zip(*parts, packing.masks, packing.causal, strict=True)
        ]
    return torch.cat(outputs, dim=1), None


def computing_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Data type of matrix products with a tensor: the type of autocast, or of the tensor."""
    device_type = tensor.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else tensor.dtype


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, scaling: float | None, packing: Packing
) -> torch.Tensor:
    tensors_THW = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    ends, longest = packing.ends, max(packing.lengths)
    sizes = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return flash_attn_varlen_func(*tensors_THW, **sizes, dropout_p=dropout, softmax_scale=scaling, causal=True)[None]


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def _last_layer(
    layer: Any, hidden_states: torch.Tensor, *, packing: Packing | None = None, **kwargs: Any
) -> torch.Tensor:
    """[1, R, D], forward of the last layer: only attention needs the rows that are not read, as keys and values."""
    normed = layer.input_layernorm(hidden_states)
    hidden_states = hidden_states + layer.self_attn(hidden_states=normed, packing=packing, **kwargs)[0]
    if packing is not None and packing.rows_R is not None:
        hidden_states = hidden_states.index_select(1, packing.rows_R)
    return hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states))


def hidden_states(model: PreTrainedModel, batch: PackedBatch, rows_R: torch.Tensor | None = None) -> torch.Tensor:
    """[R, D], output of the last layer for some rows of a batch, or [T, D] for all of them.

    The model keeps `ATTENTION` and `_last_layer` afterwards, as gradient checkpointing runs layers again in backward.
    """
    decoder = model.get_decoder()
    last = decoder.layers[-1]
    if model.config._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    if "forward" not in vars(last):
        last.forward = MethodType(_last_layer, last)
    output = decoder(
        input_ids=batch.tokens_T[None],
        position_ids=batch.positions_T[None],
        # transformers takes a tensor of four axes as a finished mask; otherwise it would make a mask of T x T.
        attention_mask=batch.tokens_T.new_zeros(1, 1, 1, 1),
        use_cache=False,
        packing=Packing.of(batch, model.dtype, rows_R),
    )
    return output.last_hidden_state[0]
