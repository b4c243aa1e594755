"""The contract between decoders and the engine: small frozen records, without torch.

A decoder is a generator. It yields a `Forward`, which says what to compute, receives one `Readout` for each `Read` in
it, and returns a `Response`. The engine runs the decoder and returns a `Decoded`.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int64]
ProbArray = npt.NDArray[np.floating[Any]]

# Of a gap that is full; "content_filter" is of servers only.
StopReason = Literal["eos", "length", "stop_string", "content_filter", "gap"]
ConfidenceDtype = Literal["float32", "float64", "model"]

# What a checkpoint was trained to do: predict the next token ("causal"), fill masks by an unknown method ("masked"), or
# what the named method asks for.
CheckpointKind = Literal["causal", "masked", "refusion", "llada", "dream", "diffusion_gemma"]

# Weights up to this size are computed fastest by one thread: the embedded models make 824 tokens/s so, 38 with two.
ONE_THREAD_BYTES = 64 * 2**20

# The tags of a thinking block, as chat templates and models write them.
THINK_START, THINK_END = "<think>", "</think>"
PROMPT_END = 12  # a prompt that opens a thought has the tag among this many tokens at its end

# Token ids and positions are below these limits. No vocabulary and no context is near them.
MOST_TOKENS = 2**31
MOST_POSITIONS = 2**20

# Kind of the forwards of an encoder, whose decoder has forwards of its own.
ENCODE = "encode"

# Stands in a prompt for a token that is to be found: the places of a gap (see `refusion_eval.decoders.infilling`).
HOLE = -1
# Stands behind them for each further token that a gap may have, whose length is then open.
OPEN = -2


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive query rows with the same attention rule; every row sees all committed rows of the cache.

    Attributes:
        size: number of rows, >= 1.
        sees: half-open ranges (first row, last row + 1) of rows of this forward before the segment, which it sees too.
        causal: whether a row sees only earlier rows of its segment and itself, or all of them.
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
    """Independent groups, each causal in itself; slots under completion share the cache in this way."""
    return tuple(Segment(size) for size in sizes)


def block_causal(sizes: Sequence[int], padding: int = 0) -> Attention:
    """Full attention within a block, and every block sees the blocks before it, but not the padding in front of all."""
    segments, start = [Segment(padding, causal=False)] if padding else [], padding
    for size in sizes:
        segments.append(Segment(size, sees=((padding, start),) if start > padding else (), causal=False))
        start += size
    return tuple(segments)


@dataclass(frozen=True, slots=True)
class Confidence:
    """The distribution from which probabilities, entropy and margin are computed.

    Attributes:
        temperature: divides the logits, > 0; independent of `Read.temperature`, at which tokens are sampled.
        exclude: ids that get no probability here, although they may be chosen.
        dtype: precision of the softmax; "model" is the dtype of the weights, as in several releases.
        choose: whether the most probable token at this precision, at which logits can tie, is chosen instead of the
            largest logit. It has no effect when sampling.
        truncate: whether `Read.top_p` and `Read.top_k` truncate this distribution, and not the sampled one alone.
    """

    temperature: float = 1.0
    exclude: tuple[int, ...] = ()
    dtype: ConfidenceDtype = "float32"
    choose: bool = False
    truncate: bool = True


PLAIN = Confidence()


@dataclass(frozen=True, slots=True)
class Guidance:
    """Classifier-free guidance: logits = u + (scale + 1) (c - u).

    Attributes:
        rows: for each row that is read (logits c), the row of the same forward with the logits u.
        scale: > 0.
    """

    rows: Sequence[int]
    scale: float


@dataclass(frozen=True, slots=True)
class Read:
    """Which query rows go through the output head, and what is computed from their logits.

    Attributes:
        rows: query rows, each 0 <= row < number of rows of the forward.
        given: for each row a token whose probability is computed, or None.
        suppress: ids that may not be chosen. Probabilities are still normalised over the full vocabulary.
        temperature: 0 chooses the largest logit (ties: the lowest id), above 0 samples softmax(logits / temperature).
        draws: for each row the key of its random draw (`draw_key`); required when temperature > 0. Equal keys and
            logits give equal samples, whatever else is in the forward or the batch.
        entropy, margin: whether these two statistics are computed.
        logits: whether the logits themselves can be had.
        exclude: ids whose logits count as minus infinity for everything.
        top_p: keeps the most probable tokens up to the first one at which their sum exceeds top_p, in (0, 1], in the
            sampled distribution and in that of the confidences. 1 keeps all.
        top_k: keeps this many of the largest logits in both distributions; 0 keeps all.
        top_k_first: whether top_p counts the probabilities of what top_k keeps; else it counts those of all tokens.
        confidence: the distribution from which probabilities, entropy and margin are computed.
        guidance: replaces the logits by guided ones, before everything else.
    """

    rows: Sequence[int]
    given: Sequence[int] | None = None
    suppress: tuple[int, ...] = ()
    temperature: float = 0.0
    draws: tuple[int, ...] = ()
    entropy: bool = False
    margin: bool = False
    logits: bool = False
    exclude: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    top_k_first: bool = False
    confidence: Confidence = PLAIN
    guidance: Guidance | None = None


@dataclass(frozen=True, slots=True)
class Readout:
    """The result of a `Read`: host arrays with one entry a row, in the order of `Read.rows`.

    Attributes:
        tokens: the chosen token ids.
        probs: probability of the chosen token under `Read.confidence`; float64 if the confidence is, else float32.
        given, entropy, margin: probability of each token in `Read.given`, entropy of the distribution in nats, and
            largest minus second largest probability; None if not requested.
        rounded_to: dtype of the weights, such as "bfloat16", if probabilities were rounded to it; else empty.
        logits: copies the logits of one of the rows from the device, [vocabulary]; None if not requested.
        row_cost: what a further row costs in such a batch (`LoadCurve.row_cost`); None where it does not price rows.
    """

    tokens: TokenArray
    probs: ProbArray
    given: ProbArray | None = None
    entropy: ProbArray | None = None
    margin: ProbArray | None = None
    rounded_to: str = ""
    logits: Callable[[int], ProbArray] | None = None
    row_cost: float | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """Which rows of the PREVIOUS forward stay in the KV cache; all its other rows are dropped.

    The order of the rows of the cache is free, as position ids tell them apart.

    Attributes:
        rows: query rows of the previous forward, in the order in which they are kept.
        keep: number of committed rows that stay, counted from the first, with `rows` after them; None keeps all.
    """

    rows: Sequence[int] = ()
    keep: int | None = None


NOTHING = Commit()
DROP_ALL = Commit(keep=0)


@dataclass(frozen=True, slots=True)
class RowScores:
    """Scores of key rows by query rows of the same forward, by which the next commit is thinned out (Sparse-dLLM).

    The score of a key row is its key times the mean query of the query rows, both rotated, averaged over query heads,
    and then the largest in its neighbourhood. The next forward commits the key rows, of which each layer keeps the best
    ones, or nothing.

    Attributes:
        queries: rows of the forward, at least one.
        keys: rows of the forward; consecutive ones are neighbours.
        best: number of key rows that each layer keeps, the first ones among equals.
        pooling: size of the centred neighbourhood, odd; 1 leaves scores as they are.
    """

    queries: Sequence[int]
    keys: Sequence[int]
    best: int
    pooling: int = 1


@dataclass(frozen=True, slots=True)
class FeatureReuse:
    """Which rows of a forward are computed; the others reuse features of earlier forwards (dLLM-Cache).

    A row that is not computed adds the attention and MLP outputs of its last time in each layer, and other rows see its
    key and value of that time. Such forwards are of whole texts with full attention and an empty KV cache; those after
    the first have the same number of rows at the same positions.

    Attributes:
        num_prompt: number of rows of the prompt, which come first; the other rows are the response.
        refresh_prompt, refresh_response: whether all rows of the prompt, or of the response, are computed.
        transfer_ratio: in [0, 1]. If the response is not refreshed, all its values are computed, and in each layer this
            share of its rows, rounded down: those whose value changed most (cosine over all heads; the first rows among
            equals). With 0 nothing of the response is computed, not even values.
    """

    num_prompt: int
    refresh_prompt: bool = True
    refresh_response: bool = True
    transfer_ratio: float = 0.0


# Approximate caches of bidirectional models, each of one paper.
Approximation = RowScores | FeatureReuse


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward pass of one sequence.

    Attributes:
        tokens: token ids of the query rows.
        positions: position ids of the query rows, absolute indices in the final text, in any order.
        attention: attention rules of consecutive rows; the sizes of the segments add up to the number of rows.
        reads: what is computed from the logits of which rows.
        commit: which rows of the previous forward stay in the cache.
        kind: the decoder's name for this forward ("plan", "verify", ...), recorded in traces and without effect.
        approximation: how the forward takes part in an approximate cache; None is an exact forward.
        self_conditioning: divides the logits of the forward before, of which each row gets the mean embedding besides
            its own (DiffusionGemma); None for none.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    attention: Attention
    reads: tuple[Read, ...]
    commit: Commit = NOTHING
    kind: str = "decode"
    approximation: Approximation | None = None
    self_conditioning: float | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """The return value of a decoder: the tokens up to and including the first EOS, and why decoding ended.

    `num_forced` of the tokens are of no forward: they ended a thought whose budget was spent.
    """

    tokens: tuple[int, ...]
    stop: StopReason
    num_forced: int = 0


@dataclass(frozen=True, slots=True)
class ForwardDone:
    """One model call: its number, the decoder's name for it, its number of query rows, and that of the cached rows."""

    tag: ClassVar[str] = "forward"
    forward: int
    kind: str
    rows: int
    cached: int


