"""The search for the fastest own kernels of a card (`refusion_eval.bench.tune_kernels`)."""

import time
from functools import partial
from subprocess import Popen

import pytest
import torch

from refusion_eval.bench import tune_kernels
from refusion_eval.bench.tune_kernels import candidates
from refusion_eval.bench.tune_steps import Tuning
from refusion_eval.models.choices import Product

OWN = {"kernel": "dot", "block_n": 32, "block_k": 128, "splits": 2, "num_stages": 6}
SIZES = (256, 512)  # columns of a result, and entries of a row


def test_the_products_to_try_fit_the_matrix_and_differ_from_the_fastest_in_one_number() -> None:
    for rows in (16, 40):
        assert all(product.splits == 1 for product in candidates(None, rows, "qkv", 6144, 4096))
        assert {product.splits for product in candidates(None, rows, "down", 4096, 12288)} == {2}
    best = Product(**OWN)
    tried = candidates(best, 16, "out", *SIZES)
    assert {product.splits for product in tried} == {1, 2, 4}  # three splits do not divide a row of 512 entries
    for product in tried:
        changed = [name for name in vars(best) if getattr(best, name) != getattr(product, name)]
        assert len(changed) == 1
        assert SIZES[1] % (product.block_k * product.splits) == 0


def test_what_is_compiled_ahead_is_what_a_search_tries(monkeypatch) -> None:
    ahead = tune_kernels.first_and_near()
    for matrix, columns, width in (("out", 4096, 4096), ("gate_up", 12288, 4096), ("qkv", 6144, 4096)):
        for rows in (16, 40):
            first = candidates(None, rows, matrix, columns, width)
            near = [product for best in first for product in candidates(best, rows, matrix, columns, width)]
            assert {(matrix, product, rows) for product in first + near} <= set(ahead)
    tried = []
    monkeypatch.setattr(tune_kernels, "own_product", lambda matrix, product: lambda x, weight: tried.append(product))
    monkeypatch.setattr(tune_kernels, "first_and_near", lambda: ahead[:1])
    tune_kernels.compile_part("cpu", 0, 1)
    assert tried == [ahead[0][1]]


def test_compiling_ahead_ends_in_time(monkeypatch) -> None:
    monkeypatch.setattr(tune_kernels.subprocess, "Popen", lambda command, **_: Popen(["sleep", "600"]))
    begun = time.monotonic()
    assert tune_kernels.compile_ahead(Tuning("cpu", None, begun + 1, {})) == 0
    assert time.monotonic() - begun < 60


@pytest.fixture
def search(monkeypatch):
    """The search for `out` on the CPU, where a product with more warps is faster and one of 5 stages breaks."""

    def own_product(matrix, product):
        def compute(x, weight):
            if product.num_stages == 5:
                raise RuntimeError("out of resource: shared memory")
            return x @ weight.t() * (1.1 if product.block_n == 16 else 1)

        compute.product = product
        return compute

    def seconds_in_turns(tuning, device, replays):
        product = replays[1].product
        return [1.0, 1.0 if product is None else 0.9 if product.num_warps == 8 else 0.95]

    def replay_of(matrices, compute):
        replay = partial(int)
        replay.product = getattr(compute.func, "product", None)
        return replay

    monkeypatch.setattr(tune_kernels, "own_product", own_product)
    monkeypatch.setattr(tune_kernels, "seconds_in_turns", seconds_in_turns)
    monkeypatch.setattr(tune_kernels, "replay_of", replay_of)
    given = Tuning("cpu", None, time.monotonic() + 60, {})
    given = type("OnGpu", (Tuning,), {"on_gpu": True, "dtype": torch.float32})(*given)
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(SIZES, generator=generator)]
    return tune_kernels.Search(given, "out", matrices, (1, 8, 16))


def test_the_search_goes_from_the_fastest_to_what_is_near_it(search) -> None:
    best = search.run(16, time.monotonic() + 60, *SIZES)
    assert best.num_warps == 8
    assert search.gains[best] == pytest.approx(1 / 0.9)
    assert len(search.gains) > 5


def test_a_product_that_is_wrong_or_does_not_run_is_never_timed(search) -> None:
    search.run(16, time.monotonic() + 60, *SIZES)
    assert not any(product.block_n == 16 or product.num_stages == 5 for product in search.gains)
    reasons = " ".join(search.refused.values())
    assert "differs from float64 by 0.1 of the largest result" in reasons
    assert "RuntimeError: out of resource: shared memory" in reasons


def test_the_search_ends_in_time_with_what_it_has(search) -> None:
    best = search.run(16, time.monotonic() - 1, *SIZES)
    assert list(search.gains) == [best]


@pytest.mark.parametrize("matrix", ["qkv", "out", "gate_up", "down"])
def test_own_products_are_compared_with_float64(matrix) -> None:
    """The definitions that run on a CPU are right, and a change of one weight is seen."""
    x, weight = (torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)) for rows in (5, 64))
    product = Product(**OWN | {"splits": 2 if matrix in ("out", "down") else 1})
    assert tune_kernels.difference(matrix, product, x, weight) < 1e-5
    expected = tune_kernels.exact(matrix, x, weight)
    weight[3, 7] += 1
    assert (tune_kernels.exact(matrix, x, weight) - expected).abs().max() > 1e-3


def test_attention_is_timed_once_for_each_number_of_splits_under_that_number() -> None:
    pytest.importorskip("triton")
    given = Tuning("cuda", "8B", 0.0, {})
    few, more = "16 splits", ["16 splits, 8 warps", "8 splits", "32 splits", "64 splits"]
    assert list(tune_kernels.attention_kernels_of(given, 1, 364)) == [few, *more]
    many = tune_kernels.attention_kernels_of(given, 64, 364)
    assert many == {"8 splits": {}, "8 splits, 8 warps": {"NUM_WARPS": 8}, "16 splits": tune_kernels.PATCHES[-1]}
    assert next(iter(tune_kernels.attention_kernels_of(given, 1, 32_064))) == "32 splits"  # of a long buffer
