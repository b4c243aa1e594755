"""One inference forward of a decoder-only transformer, over packed rows.

The rows of one or more sequences are packed in one axis. Only attention knows which rows belong together, and the
caller passes it in: a function that stores keys and values and returns the attended values.

Shapes: T packed rows, N rows read, C residual width, H query heads, G key-value heads, D head width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding

from refusion_eval.models.config import ModelConfig
from refusion_eval.models.layers import RotaryTable, linear, rms_norm, rotate, swiglu


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer; matrices are [out, in].

    Attributes:
        input_norm: scales before attention, [C].
        qkv: queries, keys and values in one matrix, [(H + 2G) D, C].
        qkv_bias: bias of queries, keys and values, [(H + 2G) D]; None in families without one.
        qk_norm: per-head scales of queries and keys, one row a head, [H + G, D]; None in families without them.
        out: attention output, [C, H D].
        mlp_norm: scales before the MLP, [C].
        gate_up: gate and up projection in one matrix, [2 I, C].
        down: down projection, [C, I].
    """

    input_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    qk_norm: Tensor | None = None


@dataclass(frozen=True)
class Weights:
    """All weights of a model.

    Attributes:
        embedding: [V, C].
        layers: one entry a layer.
        final_norm: [C].
        head: [V, C]; the embedding itself if tied.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor


class Attend(Protocol):
    """Stores the keys and values of the rows of a layer and computes attention."""

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Returns the attended values, [T, H, D]."""
        ...


class Transformer:
    """The forward pass; holds weights and rotary tables, no cache.

    Args:
        config: shapes.
        weights: as `refusion_eval.models.weights.load_weights` returns them.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._rotary = RotaryTable(config.head_dim, config.rope_theta, self.device, config.rope_scaling)

    def prepare_positions(self, num_positions: int) -> None:
        """Extends the rotary tables to `num_positions`, so that no forward below that moves them."""
        self._rotary.lookup(torch.zeros(1, dtype=torch.int64, device=self.device), num_positions - 1)

    @torch.inference_mode()
    def hidden(self, tokens_T: Tensor, positions_T: Tensor, last_position: int, attend: Attend) -> Tensor:
        """Runs all layers.

        Args:
            tokens_T: token ids.
            positions_T: position ids.
            last_position: largest position id.
            attend: stores keys and values and computes attention.

        Returns:
            The residual stream before the final norm, [T, C].
        """
        cos_T1D, sin_T1D = self.rotation(positions_T, last_position)
        x_TC = self.embed(tokens_T)
        for index, layer in enumerate(self.weights.layers):
            q_THD, k_TGD, v_TGD = self.project(layer, x_TC, cos_T1D, sin_T1D)
            x_TC = x_TC + self.merge_heads(layer, attend(index, q_THD, k_TGD, v_TGD))
            x_TC = x_TC + self.mlp(layer, x_TC)
        return x_TC

    def embed(self, tokens_T: Tensor) -> Tensor:
        """The residual stream before the first layer, [T, C]."""
        return embedding(tokens_T, self.weights.embedding)

    def rotation(self, positions_T: Tensor, last_position: int) -> tuple[Tensor, Tensor]:
        """Rotary tables of rows, as `RotaryTable.lookup` returns them."""
        return self._rotary.lookup(positions_T, last_position)

    def project(
        self, layer: LayerWeights, x_TC: Tensor, cos_T1D: Tensor, sin_T1D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [T, H, D], rotated keys [T, G, D] and values [T, G, D] of a layer."""
        num_heads, num_kv_heads, eps = self.config.num_heads, self.config.num_kv_heads, self.config.rms_norm_eps
        qkv_TO = linear(rms_norm(x_TC, layer.input_norm, eps), layer.qkv, layer.qkv_bias)
        qkv_THD = qkv_TO.view(x_TC.shape[0], -1, self.config.head_dim)
        qk_THD, v_TGD = qkv_THD.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if layer.qk_norm is not None:
            qk_THD = rms_norm(qk_THD, layer.qk_norm, eps)
        q_THD, k_TGD = rotate(qk_THD, cos_T1D, sin_T1D).split_with_sizes((num_heads, num_kv_heads), dim=1)
        return q_THD, k_TGD, v_TGD

    def values(self, layer: LayerWeights, x_TC: Tensor) -> Tensor:
        """Only the values of a layer, [T, G, D]."""
        num_kv_heads, head_dim = self.config.num_kv_heads, self.config.head_dim
        first = -num_kv_heads * head_dim
        bias = None if layer.qkv_bias is None else layer.qkv_bias[first:]
        normed_TC = rms_norm(x_TC, layer.input_norm, self.config.rms_norm_eps)
        return linear(normed_TC, layer.qkv[first:], bias).view(-1, num_kv_heads, head_dim)

    def merge_heads(self, layer: LayerWeights, attended_THD: Tensor) -> Tensor:
        """What attention adds to the residual stream, [T, C]."""
        return linear(attended_THD.reshape(attended_THD.shape[0], -1), layer.out)

    def mlp(self, layer: LayerWeights, x_TC: Tensor) -> Tensor:
        """What the MLP adds to the residual stream, [T, C]."""
        normed_TC = rms_norm(x_TC, layer.mlp_norm, self.config.rms_norm_eps)
        return linear(swiglu(linear(normed_TC, layer.gate_up)), layer.down)

    @torch.inference_mode()
    def logits(self, x_NC: Tensor) -> Tensor:
        """Final norm and output head for the rows that are read; float32, [N, V]."""
        return linear(rms_norm(x_NC, self.weights.final_norm, self.config.rms_norm_eps), self.weights.head).float()
