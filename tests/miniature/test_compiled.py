"""Compiled layers (`miniature.compiled`): the same gradients, and only where they pay and are possible."""

import copy
from typing import Any

import pytest
import torch

from miniature.compiled import MIN_STEPS, compile_layers
from refusion_eval.training.objectives.loss import hybrid_loss
from tests.training.backbones import batch_for
from tests.training.tiny import MASK, random_model


def is_compiled(model: Any) -> bool:
    return any(module._compiled_call_impl is not None for module in model.modules())


@pytest.mark.slow
def test_losses_and_gradients_stay_equal() -> None:
    model = random_model()
    compiled = copy.deepcopy(model)
    assert compile_layers(compiled, MIN_STEPS)
    assert is_compiled(compiled)
    for objective in ("refusion", "bd3lm", "sft", "llada"):
        batch, losses = batch_for(objective, MASK), []
        for some in (model, compiled):
            some.zero_grad()
            losses.append(hybrid_loss(some, batch).total)
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0])
        expected = dict(model.named_parameters())
        for name, weight in compiled.named_parameters():
            assert (weight.grad - expected[name].grad).norm() <= 1e-5 * expected[name].grad.norm() + 1e-9, name


def test_a_short_run_is_not_compiled() -> None:
    model = random_model()
    assert not compile_layers(model, MIN_STEPS - 1)
    assert not is_compiled(model)


def test_without_a_compiler_the_layers_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*args: Any, **settings: Any) -> None:
        raise RuntimeError("InvalidCxxCompiler: no working C++ compiler\nand more")

    monkeypatch.setattr(torch, "compile", failing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = random_model()
    assert not compile_layers(model, MIN_STEPS)
    assert not is_compiled(model)
    assert "not compiled" in (said := capsys.readouterr().err)
    assert said.endswith("no working C++ compiler\n")
