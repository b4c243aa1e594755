"""Which attention backend serves: by itself, by its name, or refused with the reason."""

import pytest
import torch

from refusion_eval.errors import ConfigError
from refusion_eval.models import attention, products
from refusion_eval.models.device import choose_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def flash_installed(monkeypatch):
    monkeypatch.setattr(attention, "flash_attn_func", lambda *args, **options: None)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [("auto", torch.float32, "native"), ("sdpa", torch.float32, "sdpa"), ("auto", torch.bfloat16, "native")],
)
def test_a_cpu_compiles_forwards_whatever_the_weights(name, dtype, expected, flash_installed):
    assert choose_backend(name, dtype, CPU) == expected


def test_without_the_products_of_torch_a_cpu_takes_sdpa(monkeypatch):
    monkeypatch.setattr(products, "obstacle", lambda: "this build of torch has no products")
    assert choose_backend("auto", torch.float32, CPU) == "sdpa"
    with pytest.raises(ConfigError, match="no products; use attention='sdpa'"):
        choose_backend("native", torch.float32, CPU)


def test_flash_runs_only_where_it_is_named(flash_installed):
    assert choose_backend("auto", torch.bfloat16, CUDA) == "sdpa"
    assert choose_backend("flash", torch.bfloat16, CUDA) == "flash"


def test_without_flash_everything_is_sdpa(monkeypatch):
    monkeypatch.setattr(attention, "flash_attn_func", None)
    assert choose_backend("auto", torch.bfloat16, CUDA) == "sdpa"
    with pytest.raises(ConfigError, match="not installed"):
        choose_backend("flash", torch.bfloat16, CUDA)


@pytest.mark.parametrize(
    ("dtype", "device", "reason"),
    [(torch.bfloat16, CPU, "needs a CUDA device"), (torch.float32, CUDA, "needs bfloat16")],
)
def test_flash_is_refused_where_it_cannot_run(flash_installed, dtype, device, reason):
    with pytest.raises(ConfigError, match=reason):
        choose_backend("flash", dtype, device)


def test_unknown_backend():
    with pytest.raises(ConfigError, match="choose auto, sdpa, flash, native"):
        choose_backend("eager", torch.float32, CPU)
