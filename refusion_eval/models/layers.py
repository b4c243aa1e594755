"""Products and activations that layers of every kind share.

Shapes: T rows, I entries of a row, O entries of a result.
"""

import torch
from torch import Tensor, nn

from refusion_eval.models.weights import SMALL_MATRIX

FEW_ROWS = (5, 48)  # the range in which `linear` turns a product round


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Each row times the transposed matrix, plus the bias if there is one, [T, O]; in the precision of the rows."""
    if weight_OI.dtype != x_TI.dtype:  # 16-bit weights of a forward that computes in float32
        from refusion_eval.models.products import multiply_tensors  # numba takes most of a second to import

        product_TO = multiply_tensors(x_TI, weight_OI)
        return product_TO if bias_O is None else product_TO.add_(bias_O)
    # On a CPU in float32 a large matrix times a few columns is faster than the same rows times the matrix: 0.65 to
    # 0.85 of the time for 8 to 32 rows at 1024 to 6144 entries a side.
    few = FEW_ROWS[0] <= x_TI.shape[0] <= FEW_ROWS[1]
    if few and weight_OI.numel() > SMALL_MATRIX and x_TI.dtype == torch.float32 and not x_TI.is_cuda:
        if bias_O is not None:
            return torch.addmm(bias_O[:, None], weight_OI, x_TI.t()).t().contiguous()
        return torch.mm(weight_OI, x_TI.t()).t().contiguous()
    return nn.functional.linear(x_TI, weight_OI, bias_O)


def swiglu(gate_up_TI: Tensor) -> Tensor:
    gate, up = gate_up_TI.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up
