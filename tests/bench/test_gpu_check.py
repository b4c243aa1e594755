"""The checks of the GPU path, run as a rehearsal on the CPU: their figures say nothing, but they can all be made."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from typer.testing import CliRunner

from refusion_eval.bench import gpu_check
from refusion_eval.bench.child import in_process
from refusion_eval.bench.gpu_check import (
    CHECKS,
    Check,
    GpuCheck,
    Result,
    conditions,
    results_rows,
    write_report,
)
from refusion_eval.cli import app
from refusion_eval.errors import ConfigError

FEW_PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "tokenizers", "typer", "rich", "pydantic")


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


def test_the_curve_that_was_measured_stays_where_forwards_cannot_be_recorded(rehearsal, monkeypatch, tmp_path) -> None:
    def timed(model, attention, widths, context, rounds, seconds, recorded):
        if recorded is not None:
            raise ConfigError("a recorded forward of 40 rows differs")
        return {width: [0.5] for width in widths}

    monkeypatch.setattr(gpu_check, "time_forwards", timed)
    result = rehearsal.width_curve()
    assert result.figures["seconds"] == {"eager": {1: 0.5, 40: 0.5}}
    assert result.text.startswith("a recorded forward of 40 rows differs; ")
    write_report(tmp_path, conditions(torch.device("cpu"), None), [Check("width-curve", 1.0, result)])
    assert (tmp_path / "roofline.png").exists()


def test_without_graphs_no_forward_is_recorded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_check, "WIDTHS", (1, 40))
    monkeypatch.setattr(gpu_check, "recorder", None)
    assert set(GpuCheck("cpu", tmp_path, None, 2, print, False).width_curve().figures["seconds"]) == {"eager"}


def test_a_check_that_raises_dies_or_hangs_ends_alone() -> None:
    assert in_process(partial(int, "7"), 60) == (7, "")
    invalid = "ValueError: invalid literal for int() with base 10: 'seven'"
    assert in_process(partial(int, "seven"), 60) == (None, invalid)
    assert in_process(partial(os._exit, 7), 60) == (None, "its process ended without a result, with status 7")
    assert in_process(partial(time.sleep, 600), 0.1) == (None, "stopped after 0 s")


def test_a_check_that_ended_without_a_result_has_failed_and_the_others_still_run(rehearsal, monkeypatch) -> None:
    answers = iter([(Result(True, "", {}), ""), (None, "status 7"), (Result(True, "", {}), "")])
    monkeypatch.setattr(gpu_check, "in_process", lambda check, seconds: next(answers))
    checks = list(rehearsal.run(["speed", "kernels", "products"]))
    assert [check.result.verdict for check in checks] == ["passed", "FAILED", "passed"]
    assert checks[1].result.text == "status 7"


def test_without_matplotlib_the_figures_are_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write_report(
        tmp_path, conditions(torch.device("cpu"), None), [Check("width-curve", 1.0, Result(None, "", {"mbu": {}}))]
    )
    assert {path.name for path in tmp_path.iterdir()} == {"checks.json", "checks.md"}


def test_checks_are_made_in_the_order_that_is_asked_for_and_get_a_limit_each(rehearsal, monkeypatch) -> None:
    limits = {}

    def in_process(check, seconds):
        limits[check.__name__] = seconds
        return Result(True, "as it should be", {}), ""

    monkeypatch.setattr(gpu_check, "in_process", in_process)
    monkeypatch.setattr(gpu_check, "CHECKS", {"kernels": 1801, "speed": 600, "batches": 7, "products": 1})
    rehearsal._on_gpu = True
    checks = list(rehearsal.run(["kernels", "batches", "speed"]))
    assert [(check.name, check.result.verdict) for check in checks] == [
        ("kernels", "left out"),  # no time is left for it
        ("batches", "passed"),
        ("speed", "passed"),
    ]
    assert list(limits) == ["batches", "speed"]
    assert limits["batches"] == 21
    assert limits["speed"] <= 1800


def test_all_checks_exist_and_speed_comes_first_in_half_an_hour(rehearsal) -> None:
    assert all(callable(getattr(rehearsal, name.replace("-", "_"))) for name in CHECKS)
    assert sum(CHECKS.values()) < gpu_check.MAX_SECONDS == 1800
    assert list(CHECKS)[:3] == ["width-curve", "speed", "kernels"]
    assert CHECKS["width-curve"] + CHECKS["speed"] <= 150


def test_a_later_call_keeps_the_checks_of_an_earlier_one_on_the_same_device(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_check, "in_process", lambda check, seconds: (Result(True, check.__name__, {}), ""))
    command = ["gpu-check", "--device", "cpu", "--out", str(tmp_path), "--checks"]
    for names in ("speed,kernels", "products,speed"):
        assert CliRunner().invoke(app, [*command, names]).exit_code == 0
    path = tmp_path / "checks.json"
    assert [check["name"] for check in json.loads(path.read_text())["checks"]] == ["speed", "kernels", "products"]
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "NVIDIA H100"'))
    assert "is of device NVIDIA H100, not cpu" in str(CliRunner().invoke(app, [*command, "speed"]).exception)
    assert "choose among width-curve, speed" in str(CliRunner().invoke(app, [*command, "speeds"]).exception)


def test_every_result_is_written_before_the_next_check_begins(tmp_path, monkeypatch) -> None:
    written = []

    def in_process(check, seconds):
        path = tmp_path / "checks.json"
        written.append([check["name"] for check in json.loads(path.read_text())["checks"]] if path.exists() else [])
        return Result(True, "", {}), ""

    monkeypatch.setattr(gpu_check, "in_process", in_process)
    CliRunner().invoke(app, ["gpu-check", "--device", "cpu", "--out", str(tmp_path), "--checks", "speed,kernels"])
    assert written == [[], ["speed"]]


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


def test_a_checkpoint_that_finds_no_room_is_refused_before_it_is_written(rehearsal, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_check.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"takes 0\.0 GB, and .* has 0\.0 GB left; name another place with --folder"):
        rehearsal._inflated("refusion")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_was_written_in_part_is_not_taken_for_one(rehearsal, tmp_path, monkeypatch) -> None:
    def inflate(source, target, shape, dtype):
        target.mkdir()
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(gpu_check, "inflate", inflate)
        with pytest.raises(OSError, match="no space left"):
            rehearsal._inflated("refusion")
    assert (rehearsal._inflated("refusion") / "config.json").exists()
    assert len(list(tmp_path.iterdir())) == 1


def test_nothing_of_the_command_needs_the_repository() -> None:
    sources = (Path(gpu_check.__file__).parent).glob("*.py")
    assert [path.name for path in sources if "parents[" in path.read_text() or "pytest" in path.read_text()] == []


@pytest.fixture(scope="module")
def few_packages(tmp_path_factory) -> Path:
    """A folder with the few packages that a machine with a GPU may have, and with those that they need."""
    folder, waiting, found = tmp_path_factory.mktemp("packages"), list(FEW_PACKAGES), set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            package = distribution(name)
        except PackageNotFoundError:  # of another platform
            continue
        needed = map(Requirement, package.requires or ())
        waiting += [other.name for other in needed if other.marker is None or other.marker.evaluate({"extra": ""})]
        for part in {path.parts[0] for path in package.files} - {"..", "__pycache__"}:
            if not (folder / part).exists():
                (folder / part).symlink_to(package.locate_file(part))
    assert not {"matplotlib", "numba", "datasets", "lm-eval", "pandas"} & found
    return folder


@pytest.mark.parametrize("checks", ["products", pytest.param(",".join(CHECKS), marks=pytest.mark.slow)])
def test_the_rehearsal_passes_with_few_packages(few_packages, tmp_path, checks) -> None:
    command = [sys.executable, "-S", "-P", "-m", "refusion_eval", "gpu-check", "--device", "cpu", "--prompts", "2"]
    environment = os.environ | {"PYTHONPATH": f"{few_packages}{os.pathsep}{Path(__file__).parents[2]}"}
    command += ["--out", str(tmp_path), "--checks", checks]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads((tmp_path / "checks.json").read_text())
    assert [check["name"] for check in report["checks"]] == checks.split(",")
    assert all(check["result"]["figures"] for check in report["checks"])
    assert not (tmp_path / "roofline.png").exists()  # matplotlib is not among them
    assert {"commit", "hardware", "torch"} < set(report["conditions"])
