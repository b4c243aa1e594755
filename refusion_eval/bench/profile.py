"""Profile of decoding at batch size 1: the time of each part of the engine."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from refusion_eval import api
from refusion_eval.decoders import DECODERS
from refusion_eval.engine import engine as engine_module
from refusion_eval.engine import masks
from refusion_eval.engine.engine import Engine
from refusion_eval.models import transformer as transformer_module
from refusion_eval.models.cache import KVCache
from refusion_eval.models.device import synchronize
from refusion_eval.models.transformer import Attend, Transformer

ATTENTION = "attention"
HEAD = "output head"
HOST = "decoder and engine (host)"
# Timed functions: (owner, attribute, part). The time of a part excludes that of the parts called within it.
PARTS: Sequence[tuple[Any, str, str]] = (
    (transformer_module, "linear", "matrix products"),
    (transformer_module, "rms_norm", "norms"),
    (transformer_module, "rotate", "rotary embedding"),
    (transformer_module, "swiglu", "activation"),
    (Transformer, "hidden", "embedding and residual sums"),
    (Transformer, "logits", HEAD),
    (engine_module, "read_out", "readout and its copy to the host"),
    (KVCache, "commit", "cache commits"),
    (masks, "attend_over", "masks"),
)


@dataclass(frozen=True, slots=True)
class Profile:
    """Time of each part of a decoding.

    Attributes:
        seconds: seconds by part; they add up to the time of the decoding with stopwatches.
        unwatched: seconds of the same decoding without stopwatches.
    """

    seconds: Mapping[str, float]
    num_forwards: int
    unwatched: float

    @property
    def shares(self) -> dict[str, float]:
        """Share of the time by part, largest first."""
        total = sum(self.seconds.values())
        return {name: part / total for name, part in sorted(self.seconds.items(), key=lambda item: -item[1])}


class _Stopwatches:
    """Measures exclusive times of nested parts; synchronises the device at every change."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._device = device
        self._parts: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._switch()
        self._parts.append(HEAD if HEAD in self._parts else name)  # the norm and product of the head belong to it
        try:
            yield
        finally:
            self._switch()
            self._parts.pop()

    def _switch(self) -> None:
        synchronize(self._device)
        now = time.perf_counter()
        if self._parts:
            self.seconds[self._parts[-1]] += now - self._since
        self._since = now

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with self.part(name):
                return function(*arguments, **named)

        return call


def profile(model: api.LoadedModel, prompts: Sequence[Sequence[int]], settings: Mapping[str, Any]) -> Profile:
    """Decodes token ids with fused ReFusion at batch size 1, once without stopwatches and once with one on every part.

    Its forwards are made of separate operations: one that is recorded or compiled as a whole has no parts to time.
    """
    fused = api.decoder_settings(model, "refusion", **settings, fuse=True)
    resolved = api.with_width_cost(fused, lambda: model.width_cost)
    decode = DECODERS["refusion"].decode
    engine = Engine(model.transformer, "sdpa" if model.attention == "native" else model.attention)
    engine.run(decode, prompts[0], resolved)
    unwatched = sum(engine.run(decode, prompt, resolved).seconds for prompt in prompts)
    watches = _Stopwatches(model.device)
    with _watching(watches), watches.part(HOST):
        num_forwards = sum(engine.run(decode, prompt, resolved).num_forwards for prompt in prompts)
    return Profile(dict(watches.seconds), num_forwards, unwatched)


@contextlib.contextmanager
def _watching(watches: _Stopwatches) -> Iterator[None]:
    """Replaces every function of `PARTS` by a timed one. The function that `attend_over` returns is timed, too."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in PARTS]
    for owner, name, part in PARTS:
        setattr(owner, name, watches.timed(getattr(owner, name), part))
    attend_over = masks.attend_over

    def timed_attend_over(*arguments: Any, **named: Any) -> Attend:
        return watches.timed(attend_over(*arguments, **named), ATTENTION)

    masks.attend_over = timed_attend_over
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def profile_table(measured: Profile) -> str:
    """The profile as text, largest part first."""
    watched = sum(measured.seconds.values())
    lines = [f"{'Part of a batch-1 decode':<40} {'share':>7} {'ms a forward':>13}"]
    lines += [
        f"  {name:<38} {share:7.1%} {1e3 * share * watched / measured.num_forwards:13.3f}"
        for name, share in measured.shares.items()
    ]
    lines.append(
        f"{measured.num_forwards} forwards, {1e3 * watched / measured.num_forwards:.3f} ms each with stopwatches, "
        f"{1e3 * measured.unwatched / measured.num_forwards:.3f} ms without"
    )
    return "\n".join(lines)
