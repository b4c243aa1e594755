"""One inference forward of a decoder-only transformer, over packed rows, and its parts as functions.

The rows of one or more sequences are packed in one axis. Only attention knows which rows belong together, and the
caller passes it in: a function that stores keys and values and returns the attended values.

Shapes: T packed rows, N rows read, C residual width, H query heads, G key-value heads, D head width, V vocabulary.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from refusion_eval.models.config import ModelConfig, RopeScaling

if TYPE_CHECKING:
    from refusion_eval.models.native import NativeForward

# Entries of a matrix that a CPU's caches hold.
SMALL_MATRIX = 1 << 20
FEW_ROWS = (5, 48)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, statistics in float32.

    Args:
        x: any shape, last axis normalised.
        weight: scales, one for each entry of the last axis, or of the last two axes (each head its own).
    """
    if x.is_cuda:
        if weight.ndim == 1:
            return torch.rms_norm(x, weight.shape, weight, eps)
        return torch.rms_norm(x, x.shape[-1:], None, eps) * weight
    # On a CPU torch's own function runs nine operations, 60 to 90 microseconds for a small row; these are five.
    size = x.shape[-1]
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    root_mean_square = torch.hypot(norm * _scalar(size**-0.5), _scalar(math.sqrt(eps)))
    return (x * (weight / root_mean_square)).to(x.dtype)


@cache
def _scalar(value: float) -> Tensor:
    """A number as a cached tensor; converting a Python number takes 9 microseconds in every call."""
    return torch.tensor(value, dtype=torch.float32)


def dense_along_first(num_entries: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a matrix is stored with its first axis dense: a small one on a CPU in float32.

    In this layout products with 8 to 24 rows were 1.4 to 1.9 times as fast as with dense rows (192 to 1024 and 512 to
    192 columns, one core), and no other width was slower. Large matrices did not gain; see `linear`.
    """
    return device.type == "cpu" and dtype == torch.float32 and num_entries <= SMALL_MATRIX


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Each row times the transposed matrix, plus the bias if there is one, [T, O].

    On a CPU in float32 a large matrix times a few columns is faster than the same rows times the matrix: 0.65 to 0.85
    of the time for 8 to 32 rows at 1024 to 6144 entries a side. A matrix that a CPU keeps in bfloat16 is multiplied in
    the precision of the rows.
    """
    if weight_OI.dtype != x_TI.dtype:
        from refusion_eval.models.tiles import multiply_tensors  # where no matrix is kept short, numba is not needed

        product_TO = multiply_tensors(x_TI, weight_OI)
        return product_TO if bias_O is None else product_TO.add_(bias_O)
    few = FEW_ROWS[0] <= x_TI.shape[0] <= FEW_ROWS[1]
    if few and weight_OI.numel() > SMALL_MATRIX and x_TI.dtype == torch.float32 and not x_TI.is_cuda:
        if bias_O is not None:
            return torch.addmm(bias_O[:, None], weight_OI, x_TI.t()).t().contiguous()
        return torch.mm(weight_OI, x_TI.t()).t().contiguous()
    return nn.functional.linear(x_TI, weight_OI, bias_O)


def swiglu(gate_up_TI: Tensor) -> Tensor:
    """SiLU of the first half of the last axis times its second half."""
    gate, up = gate_up_TI.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def rotate(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Applies the rotary embedding in float32 and returns the input's dtype.

    Entry i is paired with entry i + D/2. The tables carry the sign, so that one roll replaces negate and concatenate.
    """
    wide_THD = x_THD.float()
    half = x_THD.shape[-1] // 2
    return torch.addcmul(wide_THD * cos_T1D, wide_THD.roll(half, -1), sin_T1D).to(x_THD.dtype)


def stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Rotary frequencies (radians a position) as Llama 3.1 scales them for a longer context."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # within the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequencies / scaling.factor, frequencies, kept.clamp(0, 1))


class RotaryTable:
    """Cosine and signed sine for every position id seen so far, grown by doubling, float32.

    Attributes:
        tables: cosine and signed sine of each position, [positions, 2, D].
    """

    def __init__(self, head_dim: int, theta: float, device: torch.device, scaling: RopeScaling | None = None) -> None:
        # Rounded as in training, to float32: at position 40 000 one ulp of a frequency is 0.002 rad.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / theta**exponents
        self._frequencies = (frequencies if scaling is None else stretched(frequencies, scaling)).to(device)
        self._num_positions = 0
        self.grow(2048)

    def grow(self, num_positions: int) -> None:
        """Extends the tables to at least so many positions, at least doubling them; a table that grows moves."""
        if num_positions <= self._num_positions:
            return
        num_positions = max(num_positions, 2 * self._num_positions)
        positions = torch.arange(num_positions, device=self._frequencies.device, dtype=torch.float32)
        angles = positions[:, None] * self._frequencies
        sin = angles.sin()
        # Both in one tensor: one lookup a forward.
        self.tables = torch.stack((angles.cos().repeat(1, 2), torch.cat((-sin, sin), dim=-1)), dim=1)
        self._num_positions = num_positions

    def lookup(self, positions_T: Tensor, last_position: int) -> tuple[Tensor, Tensor]:
        """Returns (cos, sin), each [T, 1, D]."""
        self.grow(last_position + 1)
        cos_T1D, sin_T1D = self.tables[positions_T].split(1, dim=1)
        return cos_T1D, sin_T1D


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
    """All weights of a model, in the dtype in which it computes; on a CPU matrices may be kept in bfloat16.

    Attributes:
        embedding: [V, C].
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
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.final_norm.dtype
        self._rotary = RotaryTable(config.head_dim, config.rope_theta, self.device, config.rope_scaling)

    @cached_property
    def native(self) -> "NativeForward":
        """The compiled forwards of this model, for a CPU in float32; numba is imported when they are first used."""
        from refusion_eval.models.native import NativeForward

        return NativeForward(self)

    def rotary_tables(self, num_positions: int) -> Tensor:
        """The tables of `RotaryTable` for at least so many positions; no forward below that moves them."""
        self._rotary.grow(num_positions)
        return self._rotary.tables

    @torch.inference_mode()
    def hidden(self, tokens_T: Tensor, positions_T: Tensor, last_position: int, attend: Attend) -> Tensor:
        """Runs all layers.

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
        return nn.functional.embedding(tokens_T, self.weights.embedding).to(self.dtype)

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
