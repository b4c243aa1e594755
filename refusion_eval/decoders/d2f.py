"""D2F (Discrete Diffusion Forcing, arXiv 2508.09192): fills several blocks of masks at once.

Attention is full within a block, and a block sees the blocks before it; the prompt is the first block. Once a block and
all blocks before it are finished, its keys and values never change and are cached. A block is appended while the last
one is still being filled. A block becomes full, in the word of the release, once enough of the block before it is
decoded: from then on every forward fixes at least one of its tokens.

D2F was released for LLaDA and Dream. The algorithm is one; the models differ in the row that predicts a position.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from refusion_eval.config import Fraction, NonNegativeInt, PositiveInt, settings_class
from refusion_eval.decoders import Decoder, Reads, Style, most_confident, rounded_threshold
from refusion_eval.decoders.canvas import Canvas, MaskedSettings, blocks_of
from refusion_eval.errors import ConfigError
from refusion_eval.types import Commit, Confidence, Decoding, Forward, ProbArray, Read, Trace, block_causal

SamplingStrategy = Literal["default", "margin_confidence", "neg_entropy"]


@settings_class("d2f_llada")
class D2fLladaSettings(MaskedSettings):
    """Settings of D2F on LLaDA, named as in its release; the defaults are those of its HumanEval and MATH.

    `gen_length` is the release's max_new_tokens: as many whole blocks are decoded as fit in it. Above temperature 0,
    confidences too are computed from the tempered distribution.

    Attributes:
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

    decoder: ClassVar[str] = "d2f_llada"

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
            sizes = f"block_size is {self.block_size} and gen_length {self.gen_length}"
            raise ConfigError(f"{self.decoder}: {sizes}; set gen_length to one whole block or more")

    @property
    def num_positions(self) -> int:
        return self.gen_length // self.block_size * self.block_size

    @property
    def halting(self) -> frozenset[int]:
        return frozenset(self.eos_ids[:1] if self.halt_ids is None else self.halt_ids)

    @property
    def confidence(self) -> Confidence:
        # In a short dtype probabilities tie where logits differ, and the release takes the first of the tied ones.
        return Confidence(
            temperature=self.temperature or 1.0,
            dtype=self.confidence_dtype,
            choose=self.confidence_dtype == "model" and self.temperature == 0,
        )

    def read(self, rows: Sequence[int], step: int, positions: Sequence[int]) -> Read:
        return replace(
            MaskedSettings.read(self, rows, step, positions),
            margin=self.sampling_strategy == "margin_confidence",
            entropy=self.sampling_strategy == "neg_entropy",
        )


@settings_class("d2f_dream")
class D2fDreamSettings(D2fLladaSettings):
    """Settings of D2F on Dream, in which a row predicts the next position."""

    decoder: ClassVar[str] = "d2f_dream"
    shift: ClassVar[int] = 1


class _Guess(NamedTuple):
    """Candidate of a position, and the score by which the best candidate of a block is picked."""

    token: int
    prob: np.floating
    score: np.floating


def decode(prompt: Sequence[int], settings: D2fLladaSettings, trace: Trace) -> Decoding:
    """Decodes one prompt in at most as many forwards as it fixes tokens: the first unfinished block is always full."""
    canvas, size = Canvas(prompt, settings, trace, gen_length=0), settings.block_size
    start, num_final = -len(prompt), 0  # response index of the first row that is not cached; rows to cache next
    threshold, halted = settings.skip_threshold, False
    guesses: dict[int, _Guess] = {}
    for step in range(settings.max_iterations):
        # At most one a forward: a block that begins before anything near it is known would be filled with guesses.
        has_room = canvas.gen_length < settings.num_positions and not halted
        if has_room and _decoded_ratio(canvas, canvas.gen_length - size, size) >= settings.block_add_threshold:
            canvas.extend(size)
        masked = canvas.masked()
        if not masked:
            break
        # With a shift, the row that predicts the first uncached position is in the cache and cannot be read again. That
        # position keeps the guess (and the sample) of the forward that computed the row, which is exact.
        positions = [position for position in masked if position - settings.shift >= start]
        fed = range(canvas.start + start, len(canvas.tokens))
        sizes = [len(prompt)] * (start < 0) + [size] * ((canvas.gen_length - max(start, 0)) // size)
        reads, commit = canvas.reads(positions, step, fed.start), Commit(range(num_final))
        forward = Forward(canvas.tokens[fed.start :], fed, block_causal(sizes), reads, commit, kind="denoise")
        for readout in (yield forward):
            scores = settings.scores(readout, step, positions)
            guesses.update(zip(positions, map(_Guess, readout.tokens, readout.probs, scores), strict=True))
            threshold = rounded_threshold(settings.skip_threshold, readout)
        # Rows that were final when the forward was made; a block that it finishes was computed with masks in it.
        first_unfinished = masked[0] // size * size
        start, num_final = first_unfinished, first_unfinished - start
        fixed: list[int] = []
        for block in blocks_of(canvas.gen_length, size)[first_unfinished // size :]:
            if candidates := canvas.masked(block):
                is_full = _decoded_ratio(canvas, block.start - size, size) >= settings.decoded_token_threshold
                scores, accepted = _choose([guesses[position] for position in candidates], threshold, is_full)
                chosen = [candidates[index] for index in accepted]
                trace.select("token", candidates, scores.tolist(), chosen)
                fixed += chosen
        tokens = [int(guesses[position].token) for position in fixed]
        canvas.fix(fixed, tokens)
        # A stop token ends growth, not decoding: blocks before it may still change where the text ends.
        halted = halted or not settings.halting.isdisjoint(tokens)
        if reason := canvas.settled():
            return canvas.finish(reason)
    return canvas.finish()


def _decoded_ratio(canvas: Canvas, start: int, size: int) -> float:
    """Share of the final positions of the block that begins at `start`; the prompt, before index 0, is final."""
    return 1.0 if start < 0 else (size - len(canvas.masked(range(start, start + size)))) / size


def _choose(guesses: Sequence[_Guess], threshold: float, is_full: bool) -> tuple[ProbArray, list[int]]:
    """Scores of a block's candidates, and those accepted: above the threshold, else the best one of a full block."""
    scores = np.array([guess.prob for guess in guesses])
    accepted = np.flatnonzero(scores > threshold).tolist()
    # Only in a full block: before that, waiting for the block before it costs nothing, and guessing costs quality.
    if accepted or not is_full:
        return scores, accepted
    scores = np.array([guess.score for guess in guesses])
    return scores, most_confident(scores, 1)


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
