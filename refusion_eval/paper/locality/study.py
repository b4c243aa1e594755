"""Effects of a revealed token by distance: the pilot study of the ReFusion paper (arXiv 2512.13586, sec. 4.1, Fig. 3).

How the paper sampled is not published, so this project defines it: a text is a benchmark prompt under the checkpoint's
chat template and a gold response of n tokens without an end token, of which exactly round(t n) are masked at the ratio
t, drawn uniformly. Of the masked positions `reveals` are drawn uniformly, and each is revealed alone. For a revealed
position j and every other masked position i, the Jensen-Shannon divergence between the model's distributions at i
before and after is one pair of distance i - j; positive is right of the revealed token. A figure is the mean over all
pairs of a ratio and a distance, and its interval resamples responses, whose pairs stay together.

Draws depend only on the seed, the row number and the ratio. For distant pairs of a half-precision model, differences
may be rounding errors alone; use float32 where the tail of a curve matters.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Lt
from rich.console import Console

from refusion_eval.api import LoadedModel, check_prompt
from refusion_eval.benchmarks import BENCHMARKS, Task
from refusion_eval.config import NonNegativeInt, PositiveInt, settings_class
from refusion_eval.decoders import DECODERS, fitting_decoders
from refusion_eval.errors import ConfigError, DataError
from refusion_eval.metrics import Interval, bootstrap_ratio
from refusion_eval.models.card import Card
from refusion_eval.paper.locality.divergence import MaskedText, Reading, reveal_divergences
from refusion_eval.paths import embedded_name, embedded_path
from refusion_eval.results.cautions import MINI_SENTENCE
from refusion_eval.results.render import Table, csv_text, interval_text
from refusion_eval.runs.terminal import ProgressDisplay
from refusion_eval.store.atomic_write import prepare_output, write_output
from refusion_eval.version import __version__

MAX_DISTANCE = 128
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128)
RATIOS = (0.2, 0.4, 0.6, 0.8)
MIN_MASKED = 2

BENCHMARK = "gsm8k"
MINI_BENCHMARK = "math"  # its rows hold the very responses that the embedded models were trained on

# `model` is a checkpoint folder, hub id or embedded[:NAME], `distance` the read position minus the revealed one, and
# bounds are empty where they would be of a single response. The guide on locality describes all columns.
_MEANS = ("masking_ratio", "distance", "n_pairs", "n_responses", "jsd_mean", "ci_low", "ci_high")
COLUMNS = (
    *("model", "revision", "decoder", "reading", "dataset", "mini"),
    *_MEANS,
    *("unit", "reveals", "seed", "dtype", "device", "version"),
)

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
    """How the masks of a checkpoint are read, and the id of its mask token. Raises ConfigError if either is unknown."""
    advice = "set mask_token_id in its config.json if it was trained with one, or take a masked model"
    if card.mask_id is None:
        raise ConfigError(f"{card.name} has no mask token, and locality is about masked models; {advice}")
    if not 0 <= card.mask_id < vocab_size:
        raise ConfigError(f"{card.name}: the mask token {card.mask_id} lies outside the vocabulary; {advice}")
    if option != "auto":
        return option, card.mask_id
    decoder = fitting_decoders(card.kind, card.decoders)[0]
    reads = DECODERS[decoder].reads if decoder in DECODERS else None
    if reads is not None and reads.mask_shift is not None:
        return ("bidirectional_shifted" if reads.mask_shift else "bidirectional"), card.mask_id
    if reads is not None and reads.attention == "causal" and reads.masked == "own":
        return "refusion", card.mask_id
    what = "is causal" if reads is not None and reads.masked is None else f"is made for decoder={decoder}"
    readings = ", ".join(get_args(Reading))
    raise ConfigError(f"{card.name} {what}, which says nothing of how it reads masks; name a --reading: {readings}")


def encode_responses(
    model: LoadedModel, pairs: Sequence[tuple[str, str]], settings: LocalitySettings
) -> tuple[list[GoldResponse], int]:
    """The first responses that are short enough, as token ids, and how many were too long.

    Raises ConfigError if the model cannot read texts of that length, and DataError if no response is short enough.
    """
    longest = model.config.max_positions
    if settings.max_length is not None and settings.max_length > longest:
        raise ConfigError(f"locality: max_length={settings.max_length}; {model.name} reads at most {longest} tokens")
    longest = settings.max_length or longest
    encode = model.tokenizer.encode
    responses: list[GoldResponse] = []
    num_too_long = 0
    for number, (query, response) in enumerate(pairs):
        if len(responses) == settings.num_responses:
            break
        prompt = encode(model.tokenizer.render_chat([{"role": "user", "content": query}]))
        gold = GoldResponse(number, tuple(prompt), tuple(encode(response)))
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
    if empty := [ratio for at, ratio in enumerate(settings.ratios) if too_short[at] == len(responses)]:
        where = f"locality: at the masking ratio {empty[0]:g}"
        raise ConfigError(f"{where} no response has {MIN_MASKED} masked tokens; raise the ratio")
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


def locality_command(
    model: str,
    settings: LocalitySettings,
    *,
    out: Path,
    reading: ReadingOption = "auto",
    data: Path | None = None,
    distances: Sequence[int] = DISTANCES,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    console: Console,
) -> list[dict[str, Any]]:
    """Measures one model, prints the table of some distances on both sides, and writes every distance as CSV."""
    if wrong := [distance for distance in distances if not 1 <= distance <= MAX_DISTANCE]:
        raise ConfigError(f"--distances {wrong[0]}: each must lie between 1 and {MAX_DISTANCE}")
    prepare_output(out)
    name = embedded_name(model, "refusion")
    is_mini = name is not None
    checkpoint = model if name is None else str(embedded_path(name))
    opened = LoadedModel.open(checkpoint, dtype=dtype, device=device, revision=revision)
    chosen, mask_id = choose_reading(opened.card, opened.config.vocab_size, reading)
    task = Task(BENCHMARKS[MINI_BENCHMARK if is_mini else BENCHMARK], mini=is_mini)
    responses, num_too_long = encode_responses(opened, gold_pairs(task, data), settings)
    dataset = task.name if is_mini else BENCHMARK
    if num_too_long:
        _say(f"{num_too_long} responses were passed over: too long with their prompts")
    if len(responses) < settings.num_responses:
        _say(f"{dataset} has only {len(responses)} of the {settings.num_responses} responses asked for")
    masked = mask_responses(responses, settings)
    with ProgressDisplay(model, {dataset: len(masked.texts)}) as progress:
        done = partial(progress.scored, dataset)
        locality = measure_locality(opened, masked, settings.batch_size, chosen, mask_id, done)
    for ratio, num_short in zip(settings.ratios, masked.num_too_short, strict=True):
        if num_short:
            _say(f"{num_short} responses are in no figure of ratio {ratio:g}: fewer than two tokens masked")
    facts: dict[str, Any] = {"model": model, "revision": opened.revision or "", "decoder": opened.decoders[0]}
    facts |= {"reading": chosen, "dataset": dataset, "mini": is_mini, "unit": "nats", "version": __version__}
    facts |= {"reveals": settings.reveals, "seed": settings.seed, "device": opened.device.type}
    facts |= {"dtype": str(opened.dtype).removeprefix("torch.")}
    means = [facts | mean for mean in _means(locality, settings)]
    write_output(out, csv_text(COLUMNS, ([mean[name] for name in COLUMNS] for mean in means)))
    console.print(locality_table(means, distances).rich())
    return means


def gold_pairs(task: Task, data: Path | None = None) -> list[tuple[str, str]]:
    """(User turn, gold response) of the test rows of a task. Raises DataError if the rows cannot be found."""
    # A gold text is the solution as a model that follows the prompt would write it, for GSM8K without the calculator
    # annotations <<...>> and with "The answer is N." instead of the last line "#### N".
    prompts = task.benchmark.prompts
    return [(prompts.user(row), prompts.gold_text(row)) for row in task.rows(data)]


def locality_table(means: Sequence[Mapping[str, Any]], distances: Sequence[int]) -> Table:
    first = means[0]
    ratios = list(dict.fromkeys(mean["masking_ratio"] for mean in means))
    texts = {}
    for mean in means:
        interval = Interval(*(mean[name] for name in ("jsd_mean", "ci_low", "ci_high", "n_responses")))
        texts[mean["masking_ratio"], mean["distance"]] = interval_text(interval, digits=4)
    shown = sorted({sign * distance for distance in distances for sign in (-1, 1)})
    return Table(
        title=f"{first['model']} on {first['dataset']}, reading {first['reading']}",
        columns=("Distance", *(f"t = {ratio:g}" for ratio in ratios)),
        rows=[(f"{distance:+d}", *(texts.get((ratio, distance), "-") for ratio in ratios)) for distance in shown],
        num_left=0,
        notes=(
            "Jensen-Shannon divergence in nats (x 1.4427: bits). In brackets: 95% bootstrap interval by response.",
            MINI_SENTENCE if first["mini"] else "",
        ),
    )


def _means(locality: Locality, settings: LocalitySettings) -> Iterator[dict[str, Any]]:
    """The mean of every ratio and distance that has a pair, by ratio, then distance."""
    for ratio_index, ratio in enumerate(settings.ratios):
        for distance in range(-MAX_DISTANCE, MAX_DISTANCE + 1):
            mean = locality.mean(ratio_index, distance, settings.seed)
            if mean is not None:
                interval, num_pairs = mean
                values = (ratio, distance, num_pairs, interval.n, interval.value, interval.low, interval.high)
                yield dict(zip(_MEANS, values, strict=True))


def _say(line: str) -> None:
    print(line, file=sys.stderr)
