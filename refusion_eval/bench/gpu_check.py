"""Proof of speed and tokens on a machine that has a GPU: a list of checks, each with a verdict and figures.

The trained part of every model is an embedded checkpoint, by itself or inflated, so that nothing has to be downloaded.
"""

import math
import operator
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from refusion_eval import api
from refusion_eval.bench import bench
from refusion_eval.bench.batches import decode_batch, requests_of, speeds_by_way
from refusion_eval.bench.checkpoints import SHAPES, Shape, config_of, inflate
from refusion_eval.bench.child import in_process
from refusion_eval.bench.gpu_report import (
    BATCH_SIZE,
    OWN_CONDITIONS,
    Check,
    Result,
    batches_text,
    plain_loops_text,
    reaches_bounds,
    speed_text,
)
from refusion_eval.bench.predict import CARDS, DRIVER_NAMES, expected
from refusion_eval.bench.profiling import kernels_by_width, microseconds_of, multiply, profile, replay_of
from refusion_eval.bench.tune_choices import LEAST_SAME
from refusion_eval.engine.engine import Engine
from refusion_eval.engine.recorded import Record, recorder
from refusion_eval.engine.width import time_forwards, time_replays
from refusion_eval.errors import ConfigError, RefusionEvalError
from refusion_eval.models.choices import choices_for
from refusion_eval.models.device import (
    cache_bytes_per_row,
    copy_bandwidth,
    read_bandwidth,
    seconds_of_calls,
    weight_bytes,
)
from refusion_eval.paths import embedded_decoders, embedded_path

REHEARSAL = Shape(256, 6, 4, 2, 512, 2300)
REFUSION_SETTINGS = {"gen_length": 128, "slot_size": 8, "block_size": 32}
# In a rehearsal, whose figures do not count. Many processors compute bfloat16 ten times slower than float32; the check
# of tokens in bfloat16 still does.
REHEARSED_LENGTH, REHEARSED_DTYPE = 32, "float32"  # tokens of a response at most
WIDTHS = (1, 8, 16, 32, 40, 64, 128, 256)
SHOWN_WIDTHS = (1, 40)
PROFILED_WIDTHS = (1, 8, 40)
# Targets as ratios of systems in one run.
LEAST_SPEED_UP = 5.0
LEAST_BATCH_GAIN = 12.0
NUM_TIMED = 5  # prompts where every one takes seconds, and where more show nothing new
PRODUCT_WIDTHS = (1, 2, 8, 16, 40, 64)
MAX_SECONDS = 1800.0  # of all checks together
PATIENCE = 3  # a check is stopped after so many times its estimate
TUNE = "tune"  # makes the table of kernels of a card (`refusion_eval.bench.tune`), if it is asked for
# The checks in their order, methods of `GpuCheck`, with the seconds that each is estimated to take at the shape 8B on
# an H100. The figures that a GPU is rented for come first; checks on one checkpoint follow each other.
CHECKS: Mapping[str, float] = {
    "width-curve": 95,
    "speed": 50,
    "kernels": 45,
    "products": 30,
    "plain-loops": 150,
    "batches": 180,
    "bfloat16-tokens": 80,
    "float32-tokens": 140,
    "masked-diffusion": 300,
}
TOKEN_CHECKS = ("bfloat16-tokens", "float32-tokens")  # on the embedded checkpoints as they are


