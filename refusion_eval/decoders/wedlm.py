"""WeDLM (arXiv 2512.22737): fills a window of masks that slides over the response, with causal attention.

Attention is causal by row. A forward feeds the tokens of the window in order of position, then its masks in order of
position, each with its true position; a mask therefore sees every token of the window, and itself predicts its token.
The tokens before the first mask see nothing but each other and the text before the window: their keys and values are
final and stay in the cache. The tokens behind the first mask are computed anew in every forward. The window has
`window_size` positions from the first mask on.

The code on the hub (`generate_wedlm`) decodes block after block instead, and compares probabilities, not entropies.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import ClassVar

import numpy as np

from refusion_eval.config import NonNegativeFloat, PositiveFloat, PositiveInt, settings_class
from refusion_eval.decoders import Decoder, Reads, Style, above_or_best, at_least_or_best, first_eos, most_confident
from refusion_eval.decoders.canvas import Canvas, MaskedSettings
from refusion_eval.errors import ConfigError
from refusion_eval.types import (
    DROP_ALL,
    NOTHING,
    Commit,
    Confidence,
    Decoding,
    Forward,
    ProbArray,
    Read,
    Readout,
    Trace,
    causal,
)


@settings_class("wedlm")
class WedlmSettings(MaskedSettings):
    """Settings of WeDLM, named as in its release without the prefix "wedlm_".

    Decoding ends as soon as the text up to one of `eos_ids`, or of `gen_length` tokens, is final.

    Attributes:
        early_stop: end at a stop string too.
        window_size: positions from the first mask on that a forward may fill.
        entropy_threshold: fill every mask whose entropy in nats, plus the penalty, is below this, and always the one
            with the least sum; None fills that one alone.
        pos_penalty_factor: penalty for each position between a mask and the first mask.
        block_size: decode in blocks of this length instead of the sliding window, as the code on the hub does. The
            three settings above then have no effect.
        confidence_threshold: with `block_size`, fill every mask whose token has at least this probability, and always
            the most probable one; None fills that one alone.
        confidence_temperature: temperature of the probabilities and entropies that are compared with a threshold.
        release_compatible: make the forwards of the release. Its engine feeds the prompt alone, places masks beyond
            `gen_length`, which compete with the others, and ends one forward after the text is final. Its code on the
            hub caches nothing and decodes `gen_length` tokens, whatever they are.
    """

    decoder: ClassVar[str] = "wedlm"

    early_stop: bool = True
    window_size: PositiveInt = 16
    entropy_threshold: NonNegativeFloat | None = 0.4
    pos_penalty_factor: NonNegativeFloat = 0.02
    block_size: PositiveInt | None = None
    confidence_threshold: NonNegativeFloat | None = None
    confidence_temperature: PositiveFloat = 1.0
    release_compatible: bool = False

    def __post_init__(self) -> None:
        MaskedSettings.__post_init__(self)
        if self.confidence_threshold is not None and self.block_size is None:
            where = f"wedlm: confidence_threshold is {self.confidence_threshold}"
            raise ConfigError(f"{where}, which the sliding window does not use; set block_size, or entropy_threshold")

    @property
    def num_positions(self) -> int:
        # As released, tokens beyond the length may be final at the end, and masks follow them.
        return self.gen_length + (2 * self.window_size if self.release_compatible else 0)

    @property
    def confidence(self) -> Confidence:
        return Confidence(temperature=self.confidence_temperature, dtype=self.confidence_dtype)

    def end_of_window(self, first_mask: int) -> int:
        if self.block_size is not None:
            return min((first_mask // self.block_size + 1) * self.block_size, self.gen_length)
        end = first_mask + self.window_size
        return end if self.release_compatible else min(end, self.gen_length)

    def read(self, rows: Sequence[int], step: int, positions: Sequence[int]) -> Read:
        return replace(MaskedSettings.read(self, rows, step, positions), entropy=self.block_size is None)

    def choose(self, masked: Sequence[int], readout: Readout) -> tuple[ProbArray, list[int]]:
        """Scores of the masks, higher for those to fill first, and the indices of those that are filled."""
        if readout.entropy is None:
            threshold, scores = self.confidence_threshold, readout.probs
            accepted = most_confident(scores, 1) if threshold is None else at_least_or_best(scores, threshold, readout)
            return scores, accepted
        scores = 0.0 - (readout.entropy + self.pos_penalty_factor * (np.array(masked) - masked[0]))
        threshold = np.inf if self.entropy_threshold is None else -self.entropy_threshold
        return scores, above_or_best(scores, threshold)


def decode(prompt: Sequence[int], settings: WedlmSettings, trace: Trace) -> Decoding:
    """Decodes one prompt; each forward fills at least one mask."""
    canvas = Canvas(prompt, settings, trace, gen_length=0)
    as_engine = settings.release_compatible and settings.block_size is None
    as_hub = settings.release_compatible and settings.block_size is not None
    # Tokens are cached from the start of the text up to response index `start`, once `commit` is done.
    start, commit = -canvas.start, NOTHING
    if as_engine:
        yield Forward(list(prompt), range(canvas.start), causal(canvas.start), (), commit, "prefill")
        start, commit = 0, Commit(range(canvas.start))
    for step in count():
        first_mask = next(iter(canvas.masked()), canvas.gen_length)
        final = canvas.tokens[canvas.start : canvas.start + first_mask]
        reason = None if as_hub or first_mask > settings.gen_length else canvas.settled()
        is_stopped = reason is not None or (not as_hub and first_eos(final, settings.eos_ids) is not None)
        is_ended = is_stopped or first_mask >= settings.gen_length
        if is_ended and not as_engine:
            break
        canvas.extend(settings.end_of_window(first_mask) - canvas.gen_length)
        masked = canvas.masked()
        clean = sorted(set(range(start, canvas.gen_length)).difference(masked))
        fed = [canvas.start + position for position in clean + masked]
        tokens = [canvas.tokens[position] for position in fed]
        reads = () if is_ended else (settings.read(range(len(clean), len(fed)), step, masked),)
        readouts = yield Forward(tokens, fed, causal(len(fed)), reads, commit, "denoise")
        if is_ended:
            break
        if as_hub:
            commit = DROP_ALL
        else:
            start, commit = first_mask, Commit(range(first_mask - start))
        for readout in readouts:
            canvas.fix_chosen(masked, readout, *settings.choose(masked, readout))
    return canvas.finish(reason, settings.gen_length)


DECODER = Decoder(
    decode,
    WedlmSettings,
    label="WeDLM",
    reads=Reads("causal", masked="own"),
    trained_by=("wedlm",),
    style=Style("#882255", "p", (0, (5, 1, 1, 1)), order=13),
)
