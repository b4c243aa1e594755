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
ProbArray = npt.NDArray[np.floating[Any]]

StopReason = Literal["eos", "length", "stop_string"]
ConfidenceDtype = Literal["float32", "float64", "model"]

# What a checkpoint was trained to do, where its config.json names no decoders: predict the next token ("causal"), fill
# masks in a way that nothing tells ("masked"), or what the method of this name asks for.
CheckpointKind = Literal["causal", "masked", "refusion", "llada", "dream"]


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
class Confidence:
    """The distribution that probabilities, entropy and margin are taken from.

    Attributes:
        temperature: divides the logits, > 0; the one that tokens are sampled at is `Read.temperature`.
        exclude: ids that get no probability here, though they may be chosen.
        dtype: what the softmax is computed in; "model" is that of the weights, as several releases have it.
        choose: whether the token itself is the most probable one at this precision instead of the largest logit; in a
            short dtype several probabilities are equal where the logits differ. Only when nothing is sampled.
    """

    temperature: float = 1.0
    exclude: tuple[int, ...] = ()
    dtype: ConfidenceDtype = "float32"
    choose: bool = False


PLAIN = Confidence()


@dataclass(frozen=True, slots=True)
class Guidance:
    """Classifier-free guidance: logits = u + (scale + 1) (c - u).

    Attributes:
        rows: for each read row, whose logits are c, the row of the same forward that gives u.
        scale: > 0.
    """

    rows: Sequence[int]
    scale: float


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
        entropy, margin: whether these two statistics are wanted.
        exclude: ids whose logits count as minus infinity for everything.
        top_p: keeps the most probable tokens up to the first at which their sum exceeds it, in (0, 1]; of the
            distribution that is sampled as well as of that of the confidences. 1 keeps all.
        top_k: keeps this many of the largest logits, likewise; 0 keeps all.
        confidence: what probabilities, entropy and margin are taken from.
        guidance: replaces the logits by guided ones, before all else.
    """

    rows: Sequence[int]
    given: Sequence[int] | None = None
    suppress: tuple[int, ...] = ()
    temperature: float = 0.0
    draws: tuple[int, ...] = ()
    entropy: bool = False
    margin: bool = False
    exclude: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    confidence: Confidence = PLAIN
    guidance: Guidance | None = None


@dataclass(frozen=True, slots=True)
class Readout:
    """What a `Read` gave: host arrays with one entry a row, in the order of `Read.rows`.

    Attributes:
        tokens: the chosen token ids.
        probs: probability of the chosen token under `Read.confidence`, by default the untempered softmax over the full
            vocabulary; at most 1. float64 if the confidence is, else float32.
        given: likewise of `Read.given`; None if it was None.
        entropy: entropy of that distribution in nats; None if not wanted.
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

    The cache is a set: its rows lie in any order, positions tell them apart. So keys and values that are to be computed
    anew are not overwritten but left out, and those of a refreshed canvas begin with `keep=0`.

    Attributes:
        rows: query rows of the previous forward, in the order in which they are kept.
        replace: cache rows that they overwrite, one for each of `rows`; None appends them behind the committed rows.
        keep: how many committed rows stay, the first ones; None keeps all. With `replace` it must be None.
        best: how many of `rows` stay, in each layer those that score best there; `rows` must be the keys of the
            previous forward's `RowScores`, and `replace` None. Among equals the first of them stay. None keeps all.
    """

    rows: Sequence[int] = ()
    replace: Sequence[int] | None = None
    keep: int | None = None
    best: int | None = None


NOTHING = Commit()
DROP_ALL = Commit(keep=0)


@dataclass(frozen=True, slots=True)
class RowScores:
    """How much some rows of a forward look at others, in each layer: what `Commit.best` chooses by (Sparse-dLLM).

    The score of a key row is its key times the mean query of the query rows, both rotated, averaged over the query
    heads; then the largest score of its neighbourhood among the key rows.

    Attributes:
        queries: rows of the forward, at least one.
        keys: rows of the forward, in the order in which they are neighbours.
        pooling: size of the neighbourhood, centred; odd. 1 leaves every score its own.
    """

    queries: Sequence[int]
    keys: Sequence[int]
    pooling: int = 1


@dataclass(frozen=True, slots=True)
class FeatureReuse:
    """Which rows of a forward are computed, where all others take over what a forward before it computed (dLLM-Cache).

    Each layer adds an attention output and an MLP output to every row. A row that is not computed adds those that it
    added when it last was, and is seen with the key and value that it had. Refreshes are of all layers.

    Such a forward is of a whole text that sees itself both ways, with nothing in the KV cache; those after the first
    are of as many rows at the same positions.

    Attributes:
        num_prompt: how many rows, the first ones, belong to the prompt; the others are the response.
        refresh_prompt: whether all rows of the prompt are computed.
        refresh_response: whether all rows of the response are computed.
        transfer_ratio: in [0, 1]; where the response is not refreshed, all its values are computed, and in each layer
            this share of its rows, rounded down: those whose value is least like the one before (cosine of the vectors
            of all heads; among equals the first rows). 0 computes nothing of the response, values neither.
    """

    num_prompt: int
    refresh_prompt: bool = True
    refresh_response: bool = True
    transfer_ratio: float = 0.0


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
        scores: which rows are scored on the way, for the next forward's `Commit.best`.
        reuse: which rows are computed at all; None computes each.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    attention: Attention
    reads: tuple[Read, ...]
    commit: Commit = NOTHING
    kind: str = "decode"
    scores: RowScores | None = None
    reuse: FeatureReuse | None = None


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
        prefill_seconds: the part of `seconds` up to the end of the first forward, which reads the prompt; None where it
            was not timed, as in a batch.
    """

    tokens: tuple[int, ...]
    stop: StopReason
    num_forwards: int
    seconds: float
    trace: Trace = field(repr=False)
    prefill_seconds: float | None = None


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
