"""`refusion-eval bench`: decoding speed against a plain baseline, the width curve and the limit of the memory.

Imports neither lm-eval nor anything that needs a network.
"""

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen3ForCausalLM

from refusion_eval import api
from refusion_eval.bench.contest import Entrant, Standing, compete
from refusion_eval.bench.plain import PlainEngine
from refusion_eval.bench.profile import Profile, profile
from refusion_eval.bench.profile import table as profile_table
from refusion_eval.decoders import DECODERS
from refusion_eval.engine.bandwidth import cache_bytes_per_row, copy_bandwidth, weight_bytes
from refusion_eval.engine.device import synchronize
from refusion_eval.engine.engine import Engine, Request
from refusion_eval.engine.width import time_forwards
from refusion_eval.errors import DecodeError
from refusion_eval.hf.stock import StockLoop
from refusion_eval.trace import ForwardDone
from refusion_eval.types import Decoded

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (0, 512, 4096)
FREE_ROWS = 1 << 20
# Name of a ratio -> (numerator, denominator): systems in `Report.standings`.
RATIOS = {
    "refusion fused / plain baseline": ("refusion fused", "refusion baseline"),
    "refusion unfused / plain baseline": ("refusion", "refusion baseline"),
    "refusion fused / refusion unfused": ("refusion fused", "refusion"),
    "refusion fused / our autoregressive": ("refusion fused", "autoregressive"),
    "refusion fused: graphs / without": ("refusion fused, graphs", "refusion fused"),
    "our autoregressive: graphs / without": ("autoregressive, graphs", "autoregressive"),
    "our autoregressive / model.generate": ("autoregressive", "model.generate"),
    "our autoregressive / plain baseline": ("autoregressive", "autoregressive baseline"),
}


class BatchSpeed(NamedTuple):
    """What continuous batching did at one batch size.

    Attributes:
        tokens_per_second: of wall time, all prompts several times over.
        same: share of the requests whose tokens are those of the smallest batch size; below 1 only where rounding
            differs, as in bfloat16.
    """

    tokens_per_second: float
    same: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured.

    Attributes:
        conditions: model, device, dtype, threads, versions, settings.
        standings: system -> speeds, tokens, forwards.
        forwards: how many ReFusion takes for all prompts: unfused, fused where further rows cost nothing, and the least
            there can be, when every plan and prediction but the first of a prompt rides on a verification.
        batch: decoder -> batch size -> its speed.
        curves: committed rows -> width -> seconds of each forward.
        weight_bytes, cache_bytes_per_row: what a forward reads.
        copy_bytes_per_second: what the device moves.
        profile: where the time of fused ReFusion goes; None if it was not asked for.
    """

    conditions: Mapping[str, Any]
    standings: Mapping[str, Standing]
    forwards: Mapping[str, int]
    batch: Mapping[str, Mapping[int, BatchSpeed]]
    curves: Mapping[int, Mapping[int, list[float]]]
    weight_bytes: int
    cache_bytes_per_row: int
    copy_bytes_per_second: float
    profile: Profile | None = None

    @property
    def ratios(self) -> dict[str, float]:
        """The figures that travel between machines: all of one run."""
        speeds = {name: standing.median for name, standing in self.standings.items()}
        found = {name: speeds[a] / speeds[b] for name, (a, b) in RATIOS.items() if a in speeds and b in speeds}
        unfused = self.forwards["unfused"]
        found["forwards: fused / unfused"] = self.standings["refusion fused"].num_forwards / unfused
        found["forwards: fused with free rows / unfused"] = self.forwards["free rows"] / unfused
        found["forwards: least possible / unfused"] = self.forwards["least"] / unfused
        for decoder, speeds_by_size in self.batch.items():
            first, *others = speeds_by_size
            for size in others:
                ratio = speeds_by_size[size].tokens_per_second / speeds_by_size[first].tokens_per_second
                found[f"{decoder}: batch {size} / batch {first}"] = ratio
        curve = {width: statistics.median(seconds) for width, seconds in self.curves[min(self.curves)].items()}
        found |= {
            f"forward of {width} rows / of 1": curve[width] / curve[1] for width in (8, 32, 128) if width in curve
        }
        found["MBU of a forward of 1 row"] = self.weight_bytes / curve[1] / self.copy_bytes_per_second
        return found

    def to_json(self) -> dict[str, Any]:
        """Everything, ratios first."""
        return {"ratios": self.ratios, **asdict(self)}


def measure(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    settings: Mapping[str, Any],
    *,
    dtype: str = "auto",
    device: str = "auto",
    num_rounds: int = 3,
    batch_sizes: Sequence[int] = (1, 16),
    with_baseline: bool = True,
    with_profile: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measures one checkpoint.

    Args:
        directory: checkpoint in Hugging Face layout.
        prompts: token ids to decode.
        settings: of the ReFusion decoder, but for `fuse`; `gen_length` and `eos_ids` serve all systems.
        dtype: as `load_model`.
        device: as `load_model`.
        num_rounds: of the contest.
        batch_sizes: of `run_many`, ascending; the first is what the others are compared with.
        with_baseline: also load transformers' own model, for the systems that run on it.
        with_profile: also measure where the time of a decode goes.
        progress: told what is being done.
    """
    model = api.load_model(str(directory), dtype=dtype, device=device)
    entrants = _entrants(model, directory if with_baseline else None, settings)
    standings = compete(entrants, prompts, num_rounds, progress)
    progress("forwards where rows are free")
    forwards = _count_forwards(model, settings, prompts)
    batch = {}
    for decoder in ("refusion", "autoregressive"):
        progress(f"{decoder} in batches of {', '.join(map(str, batch_sizes))}")
        resolved = api.decoder_settings(model, decoder, **_settings_of(decoder, settings))
        batch[decoder] = _batch_speeds(model, decoder, resolved, list(prompts) * 2, batch_sizes)
    curves = {}
    for context in CONTEXTS:
        if context + max(WIDTHS) <= model.config.max_positions:
            progress(f"forwards behind {context} rows")
            curves[context] = time_forwards(
                model.engine.model, model.attention, widths=WIDTHS, context=context, num_rounds=20
            )
    profiled = None
    if with_profile:
        progress("profile")
        profiled = profile(model, prompts, settings)
    progress("copy bandwidth")
    return Report(
        conditions={
            "model": str(directory),
            "shapes": asdict(model.config),
            "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.processor(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": model.attention,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "num_prompts": len(prompts),
            "num_rounds": num_rounds,
            "settings": dict(settings),
            "width_cost": model.width_cost._asdict(),
        },
        standings=standings,
        forwards=forwards,
        batch=batch,
        curves=curves,
        weight_bytes=weight_bytes(model.config, model.dtype),
        cache_bytes_per_row=cache_bytes_per_row(model.config, model.dtype),
        copy_bytes_per_second=copy_bandwidth(model.device),
        profile=profiled,
    )


