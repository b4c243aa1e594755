"""The estimate of a forward on a GPU (`refusion_eval.bench.predict`)."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from refusion_eval.bench import predict
from refusion_eval.bench.checkpoints import SHAPES, config_of
from refusion_eval.bench.predict import CARDS, Card, expected, host_seconds
from refusion_eval.cli import app
from refusion_eval.errors import CheckpointError
from refusion_eval.models.checkpoint import model_config
from refusion_eval.models.device import weight_bytes

ROOT = Path(__file__).resolve().parents[2]
CONFIG = config_of(SHAPES["8B"])


def test_products_are_a_start_and_the_bytes_of_their_weights() -> None:
    # 50 MB and 132 MB at one row: 2.51 and 2.87 TB/s on an H100, the tables behind the fit.
    for num_bytes, rate in ((2 * 6144 * 4096, 2.51e12), (2 * 12288 * 5376, 2.87e12)):
        seconds = predict.PRODUCT_START + num_bytes / (predict.STREAMED * CARDS["H100"].memory)
        assert num_bytes / seconds == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize("name", CARDS)
def test_a_forward_takes_longer_than_its_weights_by_the_data_sheet_and_grows_with_its_rows(name) -> None:
    seconds = [sum(expected(CARDS[name], CONFIG, width).values()) for width in (1, 8, 40)]
    assert seconds == sorted(seconds)
    assert weight_bytes(CONFIG, torch.bfloat16) / CARDS[name].memory < seconds[0] < seconds[2] < 1.05 * seconds[0]


def test_without_starts_and_small_kernels_only_the_weights_are_left(monkeypatch) -> None:
    for constant in ("PRODUCT_START", "KERNEL", "ATTENTION", "ENDS"):
        monkeypatch.setattr(predict, constant, 0.0)
    norms = 2 * (73 * CONFIG.hidden_size + 36 * 2 * CONFIG.head_dim)  # no product reads them
    seconds = sum(expected(Card(1e12, 1e30), CONFIG, 1).values())
    assert seconds == pytest.approx((weight_bytes(CONFIG, torch.bfloat16) - norms) / (predict.STREAMED * 1e12))


def test_the_estimate_by_kernels_meets_the_h200_and_falls_with_them() -> None:
    checks = json.loads((ROOT / "results" / "gpu" / "h200" / "checks.json").read_text())["checks"]
    (curve,) = (check["result"]["figures"]["seconds"] for check in checks if check["name"] == "width-curve")
    now, fewer, early = predict.by_kernels(CARDS["H200"], CONFIG).values()
    assert now == pytest.approx(curve["recorded"]["1"], rel=0.01)
    assert now - fewer == pytest.approx(36 * 5 * predict.BOUNDARY)
    assert early < fewer
    assert len(predict.by_kernels(CARDS["A100"], CONFIG)) == 2  # where no kernel is launched early


def test_the_command_prints_the_parts_beside_what_was_measured_on_this_card_and_shape(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(predict, "host_seconds", lambda: {"no decoder": 0.001, "refusion": 0.003})
    monkeypatch.chdir(tmp_path)
    figures = {"seconds": {"recorded": {"1": 0.01, "8": 0.02, "40": 0.04}}, "copy_bytes_per_second": 3e12}
    check = {"name": "width-curve", "seconds": 1.0, "result": {"passed": None, "text": "", "figures": figures}}
    for folder, device, shape in (
        ("h100", "NVIDIA H100 80GB HBM3", "8B"),
        ("h200", "NVIDIA H200", "8B"),
        ("b", "H100", "0.6B"),
    ):
        (tmp_path / "results" / "gpu" / folder).mkdir(parents=True)
        report = {"conditions": {"device": device, "shape": shape}, "checks": [check]}
        (tmp_path / "results" / "gpu" / folder / "checks.json").write_text(json.dumps(report))
    lines = CliRunner().invoke(app, ["bench", "--predict", "H100"]).stdout.splitlines()
    cells = {line[:40].strip(): line[40:].split() for line in lines}
    assert cells["host, measured here"] == ["1.00"] * 3
    assert cells["7 kernels a layer, with all switches"] == [
        "5.78",
        "ms,",
        "173",
        "forwards/s,",
        "87%",
        "of",
        "a",
        "copy",
    ]
    parts = [
        cells[part] for part in ("products of 36 layers", "output head", "small kernels", "embedding, readout, copies")
    ]
    total = sum(float(part[0]) for part in parts) + 1
    assert float(cells["expected"][0]) == pytest.approx(total, abs=0.03)
    assert cells["measured, results/gpu/h100"] == ["10.00", "20.00", "40.00"]
    assert sum(line.strip().startswith("measured") for line in lines) == 1
    assert "2.00 ms for refusion" in lines[-1]


QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}


def test_of_experts_as_many_are_expected_as_rows_choose_at_random(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(predict, "host_seconds", lambda: {"no decoder": 0.001})
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    lines = CliRunner().invoke(app, ["bench", "--predict", "H100", "--model", str(tmp_path)]).stdout.splitlines()
    cells = {line[:40].strip(): line[40:].split() for line in lines}
    assert cells["experts read of 128, expected"] == ["8.0", "51.6", "118.3"]
    config = model_config(tmp_path)
    read = [weight_bytes(config, torch.bfloat16, width) for width in (1, 40)]
    # Of 30.5 billion weights, 3.3 billion are of one token; the embedding is not read.
    assert read[0] / 2 == pytest.approx(3.3e9 - 151936 * 2048, rel=0.03)
    assert read[0] < read[1] < 2 * 30.5e9
    assert f"{read[0] / 1e9:.2f} GB of weights at width 1, {read[1] / 1e9:.2f} GB of weights at width 40" in lines[-1]
    seconds = [sum(expected(CARDS["H100"], config, width).values()) for width in (1, 8, 40)]
    assert seconds == sorted(seconds)
    assert seconds[1] > 2 * seconds[0]  # other rows choose other experts


def test_what_is_neither_a_shape_nor_a_checkpoint_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "--predict", "H100", "--model", "./0.6B-inflated"])
    assert isinstance(result.exception, CheckpointError)


@pytest.mark.slow
def test_the_host_takes_some_of_every_forward_and_refusion_more_than_autoregressive_decoding() -> None:
    seconds = host_seconds(num_prompts=1, num_rounds=5)
    assert min(seconds.values()) > 0
    assert seconds["autoregressive"] < seconds["refusion"]
