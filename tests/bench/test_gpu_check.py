"""The checks of the GPU path, run as a rehearsal on the CPU: their figures say nothing, but they can all be made."""

import json
import os
import re
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

from refusion_eval.bench import gpu_check, gpu_report
from refusion_eval.bench.child import in_process
from refusion_eval.bench.gpu_check import CHECKS, GpuCheck
from refusion_eval.bench.gpu_report import (
    LEAST_MBU,
    Check,
    Result,
    conditions,
    measured_curves,
    reaches_bounds,
    read_report,
    results_rows,
    write_report,
)
from refusion_eval.bench.predict import CARDS, DRIVER_NAMES
from refusion_eval.cli import app
from refusion_eval.errors import ConfigError
from refusion_eval.models.choices import NO_CHOICES, Choices

H200 = Path(__file__).parents[2] / "results" / "gpu" / "h200" / "checks.json"
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
    assert set(result.figures["device_seconds"]) == {1, 40}
    assert result.figures["read_bytes_per_second"] > 0
    write_report(tmp_path, conditions(torch.device("cpu"), None), [Check("width", 1.0, result, {})])
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
    write_report(tmp_path, conditions(torch.device("cpu"), None), [Check("width-curve", 1.0, result, {})])
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


def test_a_tuning_that_cannot_begin_has_failed_and_the_others_still_run(rehearsal, monkeypatch) -> None:
    def tune(seconds):
        raise ConfigError("tune.json holds no steps")

    monkeypatch.setattr(gpu_check, "in_process", lambda check, seconds: (Result(True, "", {}), ""))
    rehearsal._tuning = (tune, 420.0)
    checks = list(rehearsal.run(["tune", "speed"]))
    assert [check.result.verdict for check in checks] == ["FAILED", "passed"]
    assert checks[0].result.text == "ConfigError: tune.json holds no steps"


