"""One inference forward of a decoder-only transformer, over packed rows.

The rows of one or more sequences are packed in one axis. Only attention knows which rows belong together, and the
caller passes it in: a function that stores keys and values and returns the attended values.

Shapes: T packed rows, N rows read, C residual width, H query heads, G key-value heads, D head width, V vocabulary.
"""

from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from refusion_eval.models.config import ModelConfig
from refusion_eval.models.layers import LayerWeights, RotaryTable, Weights, linear, rms_norm, rotate, swiglu

if TYPE_CHECKING:
    from refusion_eval.models.native import NativeForward


class Attend(Protocol):
    """Stores the keys and values of the rows of a layer and computes attention."""

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Returns the attended values, [T, H, D]."""
        ...


class Transformer:
    """The forward pass; holds weights and rotary tables, no cache."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.rotary = RotaryTable(config.head_dim, config.rope_theta, self.device, config.rope_scaling)

    @cached_property
    def native(self) -> "NativeForward":
        """The compiled forwards of this model, for a CPU in float32."""
        from refusion_eval.models.native import NativeForward  # numba takes most of a second to import

        return NativeForward(self.config, self.weights, self.rotary)

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
        """The residual stream before the first layer, [T, C]."""
        return nn.functional.embedding(tokens_T, self.weights.embedding)

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
        """The summand of attention in the residual stream, [T, C]."""
        return linear(attended_THD.reshape(attended_THD.shape[0], -1), layer.out)

    def mlp(self, layer: LayerWeights, x_TC: Tensor) -> Tensor:
        """The summand of the MLP in the residual stream, [T, C]."""
        normed_TC = rms_norm(x_TC, layer.mlp_norm, self.config.rms_norm_eps)
        return linear(swiglu(linear(normed_TC, layer.gate_up)), layer.down)

    @torch.inference_mode()
    def logits(self, x_NC: Tensor) -> Tensor:
        """Final norm and output head for the rows that are read; float32, [N, V]."""
        # float32 whatever the weights: softmax sums over a vocabulary lose too much in a short dtype.
        return linear(rms_norm(x_NC, self.weights.final_norm, self.config.rms_norm_eps), self.weights.head).float()
