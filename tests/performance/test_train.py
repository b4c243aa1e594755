"""Our training steps and the plain loop's compute the same; the report of `performance/train.py`."""

import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import train
import train_contestant
from train_contestant import (
    CONTESTANTS,
    OURS,
    PLAIN,
    TrainBenchSettings,
    batches_of,
    random_model,
    synthetic_samples,
)

from refusion_eval.bench.checkpoints import Shape
from refusion_eval.errors import ConfigError

TINY = Shape(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=16,
    vocab_size=64,
)
SETTINGS = TrainBenchSettings(num_samples=6, batch_size=3, mean_length=30, max_length=80, device="cpu", threads=1)


def test_both_compute_the_same_losses_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(train_contestant.TRAIN_SHAPES, "small", TINY)
    found = []
    for name in (OURS, PLAIN):
        model, rng = random_model(SETTINGS), np.random.default_rng(1)
        losses = [CONTESTANTS[name](model, TINY, samples, rng) for samples in batches_of(SETTINGS)]
        torch.stack(losses).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append(([loss.item() for loss in losses], gradients))
    (our_losses, our_gradients), (plain_losses, plain_gradients) = found
    assert len(our_losses) == 2
    assert our_losses == pytest.approx(plain_losses, rel=1e-5)
    for ours, plain in zip(our_gradients, plain_gradients, strict=True):
        assert ours is not None
        assert plain is not None
        assert (ours - plain).norm() <= 1e-5 * plain.norm()


def test_lengths_have_the_mean_and_the_bounds_that_were_asked_for() -> None:
    samples = synthetic_samples(replace(SETTINGS, num_samples=5000, mean_length=330, max_length=4096))
    lengths = np.array([sample.length for sample in samples])
    assert lengths.mean() == pytest.approx(330, rel=0.05)
    assert lengths.min() >= train_contestant.MIN_LENGTH
    assert lengths.max() <= 4096
    assert np.median(lengths) < 0.75 * lengths.mean()
    assert all(sample.prompt and sample.answer for sample in samples)
    assert max(max(sample.prompt + sample.answer) for sample in samples) < 10240 - 3


@pytest.fixture
def measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One measurement stands for those of all batch sizes, because each starts two processes."""
    measure = functools.cache(train.measure_training)

    def measured(settings: TrainBenchSettings, progress: Callable[[str], None]) -> train.TrainReport:
        report = measure(replace(settings, batch_size=2), progress)
        return replace(report, conditions={**report.conditions, "batch_size": settings.batch_size})

    monkeypatch.setattr(train, "measure_training", measured)


@pytest.mark.slow
@pytest.mark.usefixtures("measured_once")
def test_the_command_prints_ratios_first_and_writes_them(script, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    options = "--samples 3 --batch-size 2,3 --rounds 2 --mean-length 12 --max-length 16 --threads 1 --device cpu"
    status, output, _ = script(train.main, *options.split(), "--out", out)
    assert status == 0
    assert output.index("samples a step") < output.index("2 samples a step: ratios (medians of one run)")
    report, other = json.loads(out.read_text())
    assert [some["conditions"]["batch_size"] for some in (report, other)] == [2, 3]
    speed = report["ratios"]["tokens/s: ours / plain loop"]
    assert re.search(rf"^ +2 +{speed:.2f}x ", output, flags=re.MULTILINE)
    assert next(iter(report)) == "ratios"
    ours, plain = report["contestants"][OURS], report["contestants"][PLAIN]
    assert len(ours["tokens_per_second"]) == len(plain["tokens_per_second"]) == 2
    assert ours["first_loss"] == pytest.approx(plain["first_loss"], rel=1e-4)
    ratios = [a / b for a, b in zip(ours["tokens_per_second"], plain["tokens_per_second"], strict=True)]
    assert report["ratios"]["tokens/s: ours / plain loop, highest round"] == pytest.approx(max(ratios))
    assert report["ratios"]["peak memory: ours / plain loop"] == ours["peak_bytes"] / plain["peak_bytes"]
    assert all(some["peak_bytes"] > some["idle_bytes"] > 0 for some in (ours, plain))
    assert report["rows"]["packed"] == 1 <= report["rows"]["padded"]
    assert report["conditions"]["dtype"] == "float32"


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": "9B"},
        {"dtype": "float16"},
        {"device": "meta"},
        {"mean_length": 4},
        {"max_length": 100},
        {"batch_size": 0},
    ],
)
def test_a_wrong_setting_is_refused_by_name(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TrainBenchSettings(**wrong)


def test_a_process_that_dies_is_an_error_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "serve", int)  # fails, because int takes no connection
    with pytest.raises(ConfigError, match="'ours' ended"):
        train.measure_training(SETTINGS)
