"""Effects of a revealed token by distance: the pilot study of the ReFusion paper (arXiv 2512.13586, sec. 4.1, Fig. 3).

The paper plots how much the prediction at a masked position changes when one token at some distance becomes known. How
it sampled is not published, so this project defines it:

1. A text is a benchmark prompt under the checkpoint's chat template and a gold response, without an end token.
2. For a masking ratio t, exactly round(t n) of the n tokens of a response are masked, drawn uniformly.
3. Of the masked positions `reveals` are drawn uniformly, or all of them if there are fewer. Each is revealed alone: its
   gold token replaces its mask.
4. For a revealed position j and every other masked position i, the Jensen-Shannon divergence in nats between the
   model's distributions at i before and after is one pair of distance i - j. Positive is right of the revealed token.
5. A figure is the mean over all pairs of a ratio and a distance, so that every pair has the same weight. Its interval
   resamples responses, whose pairs stay together.

A response with fewer than two masked tokens has no pair at that ratio. Draws depend only on the seed, the row number
and the ratio; they are independent of the other ratios and of the number of responses.

For distant pairs of a half-precision model, differences may be rounding errors alone; use float32 where the tail of a
curve matters.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Lt

from refusion_eval.api import LoadedModel, check_prompt
from refusion_eval.config import NonNegativeInt, PositiveInt, settings_class
from refusion_eval.decoders import DECODERS, Reads, fitting_decoders
from refusion_eval.errors import ConfigError, DataError
from refusion_eval.metrics import Interval, bootstrap_ratio
from refusion_eval.models.checkpoint import Card
from refusion_eval.studies.locality.divergence import MaskedText, Reading, reveal_divergences

MAX_DISTANCE = 128
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128)
RATIOS = (0.2, 0.4, 0.6, 0.8)
MIN_MASKED = 2

ReadingOption = Literal["auto", "bidirectional", "bidirectional_shifted", "refusion"]


@settings_class("locality")
class LocalitySettings:
    """Responses, masks and reveals that are sampled."""

    ratios: tuple[Annotated[float, Gt(0), Lt(1)], ...] = RATIOS
    reveals: PositiveInt = 8
    num_responses: PositiveInt = 100
    max_length: Annotated[int, Ge(2)] | None = None
    seed: NonNegativeInt = 0
    batch_size: PositiveInt = 16

    def __post_init__(self) -> None:
        if not self.ratios or len(set(self.ratios)) < len(self.ratios):
            raise ConfigError(f"ratios {list(self.ratios)}; name at least one, each once")


@dataclass(frozen=True, slots=True)
class GoldResponse:
    """Token ids of a prompt and its gold response without an end token, and the number of their row."""

    number: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]


@dataclass(frozen=True)
class MaskedResponses:
    """The responses, masked at every ratio; `num_too_short` counts those without a pair, by ratio."""

    texts: dict[tuple[int, int], MaskedText]
    num_too_short: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Locality:
    """Sums of divergences over pairs; arrays are [ratios, responses, 2 * MAX_DISTANCE + 1] by distance."""

    sums: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]

    def mean(self, ratio_index: int, distance: int, seed: int) -> tuple[Interval, int] | None:
        """Mean divergence at a ratio and a distance, with its interval by response, and the number of pairs."""
        counts = self.counts[ratio_index, :, distance + MAX_DISTANCE]
        has_pairs = counts > 0
        if not has_pairs.any():
            return None
        sums = self.sums[ratio_index, :, distance + MAX_DISTANCE]
        return bootstrap_ratio(sums[has_pairs], counts[has_pairs], seed=seed).interval(), int(counts.sum())


def choose_reading(card: Card, vocab_size: int, option: ReadingOption = "auto") -> tuple[Reading, int]:
    """How the masks of a checkpoint are read, and the id of its mask token.

    Raises:
        ConfigError: the checkpoint has no usable mask token, or its card does not say how masks are read.
    """
    advice = "set mask_token_id in its config.json if it was trained with one, or take a masked model"
    if card.mask_id is None:
        raise ConfigError(f"{card.name} has no mask token, and locality is about masked models; {advice}")
    if not 0 <= card.mask_id < vocab_size:
        raise ConfigError(f"{card.name}: the mask token {card.mask_id} lies outside the vocabulary; {advice}")
    if option != "auto":
        return option, card.mask_id
    decoder = fitting_decoders(card.kind, card.decoders)[0]
    reads = DECODERS[decoder].reads if decoder in DECODERS else None
    reading = None if reads is None else _reading(reads)
    if reading is None:
        what = "is causal" if reads is not None and reads.masked is None else f"is made for decoder={decoder}"
        readings = ", ".join(get_args(Reading))
        raise ConfigError(f"{card.name} {what}, which says nothing of how it reads masks; name a --reading: {readings}")
    return reading, card.mask_id


def _reading(reads: Reads) -> Reading | None:
    """How the checkpoints of a decoder are read; None if the study has no such reading."""
    if reads.mask_shift is not None:
        return "bidirectional_shifted" if reads.mask_shift else "bidirectional"
    return "refusion" if reads.attention == "causal" and reads.masked == "own" else None


def encode_responses(
    model: LoadedModel, pairs: Sequence[tuple[str, str]], settings: LocalitySettings
) -> tuple[list[GoldResponse], int]:
    """The first responses that are short enough, as token ids.

    Raises:
        ConfigError: the model cannot read texts of that length, or has no chat template.
        DataError: no response is short enough.
    """
    longest = model.config.max_positions
    if settings.max_length is not None and settings.max_length > longest:
        raise ConfigError(f"locality: max_length={settings.max_length}; {model.name} reads at most {longest} tokens")
    longest = settings.max_length or longest
    tokenizer = model.tokenizer
    responses: list[GoldResponse] = []
    num_too_long = 0
    for number, (query, response) in enumerate(pairs):
        if len(responses) == settings.num_responses:
            break
        prompt = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": query}]))
        gold = GoldResponse(number, tuple(prompt), tuple(tokenizer.encode(response)))
        if len(gold.prompt) + len(gold.response) > longest:
            num_too_long += 1
            continue
        check_prompt(model, [*gold.prompt, *gold.response], 0)
        responses.append(gold)
    if not responses:
        raise DataError(f"no response of {len(pairs)} has at most {longest} tokens with its prompt; raise --max-length")
    return responses, num_too_long


def mask_response(gold: GoldResponse, ratio: float, reveals: int, seed: int) -> MaskedText | None:
    """Draws the masked share of a response and at most `reveals` positions to reveal; None for fewer than two masks."""
    length = len(gold.response)
    num_masked = round(ratio * length)
    if num_masked < MIN_MASKED:
        return None
    rng = np.random.default_rng([seed, gold.number, round(ratio * 10**9)])
    masked = np.sort(rng.choice(length, num_masked, replace=False)) + len(gold.prompt)
    revealed = rng.choice(masked, min(reveals, num_masked), replace=False)
    return MaskedText((*gold.prompt, *gold.response), masked.tolist(), revealed.tolist())


def mask_responses(responses: Sequence[GoldResponse], settings: LocalitySettings) -> MaskedResponses:
    """Masks every response at every ratio. Raises ConfigError if at some ratio no response has two masked tokens."""
    masked = {
        (ratio_index, response_index): mask_response(gold, ratio, settings.reveals, settings.seed)
        for response_index, gold in enumerate(responses)
        for ratio_index, ratio in enumerate(settings.ratios)
    }
    too_short = Counter(ratio_index for (ratio_index, _), text in masked.items() if text is None)
    for ratio_index, ratio in enumerate(settings.ratios):
        if too_short[ratio_index] == len(responses):
            raise ConfigError(
                f"locality: at the masking ratio {ratio:g} no response has {MIN_MASKED} masked tokens; raise the ratio"
            )
    texts = {key: text for key, text in masked.items() if text is not None}
    return MaskedResponses(texts, tuple(too_short[index] for index in range(len(settings.ratios))))


def measure_locality(
    model: LoadedModel,
    masked: MaskedResponses,
    batch_size: int,
    reading: Reading,
    mask_id: int,
    on_text: Callable[[], None] = lambda: None,
) -> Locality:
    """Measures all pairs of all masked texts, as `reveal_divergences`, and calls `on_text` after each text."""
    num_responses = 1 + max(response_index for _, response_index in masked.texts)
    shape = (len(masked.num_too_short), num_responses, 2 * MAX_DISTANCE + 1)
    sums, counts = np.zeros(shape), np.zeros(shape, dtype=np.int64)
    divergences = reveal_divergences(model.engine.model, list(masked.texts.values()), reading, mask_id, batch_size)
    for (key, text), divergence_KM in zip(masked.texts.items(), divergences, strict=True):
        distance_KM = np.array(text.masked)[None, :] - np.array(text.revealed)[:, None]
        is_pair = (distance_KM != 0) & (np.abs(distance_KM) <= MAX_DISTANCE)
        shifted = distance_KM[is_pair] + MAX_DISTANCE
        counts[key] = np.bincount(shifted, minlength=shape[-1])
        sums[key] = np.bincount(shifted, weights=divergence_KM[is_pair], minlength=shape[-1])
        on_text()
    return Locality(sums, counts)
