"""One inference forward of a decoder-only transformer, over packed rows.

The rows of one or more sequences are packed in one axis. Only attention knows which rows belong together, and the
caller passes it in: a function that stores keys and values and returns the attended values.

Shapes: T packed rows, N rows read, C residual width, H query heads, G key-value heads, D head width, I width of the
MLP, J experts that a row chooses, V vocabulary.
"""

import math
from collections.abc import Callable
from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from refusion_eval.models.attention import Attend
from refusion_eval.models.checkpoint import ModelConfig, RopeScaling
from refusion_eval.models.experts import mix_experts, route
from refusion_eval.models.layers import linear, swiglu
from refusion_eval.models.weights import LayerWeights, Weights

if TYPE_CHECKING:
    from refusion_eval.models.native import NativeForward


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, in float32; `weight` scales the last axis, or the last two."""
    if x.is_cuda:
        if weight.ndim == 1:
            return torch.rms_norm(x, weight.shape, weight, eps)
        return torch.rms_norm(x, x.shape[-1:], None, eps) * weight
    # On a CPU torch's own function runs nine operations, 60 to 90 microseconds for a small row; these are five.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    root_mean_square = torch.hypot(norm * _scalar(x.shape[-1] ** -0.5), _scalar(math.sqrt(eps)))
    return (x * (weight / root_mean_square)).to(x.dtype)


@cache
def _scalar(value: float) -> Tensor:
    # Converting a Python number to a tensor takes 9 microseconds in every call.
    return torch.tensor(value, dtype=torch.float32)


def rotate(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Applies the rotary embedding in float32, with entry i paired with entry i + D/2; returns the input's dtype."""
    # The tables carry the sign, so that one roll replaces negate and concatenate.
    wide_THD = x_THD.float()
    half = x_THD.shape[-1] // 2
    return torch.addcmul(wide_THD * cos_T1D, wide_THD.roll(half, -1), sin_T1D).to(x_THD.dtype)


