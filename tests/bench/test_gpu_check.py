"""The checks of the GPU path, run as a rehearsal on the CPU: their figures say nothing, but they can all be made."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from refusion_eval.bench import gpu_check
from refusion_eval.bench.gpu_check import Check, GpuCheck, Result, conditions, results_rows, write_report
from refusion_eval.cli import app


@pytest.fixture
def rehearsal(tmp_path, monkeypatch) -> GpuCheck:
    monkeypatch.setattr(gpu_check, "WIDTHS", (1, 40))
    return GpuCheck("cpu", tmp_path, None, 2, print)


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


def broken() -> Result:
    raise RuntimeError("no kernel image is available")


def test_a_check_that_raises_has_failed_and_the_others_still_run(rehearsal, monkeypatch, tmp_path) -> None:
    passes = (lambda: Result(True, "as it should be", {}), 1)
    monkeypatch.setattr(GpuCheck, "checks", {"first": passes, "second": (broken, 1), "third": passes})
    checks = list(rehearsal.run())
    assert [check.result.verdict for check in checks] == ["passed", "FAILED", "passed"]
    write_report(tmp_path, conditions(torch.device("cpu"), None), checks)
    written = json.loads((tmp_path / "checks.json").read_text())["checks"]
    assert written[1]["result"]["text"] == "RuntimeError: no kernel image is available"
    assert "| second | FAILED |" in (tmp_path / "checks.md").read_text()


def test_all_checks_are_estimated_to_take_less_than_half_an_hour(rehearsal) -> None:
    assert sum(estimate for _, estimate in rehearsal.checks.values()) < gpu_check.MAX_SECONDS == 1800


def test_a_check_for_which_no_time_is_left_is_left_out(rehearsal, monkeypatch) -> None:
    passes = Result(True, "as it should be", {})
    monkeypatch.setattr(GpuCheck, "checks", {"long": (broken, 1801), "short": (lambda: passes, 1)})
    assert [check.result.verdict for check in rehearsal.run()] == ["left out", "passed"]


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


def test_one_inflated_checkpoint_is_on_the_disk_at_a_time(rehearsal, tmp_path) -> None:
    first = rehearsal._inflated("refusion")
    assert rehearsal._inflated("refusion") == first
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    assert [rehearsal._inflated("llada")] == list(tmp_path.iterdir())


def test_nothing_of_the_command_needs_the_repository() -> None:
    sources = (Path(gpu_check.__file__).parent).glob("*.py")
    assert [path.name for path in sources if "parents[" in path.read_text() or "pytest" in path.read_text()] == []


@pytest.mark.slow
def test_the_whole_rehearsal_passes(tmp_path) -> None:
    result = CliRunner().invoke(app, ["gpu-check", "--device", "cpu", "--prompts", "2", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert {"checks.json", "checks.md", "roofline.png"} <= {path.name for path in tmp_path.iterdir()}
