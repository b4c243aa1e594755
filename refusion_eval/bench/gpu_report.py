"""Results of the checks of a GPU, as files and as the table of README.md."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from refusion_eval.store.atomic_write import write_atomically

RESULTS = "checks.json"


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


def conditions(device: torch.device, shape: str | None) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    return {
        "device": properties.name if properties else "cpu",
        "memory_bytes": properties.total_memory if properties else 0,
        "shape": shape or "small, a rehearsal on the CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def write_report(out: Path, facts: Mapping[str, Any], checks: Sequence[Check]) -> None:
    """Writes what is known so far: `checks.json`, `checks.md`, and `roofline.png` once forwards were timed by width."""
    results = [check._asdict() | {"result": check.result._asdict()} for check in checks]
    write_atomically(out / RESULTS, json.dumps({"conditions": dict(facts), "checks": results}, indent=1) + "\n")
    lines = [
        f"# GPU check: {facts['device']}, {facts['shape']}",
        "",
        f"torch {facts['torch']}, CUDA {facts['cuda']}, cuDNN {facts['cudnn']}, {facts['started']}.",
        "",
        "| check | verdict | what was found | seconds |",
        "|---|---|---|--:|",
        *(f"| {name} | {result.verdict} | {result.text} | {seconds:.0f} |" for name, seconds, result in checks),
    ]
    write_atomically(out / "checks.md", "\n".join(lines) + "\n")
    for check in checks:
        if "mbu" in check.result.figures:
            _draw_roofline(out / "roofline.png", facts["device"], check.result.figures)


def results_rows(folder: Path) -> list[list[str]]:
    """Folder, GPU, check, verdict and text of every check in a subfolder; rehearsals on a CPU are left out."""
    rows = []
    for path in sorted(folder.glob(f"*/{RESULTS}")):
        report = json.loads(path.read_text(encoding="utf-8"))
        device = report["conditions"]["device"]
        for check in report["checks"] if device != "cpu" else ():
            result = Result(**check["result"])
            rows.append([path.parent.name, device, check["name"], result.verdict, result.text])
    return rows


def _draw_roofline(path: Path, device: str, figures: Mapping[str, Any]) -> None:
    """Draws forwards by width as points under the measured memory bandwidth."""
    from matplotlib.figure import Figure

    weights, bandwidth, flops = figures["weight_bytes"], figures["copy_bytes_per_second"], figures["flops_per_row"]
    drawing = Figure(figsize=(5, 3.4), layout="constrained")
    axes = drawing.subplots()
    for way, marker in (("eager", "o"), ("recorded", "s")):
        curve = figures["seconds"][way]
        achieved = [flops * width / seconds / 1e12 for width, seconds in curve.items()]
        axes.plot(list(curve), achieved, marker, label=f"{way} forwards")
    widths = [min(figures["mbu"]), max(figures["mbu"])]
    bound = [flops * width / (weights / bandwidth) / 1e12 for width in widths]
    axes.plot(widths, bound, color="black", linewidth=1, label=f"copy bandwidth, {bandwidth / 1e12:.2f} TB/s")
    axes.set(xscale="log", yscale="log", xlabel="rows of a forward", ylabel="TFLOP/s", title=device)
    axes.legend(frameon=False)
    drawing.savefig(path, dpi=200)