@dataclass(frozen=True, slots=True)
class Select:
    """A choice among candidates (first positions of slots or blocks, or positions of tokens) by their scores."""

    tag: ClassVar[str] = "select"
    forward: int
    unit: str
    candidates: tuple[int, ...]
    scores: tuple[float, ...]
    chosen: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed for positions that are not final yet."""

    tag: ClassVar[str] = "draft"
    forward: int
    positions: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fix:
    """Positions that became final, and their tokens; a decoder that edits may change them later, or mask them again."""

    tag: ClassVar[str] = "fix"
    forward: int
    positions: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """The end of decoding: why, and how many positions the response keeps."""

    tag: ClassVar[str] = "stop"
    forward: int
    reason: str
    position: int


Event = ForwardDone | Select | Draft | Fix | Stop
E = TypeVar("E", ForwardDone, Select, Draft, Fix, Stop)
_EVENTS: dict[str, Callable[..., Event]] = {event.tag: event for event in (ForwardDone, Select, Draft, Fix, Stop)}


@dataclass(slots=True)
class Trace:
    """Events in the order in which they happened; an event carries the number of the last forward before it."""

    events: list[Event] = field(default_factory=list)
    num_forwards: int = 0
    num_unrecorded: int = field(default=0, compare=False)  # forwards that outgrew the buffer of recorded ones

    def forward(self, kind: str, rows: int, cached: int) -> None:
        """Counts one model call. Only the engine calls this: it is the one place where forwards are counted."""
        self.events.append(ForwardDone(self.num_forwards, kind, rows, cached))
        self.num_forwards += 1

    def select(self, unit: str, candidates: Sequence[int], scores: Sequence[float], chosen: Sequence[int]) -> None:
        self.events.append(Select(self._last, unit, tuple(candidates), tuple(map(float, scores)), tuple(chosen)))

    def draft(self, positions: Sequence[int], tokens: Sequence[int]) -> None:
        self.events.append(Draft(self._last, tuple(positions), tuple(map(int, tokens))))

    def fix(self, positions: Sequence[int], tokens: Sequence[int]) -> None:
        self.events.append(Fix(self._last, tuple(positions), tuple(map(int, tokens))))

    def stop(self, reason: str, position: int) -> None:
        """Records the end of decoding and the length of the response."""
        self.events.append(Stop(self._last, reason, position))

    @property
    def _last(self) -> int:
        return self.num_forwards - 1

    def fixed_at(self) -> dict[int, int]:
        """Maps every fixed position to the number of the forward that fixed it."""
        return {position: event.forward for event in self.of(Fix) for position in event.positions}

    def fixed_tokens(self) -> dict[int, int]:
        """Maps every fixed position to its token; positions beyond the kept response are included."""
        pairs = (zip(event.positions, event.tokens, strict=True) for event in self.of(Fix))
        return dict(chain.from_iterable(pairs))

    def of(self, kind: type[E]) -> Iterator[E]:
        """The events of one kind, in order."""
        return (event for event in self.events if isinstance(event, kind))

    def to_json(self) -> list[list[Any]]:
        """Events as plain lists [tag, field, ...], for records."""
        return [[event.tag, *_values(event)] for event in self.events]

    @classmethod
    def from_json(cls, rows: Sequence[Sequence[Any]]) -> Self:
        """Rebuilds a trace from `to_json`.

        Raises:
            KeyError, TypeError, ValueError: no decoding has these events.
        """
        trace = cls()
        for tag, *values in rows:
            event = _EVENTS[tag](*[tuple(value) if isinstance(value, list) else value for value in values])
            if tag == "forward":
                trace.num_forwards += 1
            if event.forward != trace.num_forwards - 1:
                raise ValueError(f"{tag} after forward {trace.num_forwards - 1} has the number {event.forward}")
            _check_event(event)
            trace.events.append(event)
        return trace


def _check_event(event: Any) -> None:
    """Raises TypeError or ValueError if a decoder never gives an event such fields."""
    lengths = set()
    for entry, value in zip(fields(event), _values(event), strict=True):
        if entry.type is str:
            if type(value) is not str:
                raise TypeError("a name is not a text")
        elif entry.name == "scores":
            if not {int, float} >= set(map(type, value)):
                raise TypeError("a score is not a number")
        elif entry.name != "forward":
            limit = MOST_TOKENS if entry.name == "tokens" else MOST_POSITIONS
            _check_whole((value,) if entry.type is int else value, limit)
        if entry.name in ("positions", "tokens", "candidates", "scores"):
            lengths.add(len(value))
    if len(lengths) > 1:
        raise ValueError("positions and their values are not equally many")


def _check_whole(values: Sequence[int], limit: int) -> None:
    """Raises TypeError for anything but whole numbers, ValueError for one that is negative or reaches the limit."""
    if not {int}.issuperset(map(type, values)):
        raise TypeError("there are no whole numbers where there have to be")
    if values and (min(values) < 0 or max(values) >= limit):
        raise ValueError(f"{min(values)} to {max(values)} are not all from 0 to {limit - 1}")


def _values(event: Event) -> list[Any]:
    values = (getattr(event, name) for name in event.__slots__)
    return [list(value) if isinstance(value, tuple) else value for value in values]


def num_of_first(fixed_at: Mapping[int, int], num_tokens: int) -> int:
    """How many of the first tokens of a response became final in the first forward, by `Trace.fixed_at`."""
    return sum(forward == 0 and position < num_tokens for position, forward in fixed_at.items())


@dataclass(frozen=True, slots=True)
class Decoded:
    """The result of one request.

    Attributes:
        tokens: generated token ids up to and including the first EOS, without the prompt.
        stop: why decoding ended.
        num_forwards: model calls made for this request.
        seconds: time from the prompt on the device to the last token on the host, with the device synchronised. In a
            batch it runs from admission to completion, so only times at batch 1 compare.
        trace: the events of the decoding.
        prefill_seconds: the part of `seconds` up to the end of the first forward; None if not timed, as in a batch.
        joules: energy that the device used in these seconds; None where it has no counter, and in a batch.
        text: the response as text, without special tokens, if the prompt was a text; else None.
        num_forced: tokens that no forward chose, because they ended a thought whose budget was spent.
        num_experts_read: experts whose weights the forwards read, summed over layers; None without experts, and in a
            batch.
    """

    tokens: tuple[int, ...]
    stop: StopReason
    num_forwards: int
    seconds: float
    trace: Trace = field(repr=False)
    prefill_seconds: float | None = None
    joules: float | None = None
    text: str | None = None
    num_forced: int = 0
    num_experts_read: int | None = None


Decoding = Generator[Forward, tuple[Readout, ...], Response]


# Every decoder takes a prompt, its own frozen settings, and the trace for its events.
Decode = Callable[[Sequence[int], Any, Trace], Decoding]
StopRule = Callable[[Sequence[int]], bool]


def draw_key(seed: int, *counters: int) -> int:
    """Mixes a seed with counters (a position, a step) into the 64-bit key of one random draw."""
    mask, state = (1 << 64) - 1, 0
    # The mixing step is that of splitmix64, so that neighbouring counters give unrelated keys.
    for value in (seed, *counters):
        state = (state + 0x9E3779B97F4A7C15 + value) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state
