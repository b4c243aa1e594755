"""`refusion-eval locality`: data, table and CSV of the study in `refusion_eval.studies.locality.measure`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from refusion_eval.api import LoadedModel
from refusion_eval.benchmarks import BENCHMARKS, Task
from refusion_eval.errors import ConfigError
from refusion_eval.metrics import Interval
from refusion_eval.paths import embedded_name, embedded_path
from refusion_eval.results.render import Table, csv_text, interval_text
from refusion_eval.results.tables import MINI_CAPTION
from refusion_eval.runs.terminal import ProgressDisplay
from refusion_eval.store.atomic_write import prepare_output, write_output
from refusion_eval.studies.locality.measure import (
    DISTANCES,
    MAX_DISTANCE,
    Locality,
    LocalitySettings,
    ReadingOption,
    choose_reading,
    encode_responses,
    mask_responses,
    measure_locality,
)
from refusion_eval.version import __version__

if TYPE_CHECKING:
    from pandas import DataFrame

BENCHMARK = "gsm8k"
MINI_BENCHMARK = "math"  # its rows hold the very responses that the embedded models were trained on
DIGITS = 4


COLUMNS = (
    "model",  # checkpoint folder, hub id, "embedded" or "embedded:NAME"
    "revision",  # commit of the hub's files; empty for a local directory
    "decoder",  # main decoder of the checkpoint
    "reading",  # how masks were read
    "dataset",  # gsm8k or mini_math
    "mini",  # whether the dataset is the synthetic look-alike
    "masking_ratio",  # share of the response tokens that were masked
    "distance",  # position that was read minus revealed position
    "n_pairs",  # number of pairs that the mean is over
    "n_responses",  # number of responses that the pairs come from
    "jsd_mean",  # mean Jensen-Shannon divergence
    "ci_low",  # lower bound of its 95% bootstrap interval by response; NaN for a single response
    "ci_high",  # upper bound of the interval
    "unit",  # nats
    "reveals",  # most revealed positions of a masked response
    "seed",  # seed of masks, revealed positions and resamples
    "dtype",  # type of the weights
    "device",  # device of the weights
    "version",  # version of this package
)


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
) -> "DataFrame":
    """Measures one model, prints the table of some distances on both sides, and writes every distance as CSV.

    Raises:
        ConfigError: a setting is impossible, or the model has no masks to fill.
        DataError: the responses cannot be found.
    """
    for distance in distances:
        if not 1 <= distance <= MAX_DISTANCE:
            raise ConfigError(f"--distances {distance}: each must lie between 1 and {MAX_DISTANCE}")
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
        locality = measure_locality(
            opened, masked, settings.batch_size, chosen, mask_id, lambda: progress.scored(dataset)
        )
    for ratio, num_short in zip(settings.ratios, masked.num_too_short, strict=True):
        if num_short:
            _say(f"{num_short} responses are in no figure of ratio {ratio:g}: fewer than two tokens masked")
    means = _means(locality, settings).assign(
        model=model,
        revision=opened.revision or "",
        decoder=opened.decoders[0],
        reading=chosen,
        dataset=dataset,
        mini=is_mini,
        unit="nats",
        reveals=settings.reveals,
        seed=settings.seed,
        dtype=str(opened.dtype).removeprefix("torch."),
        device=opened.device.type,
        version=__version__,
    )[list(COLUMNS)]
    write_output(out, csv_text(COLUMNS, means.itertuples(index=False)))
    console.print(locality_table(means, distances).rich())
    return means


def gold_pairs(task: Task, data: Path | None = None) -> list[tuple[str, str]]:
    """(User turn, gold response) of the test rows of a task.

    The response is the row's solution as a model that follows the prompt would write it: that of GSM8K is without the
    calculator annotations <<...>>, and with "The answer is N." instead of the last line "#### N".

    Raises:
        DataError: the rows cannot be found.
    """
    prompts = task.benchmark.prompts
    return [(prompts.user(row), prompts.gold_text(row)) for row in task.rows(data)]


def locality_table(means: "DataFrame", distances: Sequence[int]) -> Table:
    """One line for each distance, one column for each masking ratio."""
    first = means.iloc[0]
    ratios = list(dict.fromkeys(means.masking_ratio))
    texts = {
        (row.masking_ratio, row.distance): interval_text(
            Interval(row.jsd_mean, row.ci_low, row.ci_high, row.n_responses), DIGITS
        )
        for row in means.itertuples()
    }
    return Table(
        title=f"{first.model} on {first.dataset}, reading {first.reading}",
        columns=("Distance", *(f"t = {ratio:g}" for ratio in ratios)),
        rows=[
            (f"{distance:+d}", *(texts.get((ratio, distance), "-") for ratio in ratios))
            for distance in sorted({sign * distance for distance in distances for sign in (-1, 1)})
        ],
        num_left=0,
        notes=(
            "Jensen-Shannon divergence in nats (x 1.4427: bits). In brackets: 95% bootstrap interval by response.",
            MINI_CAPTION if first.mini else "",
        ),
    )


def _means(locality: Locality, settings: LocalitySettings) -> "DataFrame":
    """The mean of every ratio and distance that has a pair, by ratio, then distance."""
    from pandas import DataFrame  # takes half a second

    rows = []
    for ratio_index, ratio in enumerate(settings.ratios):
        for distance in range(-MAX_DISTANCE, MAX_DISTANCE + 1):
            mean = locality.mean(ratio_index, distance, settings.seed)
            if mean is not None:
                interval, num_pairs = mean
                rows.append((ratio, distance, num_pairs, interval.n, interval.value, interval.low, interval.high))
    names = ("masking_ratio", "distance", "n_pairs", "n_responses", "jsd_mean", "ci_low", "ci_high")
    return DataFrame(rows, columns=list(names))


def _say(line: str) -> None:
    print(line, file=sys.stderr)
