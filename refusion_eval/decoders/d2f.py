"""D2F's decoding (Discrete Diffusion Forcing, arXiv 2508.09192): several blocks of masks filled in at once.

A block sees itself both ways and everything before it, never what comes after it; the prompt is the first block. So
the keys and values of a finished block never change once all blocks before it are finished, and are cached then. Blocks
are appended while the last one is still being filled in. A block is full once enough of the one before it is decoded:
from then on every forward fixes at least one of its tokens.

One algorithm serves both models that it was released for; they differ in the row that predicts a position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from refusion_eval.decoders import validate
from refusion_eval.decoders.canvas import Canvas, MaskedSettings
from refusion_eval.decoders.choose import most_confident
from refusion_eval.decoders.decoder import Decoder, Reads, Style
from refusion_eval.errors import ConfigError
from refusion_eval.trace import Trace
from refusion_eval.types import Commit, Confidence, Decoding, Forward, Read, Readout, block_causal

SamplingStrategy = Literal["default", "margin_confidence", "neg_entropy"]
BlockState = Literal["active", "to_cache", "in_cache"]


@dataclass(frozen=True, kw_only=True, slots=True)
class D2fSettings(MaskedSettings):
    """Settings of D2F's decoder, named as in its release; the defaults are those of its HumanEval and MATH on LLaDA.

    `gen_length` is the release's max_new_tokens: whole blocks that fit in it are decoded. Above temperature 0,
    confidences are taken from the tempered distribution too.

    Attributes:
        shift: how many rows before a position the row lies that predicts it; the model decides it, not the user.
        block_size: positions of a block.
        block_add_threshold: a block is appended once this share of the last one is decoded; at most one a forward.
        decoded_token_threshold: a block becomes full, for good, once this share of the one before it is decoded.
        skip_threshold: a token is fixed if its probability exceeds this (strictly).
        sampling_strategy: what a full block picks its best candidate by where none exceeds skip_threshold: probability,
            probability minus that of the second ("margin_confidence"), or negative entropy.
        halt_ids: once one of these is fixed no block is appended any more; None is the first of `eos_ids` alone, as
            released, so that on LLaDA <|eot_id|> ends the text but not the growth.
        max_iterations: forwards after which decoding ends whatever is still masked.

    Raises:
        ConfigError: a value is out of its range, or not one block fits.
    """

    decoder: ClassVar[str] = "d2f"
    shift: ClassVar[int] = 0

    block_size: int = 32
    block_add_threshold: float = 0.1
    decoded_token_threshold: float = 0.95
    skip_threshold: float = 0.9
    sampling_strategy: SamplingStrategy = "default"
    halt_ids: tuple[int, ...] | None = None
    max_iterations: int = 10_000

    def __post_init__(self) -> None:
        MaskedSettings.__post_init__(self)
        name = self.decoder
        validate.require_integer(name, "block_size", self.block_size, at_least=1)
        for threshold in ("block_add_threshold", "decoded_token_threshold", "skip_threshold"):
            validate.require_number(name, threshold, getattr(self, threshold), 0.0, 1.0)
        strategies = ("default", "margin_confidence", "neg_entropy")
        validate.require_choice(name, "sampling_strategy", self.sampling_strategy, strategies)
        validate.require_token_ids(name, "halt_ids", self.halt_ids or ())
        validate.require_integer(name, "max_iterations", self.max_iterations, at_least=1)
        if self.block_size > self.gen_length:
            raise ConfigError(
                f"{name}: block_size is {self.block_size} and gen_length {self.gen_length}; only whole blocks are "
                "decoded, so set gen_length to at least block_size"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks of the longest response."""
        return self.gen_length // self.block_size

    @property
    def num_positions(self) -> int:
        """Positions behind the prompt that decoding may touch: whole blocks."""
        return self.num_blocks * self.block_size

    @property
    def halting(self) -> tuple[int, ...]:
        """The ids that end the growth."""
        return self.eos_ids[:1] if self.halt_ids is None else self.halt_ids

    @property
    def confidence(self) -> Confidence:
        """The softmax that candidates are compared by; in the model's dtype it chooses the candidate as well."""
        return Confidence(
            temperature=self.temperature or 1.0,
            dtype=self.confidence_dtype,
            choose=self.confidence_dtype == "model" and self.temperature == 0,
        )

    def read(self, rows: Sequence[int], step: int, positions: Sequence[int]) -> Read:
        """A read of candidates, confidences and what `sampling_strategy` goes by; arguments as in the base class."""
        return replace(
            MaskedSettings.read(self, rows, step, positions),
            margin=self.sampling_strategy == "margin_confidence",
            entropy=self.sampling_strategy == "neg_entropy",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class D2fLladaSettings(D2fSettings):
    """Settings of D2F on LLaDA, whose rows predict their own position; attributes as `D2fSettings`."""

    decoder: ClassVar[str] = "d2f_llada"


@dataclass(frozen=True, kw_only=True, slots=True)
class D2fDreamSettings(D2fSettings):
    """Settings of D2F on Dream, whose rows predict the next position; attributes as `D2fSettings`."""

    decoder: ClassVar[str] = "d2f_dream"
    shift: ClassVar[int] = 1


@dataclass(slots=True)
class Block:
    """Consecutive positions that are filled in together.

    Attributes:
        start: its first response index; the prompt's is negative.
        size: number of positions.
        masked: response indices that are still masked, ascending.
        state: "active" while it, or a block before it, has masks; then "to_cache" until a forward has seen it
            finished, whose keys and values are the final ones.
        full: whether each forward fixes at least one of its tokens.
    """

    start: int
    size: int
    masked: list[int]
    state: BlockState = "active"
    full: bool = False

    @property
    def decoded_ratio(self) -> float:
        """Share of its positions that are final."""
        return (self.size - len(self.masked)) / self.size


class _Guess(NamedTuple):
    """Candidate of a position, its probability, and what the best one is picked by."""

    token: int
    prob: np.floating
    score: np.floating


class Pipeline:
    """Prompt and response as blocks in order: cached ones, then finished ones, then those with masks.

    Attributes:
        canvas: the tokens.
        blocks: the prompt, then the response's.

    Args:
        prompt: token ids.
        settings: of the decoder.
        trace: told of choices and of what becomes final.
    """

    def __init__(self, prompt: Sequence[int], settings: D2fSettings, trace: Trace) -> None:
        self.canvas = Canvas(prompt, settings, trace, gen_length=0)
        self.blocks = [Block(-len(prompt), len(prompt), [], "to_cache", full=True)]
        self._settings = settings
        self._trace = trace
        self._halted = False
        self._num_final_rows = 0
        self._asked: list[int] = []
        self._guesses: dict[int, _Guess] = {}

    @property
    def uncached(self) -> list[Block]:
        """The blocks that forwards are made of."""
        return [block for block in self.blocks if block.state != "in_cache"]

    @property
    def finished(self) -> bool:
        """Whether nothing is left to fill in."""
        return all(block.state != "active" for block in self.blocks)

    def grow(self) -> None:
        """Appends a block of masks if the last one has come far enough."""
        settings, size = self._settings, self._settings.block_size
        room = len(self.blocks) - 1 < settings.num_blocks
        if room and not self._halted and self.blocks[-1].decoded_ratio >= settings.block_add_threshold:
            start = self.canvas.gen_length
            self.canvas.extend(size)
            self.blocks.append(Block(start, size, list(range(start, start + size))))

    def activate(self) -> None:
        """Makes the blocks full that follow one that has come far enough."""
        for block, following in pairwise(self.blocks):
            if block.decoded_ratio >= self._settings.decoded_token_threshold:
                following.full = True

    def forward(self, step: int) -> Forward:
        """The uncached blocks, finished ones first; the cache gets the rows that were already final one forward ago.

        With a shift, the row that predicts the first position is cached, and no row can be read twice: that position
        keeps the guess, at a temperature the sample too, of the forward that had the row, whose result is exact.
        """
        settings, canvas, blocks = self._settings, self.canvas, self.uncached
        start = blocks[0].start
        self._asked = [position for block in blocks for position in block.masked if position - settings.shift >= start]
        rows = [position - settings.shift - start for position in self._asked]
        return Forward(
            canvas.tokens[canvas.start + start :],
            range(canvas.start + start, len(canvas.tokens)),
            block_causal([block.size for block in blocks]),
            (settings.read(rows, step, self._asked),) if rows else (),
            Commit(range(self._num_final_rows)),
            kind="denoise",
        )

    def take(self, readouts: Sequence[Readout]) -> None:
        """Fixes tokens of the active blocks, and counts the finished ones of the last forward as cached."""
        for readout in readouts:
            self._guesses.update(zip(self._asked, _guesses(readout), strict=True))
        positions = [position for block in self.uncached for position in self._chosen(block)]
        tokens = [self._guesses[position].token for position in positions]
        self.canvas.fix(positions, tokens)
        self._halted = self._halted or any(token in self._settings.halting for token in tokens)

        self._num_final_rows = 0
        for block in self.uncached:
            block.masked = self.canvas.masked(block.masked)
            if block.state == "to_cache":
                block.state = "in_cache"
                self._num_final_rows += block.size

    def retire(self) -> None:
        """Releases the finished blocks that no unfinished one precedes to the cache."""
        for block in self.uncached:
            if block.masked:
                return
            block.state = "to_cache"

    def _chosen(self, block: Block) -> list[int]:
        """Masked positions of a block that become final now: the sure ones, else the best one if the block is full."""
        if not block.masked:
            return []
        guesses = [self._guesses[position] for position in block.masked]
        scores = np.array([guess.prob for guess in guesses])
        chosen = np.flatnonzero(scores > self._settings.skip_threshold).tolist()
        if not chosen and block.full:
            scores = np.array([guess.score for guess in guesses])
            chosen = most_confident(scores, 1)
        positions = [block.masked[index] for index in chosen]
        self._trace.select("token", block.masked, scores.tolist(), positions)
        return positions


def _guesses(readout: Readout) -> list[_Guess]:
    scores = readout.probs
    if readout.margin is not None:
        scores = readout.margin
    elif readout.entropy is not None:
        scores = -readout.entropy
    return [_Guess(int(token), *pair) for token, *pair in zip(readout.tokens, readout.probs, scores, strict=True)]


def decode(prompt: Sequence[int], settings: D2fSettings, trace: Trace) -> Decoding:
    """Decodes one prompt; takes at most as many forwards as it fixes tokens."""
    return (yield from decode_blocks(Pipeline(prompt, settings, trace), settings))


def decode_blocks(pipeline: Pipeline, settings: D2fSettings) -> Decoding:
    """As `decode`, on blocks that a caller can watch."""
    for step in range(settings.max_iterations):
        pipeline.grow()
        pipeline.activate()
        if pipeline.finished:
            break
        pipeline.take((yield pipeline.forward(step)))
        pipeline.retire()
        if reason := pipeline.canvas.settled():
            return pipeline.canvas.finish(reason)
    return pipeline.canvas.finish()


DECODERS = {
    "d2f_dream": Decoder(
        decode,
        D2fDreamSettings,
        label="Dream w/ D2F",
        reads=Reads("block_causal", masked="next"),
        fits=("dream",),
        style=Style("#56B4E9", "X", (0, (2, 2)), order=9),
    ),
    "d2f_llada": Decoder(
        decode,
        D2fLladaSettings,
        label="LLaDA w/ D2F",
        reads=Reads("block_causal", masked="own"),
        fits=("llada",),
        style=Style("#56B4E9", "P", (0, (4, 1, 2, 1)), order=6),
    ),
}
