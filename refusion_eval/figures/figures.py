"""Every figure by name: what it is drawn from, and what draws it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from matplotlib.figure import Figure

from refusion_eval.errors import ConfigError
from refusion_eval.figures import curves, draw_baseline, draw_curves, draw_swept, draw_text, versus
from refusion_eval.figures.rows import Point, Row, TokenCell, is_rows_file, read_rows, write_rows
from refusion_eval.figures.style import save_figure


@dataclass(frozen=True, kw_only=True)
class FigureOf(Generic[Row]):
    """A figure of the paper.

    Attributes:
        shows: in words.
        sources: what its rows are read from, in words.
        kind: of its rows.
        read: (sources, task) -> rows; None where a run's samples and tokenizer are needed.
        draw: of rows.
    """

    shows: str
    sources: str
    kind: type[Row]
    read: Callable[[Sequence[Path], str | None], list[Row]] | None
    draw: Callable[[Sequence[Row]], Figure]


_SWEEPS = "folders of sweeps (refusion-eval sweep)"
_RUN = "a run directory"

POINT_FIGURES: Mapping[str, FigureOf[Point]] = {
    "figure1": FigureOf(
        shows="score and throughput against the autoregressive baseline",
        sources="run directories and results CSV files; none draws the published points alone",
        kind=Point,
        read=lambda paths, task: versus.against_baseline(paths, task or versus.TASK),
        draw=draw_baseline.draw_against_baseline,
    ),
    "figure3": FigureOf(
        shows="what a revealed token changes, by distance",
        sources="CSV files of refusion-eval locality",
        kind=Point,
        read=lambda paths, task: curves.locality_points(paths),
        draw=draw_curves.draw_locality,
    ),
    "figure4": FigureOf(
        shows="sweeps of tau_slot, tau_token and the slot size",
        sources=_SWEEPS,
        kind=Point,
        read=lambda paths, task: versus.swept(paths, task or versus.TASK),
        draw=draw_swept.draw_swept,
    ),
    "figure6": FigureOf(
        shows="score against tokens per forward",
        sources=_SWEEPS,
        kind=Point,
        read=lambda paths, task: versus.frontier(paths, task or versus.TASK),
        draw=draw_curves.draw_frontier,
    ),
    "figure7": FigureOf(
        shows="scaling with training data",
        sources=f"CSV with {','.join(curves.SCALING_COLUMNS)}",
        kind=Point,
        read=lambda paths, task: curves.scaling_points(paths),
        draw=draw_curves.draw_scaling,
    ),
    "figure8": FigureOf(
        shows="sweep of the block size",
        sources=_SWEEPS,
        kind=Point,
        read=lambda paths, task: versus.swept(paths, task or versus.TASK),
        draw=draw_swept.draw_swept,
    ),
}
TEXT_FIGURES: Mapping[str, FigureOf[TokenCell]] = {
    "figure5": FigureOf(
        shows="order of generation on the text",
        sources=_RUN,
        kind=TokenCell,
        read=None,
        draw=draw_text.draw_order,
    ),
    "figure9": FigureOf(
        shows="decoding step by step",
        sources=_RUN,
        kind=TokenCell,
        read=None,
        draw=draw_text.draw_steps,
    ),
}
FIGURES: Mapping[str, FigureOf] = {**POINT_FIGURES, **TEXT_FIGURES}


def rows_of(name: str, sources: Sequence[Path], task: str | None = None) -> list | None:
    """The rows of a figure, from its own CSV file or from its sources.

    Returns:
        None where they have to be taken from a run's samples.

    Raises:
        ConfigError: no source is given, or its own file beside others.
        DataError, StoreError: a source is missing, half-written, malformed, or does not fit the others.
    """
    figure = FIGURES[name]
    own = [path for path in sources if is_rows_file(path, figure.kind)]
    if own and len(sources) > 1:
        raise ConfigError(f"{name}: {own[0]} holds the whole figure; give it alone, or sources only ({figure.sources})")
    if own:
        return read_rows(own[0], figure.kind)
    if not sources and name != "figure1":
        raise ConfigError(f"{name} is drawn from {figure.sources}; name them, or the CSV that it was drawn from")
    return None if figure.read is None else figure.read(sources, task)


def write_figure(name: str, rows: Sequence, out: Path) -> list[Path]:
    """Writes OUT/NAME.csv, .png and .pdf; of mini tasks OUT/NAME_mini. What is drawn is what the CSV says.

    Raises:
        StoreError: a file cannot be written.
    """
    figure = FIGURES[name]
    csv = out / (f"{name}_mini.csv" if any(row.mini for row in rows) else f"{name}.csv")
    write_rows(csv, figure.kind, rows)
    return [csv, *save_figure(figure.draw(read_rows(csv, figure.kind)), csv.with_suffix(""))]
