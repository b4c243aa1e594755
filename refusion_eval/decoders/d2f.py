"""D2F (Discrete Diffusion Forcing, arXiv 2508.09192): fills several blocks of masks at once.

Attention is full within a block, and a block sees the blocks before it; the prompt is the first block. Once a block and
all blocks before it are finished, its keys and values never change and are cached. A block is appended while the last
one is still being filled. A block becomes full, in the word of the release, once enough of the block before it is
decoded: from then on every forward fixes at least one of its tokens.

D2F was released for LLaDA and Dream. The algorithm is one; the models differ in the row that predicts a position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from refusion_eval.config import Fraction, NonNegativeInt, PositiveInt, settings_class
from refusion_eval.decoders import Decoder, Reads, Style, most_confident, rounded_threshold
from refusion_eval.decoders.canvas import Canvas, MaskedSettings
from refusion_eval.errors import ConfigError
from refusion_eval.types import Commit, Confidence, Decoding, Forward, Read, Readout, Trace, block_causal

SamplingStrategy = Literal["default", "margin_confidence", "neg_entropy"]


@settings_class("d2f")
class D2fSettings(MaskedSettings):
    """Settings of D2F's decoder, named as in its release; the defaults are those of its HumanEval and MATH on LLaDA.

    `gen_length` is the release's max_new_tokens: as many whole blocks are decoded as fit in it. Above temperature 0,
    confidences too are computed from the tempered distribution.

    Attributes:
        shift: rows between a position and the row that predicts it; a property of the model, not a choice of the user.
        block_size: positions of a block.
        block_add_threshold: a block is appended once this share of the last one is decoded, at most one a forward.
        decoded_token_threshold: a block becomes full once this share of the block before it is decoded.
        skip_threshold: a token is fixed if its probability exceeds this (strictly).
        sampling_strategy: how a full block picks its best candidate if none exceeds skip_threshold: by probability, by
            the distance to the second best probability ("margin_confidence"), or by low entropy ("neg_entropy").
        halt_ids: no block is appended after one of these tokens is fixed. None is the first of `eos_ids` only, as
            released: on LLaDA <|eot_id|> ends the text, but blocks are still appended.
        max_iterations: most forwards; decoding then ends, whatever is still masked.
    """

    decoder: ClassVar[str] = "d2f"
    shift: ClassVar[int] = 0

    block_size: PositiveInt = 32
    block_add_threshold: Fraction = 0.1
    decoded_token_threshold: Fraction = 0.95
    skip_threshold: Fraction = 0.9
    sampling_strategy: SamplingStrategy = "default"
    halt_ids: tuple[NonNegativeInt, ...] | None = None
    max_iterations: PositiveInt = 10_000

    def __post_init__(self) -> None:
        MaskedSettings.__post_init__(self)
        if self.block_size > self.gen_length:
            raise ConfigError(
                f"{self.decoder}: block_size is {self.block_size} and gen_length {self.gen_length}; only whole blocks "
                "are decoded, so set gen_length to at least block_size"
            )

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the longest response."""
        return self.gen_length // self.block_size

    @property
    def num_positions(self) -> int:
        """Positions after the prompt that decoding may touch: whole blocks."""
        return self.num_blocks * self.block_size

    @property
    def halting(self) -> tuple[int, ...]:
        """The tokens after which no block is appended."""
        return self.eos_ids[:1] if self.halt_ids is None else self.halt_ids

    @property
    def confidence(self) -> Confidence:
        """The distribution by which candidates are compared."""
        # In a short dtype probabilities tie where logits differ, and the release takes the first of the tied ones.
        return Confidence(
            temperature=self.temperature or 1.0,
            dtype=self.confidence_dtype,
            choose=self.confidence_dtype == "model" and self.temperature == 0,
        )

    def read(self, rows: Sequence[int], step: int, positions: Sequence[int]) -> Read:
        """As `MaskedSettings.read`, with the statistic that `sampling_strategy` compares."""
        return replace(
            MaskedSettings.read(self, rows, step, positions),
            margin=self.sampling_strategy == "margin_confidence",
            entropy=self.sampling_strategy == "neg_entropy",
        )


@settings_class("d2f_llada")
class D2fLladaSettings(D2fSettings):
    """Settings of D2F on LLaDA, in which a masked row predicts its own position; attributes as `D2fSettings`."""

    decoder: ClassVar[str] = "d2f_llada"


@settings_class("d2f_dream")
class D2fDreamSettings(D2fSettings):
    """Settings of D2F on Dream, in which a row predicts the next position; attributes as `D2fSettings`."""

    decoder: ClassVar[str] = "d2f_dream"
    shift: ClassVar[int] = 1


@dataclass(slots=True)
class Block:
    """Consecutive positions that are filled together.

    Attributes:
        start: first response index; negative for the prompt.
        size: number of positions.
        masked: response indices that are still masked, ascending.
    """

    start: int
    size: int
    masked: list[int]

    @property
    def decoded_ratio(self) -> float:
        """Share of the positions that are final."""
        return (self.size - len(self.masked)) / self.size


class _Guess(NamedTuple):
    """Candidate of a position, and the score by which the best candidate of a block is picked."""

    token: int
    prob: np.floating
    score: np.floating


