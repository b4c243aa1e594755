"""What the checks of a GPU found: their results on the disk, as a table, and as a picture."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from refusion_eval.bench.bench import Speed
from refusion_eval.bench.predict import DRIVER_NAMES, Measured
from refusion_eval.errors import ConfigError
from refusion_eval.runs.hardware import collect_hardware
from refusion_eval.store.atomic_write import write_atomically
from refusion_eval.store.manifest import git_commit

RESULTS = "checks.json"
BATCH_SIZE = 32  # requests at a time of the checks that measure batches
# What a check keeps of the call that made it; the rest of `conditions` is the same for all checks of a folder.
OWN_CONDITIONS = ("commit", "driver", "hardware", "started")
# The least shares of the measured copy bandwidth that recorded forwards of the shape reach, by card and width.
BOUNDED_SHAPE = "8B"
LEAST_MBU = {"H100": {1: 0.80, 40: 0.74}, "H200": {1: 0.73, 40: 0.66}}


class Result(NamedTuple):
    """The outcome of a check; the text of one that raised an error is the error."""

    passed: bool | None  # None without a bound, in a rehearsal of a bound for GPUs, or where nothing was checked
    text: str
    figures: Mapping[str, Any]

    @property
    def verdict(self) -> str:
        return {True: "passed", False: "FAILED", None: "measured" if self.figures else "left out"}[self.passed]


class Check(NamedTuple):
    name: str
    seconds: float
    result: Result
    conditions: Mapping[str, Any]  # `OWN_CONDITIONS`, and `choices`, the name of the table of kernels, "" for none


def conditions(device: torch.device, shape: str | None) -> dict[str, Any]:
    hardware = asdict(collect_hardware(torch.get_num_threads(), device if device.type == "cuda" else None))
    return {
        "device": hardware["gpu"] or "cpu",
        "shape": shape or "small, a rehearsal on the CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": hardware["gpu_driver"],
        "commit": git_commit(),
        "hardware": hardware,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def speed_text(figures: Mapping[str, Any]) -> str:
    """What the check `speed` found: ReFusion by the paper's algorithm, with fused forwards, and the baseline."""
    texts = []
    for name in ("refusion", "refusion fused", "autoregressive"):
        speed = Speed(**figures["standings"][name])
        joules = "" if speed.joules_per_token is None else f", {speed.joules_per_token:.3g} J/token"
        texts.append(f"{name}: {speed.median:.0f} tokens/s, {1e3 * speed.seconds_a_forward:.2f} ms a forward{joules}")
    return "; ".join(texts)


def plain_loops_text(figures: Mapping[str, Any]) -> str:
    """What the check `plain-loops` found, as `speed_text`."""
    of_plain, fused, to_generate = (
        figures["ratios"][name]
        for name in (
            "refusion unfused / plain baseline",
            "refusion fused / plain baseline",
            "our autoregressive / model.generate",
        )
    )
    return (
        f"refusion: {of_plain:.1f} times the plain loop; refusion fused: {fused:.1f} times; autoregressive: "
        f"{to_generate:.1f} times generate"
    )


def batches_text(figures: Mapping[str, Any]) -> str:
    """What the checks `batches` and `masked-diffusion` found, as `speed_text`; ReFusion's forwards are fused there."""
    texts = []
    for decoder, found in figures.items():
        name = "refusion fused" if decoder == "refusion" else decoder
        single, batch = found["batch 1"], found[f"batch {BATCH_SIZE}"]
        steps = ""
        if "steps" in batch:  # an earlier version did not count them
            steps = (
                f" ({batch['requests_a_step']:.1f} requests and {batch['rows_a_step']:.0f} rows in each of "
                f"{batch['steps']} calls, {batch['host_share']:.0%} of the time on the host)"
            )
        rate = single["tokens_per_second"]
        texts.append(f"{name} {rate:.0f} tokens/s, {found['gain']:.1f} times as many in batches{steps}")
        ways = {way.partition(", ")[2]: speed["tokens_per_second"] for way, speed in found.items() if ", " in way}
        texts += [f"{name}, {way}: {speed:.0f} tokens/s" for way, speed in ways.items()]
    return "; ".join(texts)


# Checks whose texts are made from their figures, also when an earlier version wrote these.
_TEXTS = {
    "speed": speed_text,
    "plain-loops": plain_loops_text,
    "batches": batches_text,
    "masked-diffusion": batches_text,
}


def read_report(path: Path) -> tuple[dict[str, Any], list[Check]]:
    """The conditions of a folder of results and its checks; bounds of cards and texts are those of today."""
    report = json.loads(path.read_text(encoding="utf-8"))
    facts, checks = report["conditions"], []
    for check in report["checks"]:
        result = Result(**check["result"])
        if "recorded" in result.figures.get("seconds", {}) and (mbu := result.figures.get("mbu")):
            result = result._replace(passed=reaches_bounds(facts["device"], facts["shape"], mbu))
        if result.figures and (text := _TEXTS.get(check["name"])):
            result = result._replace(text=text(result.figures))
        # Files of earlier versions have some conditions of their last call only, and name no table.
        own = {name: facts.get(name) for name in OWN_CONDITIONS} | check.get("conditions", {})
        checks.append(Check(check["name"], check["seconds"], result, own))
    return facts, checks