def _entrants(model: api.LoadedModel, baseline: Path | None, settings: Mapping[str, Any]) -> dict[str, Entrant]:
    shared = _settings_of("autoregressive", settings)
    unfused = api.decoder_settings(model, "refusion", **settings, fuse=False)
    greedy = api.decoder_settings(model, "autoregressive", **shared)
    entrants = {
        "refusion fused": Entrant(partial(_generate, model, "refusion", {**settings, "fuse": True}), "refusion"),
        "refusion": Entrant(partial(_generate, model, "refusion", {**settings, "fuse": False})),
        "autoregressive": Entrant(partial(_generate, model, "autoregressive", shared)),
    }
    if model.device.type == "cuda":
        graphed = Engine(model.engine.model, model.attention, static=True)
        fused = api.decoder_settings(model, "refusion", **settings, fuse=True)
        fused = api.with_width_cost(fused, lambda: model.width_cost)
        entrants["refusion fused, graphs"] = Entrant(
            lambda prompt: graphed.run(DECODERS["refusion"].decode, prompt, fused), "refusion"
        )
        entrants["autoregressive, graphs"] = Entrant(
            lambda prompt: graphed.run(DECODERS["autoregressive"].decode, prompt, greedy), "autoregressive"
        )
    if baseline is not None:
        stock = Qwen3ForCausalLM.from_pretrained(baseline, dtype=model.dtype).to(model.device).eval()
        plain = PlainEngine(stock)
        entrants["refusion baseline"] = Entrant(
            lambda prompt: plain.run(DECODERS["refusion"].decode, prompt, unfused), "refusion"
        )
        entrants["autoregressive baseline"] = Entrant(
            lambda prompt: plain.run(DECODERS["autoregressive"].decode, prompt, greedy), "autoregressive"
        )
        loop = StockLoop(stock)
        entrants["model.generate"] = Entrant(lambda prompt: loop.run(prompt, greedy), "autoregressive")
    return entrants


