"""Proof of speed and tokens on a machine that has a GPU: a list of checks, each with a verdict and figures.

The trained part of every model is an embedded checkpoint, by itself or inflated, so that nothing has to be downloaded.
"""

import json
import math
import operator
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from refusion_eval import api
from refusion_eval.bench import bench
from refusion_eval.bench.checkpoints import SHAPES, Shape, inflate
from refusion_eval.decoders import DECODERS
from refusion_eval.engine.engine import Engine
from refusion_eval.engine.recorded import recorder
from refusion_eval.engine.width import time_forwards
from refusion_eval.models.device import cache_bytes_per_row, copy_bandwidth, weight_bytes
from refusion_eval.paths import embedded_decoders, embedded_path
from refusion_eval.store.atomic_write import write_atomically

REHEARSAL = Shape(256, 6, 4, 2, 512, 2300)
REFUSION_SETTINGS = {"gen_length": 128, "slot_size": 8, "block_size": 32}
WIDTHS = (1, 8, 16, 32, 40, 64, 128, 256)
# Targets at an H100, as shares of the measured copy bandwidth, and as ratios of systems in one run.
LEAST_MBU = {1: 0.75, 40: 0.70}
LEAST_SPEED_UP = 5.0
LEAST_BATCH_GAIN = 12.0
LEAST_SAME = 0.9  # share of the prompts whose tokens must agree in bfloat16, where rounding may tell two paths apart
MAX_SECONDS = 1800.0  # of all checks together
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


