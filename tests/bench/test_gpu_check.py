"""The checks of the GPU path, run as a rehearsal on the CPU: their figures say nothing, but they can all be made."""

import json

import pytest
import torch
from typer.testing import CliRunner

from refusion_eval.bench import gpu_check
from refusion_eval.bench.gpu_check import Check, GpuCheck, Result, conditions, verdict, write_report
from refusion_eval.cli import app


@pytest.fixture
def rehearsal(tmp_path, monkeypatch) -> GpuCheck:
    monkeypatch.setattr(gpu_check, "WIDTHS", (1, 40))
    monkeypatch.setattr(gpu_check, "KEY_LENGTHS", range(320, 322))
    return GpuCheck("cpu", tmp_path, None, 2, print)


def test_masked_attention_agrees_with_float32_arithmetic(rehearsal) -> None:
    result = rehearsal.masked_attention()
    assert result.passed
    assert 0 < result.figures["largest"] < gpu_check.MASK_TOLERANCE


def test_attention_that_ignores_its_mask_is_found_out(rehearsal, monkeypatch) -> None:
    def without_mask(q, keys, values, mask, is_causal):
        return gpu_check._attention_in_float32(q, keys, values, torch.zeros_like(mask))

    monkeypatch.setattr(gpu_check, "grouped_attention", without_mask)
    assert rehearsal.masked_attention().passed is False


@pytest.mark.slow
def test_the_width_curve_has_both_ways_and_the_share_of_the_bandwidth(rehearsal, tmp_path) -> None:
    result = rehearsal.width_curve()
    assert result.passed is None  # a CPU has no target
    assert {way: set(curve) for way, curve in result.figures["seconds"].items()} == {
        "eager": {1, 40},
        "recorded": {1, 40},
    }
    assert 0 < result.figures["mbu"][40] < result.figures["mbu"][1]
    write_report(tmp_path, conditions(torch.device("cpu"), None), [Check("width", 1.0, result)])
    assert (tmp_path / "roofline.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_second_batch_has_as_much_room_as_the_first(rehearsal) -> None:
    assert rehearsal.two_batches() == Result(True, "0 of 4 requests failed", {"failed": 0})


def test_a_check_that_raises_has_failed_and_the_others_still_run(rehearsal, monkeypatch, tmp_path) -> None:
    names = ("float32_tokens", "bfloat16_tokens", "masked_attention", "kernels", "width_curve", "speed")
    for name in (*names, "masked_diffusion", "two_batches", "memory"):
        monkeypatch.setattr(rehearsal, name, lambda: Result(True, "as it should be", {}))

    def broken() -> Result:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(rehearsal, "kernels", broken)
    checks = list(rehearsal.run())
    assert [verdict(check.result) for check in checks] == ["passed"] * 3 + ["FAILED"] + ["passed"] * 5
    write_report(tmp_path, conditions(torch.device("cpu"), None), checks)
    written = json.loads((tmp_path / "checks.json").read_text())["checks"]
    assert written[3]["result"]["text"] == "RuntimeError: no kernel image is available"
    assert "| kernels of a decoding | FAILED |" in (tmp_path / "checks.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_command_names_the_rehearsal(tmp_path) -> None:
    result = CliRunner().invoke(app, ["gpu-check", "--out", str(tmp_path)])
    assert "--device cpu" in str(result.exception)


@pytest.mark.slow
def test_the_whole_rehearsal_passes(tmp_path) -> None:
    result = CliRunner().invoke(app, ["gpu-check", "--device", "cpu", "--prompts", "2", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert {"checks.json", "checks.md", "roofline.png"} <= {path.name for path in tmp_path.iterdir()}
