"""Every figure of the paper by name: what it is drawn from, and what draws it."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from refusion_eval.errors import ConfigError
from refusion_eval.paper import draw_curves, draw_text, points
from refusion_eval.paper.draw_baseline import draw_against_baseline
from refusion_eval.paper.names import benchmark_of
from refusion_eval.paper.rows import Point, TokenCell, is_rows_file, read_rows, write_rows
from refusion_eval.paper.style import COLUMN_WIDTH, Drawing, Width, save_figure
from refusion_eval.results.render import latex_text
from refusion_eval.store.atomic_write import write_output


class PaperFigure(NamedTuple):
    """A figure of the paper: what it shows, and how its rows are read (None: from samples of a run) and drawn."""

    shows: str
    sources: str
    read: Callable[[Sequence[Path], str], Sequence[Any]] | None
    draw: Callable[[Sequence[Any], Width | None], Drawing]
    kind: type[Point] | type[TokenCell] = Point


_SWEEPS = "folders of sweeps (refusion-eval sweep)"
_RUN = "a run directory"
_OF_ONE_TASK = ("figure1", "figure5", "figure9")

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
    "figure5": PaperFigure("order of generation on the text", _RUN, None, draw_text.draw_order, TokenCell),
    "figure6": PaperFigure("score against tokens per forward", _SWEEPS, points.frontier, draw_curves.draw_frontier),
    "figure7": PaperFigure(
        "scaling with training data",
        f"CSV with {','.join(points.SCALING_COLUMNS)}",
        lambda paths, task: points.scaling_points(paths),
        draw_curves.draw_scaling,
    ),
    "figure8": PaperFigure("sweep of the block size", _SWEEPS, points.swept, draw_curves.draw_swept),
    "figure9": PaperFigure("decoding step by step", _RUN, None, draw_text.draw_steps, TokenCell),
}


def rows_of(name: str, sources: Sequence[Path], task: str | None = None) -> Sequence[Any] | None:
    """The rows of a figure, read from its own CSV file or from its sources; by default of a sweep's only task.

    Raises ConfigError if no source is given, or the figure's own file beside others, and DataError or StoreError if a
    source is missing, half-written, malformed, or does not fit the others.
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


def write_figure(
    name: str, rows: Sequence[Any], out: Path, width: Width | None = None, margin: float | None = None
) -> list[Path]:
    """Writes a figure as .csv, .png and .pdf, and its caption as .txt and .tex. It is drawn from the written CSV.

    The files are called after the figure, with `_mini` for mini tasks. Those of Figures 1, 5 and 9 name task and item.
    The margin, in points of score, is that of sweet spots; ConfigError for a figure without one.
    """
    figure = FIGURES[name]
    if margin is not None and figure.draw is not draw_curves.draw_swept:
        raise ConfigError(f"{name} has no sweet spot, so it takes no margin; leave --margin out")
    stem = out / _stem(name, rows)
    csv, text, latex = (stem.with_name(f"{stem.name}.{ending}") for ending in ("csv", "txt", "tex"))
    write_rows(csv, figure.kind, rows)
    draw: Callable[[Sequence[Any], Width | None], Drawing] = figure.draw
    if margin is not None:
        draw = partial(draw_curves.draw_swept, margin=margin)
    drawn = draw(read_rows(csv, figure.kind), width)
    pictures = save_figure(drawn.figure, stem)
    write_output(text, f"{drawn.caption}\n")
    write_output(latex, _float(stem.name, drawn))
    return [csv, *pictures, text, latex]


def _stem(name: str, rows: Sequence[Any]) -> str:
    mini = "_mini" if any(row.mini for row in rows) else ""
    if name not in _OF_ONE_TASK:
        return f"{name}{mini}"
    measured = [row for row in rows if isinstance(row, TokenCell) or row.origin == "measured"]
    if not measured:
        return name
    item = f"_{measured[0].item}" if isinstance(measured[0], TokenCell) else ""
    return re.sub(r"[^\w.-]+", "-", f"{name}{mini}_{benchmark_of(measured[0].task)}{item}")


def _float(name: str, drawn: Drawing) -> str:
    """The figure with its caption for LaTeX, over as many columns as it was drawn for."""
    kind = "figure" if drawn.figure.get_figwidth() <= COLUMN_WIDTH else "figure*"
    lines = [
        r"% needs \usepackage{graphicx}",
        rf"\begin{{{kind}}}[t]",
        r"\centering",
        rf"\includegraphics[width=\linewidth]{{{name}.pdf}}",
        rf"\caption{{{latex_text(drawn.caption)}}}",
        rf"\label{{fig:{name.replace('_', '-')}}}",
        rf"\end{{{kind}}}",
    ]
    return "\n".join(lines) + "\n"
