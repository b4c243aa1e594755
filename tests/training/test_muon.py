"""The Muon optimizer (`refusion_eval.training.train`)."""

import pytest
import torch

from refusion_eval.training.train import Muon, orthogonalised


@pytest.mark.parametrize("shape", [(8, 8), (8, 32), (5, 7)])
def test_singular_values_come_close_to_one_and_directions_stay(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(3, *shape)
    done = orthogonalised(matrix)
    values = torch.linalg.svdvals(done)
    assert 0.3 < values.min() <= values.max() < 1.3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    aligned = left.mT @ done @ right.mT
    assert torch.allclose(aligned, torch.diag_embed(aligned.diagonal(dim1=1, dim2=2)), atol=1e-4)


def test_the_first_step_goes_against_the_gradient_by_the_root_of_the_aspect() -> None:
    torch.manual_seed(0)
    tall = torch.nn.Parameter(torch.zeros(32, 8))
    tall.grad = torch.randn(32, 8)
    Muon([tall], lr=0.1).step()
    values = torch.linalg.svdvals(tall.detach())
    assert 0.3 * 0.2 < values.min() <= values.max() < 1.3 * 0.2
    assert (tall * tall.grad).sum() < 0


def test_a_quadratic_is_minimised() -> None:
    torch.manual_seed(0)
    target = torch.randn(6, 9)
    matrix = torch.nn.Parameter(torch.zeros(6, 9))
    optimizer = Muon([matrix], lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        loss = (matrix - target).square().sum()
        loss.backward()
        optimizer.step()
    assert loss < 0.05 * target.square().sum()
