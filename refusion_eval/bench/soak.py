"""`refusion-eval soak`: thousands of requests through one engine, to see that no memory grows and no result drifts.

Requests come in rounds, with random prompts, lengths and settings of every decoder that the checkpoint fits, most of
them in batches of random size and some alone. After each round the same probes are decoded as before the first, and
memory is read.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from refusion_eval import api
from refusion_eval.decoders import DECODERS
from refusion_eval.errors import ConfigError, DecodeError

Draw = Callable[[random.Random, int], dict[str, Any]]
Tokens = tuple[int, ...]

NUM_PROBES = 6
ALONE_SHARE = 0.1
ENDLESS_SHARE = 0.7  # of the requests, which have no end token: random prompts get short answers
STATM = Path("/proc/self/statm")
PAGE_BYTES = 4096
MIB = 2**20
# Growth of host memory in 1,000 requests that is no leak: an allocator's heap still settles by some MiB.
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
    """A block length that divides the response, and steps that divide among its blocks."""
    num_blocks = chooser.choice([count for count in (1, 2, 4) if gen_length % count == 0])
    block_length = gen_length // num_blocks
    return {"block_length": block_length, "steps": num_blocks * chooser.randint(1, block_length)}


def _bd3lm(chooser: random.Random, gen_length: int) -> dict[str, Any]:
    return {"block_length": chooser.choice((4, 8, 16)), "threshold": chooser.random()}


def _esolm(chooser: random.Random, gen_length: int) -> dict[str, Any]:
    return {"alpha_0": chooser.random(), "steps": chooser.randint(1, gen_length)}


# What is drawn beside length, temperature and seed; of other decoders, the defaults serve.
DRAWS: Mapping[str, Draw] = {"refusion": _refusion, "llada": _blocks, "bd3lm": _bd3lm, "esolm": _esolm}


@dataclass(frozen=True, kw_only=True)
class SoakSettings:
    """How long and how wild.

    Attributes:
        num_requests: in all, probes not counted, >= 1.
        round_size: requests between two looks at memory and probes, >= 1.
        max_batch: most requests alive at once, >= 1.
        max_prompt, max_gen: most tokens of a prompt and of a response, >= 1.
        seed: of everything random.
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
    """What was seen after a round.

    Attributes:
        requests: decoded so far.
        seconds: since the start.
        host_bytes: resident memory of the process.
        tensor_bytes: of all live tensors, on whatever device, the keys and values that the engine holds among them.
        cache_bytes: these keys and values.
        device_bytes: what the CUDA allocator has handed out; 0 on a CPU.
        drifted: probes whose tokens were not those of the first time.
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
    """What came of it.

    Attributes:
        conditions: model, device, settings.
        moments: one before the first request, then one a round.
        decoded: decoder -> requests.
        failed: requests that ended in an error.
        tokens: decoded.
    """

    conditions: Mapping[str, Any]
    moments: Sequence[Moment]
    decoded: Mapping[str, int]
    failed: int
    tokens: int

    @property
    def drifted(self) -> int:
        """Probes, over all rounds, that came out otherwise than the first time."""
        return sum(moment.drifted for moment in self.moments)

    @property
    def num_compared(self) -> int:
        """Probes that were held against the first time."""
        return NUM_PROBES * (len(self.moments) - 1)

    @property
    def leaks(self) -> bool:
        """Whether memory grows beyond `MOST_GROWTH`; False where there are too few rounds to tell."""
        return any(self.growth(name) > MOST_GROWTH for name in MEMORIES)

    def growth(self, name: str) -> float:
        """Bytes that a figure of `Moment` grows by in 1,000 requests: slope of a line through the later half.

        NaN with fewer than three rounds in that half.
        """
        later = self.moments[len(self.moments) // 2 :]
        if len(later) < 3:
            return math.nan
        slope, _ = np.polyfit([one.requests for one in later], [getattr(one, name) for one in later], 1)
        return float(1000 * slope)

    def in_words(self) -> str:
        """A few lines for the terminal."""
        last = self.moments[-1]
        of_decoders = ", ".join(f"{name} {count:,}" for name, count in sorted(self.decoded.items()))
        lines = [
            f"{last.requests:,} requests ({of_decoders}), {self.tokens:,} tokens, {last.seconds:.0f} s",
            f"failed: {self.failed}; probes that drifted: {self.drifted} of {self.num_compared}",
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
        """Everything."""
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
    """Decodes and watches.

    Args:
        model: a checkpoint; every decoder that it fits takes part.
        settings: how long and how wild.
        progress: told after every round.

    Raises:
        ConfigError: responses and prompts of these lengths exceed the context.
    """
    chooser = random.Random(settings.seed)
    probes = list(_requests(model, settings, random.Random(settings.seed + 1), NUM_PROBES))
    first = _decode_probes(model, probes)
    started = time.monotonic()
    moments = [_look(model, 0, started, 0)]
    decoded = dict.fromkeys(model.card.decoders, 0)
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
        moments.append(_look(model, done + size, started, drifted))
        progress(moments[-1])
    conditions = {"model": model.name, "device": str(model.device), "dtype": str(model.dtype), **asdict(settings)}
    return SoakReport(conditions=conditions, moments=moments, decoded=decoded, failed=failed, tokens=tokens)


Asked = tuple[str, list[int], Any]


def _requests(model: api.LoadedModel, settings: SoakSettings, chooser: random.Random, count: int) -> Iterator[Asked]:
    """Random requests of the checkpoint's decoders in turn: decoder, prompt, settings."""
    decoders = model.card.decoders
    for number in range(count):
        decoder = decoders[number % len(decoders)]
        known = DECODERS[decoder].Settings.__dataclass_fields__
        gen_length = 4 * chooser.randint(1, max(1, settings.max_gen // 4))
        drawn = {"gen_length": gen_length, **DRAWS.get(decoder, lambda *_: {})(chooser, gen_length)}
        if chooser.random() < ENDLESS_SHARE:
            drawn["eos_ids"] = ()
        if "temperature" in known and chooser.random() < 0.3:
            drawn |= {"temperature": 0.7, "seed": chooser.randrange(1000)}
        prompt = [chooser.randrange(model.config.vocab_size) for _ in range(chooser.randint(1, settings.max_prompt))]
        resolved = api.decoder_settings(model, decoder, **drawn)
        api.check_prompt(model, prompt, resolved.num_positions)
        yield decoder, prompt, resolved


def _decode(model: api.LoadedModel, requests: Sequence[Asked], batch_size: int) -> list[Tokens | None]:
    """Tokens of each request, None where it failed; a batch size of 1 is the engine's loop for one request."""
    found: list[Tokens | None] = [None] * len(requests)
    if batch_size > 1:
        for index, outcome in api.generate_stream(model, requests, batch_size):
            found[index] = None if isinstance(outcome, DecodeError) else outcome.tokens
        return found
    for index, (decoder, prompt, settings) in enumerate(requests):
        here = api.with_width_cost(settings, lambda: model.width_cost)
        try:
            found[index] = model.engine.run(DECODERS[decoder].decode, prompt, here).tokens
        except DecodeError:
            continue
    return found


def _decode_probes(model: api.LoadedModel, probes: Sequence[Asked]) -> list[Tokens | None]:
    """Half of them alone, half together."""
    half = len(probes) // 2
    return _decode(model, probes[:half], 1) + _decode(model, probes[half:], len(probes) - half)


def _look(model: api.LoadedModel, requests: int, started: float, drifted: int) -> Moment:
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
    """Bytes of all storages that a live tensor uses, each once."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
