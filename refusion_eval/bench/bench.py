"""Decoding speed of one checkpoint: against a plain baseline, in batches, by width, and against the memory's limit."""

import operator
import os
import platform
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from refusion_eval import api
from refusion_eval.bench.batches import BatchSpeed, batch_speeds, requests_of
from refusion_eval.bench.checkpoints import SHAPES, checkpoint_named
from refusion_eval.bench.profiling import Profile, profile, profile_table
from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.benchmarks.rows import read_rows
from refusion_eval.decoders import DECODERS
from refusion_eval.engine.engine import Engine
from refusion_eval.engine.width import time_forwards
from refusion_eval.models.device import cache_bytes_per_row, copy_bandwidth, weight_bytes
from refusion_eval.paths import tasks_path
from refusion_eval.types import Decoded, ForwardDone

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (0, 512, 4096)
BATCH_SIZES = (1, 16)
FREE_ROWS = 1 << 20
# Name of a ratio -> (numerator, denominator), both names of systems in `Report.speeds`.
RATIOS = {
    "refusion fused / plain baseline": ("refusion fused", "refusion baseline"),
    "refusion unfused / plain baseline": ("refusion", "refusion baseline"),
    "refusion fused / refusion unfused": ("refusion fused", "refusion"),
    "refusion fused / our autoregressive": ("refusion fused", "autoregressive"),
    "refusion unfused / our autoregressive": ("refusion", "autoregressive"),
    "refusion fused: graphs / without": ("refusion fused", "refusion fused, without graphs"),
    "our autoregressive: graphs / without": ("autoregressive", "autoregressive, without graphs"),
    "our autoregressive / model.generate": ("autoregressive", "model.generate"),
    "our autoregressive / plain baseline": ("autoregressive", "autoregressive baseline"),
}
PROMPTED = ("gsm8k", "math", "humaneval", "mbpp", "mmlu_pro", "arc_challenge")
RANDOM_PROMPT_LENGTH = 64


# How much is measured: prompts of a round, rounds, tokens of a response, and whether the plain baseline runs.
EXTENT = {"num_prompts": 14, "num_rounds": 3, "gen_length": 128, "with_baseline": True}
# A forward of a large shape takes a tenth of a second and more on a CPU; this takes minutes.
LARGE_ON_CPU = {"num_prompts": 2, "num_rounds": 2, "gen_length": 32, "with_baseline": False}


class System(NamedTuple):
    """A way of decoding token ids, and the name of another one that gives the same tokens."""

    run: Callable[[Sequence[int]], Decoded]
    same_tokens_as: str | None = None


def system_of(engine: Engine, decoder: str, settings: Any, same_tokens_as: str | None = None) -> System:
    return System(lambda prompt: engine.run(DECODERS[decoder].decode, prompt, settings), same_tokens_as)


@dataclass(frozen=True, slots=True)
class Speed:
    tokens_per_second: tuple[float, ...]  # of each round: all its tokens divided by all its seconds
    num_tokens: int  # of one round, as the forwards
    num_forwards: int
    num_same: int | None  # prompts with the tokens of `System.same_tokens_as`
    num_prompts: int
    joules_per_token: float | None = None  # None where the device has no counter or the system reads none

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_second)

    @property
    def seconds_a_forward(self) -> float:
        return self.num_tokens / self.median / self.num_forwards


def compare(
    systems: Mapping[str, System],
    prompts: Sequence[Sequence[int]],
    num_rounds: int,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Speed]:
    for name, system in systems.items():
        progress(f"warm-up: {name}")
        system.run(prompts[0])
    rounds: dict[str, list[list[Decoded]]] = {name: [] for name in systems}
    for number in range(num_rounds):
        for name, system in systems.items():  # in turns, so that other load on the machine affects all of them
            progress(f"round {number + 1} of {num_rounds}: {name}")
            rounds[name].append([system.run(prompt) for prompt in prompts])
    speeds = {}
    for name, (_, same_as) in systems.items():
        totals = [(sum(len(r.tokens) for r in results), sum(r.seconds for r in results)) for results in rounds[name]]
        last, other = ([r.tokens for r in rounds[of][-1]] for of in (name, same_as or name))
        joules = [result.joules for results in rounds[name] for result in results]
        speeds[name] = Speed(
            tuple(num_tokens / seconds for num_tokens, seconds in totals),
            totals[-1][0],
            sum(result.num_forwards for result in rounds[name][-1]),
            None if same_as is None else sum(map(operator.eq, last, other)),
            len(prompts),
            _mean_joules(joules, num_rounds * totals[-1][0]),
        )
    return speeds


def ratios_of(speeds: Mapping[str, Speed]) -> dict[str, float]:
    """The `RATIOS` whose two systems were measured."""
    medians = {name: speed.median for name, speed in speeds.items()}
    return {name: medians[a] / medians[b] for name, (a, b) in RATIOS.items() if a in medians and b in medians}


def _mean_joules(joules: Sequence[float | None], num_tokens: int) -> float | None:
    measured = [energy for energy in joules if energy is not None]
    return sum(measured) / num_tokens if num_tokens and len(measured) == len(joules) else None


@dataclass(frozen=True, kw_only=True)
class Report:
    conditions: Mapping[str, Any]
    speeds: Mapping[str, Speed]
    # Forwards of ReFusion over all prompts: "unfused", "free rows" (fused, with further rows at no cost), and "least",
    # where all plans and predictions but the first plan are fused into verifications.
    forwards: Mapping[str, int]
    batch: Mapping[str, Mapping[int, BatchSpeed]]
    # Seconds of each timed forward by committed rows and width: recorded where `run` records, and then eager as well.
    curves: Mapping[int, Mapping[int, list[float]]]
    eager_curves: Mapping[int, Mapping[int, list[float]]]
    weight_bytes: int
    cache_bytes_per_row: int
    copy_bytes_per_second: float
    profile: Profile | None = None

    @property
    def ratios(self) -> dict[str, float]:
        """Ratios within this report; unlike speeds, they can be compared between machines."""
        ratios, unfused = ratios_of(self.speeds), self.forwards["unfused"]
        ratios["forwards: fused / unfused"] = self.speeds["refusion fused"].num_forwards / unfused
        ratios["forwards: fused with free rows / unfused"] = self.forwards["free rows"] / unfused
        ratios["forwards: least possible / unfused"] = self.forwards["least"] / unfused
        for decoder, by_size in self.batch.items():
            first, *others = by_size
            for size in others:
                speed_up = by_size[size].tokens_per_second / by_size[first].tokens_per_second
                ratios[f"{decoder}: batch {size} / batch {first}"] = speed_up
        curve = {width: statistics.median(seconds) for width, seconds in self.curves[min(self.curves)].items()}
        ratios |= {
            f"forward of {width} rows / of 1": curve[width] / curve[1] for width in (8, 32, 128) if width in curve
        }
        ratios["MBU of a forward of 1 row"] = self.weight_bytes / curve[1] / self.copy_bytes_per_second
        return ratios

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON types, ratios first; the speeds have the key "standings" in files."""
        fields = asdict(self)
        first = {"conditions": fields.pop("conditions"), "standings": fields.pop("speeds")}
        return {"ratios": self.ratios, **first, **fields}


def measure(
    model: api.LoadedModel,
    prompts: Sequence[Sequence[int]],
    settings: Mapping[str, Any],
    *,
    num_rounds: int,
    with_baseline: bool,
    with_profile: bool,
    progress: Callable[[str], None],
) -> Report:
    torch.set_num_threads(model.num_threads)  # the baselines, on transformers' own model, get as many
    systems = systems_of(model, settings, with_baseline=with_baseline)
    speeds = compare(systems, prompts, num_rounds, progress)
    progress("forwards where rows are free")
    forwards = _count_forwards(model, settings, prompts)
    batch = {}
    for decoder in ("refusion", "autoregressive"):
        progress(f"{decoder} in batches of {', '.join(map(str, BATCH_SIZES))}")
        requests = requests_of(decoder, resolved(model, decoder, settings), [*prompts] * 2)
        batch[decoder] = batch_speeds(model.engine, requests, BATCH_SIZES)
    engine, curves, eager_curves = model.engine, {}, {}
    for context in CONTEXTS:
        if context + max(WIDTHS) <= model.config.max_positions:
            progress(f"forwards after {context} rows")
            timed = partial(time_forwards, engine.model, engine.attention, WIDTHS, context, 20)
            curves[context] = timed(recorded=engine.recorded)
            if engine.recorded is not None:
                eager_curves[context] = timed()
    progress("profile and copy bandwidth" if with_profile else "copy bandwidth")
    return Report(
        conditions={
            "model": model.options.pretrained,
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
        speeds=speeds,
        forwards=forwards,
        batch=batch,
        curves=curves,
        eager_curves=eager_curves,
        weight_bytes=weight_bytes(model.config, model.weight_dtype),
        cache_bytes_per_row=cache_bytes_per_row(model.config, model.cache_dtype),
        copy_bytes_per_second=copy_bandwidth(model.device),
        profile=_profile_by_operation(model, settings, prompts) if with_profile else None,
    )


def _profile_by_operation(
    model: api.LoadedModel, settings: Mapping[str, Any], prompts: Sequence[Sequence[int]]
) -> Profile:
    # A forward that is compiled or recorded as a whole has no operations to time.
    engine = Engine(model.transformer, "sdpa" if model.attention == "native" else model.attention)
    return profile(engine, requests_of("refusion", resolved(model, "refusion", {**settings, "fuse": True}), prompts))


def systems_of(model: api.LoadedModel, settings: Mapping[str, Any], *, with_baseline: bool) -> dict[str, System]:
    """The systems of the comparison, also those on transformers' own model if they are asked for."""
    unfused = resolved(model, "refusion", {**settings, "fuse": False})
    fused = resolved(model, "refusion", {**settings, "fuse": True})
    greedy = resolved(model, "autoregressive", settings)
    systems = {
        "refusion fused": system_of(model.engine, "refusion", fused, "refusion"),
        "refusion": system_of(model.engine, "refusion", unfused),
        "autoregressive": system_of(model.engine, "autoregressive", greedy),
    }
    if model.cuda_graphs:
        eager = Engine(model.engine.model, model.attention)
        systems["refusion fused, without graphs"] = system_of(eager, "refusion", fused, "refusion")
        systems["autoregressive, without graphs"] = system_of(eager, "autoregressive", greedy, "autoregressive")
    if with_baseline:
        from transformers import Qwen3ForCausalLM  # transformers' models load slowly

        from refusion_eval.bench.plain import PlainEngine
        from refusion_eval.runs.stock_loop import StockLoop

        stock = Qwen3ForCausalLM.from_pretrained(model.directory, dtype=model.dtype).to(model.device).eval()
        plain, loop = PlainEngine(stock), StockLoop(stock)
        systems["refusion baseline"] = system_of(plain, "refusion", unfused, "refusion")
        systems["autoregressive baseline"] = system_of(plain, "autoregressive", greedy, "autoregressive")
        systems["model.generate"] = System(lambda prompt: loop.run(prompt, greedy), "autoregressive")
    return systems


def resolved(model: api.LoadedModel, decoder: str, settings: Mapping[str, Any]) -> Any:
    """A decoder's settings, from those of ReFusion that it has as well, with the width curve of this device."""
    names = DECODERS[decoder].Settings.__dataclass_fields__
    own = {name: value for name, value in settings.items() if name in names}
    return api.with_width_cost(api.decoder_settings(model, decoder, **own), lambda: model.width_cost)


def _count_forwards(
    model: api.LoadedModel, settings: Mapping[str, Any], prompts: Sequence[Sequence[int]]
) -> dict[str, int]:
    unfused, free = (
        [api.generate(model, prompt, decoder="refusion", **settings, **fusing) for prompt in prompts]
        for fusing in ({"fuse": False}, {"fuse": True, "free_rows": FREE_ROWS, "row_cost": 0.0})
    )
    verifications = sum(done.kind == "verify" for result in unfused for done in result.trace.of(ForwardDone))
    return {
        "unfused": sum(result.num_forwards for result in unfused),
        "free rows": sum(result.num_forwards for result in free),
        "least": len(prompts) + verifications,
    }


def _same_text(speed: Speed, dtype: str) -> str:
    """Whether a system reproduces the tokens of another: a verdict in float32, else a number, as rounding differs."""
    if speed.num_same is None:
        return ""
    if dtype == "float32":
        return "same" if speed.num_same == speed.num_prompts else "DIFFERENT"
    return f"{dtype}: {speed.num_same} of {speed.num_prompts} prompts"


def _energy_text(speed: Speed | BatchSpeed) -> str:
    return "" if speed.joules_per_token is None else f"  {speed.joules_per_token:.3g} J/token"


def table(report: Report) -> str:
    lines = ["Ratios (medians of one run)"]
    lines += [f"  {name:<40} {ratio:8.2f}" for name, ratio in report.ratios.items()]
    lines += ["", f"{'Tokens per second, batch 1':<40} {'median':>9} {'lowest':>9} {'highest':>9} {'TPF':>6}  tokens"]
    for name, speed in report.speeds.items():
        rounds, tpf = speed.tokens_per_second, speed.num_tokens / speed.num_forwards
        figures = f"{speed.median:9.1f} {min(rounds):9.1f} {max(rounds):9.1f} {tpf:6.2f}"
        lines.append(f"  {name:<38} {figures}  {_same_text(speed, report.conditions['dtype'])}{_energy_text(speed)}")
    lines += ["", "Tokens per second, continuous batching"]
    for decoder, by_size in report.batch.items():
        for size, batch_speed in by_size.items():
            same = f"same tokens in {batch_speed.same:.1%} of the requests{_energy_text(batch_speed)}"
            lines.append(f"  {f'{decoder}, batch {size}':<38} {batch_speed.tokens_per_second:9.1f}  {same}")
    for context, curve in report.curves.items():
        lines += ["", f"Milliseconds of a forward after {context} rows: median (lowest)"]
        for width, seconds in curve.items():
            lines.append(f"  {width:>5} rows {1e3 * statistics.median(seconds):9.2f} ({1e3 * min(seconds):.2f})")
    if report.profile is not None:
        lines += ["", profile_table(report.profile)]
    lines += [
        "",
        f"Weights {report.weight_bytes / 1e6:.1f} MB a forward, cache {report.cache_bytes_per_row} bytes a row, "
        f"copy {report.copy_bytes_per_second / 1e9:.1f} GB/s",
        "{device}, {dtype}, {threads} threads, torch {torch}, {num_prompts} prompts, {num_rounds} rounds".format_map(
            report.conditions
        ),
    ]
    return "\n".join(lines)


def choose_threads(threads: int | None) -> None:
    """Has torch compute with so many threads, if a number is given."""
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # so that it counts as chosen
        torch.set_num_threads(threads)


def run_bench(
    name: str,
    *,
    extent: Mapping[str, Any],
    settings: Mapping[str, Any],
    threads: int | None,
    dtype: str,
    device: str,
    with_profile: bool,
    progress: Callable[[str], None],
) -> tuple[Report, str]:
    """Measures what `--model` names; `extent` replaces entries of `EXTENT`. Returns the report, also as text."""
    choose_threads(threads)
    size = name.removesuffix("-inflated")
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    extent = {**(LARGE_ON_CPU if on_cpu and size in SHAPES else EXTENT), **extent}
    settings, num_prompts = {**settings, "gen_length": extent["gen_length"]}, extent["num_prompts"]
    weight_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
    with checkpoint_named(name, weight_dtype, progress) as checkpoint:
        # Its weights are loaded after the prompts are made, so that a wrong tokenizer or template is said at once.
        model = api.LoadedModel.open(str(checkpoint), dtype=dtype, device=device, tune=True)
        if name in SHAPES:
            # A threshold of 0 accepts the drafts of random weights, so that slots are decoded in parallel.
            settings |= {"tau_token": 0.0, "eos_ids": ()}
            chooser = random.Random(0)
            prompts = [[chooser.randrange(1000) for _ in range(RANDOM_PROMPT_LENGTH)] for _ in range(num_prompts)]
            title = "random weights, random prompts, tau_token 0"
        else:
            prompts, title = mini_prompts(model, num_prompts), "prompts of the mini tasks (synthetic)"
        _ = model.engine  # `measure` sets the threads
        report = measure(
            model,
            prompts,
            settings,
            num_rounds=extent["num_rounds"],
            with_baseline=extent["with_baseline"],
            with_profile=with_profile,
            progress=progress,
        )
    return report, f"{name}: {title}\n{table(report)}"


def mini_prompts(model: api.LoadedModel, count: int) -> list[list[int]]:
    """Token ids of `mini_texts` as prompts of a model."""
    return [
        model.tokenizer.encode(model.tokenizer.render_chat([{"role": "user", "content": text}]))
        for text in mini_texts(count)
    ]


def mini_texts(count: int) -> list[str]:
    """The first questions of the mini tasks; the tasks of `PROMPTED` take turns."""
    rows = {name: read_rows(tasks_path() / "mini" / name / "test.jsonl") for name in PROMPTED}
    texts = [
        BENCHMARKS[name].prompts.user(rows[name][number])
        for number in range(-(-count // len(PROMPTED)))
        for name in PROMPTED
    ]
    return texts[:count]
