"""Every figure of the paper by name: what it is drawn from, and what draws it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from refusion_eval.errors import ConfigError
from refusion_eval.figures import draw_curves, draw_text, points
from refusion_eval.figures.draw_baseline import draw_against_baseline
from refusion_eval.figures.rows import Point, TokenCell, is_rows_file, read_rows, write_rows
from refusion_eval.figures.style import save_figure


class PaperFigure(NamedTuple):
    """A figure of the paper.

    Attributes:
        shows: what the figure shows, for readers.
        sources: what its rows are read from, for readers.
        read: reads the rows from sources for a benchmark; None if a run's samples and tokenizer are needed.
        draw: draws the rows.
        kind: class of its rows.
    """

    shows: str
    sources: str
    read: Callable[[Sequence[Path], str], Sequence[Any]] | None
    draw: Callable[[Sequence[Any]], Figure]
    kind: type[Point] | type[TokenCell] = Point


_SWEEPS = "folders of sweeps (refusion-eval sweep)"
_RUN = "a run directory"

FIGURES: Mapping[str, PaperFigure] = {
    "figure1": PaperFigure(
        "score and throughput against the autoregressive baseline",
        "run directories and results CSV files; none draws the published points alone",
        points.against_baseline,
        draw_against_baseline,
    ),
    "figure3": PaperFigure(
        "what a revealed token changes, by distance",
        "CSV files of refusion-eval locality",
        lambda paths, task: points.locality_points(paths),
        draw_curves.draw_locality,
    ),
    "figure4": PaperFigure(
        "sweeps of tau_slot, tau_token and the slot size", _SWEEPS, points.swept, draw_curves.draw_swept
    ),
    "figure6": PaperFigure("score against tokens per forward", _SWEEPS, points.frontier, draw_curves.draw_frontier),
    "figure7": PaperFigure(
        "scaling with training data",
        f"CSV with {','.join(points.SCALING_COLUMNS)}",
        lambda paths, task: points.scaling_points(paths),
        draw_curves.draw_scaling,
    ),
    "figure8": PaperFigure("sweep of the block size", _SWEEPS, points.swept, draw_curves.draw_swept),
    "figure5": PaperFigure("order of generation on the text", _RUN, None, draw_text.draw_order, TokenCell),
    "figure9": PaperFigure("decoding step by step", _RUN, None, draw_text.draw_steps, TokenCell),
}


def rows_of(name: str, sources: Sequence[Path], task: str | None = None) -> Sequence[Any] | None:
    """The rows of a figure, read from its own CSV file or from its sources.

    Args:
        name: name of the figure.
        sources: files and folders that the user named.
        task: benchmark; if None that of a sweep of only one, else the paper's.

    Returns:
        None if the rows have to be taken from the samples of a run.

    Raises:
        ConfigError: no source is given, or the figure's own file beside others.
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
    return None if figure.read is None else figure.read(sources, task or points.only_task(sources) or points.TASK)


def write_figure(name: str, rows: Sequence[Any], out: Path) -> list[Path]:
    """Writes OUT/NAME.csv, .png and .pdf, or OUT/NAME_mini for mini tasks. The figure is drawn from the written CSV.

    Raises:
        StoreError: a file cannot be written.
    """
    figure = FIGURES[name]
    csv = out / (f"{name}_mini.csv" if any(row.mini for row in rows) else f"{name}.csv")
    write_rows(csv, figure.kind, rows)
    return [csv, *save_figure(figure.draw(read_rows(csv, figure.kind)), csv.with_suffix(""))]
