"""Proof of the GPU path on a machine that has a GPU: a list of checks, each with a verdict and figures.

The trained part of every model here is an embedded checkpoint, by itself or inside the shape of an 8B model
(`refusion_eval.bench.checkpoints`), so that nothing has to be downloaded. Without a GPU the same checks run at a small
shape on the CPU, which shows that they work and says nothing about a GPU.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from refusion_eval import api
from refusion_eval.bench.bench import decode_batch, measure
from refusion_eval.bench.checkpoints import SHAPES, Shape, inflate
from refusion_eval.bench.command import mini_prompts
from refusion_eval.bench.gpu_processes import recorded_decodings, training
from refusion_eval.bench.gpu_report import Check, Result
from refusion_eval.decoders import DECODERS
from refusion_eval.engine.engine import Engine, Request
from refusion_eval.engine.recorded import recorder
from refusion_eval.errors import DecodeError
from refusion_eval.models.attention import grouped_attention
from refusion_eval.models.device import cache_bytes_per_row, copy_bandwidth, weight_bytes
from refusion_eval.paths import embedded_decoders, embedded_path
from refusion_eval.types import Commit, Decoding, Forward, Read, Response, Trace, causal

REHEARSAL = Shape(
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=512,
    vocab_size=2300,
)
REFUSION_SETTINGS = {"gen_length": 128, "slot_size": 8, "block_size": 32}
WIDTHS = (1, 8, 16, 32, 40, 64, 128, 256)
KEY_LENGTHS = range(289, 354)
# Targets at an H100, as shares of the measured copy bandwidth, and as ratios of systems in one run.
LEAST_MBU = {1: 0.75, 40: 0.70}
LEAST_SPEED_UP = 5.0
LEAST_BATCH_GAIN = 12.0
LEAST_SAME = 0.9  # share of the prompts whose tokens must agree in bfloat16, where rounding may tell two paths apart
MASK_TOLERANCE = 0.02
MAX_SECONDS = 1800.0  # of all checks together


class GpuCheck:
    """The checks on one device.

    Args:
        folder: existing empty folder for the inflated checkpoints (16 GB each at the shape 8B) and a training run.
        shape: key of `SHAPES`; None is the small shape of a rehearsal.
    """

    def __init__(
        self, device: str, folder: Path, shape: str | None, num_prompts: int, progress: Callable[[str], None]
    ) -> None:
        self.device = torch.device(device)
        self._folder, self._num_prompts, self._progress = folder, num_prompts, progress
        self._shape_name = shape or "rehearsal"
        self._shape = REHEARSAL if shape is None else SHAPES[shape]
        self._on_gpu = self.device.type == "cuda"
        self._training_shape = SHAPES["0.6B"] if self._on_gpu else REHEARSAL

    @property
    def checks(self) -> Mapping[str, tuple[Callable[[], Result], float]]:
        """The checks in their order, and the seconds that each is estimated to take at the shape 8B on an H100."""
        return {
            "recorded decodings of the releases": (partial(recorded_decodings, self.device, self._folder), 240),
            "float32 tokens of all decoders": (self.float32_tokens, 120),
            "bfloat16 tokens, recorded and in batches": (self.bfloat16_tokens, 60),
            "attention under a mask": (self.masked_attention, 10),
            "kernels of a decoding": (self.kernels, 150),
            "width curve and bandwidth": (self.width_curve, 60),
            "speed of the systems": (self.speed, 600),
            "speed of masked diffusion": (self.masked_diffusion, 280),
            "two batches in a row": (self.two_batches, 40),
            "memory after many requests": (self.memory, 60),
            "training steps": (partial(training, self.device, self._folder, self._training_shape), 90),
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

    def float32_tokens(self) -> Result:
        """Compares the tokens of every decoder on every embedded checkpoint with those of the CPU."""
        different, compared = [], 0
        for name in embedded_decoders():
            here, there = (self._model(embedded_path(name), "float32", device) for device in ("cpu", str(self.device)))
            for decoder in here.decoders:
                settings = self._settings(here, decoder, gen_length=32)
                for number, prompt in enumerate(mini_prompts(here, min(self._num_prompts, 6))):
                    decode = DECODERS[decoder].decode
                    tokens = [model.engine.run(decode, prompt, settings).tokens for model in (here, there)]
                    compared += 1
                    if tokens[0] != tokens[1]:
                        different.append(f"{name}, {decoder}, prompt {number}")
        text = f"{compared - len(different)} of {compared} decodings have the tokens of the CPU"
        return Result(not different, text, {"compared": compared, "different": different})

    def bfloat16_tokens(self) -> Result:
        """Compares recorded forwards and batches with single forwards that are launched one by one."""
        model = self._model(embedded_path("refusion"), "bfloat16")
        prompts = mini_prompts(model, self._num_prompts)
        figures: dict[str, float] = {}
        for decoder in ("refusion", "autoregressive"):
            decode, settings = DECODERS[decoder].decode, self._settings(model, decoder, gen_length=64)
            eager = Engine(model.engine.model, model.attention)
            recorded = Engine(model.engine.model, model.attention, record=recorder(self.device))
            expected = [eager.run(decode, prompt, settings).tokens for prompt in prompts]
            alone = [recorded.run(decode, prompt, settings).tokens for prompt in prompts]
            batched = decode_batch(model, decoder, settings, prompts, 16)
            for way, tokens in (("recorded", alone), ("batch 16", batched)):
                same = sum(one == other for one, other in zip(expected, tokens, strict=True))
                figures[f"{decoder}, {way}"] = same / len(prompts)
        worst = min(figures, key=figures.__getitem__)
        num_same = round(figures[worst] * len(prompts))
        text = f"bfloat16: at least {num_same} of {len(prompts)} prompts keep their tokens ({worst})"
        return Result(figures[worst] >= LEAST_SAME, text, figures)

    def masked_attention(self) -> Result:
        """Compares masked bfloat16 attention with float32 arithmetic for every number of keys in `KEY_LENGTHS`."""
        heads, kv_heads, head_dim = 32, 8, 128
        generator = torch.Generator().manual_seed(0)
        worst, where = 0.0, (0, 0)
        for num_keys in KEY_LENGTHS:
            for num_queries in (1, 8, 40):
                sizes = ((num_queries, heads), (kv_heads, num_keys), (kv_heads, num_keys))
                drawn = (torch.randn(*size, head_dim, generator=generator) for size in sizes)
                q_THD, keys_GKD, values_GKD = (tensor.to(self.device, torch.bfloat16) for tensor in drawn)
                mask_TK = torch.zeros(num_queries, num_keys, dtype=torch.bfloat16, device=self.device)
                mask_TK[:, -num_queries:].masked_fill_(
                    ~torch.ones_like(mask_TK[:, -num_queries:]).tril().bool(), -math.inf
                )
                found = grouped_attention(q_THD, keys_GKD, values_GKD, mask_TK, is_causal=False)
                difference = (found.float() - _attention_in_float32(q_THD, keys_GKD, values_GKD, mask_TK)).abs().max()
                if not difference.item() <= worst:
                    worst, where = difference.item(), (num_keys, num_queries)
        text = f"largest difference from float32 {worst:.1e}, at {where[0]} keys and {where[1]} queries"
        return Result(worst <= MASK_TOLERANCE, text, {"largest": worst, "keys": where[0], "queries": where[1]})

    def kernels(self) -> Result:
        """Profiles the decoding of prompts that were not decoded before, and lists the kernels by name."""
        model = self._model(self._inflated("refusion"), "bfloat16")
        settings = self._settings(model, "refusion")
        decode = DECODERS["refusion"].decode
        first, *prompts = mini_prompts(model, 21)
        model.engine.run(decode, first, settings)
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if self._on_gpu else []
        with torch.profiler.profile(activities=activities) as profiled:
            num_forwards = sum(model.engine.run(decode, prompt, settings).num_forwards for prompt in prompts)
        events = profiled.key_averages()
        on_device = "CUDA" if self._on_gpu else "CPU"
        counts = {event.key: event.count for event in events if event.device_type.name == on_device}
        forbidden = [name for name in counts if "cudnn" in name.lower()]
        a_layer = sum(counts.values()) / num_forwards / model.config.num_layers
        text = f"{a_layer:.1f} kernels a layer over {num_forwards} forwards; of cuDNN {len(forbidden)} kernels"
        figures = {"forwards": num_forwards, "a_layer": a_layer, "cudnn": forbidden, "counts": counts}
        return Result(not forbidden if self._on_gpu else None, text, figures)

    def width_curve(self) -> Result:
        """Times forwards by width, launched one by one and recorded, and compares them with the measured bandwidth."""
        model = self._model(self._inflated("refusion"), "bfloat16")
        bandwidth = copy_bandwidth(self.device)
        weights = weight_bytes(model.config, model.dtype)
        curves: dict[str, dict[int, float]] = {}
        for way, record in (("eager", None), ("recorded", recorder(self.device))):
            engine = Engine(model.engine.model, model.attention, record=record)
            curves[way] = {width: _seconds_of_forward(engine, width, 30 if self._on_gpu else 2) for width in WIDTHS}
        mbu = {width: weights / seconds / bandwidth for width, seconds in curves["recorded"].items()}
        shares = ", ".join(f"{mbu[width]:.0%} at width {width}" for width in LEAST_MBU)
        limit = bandwidth / weights
        text = (
            f"{shares} of the copy bandwidth of {bandwidth / 1e12:.2f} TB/s; "
            f"{1 / curves['recorded'][1]:.1f} of at most {limit:.1f} forwards/s"
        )
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

    def speed(self) -> Result:
        """Measures ReFusion and the autoregressive decoder beside the plain loops on transformers' own model."""
        path = self._inflated("refusion")
        prompts = mini_prompts(self._model(path, "bfloat16"), self._num_prompts)
        report = measure(
            path,
            prompts,
            REFUSION_SETTINGS,
            dtype="bfloat16",
            device=str(self.device),
            batch_sizes=(1, 32),
            progress=self._progress,
        )
        speed_up = report.ratios["refusion fused / plain baseline"]
        gain = report.ratios["autoregressive: batch 32 / batch 1"]
        speeds = {name: speed.median for name, speed in report.speeds.items()}
        joules = report.speeds["refusion fused"].joules_per_token
        text = (
            f"refusion fused: {speeds['refusion fused']:.0f} tokens/s, {speed_up:.1f} times the plain loop; batch 32 "
            f"{gain:.1f} times batch 1" + ("" if joules is None else f"; {joules:.3g} J/token")
        )
        passed = speed_up >= LEAST_SPEED_UP and gain >= LEAST_BATCH_GAIN
        return Result(passed if self._on_gpu else None, text, report.to_json())

    def masked_diffusion(self) -> Result:
        """Measures LLaDA and BD3-LM at batch 1 and 32."""
        figures: dict[str, dict[str, float]] = {}
        for decoder in ("llada", "bd3lm"):
            model = self._model(self._inflated(decoder), "bfloat16")
            settings = self._settings(model, decoder, gen_length=64)
            prompts = mini_prompts(model, self._num_prompts)
            decode = DECODERS[decoder].decode
            model.engine.run(decode, prompts[0], settings)
            decoded = [model.engine.run(decode, prompt, settings) for prompt in prompts]
            num_tokens, seconds = sum(len(each.tokens) for each in decoded), sum(each.seconds for each in decoded)
            num_forwards = sum(each.num_forwards for each in decoded)
            started = time.perf_counter()
            batched = decode_batch(model, decoder, settings, prompts, 32)
            together = time.perf_counter() - started
            figures[decoder] = {
                "tokens_per_second": num_tokens / seconds,
                "tokens_per_forward": num_tokens / num_forwards,
                "forwards_per_second": num_forwards / seconds,
                "batch 32, tokens_per_second": sum(map(len, batched)) / together,
            }
        text = "; ".join(f"{name} {found['tokens_per_second']:.0f} tokens/s" for name, found in figures.items())
        return Result(None, text, figures)

    def two_batches(self) -> Result:
        """Decodes two batches one after the other whose prompts outgrow the first buffer, as two tasks of a run do."""
        model = self._model(self._inflated("refusion"), "bfloat16")
        settings = self._settings(model, "refusion", gen_length=32)
        prompts = [list(prompt) * (600 // len(prompt) + 1) for prompt in mini_prompts(model, min(self._num_prompts, 8))]
        failed = 0
        for _ in range(2):
            requests = (Request(DECODERS["refusion"].decode, prompt, settings) for prompt in prompts)
            failed += sum(isinstance(result, DecodeError) for _, result in model.engine.run_many(requests, 64))
        return Result(failed == 0, f"{failed} of {2 * len(prompts)} requests failed", {"failed": failed})

    def memory(self) -> Result:
        """Decodes the same prompts again and again and compares the memory that torch holds before and after."""
        model = self._model(embedded_path("refusion"), "bfloat16")
        settings, prompts = self._settings(model, "refusion"), mini_prompts(model, self._num_prompts)
        held: list[int] = []
        for _ in range(6):
            for prompt in prompts:
                model.engine.run(DECODERS["refusion"].decode, prompt, settings)
            decode_batch(model, "refusion", settings, prompts, 8)
            held.append(torch.cuda.memory_allocated(self.device) if self._on_gpu else 0)
        growth = held[-1] - held[1]
        passed = growth <= 0 if self._on_gpu else None
        return Result(passed, f"{growth} bytes more after 4 further rounds of {len(prompts)} prompts", {"bytes": held})

    def _model(self, path: Path, dtype: str, device: str | None = None) -> api.LoadedModel:
        return api.load_model(str(path), dtype=dtype, device=device or str(self.device), tune=True)

    def _settings(self, model: api.LoadedModel, decoder: str, **settings: Any) -> Any:
        """Settings of a decoder; ReFusion's forwards are fused."""
        chosen = REFUSION_SETTINGS | {"fuse": True} if decoder == "refusion" else {"gen_length": 128}
        resolved = api.decoder_settings(model, decoder, **(chosen | settings))
        return api.with_width_cost(resolved, lambda: model.width_cost)

    def _inflated(self, decoder: str) -> Path:
        """The embedded checkpoint of a decoder in the shape of this check, written at its first use."""
        path = self._folder / f"{decoder}-{self._shape_name}"
        if not path.exists():
            self._progress(f"the embedded {decoder} checkpoint in the shape {self._shape_name}")
            inflate(embedded_path(decoder), path, self._shape, torch.bfloat16)
        return path


def _attention_in_float32(q_THD: Tensor, keys_GKD: Tensor, values_GKD: Tensor, mask_TK: Tensor) -> Tensor:
    """What `grouped_attention` computes, by torch's plain kernel in float32."""
    num_shared = q_THD.shape[1] // keys_GKD.shape[0]
    keys, values = (tensor.float().repeat_interleave(num_shared, dim=0) for tensor in (keys_GKD, values_GKD))
    with sdpa_kernel(SDPBackend.MATH):
        attended = scaled_dot_product_attention(q_THD.float().transpose(0, 1), keys, values, attn_mask=mask_TK.float())
    return attended.transpose(0, 1)


def _seconds_of_forward(engine: Engine, width: int, num_forwards: int, num_prompt: int = 300) -> float:
    """Seconds of a forward of `width` rows that are all read, the decoder's part included: median of five decodings.

    One row of each forward is committed, so that no two forwards have the same number of keys.
    """

    def decode(prompt: Sequence[int], settings: Any, trace: Trace) -> Decoding:
        yield Forward(prompt, range(len(prompt)), causal(len(prompt)), (Read((0,)),), kind="prefill")
        commit = Commit(range(len(prompt)))
        for number in range(num_forwards):
            positions = range(len(prompt) + number, len(prompt) + number + width)
            tokens = [(number + row) % 1000 for row in range(width)]
            yield Forward(tokens, positions, causal(width), (Read(range(width)),), commit)
            commit = Commit((0,))
        return Response((), "length")

    seconds = []
    for _ in range(6):
        decoded = engine.run(decode, list(range(num_prompt)), None)
        assert decoded.prefill_seconds is not None
        seconds.append((decoded.seconds - decoded.prefill_seconds) / num_forwards)
    return statistics.median(seconds[1:])
