"""`refusion-eval locality`: data, progress, table and CSV of the study in `refusion_eval.studies.locality.measure`."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

import refusion_eval
from refusion_eval.api import LoadedModel
from refusion_eval.benchmarks import BENCHMARKS, Task
from refusion_eval.errors import ConfigError
from refusion_eval.metrics.bootstrap import Interval
from refusion_eval.paths import embedded_path
from refusion_eval.results.render import csv_text, interval_text
from refusion_eval.results.summary import MINI_CAPTION
from refusion_eval.runs.model_args import EMBEDDED
from refusion_eval.runs.progress import SECONDS_BETWEEN_LINES
from refusion_eval.store.atomic_write import prepare_output, write_output
from refusion_eval.studies.locality.measure import (
    DISTANCES,
    MAX_DISTANCE,
    Locality,
    LocalitySettings,
    ReadingOption,
    choose_reading,
    encode_responses,
    measure_locality,
)

BENCHMARK = "gsm8k"
DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalityRow:
    """One line of the CSV: the mean of a masking ratio and a distance.

    Attributes:
        model: checkpoint folder, hub id, or "embedded".
        revision: commit of the hub's files; empty for a local directory.
        decoder: the main decoder of its card.
        reading: how masks were read.
        dataset: gsm8k or mini_gsm8k.
        mini: whether that is the synthetic look-alike.
        masking_ratio: t.
        distance: position read minus revealed position.
        n_pairs: pairs the mean is over.
        n_responses: responses these come from.
        jsd_mean: Jensen-Shannon divergence.
        ci_low, ci_high: 95% bootstrap interval by response; NaN if one response gives none.
        unit: nats.
        reveals: most revealed positions of a masked response.
        seed: of masks, reveals and resamples.
        dtype, device: of the weights.
        version: of this package.
    """

    model: str
    revision: str
    decoder: str
    reading: str
    dataset: str
    mini: bool
    masking_ratio: float
    distance: int
    n_pairs: int
    n_responses: int
    jsd_mean: float
    ci_low: float
    ci_high: float
    unit: str
    reveals: int
    seed: int
    dtype: str
    device: str
    version: str

    @property
    def interval(self) -> Interval:
        """Mean and bounds."""
        return Interval(self.jsd_mean, self.ci_low, self.ci_high, self.n_responses)


COLUMNS = tuple(field.name for field in fields(LocalityRow))


def locality_command(
    model: str,
    settings: LocalitySettings,
    *,
    out: Path,
    mini_pairs: Callable[[], Sequence[tuple[str, str]]],
    reading: ReadingOption = "auto",
    data: Path | None = None,
    distances: Sequence[int] = DISTANCES,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    console: Console,
) -> list[LocalityRow]:
    """Measures one model, prints the table and writes every distance as CSV.

    Args:
        model: checkpoint folder, hub id, or "embedded", which is measured on the mini task.
        settings: what is sampled.
        out: the CSV; written when all is measured.
        mini_pairs: gives (user turn, gold response) of the mini task's test items.
        reading: how masks are read; by default the card says it.
        data: folder with benchmark rows, see `Task.rows`.
        distances: of the printed table, on both sides.
        dtype: as `load_model`.
        device: as `load_model`.
        revision: as `load_model`.
        console: where the table is printed.

    Returns:
        The rows of the CSV.

    Raises:
        ConfigError: a setting is impossible, or the model fills no masks.
        CheckpointError: the checkpoint cannot be loaded.
        DataError: the responses cannot be found.
        StoreError: the CSV cannot be written; known before anything is measured.
    """
    for distance in distances:
        if not 1 <= distance <= MAX_DISTANCE:
            raise ConfigError(f"--distances {distance}: each must lie between 1 and {MAX_DISTANCE}")
    prepare_output(out)
    is_mini = model == EMBEDDED
    checkpoint = str(embedded_path("refusion")) if is_mini else model
    opened = LoadedModel.open(checkpoint, dtype=dtype, device=device, revision=revision)
    chosen, mask_id = choose_reading(opened.card, opened.config.vocab_size, reading)
    responses, num_too_long = encode_responses(opened, mini_pairs() if is_mini else gold_pairs(data), settings)
    dataset = Task(BENCHMARKS[BENCHMARK], mini=True).name if is_mini else BENCHMARK
    if num_too_long:
        _say(f"{num_too_long} responses were passed over: too long with their prompts")
    if len(responses) < settings.num_responses:
        _say(f"{dataset} has only {len(responses)} of the {settings.num_responses} responses asked for")
    locality = measure_locality(opened, responses, settings, chosen, mask_id, Progress(f"{model} {dataset}"))
    for ratio, num_short in zip(settings.ratios, locality.num_too_short, strict=True):
        if num_short:
            _say(f"{num_short} responses are in no figure of ratio {ratio:g}: fewer than two tokens masked")
    rows = list(_rows(locality, settings, model, opened, chosen, dataset, is_mini))
    write_output(out, csv_text(COLUMNS, map(astuple, rows)))
    console.print(locality_table(rows, distances))
    return rows


def gold_pairs(data: Path | None) -> list[tuple[str, str]]:
    """(User turn, gold response) of the GSM8K test rows.

    The response is the row's solution as a model would write it that follows the prompt: without the calculator
    annotations <<...>>, and with "The answer is N." in place of the last line "#### N".

    Raises:
        DataError: the rows cannot be found.
    """
    bench = BENCHMARKS[BENCHMARK]
    return [(bench.prompt(row), bench.gold_text(row)) for row in Task(bench).rows(data)]


def locality_table(rows: Sequence[LocalityRow], distances: Sequence[int]) -> Table:
    """The table for a terminal: one line a distance, one column a masking ratio."""
    any_row = rows[0]
    caption = "Jensen-Shannon divergence in nats (x 1.4427: bits). In brackets: 95% bootstrap interval by response."
    if any_row.mini:
        caption += f" {MINI_CAPTION}"
    title = f"{any_row.model} on {any_row.dataset}, reading {any_row.reading}"
    table = Table(title=title, caption=caption, caption_justify="left")
    ratios = list(dict.fromkeys(row.masking_ratio for row in rows))
    for heading in ("Distance", *(f"t = {ratio:g}" for ratio in ratios)):
        table.add_column(heading, justify="right")
    by_key = {(row.masking_ratio, row.distance): row.interval for row in rows}
    for distance in sorted({sign * distance for distance in distances for sign in (-1, 1)}):
        intervals = (by_key.get((ratio, distance)) for ratio in ratios)
        table.add_row(f"{distance:+d}", *(interval_text(interval, DIGITS, missing="-") for interval in intervals))
    return table


class Progress:
    """Says on stderr how many masked texts are done: in place on a terminal, elsewhere a line now and then."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._last_line = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Tells that `done` of `total` masked texts are measured."""
        line = f"{self._label}: {done}/{total} masked texts"
        if sys.stderr.isatty():
            print(f"\r{line}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif done == total or time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            print(line, file=sys.stderr, flush=True)


def _rows(
    locality: Locality,
    settings: LocalitySettings,
    name: str,
    model: LoadedModel,
    reading: str,
    dataset: str,
    is_mini: bool,
) -> Iterator[LocalityRow]:
    """Every ratio and distance that has a pair, by ratio, then distance."""
    for ratio_index, ratio in enumerate(settings.ratios):
        for distance in range(-MAX_DISTANCE, MAX_DISTANCE + 1):
            found = locality.mean(ratio_index, distance, settings.seed)
            if found is None:
                continue
            interval, num_pairs = found
            yield LocalityRow(
                model=name,
                revision=model.revision or "",
                decoder=model.decoders[0],
                reading=reading,
                dataset=dataset,
                mini=is_mini,
                masking_ratio=ratio,
                distance=distance,
                n_pairs=num_pairs,
                n_responses=interval.n,
                jsd_mean=interval.value,
                ci_low=interval.low,
                ci_high=interval.high,
                unit="nats",
                reveals=settings.reveals,
                seed=settings.seed,
                dtype=str(model.dtype).removeprefix("torch."),
                device=model.device.type,
                version=refusion_eval.__version__,
            )


def _say(line: str) -> None:
    print(line, file=sys.stderr)
