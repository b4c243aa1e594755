"""Pieces of a layer against plain formulas (`refusion_eval.models.transformer`)."""

import pytest
import torch

from refusion_eval.models.layers import FEW_ROWS, linear
from refusion_eval.models.transformer import rms_norm
from refusion_eval.models.weights import SMALL_MATRIX


@pytest.mark.parametrize("num_rows", [1, FEW_ROWS[0], 16, FEW_ROWS[1], FEW_ROWS[1] + 1])
@pytest.mark.parametrize("num_columns", [64, SMALL_MATRIX // 1000])
def test_a_product_is_the_same_whatever_its_size(num_rows: int, num_columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, num_columns, generator=generator)
    weight = torch.randn(1100, num_columns, generator=generator)
    found = linear(rows, weight)
    assert found.is_contiguous()
    torch.testing.assert_close(found, rows @ weight.t(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32,), (3, 32)])
def test_rms_norm_is_its_formula_in_float32(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 32, generator=generator).to(dtype)
    weight = torch.rand(shape, generator=generator).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight.double()
    found = rms_norm(x, weight, 1e-2)
    assert found.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