class Pipeline:
    """Prompt and response as blocks in order: cached ones, then finished ones, then those with masks.

    Attributes:
        canvas: the tokens.
        blocks: the prompt, then the blocks of the response.
        num_cached: number of blocks whose keys and values are cached.
    """

    def __init__(self, prompt: Sequence[int], settings: D2fSettings, trace: Trace) -> None:
        self.canvas = Canvas(prompt, settings, trace, gen_length=0)
        self.blocks = [Block(-len(prompt), len(prompt), [])]
        self.num_cached = 0
        self._settings = settings
        self._trace = trace
        self._halted = False
        self._num_final_rows = 0
        self._positions_read: list[int] = []
        self._guesses: dict[int, _Guess] = {}
        self._skip_threshold = settings.skip_threshold

    @property
    def num_finished(self) -> int:
        """Number of blocks, cached ones included, before the first one with masks."""
        return next((number for number, block in enumerate(self.blocks) if block.masked), len(self.blocks))

    def is_full(self, number: int) -> bool:
        """Whether each forward fixes at least one token of a block of the response."""
        return self.blocks[number - 1].decoded_ratio >= self._settings.decoded_token_threshold

    def grow(self) -> None:
        """Appends a block of masks if enough of the last block is decoded."""
        # At most one a forward: a block that begins before anything near it is known would be filled with guesses.
        settings, size = self._settings, self._settings.block_size
        has_room = len(self.blocks) - 1 < settings.num_blocks
        if has_room and not self._halted and self.blocks[-1].decoded_ratio >= settings.block_add_threshold:
            start = self.canvas.gen_length
            self.canvas.extend(size)
            self.blocks.append(Block(start, size, list(range(start, start + size))))

    def forward(self, step: int) -> Forward:
        """The forward of the uncached blocks; it commits the rows that were already final in the forward before."""
        # With a shift, the row that predicts the first uncached position is in the cache and cannot be read again. That
        # position keeps the guess (and the sample) of the forward that computed the row, which is exact.
        settings, canvas, blocks = self._settings, self.canvas, self.blocks[self.num_cached :]
        start = blocks[0].start
        masked = (position for block in blocks for position in block.masked)
        self._positions_read = [position for position in masked if position - settings.shift >= start]
        rows = [position - settings.shift - start for position in self._positions_read]
        return Forward(
            canvas.tokens[canvas.start + start :],
            range(canvas.start + start, len(canvas.tokens)),
            block_causal([block.size for block in blocks]),
            (settings.read(rows, step, self._positions_read),) if rows else (),
            Commit(range(self._num_final_rows)),
            kind="denoise",
        )

    def take(self, readouts: Sequence[Readout]) -> None:
        """Fixes tokens, and counts the blocks that were finished before the last forward as cached."""
        for readout in readouts:
            self._guesses.update(zip(self._positions_read, _guesses(readout), strict=True))
            self._skip_threshold = rounded_threshold(self._settings.skip_threshold, readout)
        num_finished, unfinished = self.num_finished, range(self.num_finished, len(self.blocks))
        positions = [position for number in unfinished for position in self._chosen(number)]
        tokens = [self._guesses[position].token for position in positions]
        self.canvas.fix(positions, tokens)
        # A stop token ends growth, not decoding: blocks before it may still change where the text ends.
        self._halted = self._halted or any(token in self._settings.halting for token in tokens)
        for block in self.blocks[num_finished:]:
            block.masked = self.canvas.masked(block.masked)
        # Rows that were final when the forward was made; a block that it finished was computed with masks in it.
        self._num_final_rows = sum(block.size for block in self.blocks[self.num_cached : num_finished])
        self.num_cached = num_finished

    def _chosen(self, number: int) -> list[int]:
        """Masked positions that become final: those above skip_threshold, else the best one if the block is full."""
        masked = self.blocks[number].masked
        if not masked:
            return []
        guesses = [self._guesses[position] for position in masked]
        scores = np.array([guess.prob for guess in guesses])
        accepted = np.flatnonzero(scores > self._skip_threshold).tolist()
        # Only in a full block: before that, waiting for the block before it costs nothing, and guessing costs quality.
        if not accepted and self.is_full(number):
            scores = np.array([guess.score for guess in guesses])
            accepted = most_confident(scores, 1)
        positions = [masked[index] for index in accepted]
        self._trace.select("token", masked, scores.tolist(), positions)
        return positions


def _guesses(readout: Readout) -> list[_Guess]:
    scores = readout.probs
    if readout.margin is not None:
        scores = readout.margin
    elif readout.entropy is not None:
        scores = -readout.entropy
    return [_Guess(int(token), *pair) for token, *pair in zip(readout.tokens, readout.probs, scores, strict=True)]


def decode(prompt: Sequence[int], settings: D2fSettings, trace: Trace) -> Decoding:
    """Decodes one prompt in at most as many forwards as it fixes tokens: the first unfinished block is always full."""
    return (yield from decode_blocks(Pipeline(prompt, settings, trace), settings))


def decode_blocks(pipeline: Pipeline, settings: D2fSettings) -> Decoding:
    """As `decode`, with blocks that the caller can inspect between forwards."""
    for step in range(settings.max_iterations):
        pipeline.grow()
        if pipeline.num_finished == len(pipeline.blocks):
            break
        pipeline.take((yield pipeline.forward(step)))
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