class GpuCheck:
    """The checks on one device. The folder takes inflated checkpoints, of 16 GB at the shape 8B, one at a time."""

    def __init__(
        self,
        device: str,
        folder: Path,
        shape: str | None,
        num_prompts: int,
        progress: Callable[[str], None],
        cuda_graphs: bool | None = None,
        tuning: tuple[Callable[[float], Result], float] | None = None,  # of seconds, and those that it takes at most
    ) -> None:
        self._device = torch.device(device)
        self._folder, self._num_prompts, self._progress = folder, num_prompts, progress
        self._shape_name, self._shape = shape, REHEARSAL if shape is None else SHAPES[shape]
        self._on_gpu, self._cuda_graphs = self._device.type == "cuda", cuda_graphs
        self._tuning = tuning
        self._dtype = "bfloat16" if self._on_gpu else REHEARSED_DTYPE
        self._name = torch.cuda.get_device_name(self._device) if self._on_gpu else "cpu"

    def run(self, names: Sequence[str] = tuple(CHECKS), facts: Mapping[str, Any] | None = None) -> Iterator[Check]:
        """Runs the checks for which there is time, each in a process of its own and with a limit of its own.

        Each keeps those of the facts about this call (`gpu_report.conditions`) that may be others in the next one, and
        the name of the table of kernels at its start, which a check before it may have made.

        Raises:
            ConfigError: the table of this device cannot be read.
        """
        own = {name: value for name, value in (facts or {}).items() if name in OWN_CONDITIONS}
        begun = time.perf_counter()
        for number, name in enumerate(names, start=1):
            started, when = time.perf_counter(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
            own = own | {"started": when, "choices": self._table_of(name)}
            tune, most = self._tuning if name == TUNE and self._tuning else (None, 0.0)
            left, estimate = MAX_SECONDS - (started - begun), CHECKS.get(name, 0.0)
            if tune is not None:  # goes on in a later call
                estimate = min(most, left)
            about = f"about {estimate / 60:.1f} of {left / 60:.0f} minutes"
            self._progress(f"check {number} of {len(names)}: {name}, {about}")
            if estimate > left:
                yield Check(name, 0.0, Result(None, f"{about}: too little time was left", {}), own)
                continue
            limit = min(PATIENCE * estimate, left) if self._on_gpu else left
            if tune is not None:  # whose steps have a process each
                result, failure = _caught(partial(tune, estimate))
            else:
                result, failure = in_process(getattr(self, name.replace("-", "_")), limit)
            yield Check(name, time.perf_counter() - started, result or Result(False, failure, {}), own)

    def _table_of(self, check: str) -> str:
        # Tables are of recorded forwards. The embedded models, whose tokens are compared, have no table.
        if self._cuda_graphs is False or check in TOKEN_CHECKS:
            return ""
        return choices_for(self._device, config_of(self._shape), getattr(torch, self._dtype)).name

    def width_curve(self) -> Result:
        """Times forwards by width, launched one by one and recorded, and compares them with the measured bandwidth."""
        model = self._model(self._inflated("refusion"), self._dtype)
        bandwidth, read = copy_bandwidth(self._device), read_bandwidth(self._device)
        weights = weight_bytes(model.config, model.dtype)
        ways = {"eager": None} | ({} if self._cuda_graphs is False else {"recorded": recorder(self._device)})
        curves: dict[str, dict[int, float]] = {}
        alone: dict[int, float] = {}
        failure = ""
        for way, record in ways.items():
            try:
                curves[way], alone = self._curve(model, record)
            except ConfigError as error:  # of forwards that cannot be recorded; those launched one by one are known
                failure = f"{error}; "
        best = curves.get("recorded", curves["eager"])
        mbu = {width: weights / seconds / bandwidth for width, seconds in best.items()}
        text = failure + ", ".join(f"{mbu[width]:.0%} at width {width}" for width in SHOWN_WIDTHS)
        text += f" of the copy bandwidth of {bandwidth / 1e12:.2f} TB/s (reading alone {read / 1e12:.2f}); "
        if alone:
            of_host = ", ".join(f"{1e3 * (best[width] - alone[width]):.2f}" for width in SHOWN_WIDTHS)
            text += f"{of_host} ms of them are the host's; "
        text += f"{1 / best[1]:.1f} of at most {bandwidth / weights:.1f} forwards/s"
        if (card := CARDS.get(DRIVER_NAMES.get(self._name, ""))) is not None:
            text += f" ({1 / sum(expected(card, model.config, 1, 300).values()):.0f} expected without the host); "
            text += f"{weights / best[1] / card.memory:.0%} of the data sheet's bandwidth at width 1"
        figures = {
            "seconds": curves,
            "device_seconds": alone,
            "mbu": mbu,
            "copy_bytes_per_second": bandwidth,
            "read_bytes_per_second": read,
            "weight_bytes": weights,
            "cache_bytes_per_row": cache_bytes_per_row(model.config, model.dtype),
            "flops_per_row": 2 * weights / model.dtype.itemsize,
        }
        passed = reaches_bounds(self._name, self._shape_name, mbu) if "recorded" in curves else None
        return Result(False if failure else passed, text, figures)

    def products(self) -> Result:
        """Times the matrix products of all layers and of the head by rows, recorded, as bytes of weights per second."""
        weights = self._model(self._inflated("refusion"), self._dtype).transformer.weights
        matrices = {
            name: [getattr(layer, name) for layer in weights.layers] for name in ("qkv", "out", "gate_up", "down")
        }
        figures: dict[str, dict[int, float]] = {}
        for name, of_layers in (matrices | {"head": [weights.head]}).items():
            figures[name] = {}
            for width in PRODUCT_WIDTHS:
                rows = of_layers[0].new_ones(width, of_layers[0].shape[1])
                target = rows.new_empty(width, of_layers[0].shape[0])
                with torch.inference_mode():
                    replay = replay_of(of_layers, partial(multiply, rows, target))
                    seconds = statistics.median(seconds_of_calls(replay, self._device, 16, 5))
                figures[name][width] = sum(weight.nbytes for weight in of_layers) / seconds
        text = "; ".join(
            f"{name} {', '.join(f'{speeds[width] / 1e12:.2f}' for width in SHOWN_WIDTHS)}"
            for name, speeds in figures.items()
        )
        return Result(None, f"TB/s of weights at widths {', '.join(map(str, SHOWN_WIDTHS))}: {text}", figures)

    def kernels(self) -> Result:
        """Profiles decodings and recorded forwards, counts and times their kernels by name, and refuses cuDNN's."""
        model = self._model(self._inflated("refusion"), self._dtype)
        # Five prompts show every kernel; profiles of more take minutes to sum up.
        prompts = bench.mini_prompts(model, NUM_TIMED if self._on_gpu else 1)
        measured = profile(model.engine, requests_of("refusion", self._settings(model, "refusion"), prompts))
        counts, num_forwards = measured.counts, measured.num_forwards
        forbidden = [name for name in counts if "cudnn" in name.lower()]
        a_layer = sum(counts.values()) / num_forwards / model.config.num_layers
        text = f"{a_layer:.1f} kernels a layer over {num_forwards} forwards; of cuDNN {len(forbidden)} kernels"
        figures = {"forwards": num_forwards, "a_layer": a_layer, "cudnn": forbidden, "counts": counts}
        figures |= {"microseconds": microseconds_of(measured.seconds, counts)}
        if self._cuda_graphs is not False:
            engine = model.engine  # which records nothing in a rehearsal
            if engine.recorded is None:
                engine = Engine(engine.model, model.attention, record=recorder(self._device))
            assert engine.recorded is not None
            rounds = 7 if self._on_gpu else 1
            widths = kernels_by_width(engine.model, engine.recorded, PROFILED_WIDTHS, 300, rounds)
            figures["widths"] = widths
            text += "; " + ", ".join(
                f"at width {width} {found['sum_ms']:.2f} ms of kernels in {found['device_ms']:.2f} ms"
                for width, found in widths.items()
            )
        return Result(not forbidden if self._on_gpu else None, text, figures)

    def speed(self) -> Result:
        """Measures ReFusion and the autoregressive decoder, recorded and launched one by one."""
        figures = self._speeds(with_plain_loops=False, num_rounds=2)
        return Result(None, speed_text(figures), figures)

    def plain_loops(self) -> Result:
        """Measures both decoders in turns with the plain loops on transformers' own model."""
        figures = self._speeds(with_plain_loops=True, num_rounds=1)
        speed_up = figures["ratios"]["refusion fused / plain baseline"]
        return Result(speed_up >= LEAST_SPEED_UP if self._on_gpu else None, plain_loops_text(figures), figures)

    def _speeds(self, with_plain_loops: bool, num_rounds: int) -> dict[str, Any]:
        model = self._model(self._inflated("refusion"), self._dtype)
        settings = REFUSION_SETTINGS | {"gen_length": self._length(128)}
        systems = bench.systems_of(model, settings, with_baseline=with_plain_loops)
        prompts = bench.mini_prompts(model, min(self._num_prompts, NUM_TIMED))
        speeds = bench.compare(systems, prompts, num_rounds, self._progress)
        standings = {name: asdict(speed) for name, speed in speeds.items()}
        return {"ratios": bench.ratios_of(speeds), "standings": standings}

    def batches(self) -> Result:
        """Measures ReFusion and the autoregressive decoder in batches of 32, overlap too, beside single requests."""
        # Four times as many prompts as places, so that these are taken most of the time.
        num_prompts = 4 * BATCH_SIZE if self._on_gpu else self._num_prompts
        result = self._batches({"autoregressive": "refusion", "refusion": "refusion"}, 128, num_prompts)
        passed = result.figures["autoregressive"]["gain"] >= LEAST_BATCH_GAIN
        return result._replace(passed=passed if self._on_gpu else None)

    def masked_diffusion(self) -> Result:
        """Measures LLaDA and BD3-LM in batches of 32 beside single requests."""
        num_prompts = self._num_prompts * (4 if self._on_gpu else 1)
        return self._batches({"llada": "llada", "bd3lm": "bd3lm"}, 64, num_prompts)

    def _batches(self, checkpoints: Mapping[str, str], gen_length: int, num_prompts: int) -> Result:
        figures: dict[str, dict[str, Any]] = {}
        for decoder, checkpoint in checkpoints.items():
            model = self._model(self._inflated(checkpoint), self._dtype)
            settings = self._settings(model, decoder, gen_length=gen_length)
            requests = requests_of(decoder, settings, bench.mini_prompts(model, num_prompts))
            speeds = speeds_by_way(model, requests, BATCH_SIZE)
            gain = speeds[f"batch {BATCH_SIZE}"].tokens_per_second / speeds["batch 1"].tokens_per_second
            figures[decoder] = {"gain": gain} | {way: speed._asdict() for way, speed in speeds.items()}
        return Result(None, batches_text(figures), figures)

    def bfloat16_tokens(self) -> Result:
        """Compares recorded forwards and batches with single forwards that are launched one by one."""
        model = self._model(embedded_path("refusion"), "bfloat16")
        prompts = bench.mini_prompts(model, self._num_prompts)
        ways = (None, None if self._cuda_graphs is False else recorder(self._device))
        engines = [Engine(model.engine.model, model.attention, record=record) for record in ways]
        figures: dict[str, float] = {}
        for decoder in ("refusion", "autoregressive"):
            requests = requests_of(decoder, self._settings(model, decoder, gen_length=64), prompts)
            eager, recorded = ([engine.run(*request).tokens for request in requests] for engine in engines)
            batched = decode_batch(model.engine, requests, 16)
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
                settings = self._settings(here, decoder, gen_length=32)
                requests = requests_of(decoder, settings, bench.mini_prompts(here, num_prompts))
                tokens = ([model.engine.run(*request).tokens for request in requests] for model in (here, there))
                pairs = zip(*tokens, strict=True)
                different += [f"{name}, {decoder}, prompt {n}" for n, (a, b) in enumerate(pairs) if a != b]
                compared += num_prompts
        text = f"{compared - len(different)} of {compared} decodings have the tokens of the CPU"
        return Result(not different, text, {"compared": compared, "different": different})

    def _curve(self, model: api.LoadedModel, record: Record | None) -> tuple[dict[int, float], dict[int, float]]:
        """Median seconds of forwards by width after 300 rows, and of those that are recorded on the device alone.

        Raises:
            ConfigError: they cannot be recorded.
        """
        engine = Engine(model.engine.model, model.attention, record=record)
        rounds = 30 if self._on_gpu else 2
        timed = time_forwards(engine.model, model.attention, WIDTHS, 300, rounds, math.inf, engine.recorded)
        alone = {} if engine.recorded is None else time_replays(engine.model, engine.recorded, WIDTHS, 300)
        return {width: statistics.median(seconds) for width, seconds in timed.items()}, alone

    def _model(self, path: Path, dtype: str, device: str | None = None) -> api.LoadedModel:
        if self._on_gpu:
            torch.cuda.set_device(self._device.index or 0)  # graphs are recorded on the current device
        # One attention everywhere, so that tokens of CPU and GPU differ by the device alone.
        options = {"attention": "sdpa", "tune": True, "cuda_graphs": self._cuda_graphs}
        return api.load_model(str(path), dtype=dtype, device=device or str(self._device), **options)

    def _settings(self, model: api.LoadedModel, decoder: str, **settings: Any) -> Any:
        given = {"gen_length": 128} | (REFUSION_SETTINGS | {"fuse": True} if decoder == "refusion" else {}) | settings
        return bench.resolved(model, decoder, given | {"gen_length": self._length(given["gen_length"])})

    def _length(self, wanted: int) -> int:
        return wanted if self._on_gpu else min(wanted, REHEARSED_LENGTH)

    def _inflated(self, decoder: str) -> Path:
        """The embedded checkpoint of a decoder in the shape of this check, written in place of the one before."""
        path = self._folder / f"inflated-{decoder}"
        if not path.exists():
            for other in self._folder.iterdir():  # three of them would not fit on the disks of many machines
                shutil.rmtree(other)
            config = config_of(self._shape)
            needed = weight_bytes(config, torch.bfloat16) + 2 * config.vocab_size * config.hidden_size
            if (free := shutil.disk_usage(self._folder).free) < needed:
                have = f"{needed / 1e9:.1f} GB, and {self._folder} has {free / 1e9:.1f} GB left"
                raise ConfigError(f"the checkpoint of a check takes {have}; name another place with --folder")
            self._progress(f"the embedded {decoder} checkpoint in the shape of the timed models")
            unfinished = path.with_suffix(".unfinished")  # a check that is stopped leaves no part of a checkpoint
            inflate(embedded_path(decoder), unfinished, self._shape, torch.bfloat16)
            unfinished.rename(path)
        return path


def _caught(tune: Callable[[], Result]) -> tuple[Result | None, str]:
    try:
        return tune(), ""
    except (RefusionEvalError, OSError) as error:  # as of a file that is damaged; the other checks go on
        return None, f"{type(error).__name__}: {error}"
