"""What a revealed token changes, and where: the pilot study of the ReFusion paper (arXiv 2512.13586, sec. 4.1, Fig. 3).

The paper plots how much the prediction at a masked position changes when one token at some distance becomes known. How
it sampled is not published, so this is a definition of our own:

1. A text is a benchmark prompt under the checkpoint's chat template and a gold response, without an end token.
2. Of the n tokens of a response exactly round(t n) are masked, for a masking ratio t, drawn uniformly.
3. Of the masked positions `reveals` are drawn uniformly, or all of them where there are fewer. Each is revealed alone:
   its gold token takes the place of its mask.
4. For a revealed position j and every other masked position i the Jensen-Shannon divergence in nats between the model's
   distributions at i before and after is one pair of distance i - j: positive is to the right of the revealed token.
5. A figure is the mean over all pairs of a ratio and a distance, so that every pair weighs the same. Its interval
   resamples responses, whose pairs stay together.

A response with fewer than two masked tokens has no pair at that ratio. Draws depend on the seed, the number of the row
and the ratio alone: neither on the other ratios nor on the number of responses.

A far pair of a half-precision model rests on differences that rounding alone can make; take float32 where the tail of a
curve matters.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from refusion_eval.api import LoadedModel, check_prompt
from refusion_eval.decoders import DECODERS, fitting_decoders
from refusion_eval.decoders.decoder import Reads
from refusion_eval.errors import ConfigError, DataError
from refusion_eval.metrics.bootstrap import Interval, bootstrap_ratio
from refusion_eval.models.cards import Card
from refusion_eval.studies.locality.divergence import MaskedText, Reading, reveal_divergences

MAX_DISTANCE = 128
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128)
RATIOS = (0.2, 0.4, 0.6, 0.8)
MIN_MASKED = 2

ReadingOption = Literal["auto", "bidirectional", "bidirectional_shifted", "refusion"]

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class LocalitySettings:
    """What is sampled.

    Attributes:
        ratios: shares of the response tokens that are masked, each above 0 and below 1.
        reveals: revealed positions of a masked response, >= 1.
        num_responses: responses, >= 1.
        max_length: most tokens of prompt and response together; None is what the model can read.
        seed: of masks and reveals.
        batch_size: texts in one forward, >= 1; changes no figure beyond the rounding of floats.
    """

    ratios: tuple[float, ...] = RATIOS
    reveals: int = 8
    num_responses: int = 100
    max_length: int | None = None
    seed: int = 0
    batch_size: int = 16

    def __post_init__(self) -> None:
        if not self.ratios or len(set(self.ratios)) < len(self.ratios):
            raise ConfigError(f"locality: ratios {list(self.ratios)}; name at least one, each once")
        for ratio in self.ratios:
            if not 0 < ratio < 1:
                raise ConfigError(f"locality: the masking ratio {ratio:g} must be above 0 and below 1")
        for name, low in (("reveals", 1), ("num_responses", 1), ("seed", 0), ("batch_size", 1), ("max_length", 2)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"locality: {name} is {value}; it must be at least {low}")


@dataclass(frozen=True, slots=True)
class GoldResponse:
    """A prompt and its gold response as token ids.

    Attributes:
        number: of its row in the benchmark.
        prompt: token ids.
        response: token ids, no end token.
    """

    number: int
    prompt: tuple[int, ...]
    response: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Locality:
    """Sums of divergences; arrays are [ratios, responses, 2 * MAX_DISTANCE + 1], the last axis being distance.

    Attributes:
        sums: nats.
        counts: pairs.
        num_too_short: for each ratio the responses without a pair, as they have fewer than two masked tokens.
    """

    sums: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    num_too_short: tuple[int, ...]

    def mean(self, ratio_index: int, distance: int, seed: int) -> tuple[Interval, int] | None:
        """Mean divergence at a ratio and a distance, with its interval and the pairs it rests on; None without any.

        The interval's n is the number of responses with such a pair.
        """
        counts = self.counts[ratio_index, :, distance + MAX_DISTANCE]
        has_pairs = counts > 0
        if not has_pairs.any():
            return None
        sums = self.sums[ratio_index, :, distance + MAX_DISTANCE]
        return bootstrap_ratio(sums[has_pairs], counts[has_pairs], seed=seed), int(counts.sum())


def choose_reading(card: Card, vocab_size: int, option: ReadingOption = "auto") -> tuple[Reading, int]:
    """How a checkpoint is read, and its mask token.

    Args:
        card: of the checkpoint; its main decoder decides.
        vocab_size: of the checkpoint.
        option: a reading that outranks the card's.

    Raises:
        ConfigError: the checkpoint fills no masks, or its card does not say how they are read.
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

    Args:
        model: its tokenizer and chat template are used.
        pairs: (text of the user turn, gold response) in the order of the rows.
        settings: how many, and how long at most.

    Returns:
        The responses, and how many were passed over because they are too long.

    Raises:
        ConfigError: the model cannot read texts of that length, or has no chat template.
        DataError: no response is short enough.
    """
    longest = model.config.max_positions
    if settings.max_length is not None and settings.max_length > longest:
        raise ConfigError(f"locality: max_length={settings.max_length}; {model.name} reads at most {longest} tokens")
    longest = settings.max_length or longest
    tokenizer = model.tokenizer
    found: list[GoldResponse] = []
    num_too_long = 0
    for number, (query, response) in enumerate(pairs):
        if len(found) == settings.num_responses:
            break
        prompt = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": query}]))
        gold = GoldResponse(number, tuple(prompt), tuple(tokenizer.encode(response)))
        if len(gold.prompt) + len(gold.response) > longest:
            num_too_long += 1
            continue
        check_prompt(model, [*gold.prompt, *gold.response], 0)
        found.append(gold)
    if not found:
        raise DataError(f"no response of {len(pairs)} has at most {longest} tokens with its prompt; raise --max-length")
    return found, num_too_long


def mask_response(gold: GoldResponse, ratio: float, reveals: int, seed: int) -> MaskedText | None:
    """Draws masks and reveals; None if fewer than two tokens would be masked.

    Args:
        gold: prompt and response.
        ratio: t, share of the response's tokens that is masked.
        reveals: most revealed positions.
        seed: of the draws.
    """
    length = len(gold.response)
    num_masked = round(ratio * length)
    if num_masked < MIN_MASKED:
        return None
    rng = np.random.default_rng([seed, gold.number, round(ratio * 10**9)])
    masked = np.sort(rng.choice(length, num_masked, replace=False)) + len(gold.prompt)
    revealed = rng.choice(masked, min(reveals, num_masked), replace=False)
    return MaskedText((*gold.prompt, *gold.response), masked.tolist(), revealed.tolist())


def measure_locality(
    model: LoadedModel,
    responses: Sequence[GoldResponse],
    settings: LocalitySettings,
    reading: Reading,
    mask_id: int,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> Locality:
    """Measures all pairs of all responses at all ratios.

    Args:
        model: the masked model.
        responses: what is masked.
        settings: how it is masked and revealed.
        reading: how the model reads masks.
        mask_id: its mask token.
        on_done: told how many masked texts of how many are done.

    Raises:
        ConfigError: a ratio leaves no response with two masked tokens.
        DecodeError: logits are not finite.
    """
    keys: list[tuple[int, int]] = []
    texts: list[MaskedText] = []
    num_too_short = [0] * len(settings.ratios)
    for response_index, gold in enumerate(responses):
        for ratio_index, ratio in enumerate(settings.ratios):
            text = mask_response(gold, ratio, settings.reveals, settings.seed)
            if text is None:
                num_too_short[ratio_index] += 1
                continue
            keys.append((ratio_index, response_index))
            texts.append(text)
    for ratio, num_short in zip(settings.ratios, num_too_short, strict=True):
        if num_short == len(responses):
            raise ConfigError(
                f"locality: at the masking ratio {ratio:g} no response has {MIN_MASKED} masked tokens; raise the ratio"
            )
    shape = (len(settings.ratios), len(responses), 2 * MAX_DISTANCE + 1)
    sums, counts = np.zeros(shape), np.zeros(shape, dtype=np.int64)
    found = reveal_divergences(model.engine.model, texts, reading, mask_id, settings.batch_size)
    for done, (key, text, divergence_KM) in enumerate(zip(keys, texts, found, strict=True), start=1):
        distance_KM = np.array(text.masked)[None, :] - np.array(text.revealed)[:, None]
        is_pair = (distance_KM != 0) & (np.abs(distance_KM) <= MAX_DISTANCE)
        shifted = distance_KM[is_pair] + MAX_DISTANCE
        counts[key] = np.bincount(shifted, minlength=shape[-1])
        sums[key] = np.bincount(shifted, weights=divergence_KM[is_pair], minlength=shape[-1])
        on_done(done, len(texts))
    return Locality(sums, counts, tuple(num_too_short))


def parse_numbers(text: str, option: str, kind: type[Number]) -> tuple[Number, ...]:
    """Numbers separated by commas.

    Args:
        text: what the user wrote.
        option: name of the option, for the message.
        kind: int or float.

    Raises:
        ConfigError: a part is no such number.
    """
    try:
        return tuple(kind(part) for part in re.split(r"\s*,\s*", text.strip()))
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: write numbers separated by commas, such as 1,2,4") from error