def _settings_of(decoder: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of the settings of ReFusion those that another decoder has as well."""
    known = DECODERS[decoder].Settings.__dataclass_fields__
    return {name: value for name, value in settings.items() if name in known}


def _count_forwards(
    model: api.LoadedModel, settings: Mapping[str, Any], prompts: Sequence[Sequence[int]]
) -> dict[str, int]:
    plain, free = [], []
    for prompt in prompts:
        plain.append(_generate(model, "refusion", {**settings, "fuse": False}, prompt))
        costless = {"fuse": True, "free_rows": FREE_ROWS, "row_cost": 0.0}
        free.append(_generate(model, "refusion", {**settings, **costless}, prompt))
    verifications = sum(done.kind == "verify" for decoded in plain for done in decoded.trace.of(ForwardDone))
    return {
        "unfused": sum(decoded.num_forwards for decoded in plain),
        "free rows": sum(decoded.num_forwards for decoded in free),
        "least": len(prompts) + verifications,
    }


def _generate(model: api.LoadedModel, decoder: str, settings: Mapping[str, Any], prompt: Sequence[int]) -> Decoded:
    return api.generate(model, prompt, decoder=decoder, **settings)


def _batch_speeds(
    model: api.LoadedModel, decoder: str, settings: Any, prompts: Sequence[Sequence[int]], batch_sizes: Sequence[int]
) -> dict[int, BatchSpeed]:
    """Speed of wall time with so many requests alive, and whether the tokens stayed."""
    resolved = api.with_width_cost(settings, lambda: model.width_cost)
    requests = [Request(DECODERS[decoder].decode, prompt, resolved) for prompt in prompts]
    speeds: dict[int, BatchSpeed] = {}
    expected: dict[int, tuple[int, ...]] = {}
    for size in batch_sizes:
        synchronize(model.device)
        started = time.perf_counter()
        tokens: dict[int, tuple[int, ...]] = {}
        for index, result in model.engine.run_many(requests, size):
            if isinstance(result, DecodeError):
                raise result
            tokens[index] = result.tokens
        synchronize(model.device)
        seconds = time.perf_counter() - started
        expected = expected or tokens
        same = sum(tokens[index] == expected[index] for index in tokens) / len(tokens)
        speeds[size] = BatchSpeed(sum(map(len, tokens.values())) / seconds, same)
    return speeds


def table(report: Report) -> str:
    """The report as text, ratios first."""
    lines = ["Ratios (medians of one run)"]
    lines += [f"  {name:<40} {ratio:8.2f}" for name, ratio in report.ratios.items()]
    lines += ["", f"{'Tokens per second, batch 1':<40} {'median':>9} {'lowest':>9} {'highest':>9} {'TPF':>6}  tokens"]
    verdicts = {True: "same", False: "DIFFERENT", None: ""}
    for name, standing in report.standings.items():
        speeds, tpf = standing.tokens_per_second, standing.num_tokens / standing.num_forwards
        figures = f"{standing.median:9.1f} {min(speeds):9.1f} {max(speeds):9.1f} {tpf:6.2f}"
        lines.append(f"  {name:<38} {figures}  {verdicts[standing.same_tokens]}")
    lines += ["", "Tokens per second, continuous batching"]
    for decoder, speeds_by_size in report.batch.items():
        for size, speed in speeds_by_size.items():
            kept = f"same tokens in {speed.same:.1%} of the requests"
            lines.append(f"  {f'{decoder}, batch {size}':<38} {speed.tokens_per_second:9.1f}  {kept}")
    for context, curve in report.curves.items():
        lines += ["", f"Milliseconds of a forward behind {context} rows: median (lowest)"]
        for width, seconds in curve.items():
            lines.append(f"  {width:>5} rows {1e3 * statistics.median(seconds):9.2f} ({1e3 * min(seconds):.2f})")
    if report.profile is not None:
        lines += ["", profile_table(report.profile)]
    lines += [
        "",
        f"Weights {report.weight_bytes / 1e6:.1f} MB a forward, cache {report.cache_bytes_per_row} bytes a row, "
        f"copy {report.copy_bytes_per_second / 1e9:.1f} GB/s",
        f"{report.conditions['device']}, {report.conditions['dtype']}, {report.conditions['threads']} threads, "
        f"torch {report.conditions['torch']}, {report.conditions['num_prompts']} prompts, "
        f"{report.conditions['num_rounds']} rounds",
    ]
    return "\n".join(lines)