class GpuCheck:
    """The checks on one device. The folder takes inflated checkpoints, of 16 GB at the shape 8B, one at a time."""

    def __init__(
        self, device: str, folder: Path, shape: str | None, num_prompts: int, progress: Callable[[str], None]
    ) -> None:
        self._device = torch.device(device)
        self._folder, self._num_prompts, self._progress = folder, num_prompts, progress
        self._shape = REHEARSAL if shape is None else SHAPES[shape]
        self._on_gpu = self._device.type == "cuda"

    @property
    def checks(self) -> Mapping[str, tuple[Callable[[], Result], float]]:
        """The checks in their order, and the seconds that each is estimated to take at the shape 8B on an H100."""
        # The figures that a GPU is rented for come first; checks on one checkpoint follow each other.
        return {
            "width curve and bandwidth": (self.width_curve, 60),
            "kernels of a decoding": (self.kernels, 60),
            "speed of the systems": (self.speed, 600),
            "bfloat16 tokens, recorded and in batches": (self.bfloat16_tokens, 60),
            "float32 tokens of all decoders": (self.float32_tokens, 120),
            "speed of masked diffusion": (self.masked_diffusion, 280),
        }

    def run(self) -> Iterator[Check]:
        """Runs the checks for which there is time; an error ends only the check that raised it."""
        begun = time.perf_counter()
        for number, (name, (check, estimate)) in enumerate(self.checks.items(), start=1):
            started = time.perf_counter()
            left = MAX_SECONDS - (started - begun)
            about = f"about {estimate / 60:.1f} of {left / 60:.0f} minutes"
            self._progress(f"check {number} of {len(self.checks)}: {name}, {about}")
            if estimate > left:
                yield Check(name, 0.0, Result(None, f"{about}: too little time was left", {}))
                continue
            try:
                result = check()
            except Exception as error:  # noqa: BLE001 - one check that fails must not take the others' figures along
                result = Result(False, f"{type(error).__name__}: {error}", {})
            yield Check(name, time.perf_counter() - started, result)
            if self._on_gpu:
                torch.cuda.empty_cache()

    def width_curve(self) -> Result:
        """Times forwards by width, launched one by one and recorded, and compares them with the measured bandwidth."""
        model = self._model(self._inflated("refusion"), "bfloat16")
        bandwidth, weights = copy_bandwidth(self._device), weight_bytes(model.config, model.dtype)
        curves: dict[str, dict[int, float]] = {}
        for way, record in (("eager", None), ("recorded", recorder(self._device))):
            engine = Engine(model.engine.model, model.attention, record=record)
            rounds = 30 if self._on_gpu else 2
            timed = time_forwards(engine.model, model.attention, WIDTHS, 300, rounds, math.inf, engine.recorded)
            curves[way] = {width: statistics.median(seconds) for width, seconds in timed.items()}
        mbu = {width: weights / seconds / bandwidth for width, seconds in curves["recorded"].items()}
        text = ", ".join(f"{mbu[width]:.0%} at width {width}" for width in LEAST_MBU)
        text += f" of the copy bandwidth of {bandwidth / 1e12:.2f} TB/s; "
        text += f"{1 / curves['recorded'][1]:.1f} of at most {bandwidth / weights:.1f} forwards/s"
        figures = {
            "seconds": curves,
            "mbu": mbu,
            "copy_bytes_per_second": bandwidth,
            "weight_bytes": weights,
            "cache_bytes_per_row": cache_bytes_per_row(model.config, model.dtype),
            "flops_per_row": 2 * weights / model.dtype.itemsize,
        }
        passed = all(mbu[width] >= least for width, least in LEAST_MBU.items())
        return Result(passed if self._on_gpu else None, text, figures)

    def kernels(self) -> Result:
        """Profiles decodings, counts their kernels by name, and refuses those of cuDNN."""
        model = self._model(self._inflated("refusion"), "bfloat16")
        # Five prompts show every kernel; profiles of more take minutes to sum up.
        measured = bench.profile(model.engine, self._settings(model, "refusion"), bench.mini_prompts(model, 5))
        counts, num_forwards = measured.counts, measured.num_forwards
        forbidden = [name for name in counts if "cudnn" in name.lower()]
        a_layer = sum(counts.values()) / num_forwards / model.config.num_layers
        text = f"{a_layer:.1f} kernels a layer over {num_forwards} forwards; of cuDNN {len(forbidden)} kernels"
        figures = {"forwards": num_forwards, "a_layer": a_layer, "cudnn": forbidden, "counts": counts}
        return Result(not forbidden if self._on_gpu else None, text, figures)

    def speed(self) -> Result:
        """Measures ReFusion and the autoregressive decoder beside the plain loops on transformers' own model."""
        path = self._inflated("refusion")
        prompts = bench.mini_prompts(self._model(path, "bfloat16"), self._num_prompts)
        measured = partial(bench.measure, batch_sizes=(1, 32), progress=self._progress)
        report = measured(path, prompts, REFUSION_SETTINGS, dtype="bfloat16", device=str(self._device))
        speed_up = report.ratios["refusion fused / plain baseline"]
        gain = report.ratios["autoregressive: batch 32 / batch 1"]
        fused = report.speeds["refusion fused"]
        text = (
            f"refusion fused: {fused.median:.0f} tokens/s, {speed_up:.1f} times the plain loop; batch 32 {gain:.1f} "
            "times batch 1" + ("" if fused.joules_per_token is None else f"; {fused.joules_per_token:.3g} J/token")
        )
        passed = speed_up >= LEAST_SPEED_UP and gain >= LEAST_BATCH_GAIN
        return Result(passed if self._on_gpu else None, text, report.to_json())

    def bfloat16_tokens(self) -> Result:
        """Compares recorded forwards and batches with single forwards that are launched one by one."""
        model = self._model(embedded_path("refusion"), "bfloat16")
        prompts = bench.mini_prompts(model, self._num_prompts)
        figures: dict[str, float] = {}
        for decoder in ("refusion", "autoregressive"):
            settings = self._settings(model, decoder, gen_length=64)
            eager, recorded = (
                _tokens(Engine(model.engine.model, model.attention, record=record), decoder, settings, prompts)
                for record in (None, recorder(self._device))
            )
            batched = bench.decode_batch(model, decoder, settings, prompts, 16)
            for way, tokens in (("recorded", recorded), ("batch 16", batched)):
                figures[f"{decoder}, {way}"] = sum(map(operator.eq, eager, tokens)) / len(prompts)
        worst = min(figures, key=figures.__getitem__)
        num_same = round(figures[worst] * len(prompts))
        text = f"bfloat16: at least {num_same} of {len(prompts)} prompts keep their tokens ({worst})"
        return Result(figures[worst] >= LEAST_SAME, text, figures)

    def float32_tokens(self) -> Result:
        """Compares the tokens of every decoder on every embedded checkpoint with those of the CPU."""
        different, compared, num_prompts = [], 0, min(self._num_prompts, 6)
        for name in embedded_decoders():
            here, there = (self._model(embedded_path(name), "float32", device) for device in ("cpu", str(self._device)))
            for decoder in here.decoders:
                settings, prompts = self._settings(here, decoder, gen_length=32), bench.mini_prompts(here, num_prompts)
                pairs = zip(
                    *(_tokens(model.engine, decoder, settings, prompts) for model in (here, there)), strict=True
                )
                different += [f"{name}, {decoder}, prompt {n}" for n, (a, b) in enumerate(pairs) if a != b]
                compared += num_prompts
        text = f"{compared - len(different)} of {compared} decodings have the tokens of the CPU"
        return Result(not different, text, {"compared": compared, "different": different})

    def masked_diffusion(self) -> Result:
        """Measures LLaDA and BD3-LM at batch 1 and 32."""
        figures: dict[str, dict[str, float]] = {}
        for decoder in ("llada", "bd3lm"):
            model = self._model(self._inflated(decoder), "bfloat16")
            settings = self._settings(model, decoder, gen_length=64)
            prompts = bench.mini_prompts(model, self._num_prompts)
            alone = bench.compare({"": bench.system_of(model.engine, decoder, settings)}, prompts, num_rounds=1)[""]
            batched = bench.batch_speeds(model, decoder, settings, prompts, (32,))[32]
            figures[decoder] = {
                "tokens_per_second": alone.median,
                "tokens_per_forward": alone.num_tokens / alone.num_forwards,
                "forwards_per_second": alone.median * alone.num_forwards / alone.num_tokens,
                "batch 32, tokens_per_second": batched.tokens_per_second,
            }
        text = "; ".join(f"{name} {speeds['tokens_per_second']:.0f} tokens/s" for name, speeds in figures.items())
        return Result(None, text, figures)

    def _model(self, path: Path, dtype: str, device: str | None = None) -> api.LoadedModel:
        return api.load_model(str(path), dtype=dtype, device=device or str(self._device), tune=True)

    def _settings(self, model: api.LoadedModel, decoder: str, **settings: Any) -> Any:
        defaults = REFUSION_SETTINGS | {"fuse": True} if decoder == "refusion" else {"gen_length": 128}
        return bench.resolved(model, decoder, defaults | settings)

    def _inflated(self, decoder: str) -> Path:
        """The embedded checkpoint of a decoder in the shape of this check, written in place of the one before."""
        path = self._folder / f"inflated-{decoder}"
        if not path.exists():
            for other in self._folder.glob("inflated-*"):  # three of them would not fit on the disks of many machines
                shutil.rmtree(other)
            self._progress(f"the embedded {decoder} checkpoint in the shape of the timed models")
            inflate(embedded_path(decoder), path, self._shape, torch.bfloat16)
        return path


def _tokens(engine: Engine, decoder: str, settings: Any, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return [engine.run(DECODERS[decoder].decode, prompt, settings).tokens for prompt in prompts]


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
