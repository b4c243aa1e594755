"""Own products of a few rows and the sum of their parts (`refusion_eval.models.product_kernels`), as `test_kernels`."""

import pytest
import torch

from refusion_eval.models import fused
from tests.models.test_kernels import DEVICE, EPS, SHORT, assert_close, plain, random

product_kernels = pytest.importorskip("refusion_eval.models.product_kernels", reason="Triton is not installed")
kernels = pytest.importorskip("refusion_eval.models.kernels", reason="Triton is not installed")

COLUMNS, WIDTH = 96, 384
KERNELS = ("row", "dot", "swapped")
ROWS = (1, 5, 16, 17, 40)
SPLITS = (2, 3, 4, 1, 2)  # by rows


def tiles(splits=1):
    return [32, 32, splits, 4, 3]


def operands(num_rows, dtype, columns=COLUMNS):
    """Rows of an activation, behind which stands what is not a number, and a matrix."""
    x = random(num_rows, num_rows, WIDTH, dtype=dtype)
    after = torch.full((3, WIDTH), float("nan"), dtype=dtype, device=DEVICE)
    return torch.cat((x, after)), random(1, columns, WIDTH, dtype=dtype) / WIDTH**0.5


def exact(x, weight, num_rows):
    return x[:num_rows].double().cpu() @ weight.double().cpu().t()


@pytest.mark.parametrize(("num_rows", "dtype"), [*((rows, SHORT) for rows in ROWS), (17, torch.float32)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_product(kernel, num_rows, dtype):
    x, weight = operands(num_rows, dtype)
    found = product_kernels.product(x, weight, num_rows, kernel, tiles())
    assert found.shape == (num_rows, COLUMNS)
    assert_close(found, exact(x, weight, num_rows))


@pytest.mark.parametrize(("num_rows", "splits"), zip(ROWS, SPLITS, strict=True))
@pytest.mark.parametrize("kernel", KERNELS)
def test_each_part_is_the_product_of_its_share_of_the_entries(kernel, num_rows, splits):
    x, weight = operands(num_rows, SHORT)
    found = product_kernels.product_parts(x, weight, num_rows, kernel, tiles(splits))
    assert (found.shape, found.dtype) == ((splits, num_rows, COLUMNS), torch.float32)
    shares = zip(found, *(matrix.chunk(splits, dim=1) for matrix in (x, weight)), strict=True)
    for part, some_x, some_weight in shares:
        torch.testing.assert_close(part.cpu().double(), exact(some_x, some_weight, num_rows), atol=1e-5, rtol=1e-5)
    defined = plain(fused.product_parts, x, weight, num_rows, kernel, tiles(splits))
    torch.testing.assert_close(found.cpu(), defined, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("num_rows", "padded_to"), [(1, 24), (5, 0), (16, 0), (17, 24), (40, 0)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gated_product(kernel, num_rows, padded_to):
    x, weight = operands(num_rows, SHORT, columns=2 * COLUMNS)
    found = product_kernels.gated_product(x, weight, num_rows, kernel, tiles(), padded_to)
    assert found.shape == (max(num_rows, padded_to), COLUMNS)
    gate, up = exact(x, weight, num_rows).to(SHORT).float().chunk(2, dim=1)
    assert_close(found[:num_rows], (gate * gate.sigmoid() * up).to(SHORT))
    assert_close(
        found[:num_rows], plain(fused.gated_product, x, weight, num_rows, kernel, tiles(), padded_to)[:num_rows]
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_has_one_sum_in_all_forwards_of_up_to_16_rows_and_two_runs_are_equal(kernel):
    x, weight = operands(16, SHORT)
    whole = product_kernels.product_parts(x, weight, 16, kernel, tiles(2))
    for num_rows in (1, 5, 16):
        for _ in range(2):
            found = product_kernels.product_parts(x, weight, num_rows, kernel, tiles(2))
            assert torch.equal(found, whole[:, :num_rows])


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded_to", [0, 8])
def test_a_sum_of_parts_and_its_norm(parts, dtype, padded_to):
    x, weight, added = random(0, 5, 96, dtype=dtype), random(1, 96, dtype=dtype), random(2, parts, 5, 96)
    total, normed = kernels.add_rms_norm(x, added, weight, EPS, padded_to)
    expected = plain(fused.add_rms_norm, x, added, weight, EPS)
    assert len(normed) == max(5, padded_to)
    assert_close(total, expected[0])
    assert_close(normed[:5], expected[1])


def test_parts_are_summed_in_their_order():
    """Of large parts of opposite signs and a small one, the small one is lost in another order."""
    x = torch.zeros(1, 32, device=DEVICE)
    parts = torch.tensor([1e9, -1e9, 1.0], device=DEVICE)[:, None, None].expand(3, 1, 32).contiguous()
    weight = torch.ones(32, device=DEVICE)
    total, _ = kernels.add_rms_norm(x, parts, weight, EPS)
    assert torch.equal(total, torch.ones_like(x))
    other, _ = kernels.add_rms_norm(x, parts[[0, 2, 1]], weight, EPS)
    assert torch.equal(other, torch.zeros_like(x))
