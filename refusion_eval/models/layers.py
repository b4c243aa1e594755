"""Parts of a transformer's forward as functions, its rotary tables, and the arrangement of its weights.

Shapes: T packed rows, C residual width, H query heads, G key-value heads, D head width, I width of the MLP,
V vocabulary.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from refusion_eval.models.config import RopeScaling

SMALL_MATRIX = 1 << 20  # entries that a CPU's caches hold
FEW_ROWS = (5, 48)  # the range in which `linear` turns a product round


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, statistics in float32.

    Args:
        weight: scales, one for each entry of the last axis, or of the last two axes (each head its own).
    """
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


def dense_along_first(num_entries: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a matrix is stored with its first axis dense: a small one on a CPU in float32."""
    # In this layout products with 8 to 24 rows were 1.4 to 1.9 times as fast as with dense rows (192 to 1024 and 512 to
    # 192 columns, one core), and no other width was slower. Large matrices did not gain; see `linear`.
    return device.type == "cpu" and dtype == torch.float32 and num_entries <= SMALL_MATRIX


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Each row times the transposed matrix, plus the bias if there is one, [T, O]."""
    # On a CPU in float32 a large matrix times a few columns is faster than the same rows times the matrix: 0.65 to
    # 0.85 of the time for 8 to 32 rows at 1024 to 6144 entries a side.
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
    """Applies the rotary embedding in float32, with entry i paired with entry i + D/2; returns the input's dtype."""
    # The tables carry the sign, so that one roll replaces negate and concatenate.
    wide_THD = x_THD.float()
    half = x_THD.shape[-1] // 2
    return torch.addcmul(wide_THD * cos_T1D, wide_THD.roll(half, -1), sin_T1D).to(x_THD.dtype)


def stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Rotary frequencies (radians a position) as Llama 3.1 scales them for a longer context."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # within the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequencies / scaling.factor, frequencies, kept.clamp(0, 1))


class RotaryTable:
    """Cosine and signed sine for every position id seen so far, grown by doubling, float32, [positions, 2, D]."""

    def __init__(self, head_dim: int, theta: float, device: torch.device, scaling: RopeScaling | None = None) -> None:
        # Rounded as in training, to float32: at position 40 000 one ulp of a frequency is 0.002 rad.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / theta**exponents
        self._frequencies = (frequencies if scaling is None else stretched(frequencies, scaling)).to(device)
        self._num_positions = 0
        self.grow(2048)

    def grow(self, num_positions: int) -> Tensor:
        """The tables for at least so many positions; a table that grows moves to another address."""
        if num_positions > self._num_positions:
            self._num_positions = max(num_positions, 2 * self._num_positions)
            positions = torch.arange(self._num_positions, device=self._frequencies.device, dtype=torch.float32)
            angles = positions[:, None] * self._frequencies
            sin = angles.sin()
            # Both in one tensor: one lookup a forward.
            self.tables = torch.stack((angles.cos().repeat(1, 2), torch.cat((-sin, sin), dim=-1)), dim=1)
        return self.tables

    def lookup(self, positions_T: Tensor, last_position: int) -> tuple[Tensor, Tensor]:
        """Returns (cos, sin), each [T, 1, D]."""
        cos_T1D, sin_T1D = self.grow(last_position + 1)[positions_T].split(1, dim=1)
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
    """All weights of a model, in the dtype in which it computes.

    Attributes:
        embedding: [V, C].
        final_norm: [C].
        head: [V, C]; the embedding itself if tied.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor
