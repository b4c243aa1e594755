"""Memory growth and drift of results over thousands of requests in one engine: `python performance/soak.py`.

Requests come in rounds. Prompts, lengths and settings are random, every decoder that the checkpoint supports takes
part, and most requests are decoded in batches of random size, some alone. After each round the same probe requests are
decoded again and compared with their first results, and the memory in use is read.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from command import Device, Model, Out, prepare, run_script, show_progress, write_json

from refusion_eval import api
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError, DecodeError
from refusion_eval.loading import LoadedModel
from refusion_eval.runs.model_args import parse_model_args

Draw = Callable[[random.Random, int], dict[str, Any]]
Tokens = tuple[int, ...]

NUM_PROBES = 6
ALONE_SHARE = 0.1
# Share of the requests that have no end token; random prompts get short answers otherwise.
ENDLESS_SHARE = 0.7
STATM = Path("/proc/self/statm")
PAGE_BYTES = 4096
MIB = 2**20
# Growth of memory per 1,000 requests that is not reported as a leak, because an allocator's heap varies by some MiB.
MOST_GROWTH = 8 * MIB


def _refusion(chooser: random.Random, gen_length: int) -> dict[str, Any]:
    slot_size = chooser.choice((1, 2, 4, 8, 16, 32))
    return {
        "slot_size": slot_size,
        "block_size": slot_size * chooser.randint(1, 4),
        "tau_slot": chooser.random(),
        "tau_token": chooser.random(),
        "fuse": chooser.choice((True, False)),
        "left_to_right": chooser.random() < 0.2,
        "recompute_kv": chooser.random() < 0.2,
    }


def _blocks(chooser: random.Random, gen_length: int) -> dict[str, Any]:
    """Draws a block length that divides the response, and a number of steps that the blocks divide."""
    num_blocks = chooser.choice([count for count in (1, 2, 4) if gen_length % count == 0])
    block_length = gen_length // num_blocks
    return {"block_length": block_length, "steps": num_blocks * chooser.randint(1, block_length)}


def _bd3lm(chooser: random.Random, gen_length: int) -> dict[str, Any]:
    return {"block_length": chooser.choice((4, 8, 16)), "threshold": chooser.random()}


def _esolm(chooser: random.Random, gen_length: int) -> dict[str, Any]:
    return {"alpha_0": chooser.random(), "steps": chooser.randint(1, gen_length)}


# Settings drawn in addition to length, temperature and seed. Other decoders keep their defaults.
DRAWS: Mapping[str, Draw] = {"refusion": _refusion, "llada": _blocks, "bd3lm": _bd3lm, "esolm": _esolm}


@dataclass(frozen=True, kw_only=True)
class SoakSettings:
    """Number and size of the requests.

    Attributes:
        num_requests: requests without the probes, >= 1.
        round_size: requests between two checks of memory and probes, >= 1.
        max_batch: largest number of requests decoded together, >= 1.
        max_prompt, max_gen: largest number of tokens of a prompt and of a response, >= 1.
        seed: seed of prompts, lengths and settings.
    """

    num_requests: int = 10_000
    round_size: int = 250
    max_batch: int = 16
    max_prompt: int = 256
    max_gen: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "round_size", "max_batch", "max_prompt", "max_gen"):
            if getattr(self, name) < 1:
                raise ConfigError(f"soak: {name}={getattr(self, name)}; it must be at least 1")


class Moment(NamedTuple):
    """Memory and probes after a round.

    Attributes:
        requests: requests decoded so far.
        seconds: seconds since the start.
        host_bytes: resident memory of the process.
        tensor_bytes: size of all live tensors on all devices, including the engine's keys and values.
        cache_bytes: size of the engine's keys and values.
        device_bytes: memory that the CUDA allocator has handed out; 0 on a CPU.
        drifted: probes whose tokens differ from those of their first decoding.
    """

    requests: int
    seconds: float
    host_bytes: int
    tensor_bytes: int
    cache_bytes: int
    device_bytes: int
    drifted: int


MEMORIES = tuple(name for name in Moment._fields if name.endswith("_bytes"))


@dataclass(frozen=True, kw_only=True)
class SoakReport:
    """Result of a soak.

    Attributes:
        conditions: model, device and settings.
        moments: one entry before the first request, then one per round.
        decoded: number of requests of each decoder.
        failed: requests that ended in an error.
        tokens: number of decoded tokens.
    """

    conditions: Mapping[str, Any]
    moments: Sequence[Moment]
    decoded: Mapping[str, int]
    failed: int
    tokens: int

    @property
    def drifted(self) -> int:
        """Number of probes in all rounds whose tokens differ from their first decoding."""
        return sum(moment.drifted for moment in self.moments)

    @property
    def leaks(self) -> bool:
        """Whether any memory grows faster than `MOST_GROWTH`; False if there are too few rounds for a slope."""
        return any(self.growth(name) > MOST_GROWTH for name in MEMORIES)

    def growth(self, name: str) -> float:
        """Growth per 1,000 requests: the slope of a line through the later half of the rounds.

        Args:
            name: a field of `Moment` in bytes.

        Returns:
            Bytes per 1,000 requests; NaN with fewer than three rounds in the later half.
        """
        later = self.moments[len(self.moments) // 2 :]
        if len(later) < 3:
            return math.nan
        slope, _ = np.polyfit([moment.requests for moment in later], [getattr(moment, name) for moment in later], 1)
        return float(1000 * slope)

    def in_words(self) -> str:
        """The report as a few lines for the terminal."""
        last = self.moments[-1]
        num_compared = NUM_PROBES * (len(self.moments) - 1)
        by_decoder = ", ".join(f"{name} {count:,}" for name, count in sorted(self.decoded.items()))
        lines = [
            f"{last.requests:,} requests ({by_decoder}), {self.tokens:,} tokens, {last.seconds:.0f} s",
            f"failed: {self.failed}; probes that drifted: {self.drifted} of {num_compared}",
        ]
        for name in MEMORIES:
            first, end = getattr(self.moments[0], name) / MIB, getattr(last, name) / MIB
            growth = self.growth(name) / MIB
            slope = "too few rounds for a slope" if math.isnan(growth) else f"{growth:+.3f} per 1,000 in the later half"
            lines.append(
                f"{name.replace('_bytes', ' memory')}: {first:.1f} MiB at the start, {end:.1f} at the end; {slope}"
            )
        if self.leaks:
            lines.append(f"memory grows by more than {MOST_GROWTH / MIB:g} MiB in 1,000 requests: a leak")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """All fields and the growth of each memory as plain JSON types."""
        growth = {name: None if math.isnan(self.growth(name)) else self.growth(name) for name in MEMORIES}
        return {
            "conditions": self.conditions,
            "decoded": self.decoded,
            "failed": self.failed,
            "tokens": self.tokens,
            "drifted": self.drifted,
            "growth_per_1000_requests": growth,
            "moments": [moment._asdict() for moment in self.moments],
        }


def soak(model: api.LoadedModel, settings: SoakSettings, progress: Callable[[Moment], None]) -> SoakReport:
    """Decodes random requests and checks memory and probes after every round.

    Args:
        model: a checkpoint; every decoder that it supports takes part.
        settings: number and size of the requests.
        progress: called with the state after every round.

    Raises:
        ConfigError: prompts and responses of these lengths exceed the context.
    """
    chooser = random.Random(settings.seed)
    probes = list(_requests(model, settings, random.Random(settings.seed + 1), NUM_PROBES))
    first = _decode_probes(model, probes)
    started = time.monotonic()
    moments = [_moment(model, 0, started, 0)]
    decoded = dict.fromkeys(model.decoders, 0)
    failed = tokens = 0
    while (done := moments[-1].requests) < settings.num_requests:
        size = min(settings.round_size, settings.num_requests - done)
        requests = list(_requests(model, settings, chooser, size))
        num_alone = round(ALONE_SHARE * size)
        for decoder, _, _ in requests:
            decoded[decoder] += 1
        parts = ((requests[:num_alone], 1), (requests[num_alone:], chooser.randint(1, settings.max_batch)))
        for outcome in (outcome for part, batch_size in parts for outcome in _decode(model, part, batch_size)):
            failed += outcome is None
            tokens += len(outcome or ())
        drifted = sum(now != before for now, before in zip(_decode_probes(model, probes), first, strict=True))
        moments.append(_moment(model, done + size, started, drifted))
        progress(moments[-1])
    conditions = {"model": model.name, "device": str(model.device), "dtype": str(model.dtype), **asdict(settings)}
    return SoakReport(conditions=conditions, moments=moments, decoded=decoded, failed=failed, tokens=tokens)


# Decoder, prompt and settings of a request.
SoakRequest = tuple[str, list[int], Any]


def _requests(
    model: api.LoadedModel, settings: SoakSettings, chooser: random.Random, count: int
) -> Iterator[SoakRequest]:
    """Yields random requests; the decoders of the checkpoint take turns."""
    decoders = model.decoders
    for number in range(count):
        decoder = decoders[number % len(decoders)]
        setting_names = DECODERS[decoder].Settings.__dataclass_fields__
        gen_length = 4 * chooser.randint(1, max(1, settings.max_gen // 4))
        drawn = {"gen_length": gen_length, **DRAWS.get(decoder, lambda *_: {})(chooser, gen_length)}
        if chooser.random() < ENDLESS_SHARE:
            drawn["eos_ids"] = ()
        if "temperature" in setting_names and chooser.random() < 0.3:
            drawn |= {"temperature": 0.7, "seed": chooser.randrange(1000)}
        prompt = [chooser.randrange(model.config.vocab_size) for _ in range(chooser.randint(1, settings.max_prompt))]
        resolved = api.decoder_settings(model, decoder, **drawn)
        api.check_prompt(model, prompt, resolved.num_positions)
        yield decoder, prompt, resolved


def _decode(model: api.LoadedModel, requests: Sequence[SoakRequest], batch_size: int) -> list[Tokens | None]:
    """Tokens of each request, None for failed ones. A batch size of 1 uses the engine's loop for single requests."""
    tokens: list[Tokens | None] = [None] * len(requests)
    if batch_size > 1:
        for index, outcome in api.generate_stream(model, requests, batch_size):
            tokens[index] = None if isinstance(outcome, DecodeError) else outcome.tokens
        return tokens
    for index, (decoder, prompt, settings) in enumerate(requests):
        resolved = api.with_width_cost(settings, lambda: model.width_cost)
        try:
            tokens[index] = model.engine.run(DECODERS[decoder].decode, prompt, resolved).tokens
        except DecodeError:
            continue
    return tokens


def _decode_probes(model: api.LoadedModel, probes: Sequence[SoakRequest]) -> list[Tokens | None]:
    """Decodes one half of the probes alone and the other half in one batch."""
    half = len(probes) // 2
    return _decode(model, probes[:half], 1) + _decode(model, probes[half:], len(probes) - half)


def _moment(model: api.LoadedModel, requests: int, started: float, drifted: int) -> Moment:
    gc.collect()
    on_cuda = model.device.type == "cuda"
    return Moment(
        requests=requests,
        seconds=time.monotonic() - started,
        host_bytes=int(STATM.read_text().split()[1]) * PAGE_BYTES if STATM.exists() else 0,
        tensor_bytes=_tensor_bytes(),
        cache_bytes=model.engine.cache_bytes,
        device_bytes=torch.cuda.memory_allocated(model.device) if on_cuda else 0,
        drifted=drifted,
    )


def _tensor_bytes() -> int:
    """Size of all storages that live tensors use; a shared storage counts once."""
    storages = {}
    for live in gc.get_objects():
        if type(live) in (torch.Tensor, torch.nn.Parameter):
            storage = live.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def main(
    model: Model = "embedded",
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 10_000,
    max_batch: Annotated[int, typer.Option(min=1, help="Largest number of requests decoded together.")] = 16,
    max_prompt: Annotated[int, typer.Option(min=1, help="Largest number of tokens of a prompt.")] = 256,
    max_gen: Annotated[int, typer.Option(min=1, help="Largest number of tokens of a response.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of prompts, lengths and settings.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Device = "auto",
    out: Out = None,
) -> None:
    """Decode thousands of random requests in one process: does memory grow, does any result drift?"""
    settings = SoakSettings(
        num_requests=requests, max_batch=max_batch, max_prompt=max_prompt, max_gen=max_gen, seed=seed
    )
    prepare(out)

    def progress(moment: Moment) -> None:
        memory = moment.host_bytes / MIB
        show_progress(f"{moment.requests}/{requests} requests, {moment.seconds:.0f} s, {memory:.0f} MiB")

    checkpoint = parse_model_args({"pretrained": model}).checkpoint
    report = soak(LoadedModel.open(checkpoint, dtype=dtype, device=device), settings, progress)
    print(report.in_words())
    write_json(out, report.to_json())
    if report.failed or report.drifted or report.leaks:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_script(main)
