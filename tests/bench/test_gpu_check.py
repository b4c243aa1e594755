"""The checks of the GPU path, run as a rehearsal on the CPU: their figures say nothing, but they can all be made."""

import json

import pytest
import torch
from typer.testing import CliRunner

from refusion_eval.bench import gpu_check, gpu_processes
from refusion_eval.bench.gpu_check import GpuCheck
from refusion_eval.bench.gpu_report import Check, Result, conditions, results_rows, verdict, write_report
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


def broken() -> Result:
    raise RuntimeError("no kernel image is available")


def test_a_check_that_raises_has_failed_and_the_others_still_run(rehearsal, monkeypatch, tmp_path) -> None:
    passes = (lambda: Result(True, "as it should be", {}), 1)
    monkeypatch.setattr(GpuCheck, "checks", {"first": passes, "second": (broken, 1), "third": passes})
    checks = list(rehearsal.run())
    assert [verdict(check.result) for check in checks] == ["passed", "FAILED", "passed"]
    write_report(tmp_path, conditions(torch.device("cpu"), None), checks)
    written = json.loads((tmp_path / "checks.json").read_text())["checks"]
    assert written[1]["result"]["text"] == "RuntimeError: no kernel image is available"
    assert "| second | FAILED |" in (tmp_path / "checks.md").read_text()


def test_all_checks_are_estimated_to_take_less_than_half_an_hour(rehearsal) -> None:
    assert sum(estimate for _, estimate in rehearsal.checks.values()) < gpu_check.MAX_SECONDS == 1800


def test_a_check_for_which_no_time_is_left_is_left_out(rehearsal, monkeypatch) -> None:
    passes = Result(True, "as it should be", {})
    monkeypatch.setattr(GpuCheck, "checks", {"long": (broken, 1801), "short": (lambda: passes, 1)})
    assert [verdict(check.result) for check in rehearsal.run()] == ["left out", "passed"]


@pytest.mark.slow
def test_recorded_decodings_are_counted_and_found_out_if_they_differ(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_processes, "GOLDEN_TESTS", ("tests/decoders/test_llada.py",))
    result = gpu_processes.recorded_decodings(torch.device("cpu"), tmp_path)
    assert result.passed
    assert result.figures["tests"] >= 5
    # No build of torch for CPUs has this device, so that every case fails.
    if not torch.cuda.is_available():
        assert gpu_processes.recorded_decodings(torch.device("cuda"), tmp_path).passed is False


def test_where_there_is_no_clone_recorded_decodings_are_left_out(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_processes, "ROOT", tmp_path)
    result = gpu_processes.recorded_decodings(torch.device("cpu"), tmp_path)
    assert verdict(result) == "left out"
    assert "clone of the repository" in result.text


@pytest.mark.slow
def test_a_training_has_twenty_finite_losses_that_fall(tmp_path) -> None:
    result = gpu_processes.training(torch.device("cpu"), tmp_path, gpu_check.REHEARSAL)
    assert result.passed, result.text
    assert len(result.figures["losses"]) == 20


def test_the_table_of_results_has_gpus_and_no_rehearsal(tmp_path) -> None:
    check = Check("kernels", 1.0, Result(True, "9.0 kernels a layer", {"a_layer": 9.0}))
    facts = conditions(torch.device("cpu"), None)
    write = {"here": facts, "h100": facts | {"device": "NVIDIA H100"}}
    (tmp_path / "here").mkdir()
    write_report(tmp_path / "here", write["here"], [check])
    assert results_rows(tmp_path) == []
    (tmp_path / "h100").mkdir()
    write_report(tmp_path / "h100", write["h100"], [check])
    assert results_rows(tmp_path) == [["h100", "NVIDIA H100", "kernels", "passed", "9.0 kernels a layer"]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_command_names_the_rehearsal(tmp_path) -> None:
    result = CliRunner().invoke(app, ["gpu-check", "--out", str(tmp_path)])
    assert "--device cpu" in str(result.exception)


@pytest.mark.slow
def test_the_whole_rehearsal_passes(tmp_path) -> None:
    result = CliRunner().invoke(app, ["gpu-check", "--device", "cpu", "--prompts", "2", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert {"checks.json", "checks.md", "roofline.png"} <= {path.name for path in tmp_path.iterdir()}