class RotaryTable:
    """Cosine and signed sine for every position id seen so far, grown by doubling, float32, [positions, 2, D]."""

    def __init__(
        self,
        head_dim: int,
        theta: float,
        device: torch.device,
        scaling: RopeScaling | None = None,
        rotary_dim: int | None = None,  # entries of a head that turn; None is all
    ) -> None:
        # Rounded as in training, to float32: at position 40 000 one ulp of a frequency is 0.002 rad.
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        frequencies = 1.0 / theta**exponents  # in radians a position
        if scaling is not None:  # for a longer context, as Llama 3.1 does
            turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # within the original context
            kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            frequencies = torch.lerp(frequencies / scaling.factor, frequencies, kept.clamp(0, 1))
        # Pairs that do not turn come last: `weights` arranges the entries of a head so.
        self._frequencies = nn.functional.pad(frequencies, (0, (head_dim - rotary_dim) // 2)).to(device)
        self.tables = torch.empty(0)
        self.grow(2048)

    def grow(self, num_positions: int) -> Tensor:
        """The tables for at least so many positions; a table that grows moves to another address."""
        if num_positions > len(self.tables):
            size = max(num_positions, 2 * len(self.tables))
            positions = torch.arange(size, device=self._frequencies.device, dtype=torch.float32)
            angles = positions[:, None] * self._frequencies
            sin = angles.sin()
            # Both in one tensor: one lookup a forward.
            self.tables = torch.stack((angles.cos().repeat(1, 2), torch.cat((-sin, sin), dim=-1)), dim=1)
        return self.tables

    def lookup(self, positions_T: Tensor, last_position: int) -> tuple[Tensor, Tensor]:
        cos_T1D, sin_T1D = self.grow(last_position + 1)[positions_T].split(1, dim=1)
        return cos_T1D, sin_T1D


class Transformer:
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config, self.weights = config, weights
        self.device, self.dtype = weights.embedding.device, weights.final_norm.dtype
        self.rotary = RotaryTable(
            config.head_dim, config.rope_theta, self.device, config.rope_scaling, config.rotary_dim
        )
        self.num_experts_read = torch.zeros((), dtype=torch.int64, device=self.device)  # by all forwards so far

    @cached_property
    def native(self) -> "NativeForward":
        from refusion_eval.models.native import NativeForward  # numba takes most of a second to import

        return NativeForward(self.config, self.weights, self.rotary.grow)

    @torch.inference_mode()
    def hidden(self, tokens_T: Tensor, positions_T: Tensor, last_position: int, attend: Attend) -> Tensor:
        """Runs all layers; returns the residual stream before the final norm, [T, C]."""
        cos_T1D, sin_T1D = self.rotary.lookup(positions_T, last_position)
        x_TC = self.embed(tokens_T)
        for index, layer in enumerate(self.weights.layers):
            q_THD, k_TGD, v_TGD = self.project(layer, x_TC, cos_T1D, sin_T1D)
            x_TC = x_TC + self.merge_heads(layer, attend(index, q_THD, k_TGD, v_TGD))
            x_TC = x_TC + self.mlp(layer, x_TC)
        return x_TC

    def embed(self, tokens_T: Tensor) -> Tensor:
        return nn.functional.embedding(tokens_T, self.weights.embedding).to(self.dtype)

    def project(
        self, layer: LayerWeights, x_TC: Tensor, cos_T1D: Tensor, sin_T1D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [T, H, D], rotated keys [T, G, D] and values [T, G, D] of a layer."""
        num_heads, num_kv_heads, eps = self.config.num_heads, self.config.num_kv_heads, self.config.rms_norm_eps
        qkv_TO = linear(rms_norm(x_TC, layer.input_norm, eps), layer.qkv, layer.qkv_bias)
        qkv_THD = qkv_TO.view(x_TC.shape[0], -1, self.config.head_dim)
        qk_THD, v_TGD = qkv_THD.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
        # Norm and rotation treat query and key heads alike, so one call serves both.
        if layer.qk_norm is not None:
            qk_THD = rms_norm(qk_THD, layer.qk_norm, eps)
        q_THD, k_TGD = rotate(qk_THD, cos_T1D, sin_T1D).split_with_sizes((num_heads, num_kv_heads), dim=1)
        return q_THD, k_TGD, v_TGD

    def values(self, layer: LayerWeights, x_TC: Tensor) -> Tensor:
        """Only the values of a layer, [T, G, D]: dLLM-Cache compares them to find the rows that changed."""
        num_kv_heads, head_dim = self.config.num_kv_heads, self.config.head_dim
        first = -num_kv_heads * head_dim
        bias = None if layer.qkv_bias is None else layer.qkv_bias[first:]
        normed_TC = rms_norm(x_TC, layer.input_norm, self.config.rms_norm_eps)
        return linear(normed_TC, layer.qkv[first:], bias).view(-1, num_kv_heads, head_dim)

    def merge_heads(self, layer: LayerWeights, attended_THD: Tensor) -> Tensor:
        return linear(attended_THD.reshape(attended_THD.shape[0], -1), layer.out)

    def mlp(self, layer: LayerWeights, x_TC: Tensor) -> Tensor:
        return self.feed_forward(layer, rms_norm(x_TC, layer.mlp_norm, self.config.rms_norm_eps))

    def feed_forward(
        self,
        layer: LayerWeights,
        normed_TC: Tensor,
        activate: Callable[[Tensor], Tensor] = swiglu,
        is_row_T: Tensor | None = None,
    ) -> Tensor:
        """The MLP of a layer, its experts, or the sum of both; rows of padding (not `is_row_T`) choose no expert."""
        if layer.experts is None:
            return linear(activate(linear(normed_TC, layer.gate_up)), layer.down)
        experts = self.config.experts
        assert experts is not None
        ids_TJ, shares_TJ = route(normed_TC, layer.experts, experts)
        if is_row_T is not None:
            ids_TJ = ids_TJ.where(is_row_T[:, None], experts.num_experts)
        matrices = layer.experts.gate_up, layer.experts.down
        sum_TC = mix_experts(normed_TC, ids_TJ, shares_TJ, *matrices, self.num_experts_read)
        if not experts.shared_width:
            return sum_TC
        return sum_TC + linear(activate(linear(normed_TC, layer.gate_up)), layer.down)

    @torch.inference_mode()
    def logits(self, x_NC: Tensor) -> Tensor:
        """Final norm and output head for the rows that are read; float32, [N, V]."""
        # float32 whatever the weights: softmax sums over a vocabulary lose too much in a short dtype.
        normed_NC = rms_norm(x_NC, self.weights.final_norm, self.config.rms_norm_eps)
        return linear(normed_NC, self.weights.head)[:, : self.config.vocab_size].float()
