"""What passes between a decoder, the engine and whoever asked: small frozen records, no torch.

A decoder is a generator: it yields a `Forward` (what it wants computed), receives one `Readout` for each `Read` in it,
and returns a `Response`. The engine runs it and hands out a `Decoded`.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from refusion_eval.trace import Trace

TokenArray = npt.NDArray[np.int64]
ProbArray = npt.NDArray[np.float32]

StopReason = Literal["eos", "length", "stop_string"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive query rows that share a rule about what they see.

    Every row sees all committed rows of the cache. Of the rows of its own forward it sees those of `sees`, and those of
    its own segment: up to and including itself if `causal`, else all of them.

    Attributes:
        size: number of rows, >= 1.
        sees: half-open ranges (first row, last row + 1) of rows of this forward that lie before the segment.
        causal: whether a row sees only earlier rows of its segment and itself.
    """

    size: int
    sees: tuple[tuple[int, int], ...] = ()
    causal: bool = True


Attention = tuple[Segment, ...]


def causal(num_rows: int) -> Attention:
    """Every row sees the rows before it and itself."""
    return (Segment(num_rows),)


def bidirectional(num_rows: int) -> Attention:
    """Every row sees every row."""
    return (Segment(num_rows, causal=False),)


def groups(sizes: Sequence[int]) -> Attention:
    """Independent groups side by side, each causal in itself: slots under completion share the cache without copies."""
    return tuple(Segment(size) for size in sizes)


def block_causal(sizes: Sequence[int]) -> Attention:
    """Blocks in order: full attention within a block, and every block sees the blocks before it."""
    segments, start = [], 0
    for size in sizes:
        segments.append(Segment(size, sees=((0, start),) if start else (), causal=False))
        start += size
    return tuple(segments)


@dataclass(frozen=True, slots=True)
class Read:
    """Which query rows go through the output head, and what is wanted of their logits.

    Attributes:
        rows: query rows, each 0 <= row < number of rows of the forward.
        given: for each row a token whose probability is wanted, or None.
        suppress: ids that may not be chosen. Probabilities keep the full vocabulary in their normaliser.
        temperature: 0 chooses the largest logit (ties: the lowest id), above 0 samples softmax(logits / temperature).
        draws: for each row the key of its random draw (`draw_key`); needed when temperature > 0. Equal keys and logits
            give equal samples, whatever else is in the forward or the batch.
        entropy, margin: whether these two statistics of the full softmax are wanted.
    """

    rows: Sequence[int]
    given: Sequence[int] | None = None
    suppress: tuple[int, ...] = ()
    temperature: float = 0.0
    draws: tuple[int, ...] = ()
    entropy: bool = False
    margin: bool = False


@dataclass(frozen=True, slots=True)
class Readout:
    """What a `Read` gave: host arrays with one entry a row, in the order of `Read.rows`.

    Attributes:
        tokens: the chosen token ids.
        probs: probability of the chosen token under the untempered softmax over the full vocabulary, at most 1.
        given: likewise of `Read.given`; None if it was None.
        entropy: entropy of that softmax in nats; None if not wanted.
        margin: largest minus second largest probability; None if not wanted.
    """

    tokens: TokenArray
    probs: ProbArray
    given: ProbArray | None = None
    entropy: ProbArray | None = None
    margin: ProbArray | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """Which rows of the PREVIOUS forward stay in the KV cache; all its other rows vanish.

    Attributes:
        rows: query rows of the previous forward, in the order in which they are kept.
        replace: cache rows that they overwrite, one for each of `rows`; None appends them behind the committed rows.
    """

    rows: Sequence[int] = ()
    replace: Sequence[int] | None = None


NOTHING = Commit()


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward pass of one sequence.

    Attributes:
        tokens: token ids of the query rows.
        positions: their position ids, absolute indices in the final text; the physical order is free.
        attention: how the rows see each other; the segments' sizes add up to the number of rows.
        reads: what is read of which rows.
        commit: what of the previous forward stays in the cache.
        kind: what the decoder calls this forward ("plan", "verify", ...): for traces, without effect.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    attention: Attention
    reads: tuple[Read, ...]
    commit: Commit = NOTHING
    kind: str = "decode"


@dataclass(frozen=True, slots=True)
class Response:
    """What a decoder returns: the kept tokens, up to and including the first EOS, and why it ended."""

    tokens: tuple[int, ...]
    stop: StopReason


@dataclass(frozen=True, slots=True)
class Decoded:
    """What the engine hands out for one request.

    Attributes:
        tokens: generated token ids kept in the output, up to and including the first EOS; never the prompt.
        stop: why decoding ended.
        num_forwards: model calls made for this request.
        seconds: from the prompt on the device to the last token on the host, prefill included, device synchronised;
            in a batch, from admission to completion, so only comparable at batch 1.
        trace: what happened, event by event.
    """

    tokens: tuple[int, ...]
    stop: StopReason
    num_forwards: int
    seconds: float
    trace: Trace = field(repr=False)


Decoding = Generator[Forward, tuple[Readout, ...], Response]


class Decode(Protocol):
    """The signature of every decoder: a prompt, its own frozen settings, and the trace it reports to."""

    def __call__(self, prompt: Sequence[int], settings: Any, trace: Trace) -> Decoding:
        """Starts a decoding; nothing is computed until the engine asks for the first forward."""
        ...


StopRule = Callable[[Sequence[int]], bool]


def draw_key(seed: int, *counters: int) -> int:
    """Mixes a seed with counters (a position, a step) into the 64-bit key of one random draw.

    The mixing step is splitmix64's, so that neighbouring counters give unrelated keys.
    """
    mask = (1 << 64) - 1
    state = 0
    for value in (seed, *counters):
        state = (state + 0x9E3779B97F4A7C15 + value) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state