def test_a_tuning_gets_the_seconds_that_are_left_at_most(rehearsal, monkeypatch) -> None:
    given = []
    for most in (420.0, 1800.0):
        rehearsal._tuning = (lambda seconds: given.append(seconds) or Result(None, "made", {"steps": []}), most)
        (check,) = rehearsal.run(["tune"])
        assert check.result.text == "made"
    assert given[0] == 420
    assert 1700 < given[1] < 1800


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--checks speed --seconds 60", "--seconds is for --checks tune alone"),
        ("--checks tune --seconds 2000", "should be less than or equal to 1800"),
        ("--checks tune,speed --no-cuda-graphs", "leave out --no-cuda-graphs"),
        ("--checks tune --prompts 3", "leave out --prompts, --folder"),
        ("--checks tune --folder /dev/shm", "leave out --prompts, --folder"),
    ],
)
def test_options_that_a_tuning_would_ignore_are_refused(tmp_path, options, message) -> None:
    result = CliRunner().invoke(app, ["gpu-check", "--device", "cpu", "--out", str(tmp_path / "out"), *options.split()])
    assert result.exit_code != 0
    assert message in re.sub(r"[\s│]+", " ", result.output + str(result.exception))
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_the_figures_are_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write_report(
        tmp_path, conditions(torch.device("cpu"), None), [Check("width-curve", 1.0, Result(None, "", {"mbu": {}}), {})]
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


def test_a_check_that_is_made_again_gives_the_others_neither_its_commit_nor_its_time(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_check, "in_process", lambda check, seconds: (Result(True, "", {}), ""))
    command = ["gpu-check", "--device", "cpu", "--out", str(tmp_path), "--checks"]
    for commit, begun, names in (("aaaa", "yesterday", "speed,kernels"), ("bbbb", "today", "kernels")):
        monkeypatch.setattr(gpu_report, "git_commit", lambda commit=commit: commit)
        monkeypatch.setattr(gpu_check.time, "strftime", lambda _, begun=begun: begun)
        assert CliRunner().invoke(app, [*command, names]).exit_code == 0
    facts, checks = read_report(tmp_path / "checks.json")
    found = {check.name: (check.conditions["commit"], check.conditions["started"]) for check in checks}
    assert found == {"speed": ("aaaa", "yesterday"), "kernels": ("bbbb", "today")}
    of_a_check = {"commit", "started", "driver", "hardware"}  # those of the last call would speak for all checks
    assert not set(facts) & of_a_check
    text = (tmp_path / "checks.md").read_text()
    assert re.search(r"\| speed .* aaaa .* yesterday \|", text)
    assert re.search(r"\| kernels .* bbbb .* today \|", text)


def test_a_file_of_an_earlier_version_gives_its_conditions_to_each_check(tmp_path) -> None:
    check = {"name": "speed", "seconds": 1.0, "result": {"passed": None, "text": "", "figures": {}}}
    facts = {"device": "NVIDIA H200", "shape": "8B", "torch": "2", "cuda": "13"}
    own = {"commit": f"{40 * 'a'}-dirty", "driver": "580", "started": "then"}
    own |= {"hardware": {"gpu_detail": {"clocks.sm": "345 MHz"}}}
    (tmp_path / "checks.json").write_text(json.dumps({"conditions": facts | own, "checks": [check]}))
    (found,) = read_report(tmp_path / "checks.json")[1]
    assert found.conditions == own
    write_report(tmp_path, facts, [found])
    assert read_report(tmp_path / "checks.json")[1] == [found]
    assert "| aaaaaaaaaaaa-dirty | 580 | not known | then |" in (tmp_path / "checks.md").read_text()


def test_speed_ups_stand_beside_those_of_the_papers_algorithm(tmp_path) -> None:
    """Also where an earlier version wrote the fused one alone."""
    checks = {check.name: check.result.text for check in read_report(H200)[1]}
    stored = {check["name"]: check["result"]["text"] for check in json.loads(H200.read_text())["checks"]}
    assert stored["speed"].startswith("refusion fused: 1307 tokens/s, 5.66 ms a forward; autoregressive: 207")
    first, second, third = checks["speed"].split("; ")
    assert first.startswith("refusion: 798 tokens/s, ")
    assert second == "refusion fused: 1307 tokens/s, 5.66 ms a forward, 0.417 J/token"
    assert third.startswith("autoregressive: 207 tokens/s, 4.84 ms a forward, ")
    assert checks["plain-loops"].startswith("refusion: 6.5 times the plain loop; refusion fused: 10.7 times; ")
    assert checks["batches"].endswith("; refusion fused 1447 tokens/s, 3.0 times as many in batches")
    assert checks["masked-diffusion"] == stored["masked-diffusion"]


def test_a_check_names_the_table_with_which_its_forwards_ran(tmp_path, monkeypatch) -> None:
    """A check before it may have made the table, and neither the embedded models nor eager forwards have one."""
    decided = iter([NO_CHOICES, Choices(device="NVIDIA H300")])
    monkeypatch.setattr(gpu_check, "in_process", lambda check, seconds: (Result(True, "", {}), ""))
    monkeypatch.setattr(gpu_check, "choices_for", lambda device, config, dtype: next(decided))
    facts = conditions(torch.device("cpu"), None)
    checks = list(GpuCheck("cpu", tmp_path, None, 2, print).run(["speed", "kernels", "float32-tokens"], facts))
    tables = ["", Choices(device="NVIDIA H300").name, ""]
    assert [check.conditions["choices"] for check in checks] == tables
    assert all(check.conditions["hardware"] == facts["hardware"] for check in checks)
    write_report(tmp_path, facts, checks)
    assert f"| {tables[1]} |" in (tmp_path / "checks.md").read_text()
    (eager,) = GpuCheck("cpu", tmp_path, None, 2, print, False).run(["speed"], facts)
    assert eager.conditions["choices"] == ""


NAMES = {
    "NVIDIA H200": "H200",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA GH200 480GB": None,
    "NVIDIA H100 PCIe": None,
    "NVIDIA H100 NVL": None,
    "NVIDIA A100-SXM4-40GB": None,
}


@pytest.mark.parametrize(("name", "card"), NAMES.items())
def test_a_card_is_known_by_its_whole_name(name, card, tmp_path, monkeypatch) -> None:
    """Cards whose names only contain that of another have another memory."""
    monkeypatch.setattr(gpu_report, "_draw_roofline", lambda *_: None)
    assert DRIVER_NAMES.get(name) == card
    assert card is None or card in CARDS
    figures = {"seconds": {"recorded": {1: 0.01}}, "mbu": {1: 0.9, 40: 0.9}, "copy_bytes_per_second": 3e12}
    facts = conditions(torch.device("cpu"), "8B") | {"device": name}
    (tmp_path / "gpu" / "here").mkdir(parents=True)
    write_report(tmp_path / "gpu" / "here", facts, [Check("width-curve", 1.0, Result(None, "", figures), {})])
    assert [other for other in CARDS if measured_curves(tmp_path, other, "8B")] == ([] if card is None else [card])


def test_the_bounds_of_a_card_judge_its_forwards_by_width_whenever_they_are_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu_report, "_draw_roofline", lambda *_: None)
    assert LEAST_MBU["H100"][1] > LEAST_MBU["H200"][1]  # the faster memory waits longer for small kernels
    for device, shape, mbu, passed in (
        ("NVIDIA H200", "8B", {1: 0.74, 40: 0.67}, True),
        ("NVIDIA H100 80GB HBM3", "8B", {1: 0.74, 40: 0.67}, False),
        ("NVIDIA H200", "8B", {1: 0.74, 40: 0.65}, False),
        ("NVIDIA H200", "0.6B", {1: 0.74, 40: 0.65}, None),  # whose forwards are mostly boundaries of kernels
        ("NVIDIA L40S", "8B", {1: 0.1, 40: 0.1}, None),
    ):
        assert reaches_bounds(device, shape, mbu) is passed
        figures = {"seconds": {"recorded": {}}, "mbu": mbu}
        facts = conditions(torch.device("cpu"), shape) | {"device": device}
        write_report(tmp_path, facts, [Check("width-curve", 1.0, Result(not passed, "", figures), {})])
        assert [check.result.passed for check in read_report(tmp_path / "checks.json")[1]] == [passed]


@pytest.mark.parametrize("graphs", [None, False])
def test_kernels_have_their_time_by_width_and_their_sum_beside_that_of_the_forward(
    rehearsal, tmp_path, monkeypatch, graphs
) -> None:
    monkeypatch.setattr(gpu_check, "PROFILED_WIDTHS", (1, 8))
    result = GpuCheck("cpu", tmp_path, None, 2, print, graphs).kernels()
    counts, microseconds = result.figures["counts"], result.figures["microseconds"]
    assert set(microseconds) == set(counts)
    if graphs is False:
        assert "widths" not in result.figures
        return
    for found in result.figures["widths"].values():
        total = sum(found["calls"][name] * found["microseconds"][name] for name in found["calls"])
        assert found["sum_ms"] == pytest.approx(total / 1e3)
        assert found["device_ms"] > 0
    assert "at width 8" in result.text


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
    check = Check("kernels", 1.0, Result(True, "9.0 kernels a layer", {"a_layer": 9.0}), {})
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
    assert {"cuda", "torch"} < set(report["conditions"])
    own = {"choices", "commit", "driver", "hardware", "started"}
    assert all(own == set(check["conditions"]) for check in report["checks"])