def reaches_bounds(device: str, shape: str | None, mbu: Mapping[Any, float]) -> bool | None:
    """Whether shares of a copy, by width, are at least those of `LEAST_MBU`; None for a device or shape without any."""
    bounds = LEAST_MBU.get(DRIVER_NAMES.get(device, "")) if shape == BOUNDED_SHAPE else None
    reached = {int(width): share for width, share in mbu.items()}
    return None if bounds is None else all(reached[width] >= least for width, least in bounds.items())


def earlier_checks(out: Path, facts: Mapping[str, Any]) -> list[Check]:
    """The checks that an earlier call wrote to this folder on the same device; ConfigError if it was another one."""
    if not (out / RESULTS).exists():
        return []
    before, checks = read_report(out / RESULTS)
    for name in ("device", "shape", "torch"):
        if before[name] != facts[name]:
            raise ConfigError(f"{out / RESULTS} is of {name} {before[name]}, not {facts[name]}; name another --out")
    return checks


def write_report(out: Path, facts: Mapping[str, Any], checks: Sequence[Check]) -> None:
    """Writes what is known so far: `checks.json`, `checks.md`, and `roofline.png` once forwards were timed by width."""
    results = [check._asdict() | {"result": check.result._asdict()} for check in checks]
    of_all = {name: value for name, value in facts.items() if name not in OWN_CONDITIONS}
    write_atomically(out / RESULTS, json.dumps({"conditions": of_all, "checks": results}, indent=1) + "\n")
    lines = [
        f"# GPU check: {facts['device']}, {facts['shape']}",
        "",
        f"torch {facts['torch']}, CUDA {facts['cuda']}.",
        "",
        "| check | verdict | what was found | seconds | commit | driver | table of kernels | began |",
        "|---|---|---|--:|---|---|---|---|",
        *(
            f"| {name} | {result.verdict} | {result.text} | {seconds:.0f} | {_short(str(own.get('commit')))} | "
            f"{own.get('driver')} | {own.get('choices', 'not known') or 'none'} | {own.get('started')} |"
            for name, seconds, result, own in checks
        ),
    ]
    write_atomically(out / "checks.md", "\n".join(lines) + "\n")
    for check in checks:
        if "mbu" in check.result.figures:
            with suppress(ImportError):  # without matplotlib, the figures are in the other files
                _draw_roofline(out / "roofline.png", facts["device"], check.result.figures)


def _short(commit: str) -> str:
    """The first digits of a commit, and the mark of a changed working tree."""
    digits, dash, mark = commit.partition("-")
    return f"{digits[:12]}{dash}{mark}"


def results_rows(folder: Path) -> list[list[str]]:
    """Folder, GPU, check, verdict and text of every check in a subfolder; rehearsals on a CPU are left out."""
    reports = {path.parent.name: read_report(path) for path in sorted(folder.glob(f"*/{RESULTS}"))}
    return [
        [where, facts["device"], check.name, check.result.verdict, check.result.text]
        for where, (facts, checks) in reports.items()
        for check in (checks if facts["device"] != "cpu" else ())
    ]


def measured_curves(results: Path, card: str, shape: str) -> dict[str, Measured]:
    """Seconds of recorded forwards that `gpu-check` measured on such a card, by the folder of results that has them."""
    found = {}
    for path in sorted([*results.glob(f"gpu/*/{RESULTS}"), *results.glob(f"local/gpu/{RESULTS}")]):
        facts, checks = read_report(path)
        for check in checks if DRIVER_NAMES.get(facts["device"]) == card and facts["shape"] == shape else ():
            if curve := check.result.figures.get("seconds", {}).get("recorded"):
                seconds = {int(width): time for width, time in curve.items()}
                found[f"measured, {path.parent}"] = Measured(seconds, check.result.figures["copy_bytes_per_second"])
    return found


def _draw_roofline(path: Path, device: str, figures: Mapping[str, Any]) -> None:
    """Draws forwards by width as points under the measured memory bandwidth."""
    from matplotlib.figure import Figure

    weights, bandwidth, flops = figures["weight_bytes"], figures["copy_bytes_per_second"], figures["flops_per_row"]
    drawing = Figure(figsize=(5, 3.4), layout="constrained")
    axes = drawing.subplots()
    for (way, curve), marker in zip(figures["seconds"].items(), "os", strict=False):
        achieved = [flops * int(width) / seconds / 1e12 for width, seconds in curve.items()]
        axes.plot(list(map(int, curve)), achieved, marker, label=f"{way} forwards")
    widths = [min(map(int, figures["mbu"])), max(map(int, figures["mbu"]))]
    bound = [flops * width / (weights / bandwidth) / 1e12 for width in widths]
    axes.plot(widths, bound, color="black", linewidth=1, label=f"copy bandwidth, {bandwidth / 1e12:.2f} TB/s")
    axes.set(xscale="log", yscale="log", xlabel="rows of a forward", ylabel="TFLOP/s", title=device)
    axes.legend(frameon=False)
    drawing.savefig(path, dpi=200)
