"""Figures 3, 6 and 7: locality, the frontier of score and parallelism, scaling with data."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from refusion_eval.figures import drawn, style
from refusion_eval.figures.curves import DISTANCES
from refusion_eval.figures.names import task_title
from refusion_eval.figures.rows import OPERATING_POINT, Point

MOST_COLUMNS = 4  # most columns of Figure 7


def draw_locality(points: Sequence[Point]) -> Figure:
    """Figure 3: what a revealed token changes, by distance, with one panel for each model."""
    panels = list(dict.fromkeys(point.panel for point in points))
    series = sorted({point.series for point in points}, key=lambda name: float(name.partition("=")[2]))
    with style.paper_style():
        figure = style.new_figure(style.COLUMN_WIDTH if len(panels) == 1 else style.TEXT_WIDTH, 2.2)
        for number, (axes, panel) in enumerate(zip(drawn.row_of_axes(figure, len(panels)), panels, strict=True)):
            for place, name in enumerate(series):
                curve = [point for point in points if (point.panel, point.series) == (panel, name)]
                look = style.ORDERED[place % len(style.ORDERED)]
                for side in (-1, 1):  # there is no distance 0, so the line has a gap
                    half = [point for point in curve if point.x * side > 0]
                    drawn.line(
                        axes,
                        half,
                        [_place(point.x) for point in half],
                        look,
                        half[0].label if side < 0 and half else "",
                    )
            axes.axvline(0, color=style.BLACK, linewidth=0.6, linestyle=(0, (1, 1)))
            axes.set_xticks(
                [_place(d) for d in DISTANCES], [f"{d}".replace("-", "\u2212") for d in DISTANCES], rotation=90
            )
            axes.set_ylim(bottom=0)
            axes.set_xlim(_place(DISTANCES[7]) - 0.4, _place(DISTANCES[-1]) + 0.4)
            axes.set_xlabel("Distance from the revealed token")
            axes.set_ylabel("Jensen-Shannon divergence (nats)" if number == 0 else "")
            axes.legend(title="masked share", title_fontsize=7, loc="upper right")
            style.panel_title(axes, number, panel) if len(panels) > 1 else axes.set_title(panel, loc="left")
        style.add_caption(figure, [drawn.mini_note(points), *drawn.caption(points, "responses"), drawn.NO_PUBLISHED])
    return figure


def _place(distance: float) -> float:
    """Position of a distance on the axis, where powers of two are evenly spaced on either side of 0."""
    return math.copysign(1 + math.log2(abs(distance)), distance)


def draw_frontier(points: Sequence[Point]) -> Figure:
    """Figure 6: score against tokens per forward, with one curve for each system."""
    series = list(dict.fromkeys(point.series for point in points))
    with style.paper_style():
        figure = style.new_figure(style.COLUMN_WIDTH, 2.5)
        axes = figure.subplots()
        for name in series:
            curve = sorted((point for point in points if point.series == name), key=lambda point: point.x)
            drawn.line(
                axes, curve, [point.x for point in curve], style.style_of(name, series), curve[0].label, x_bars=True
            )
            drawn.ring(axes, curve)
        axes.set_xlabel("Tokens per forward (TPF)")
        axes.set_ylabel(drawn.SCORES.get(points[0].metric, points[0].metric))
        handles, labels = axes.get_legend_handles_labels()
        if any(point.mark == OPERATING_POINT for point in points):
            handles.append(Line2D([], [], **drawn.RING))
            labels.append("operating point")
        figure.legend(handles, labels, loc="outside upper center", ncols=2, columnspacing=1.4)
        sentences = [
            drawn.mini_note(points),
            f"{drawn.benchmark_title(points)}.",
            *drawn.caption(points),
            drawn.NO_PUBLISHED,
        ]
        style.add_caption(figure, sentences)
    return figure


def draw_scaling(points: Sequence[Point]) -> Figure:
    """Figure 7: score above throughput by training samples; a column for each task, `MOST_COLUMNS` in a band."""
    panels = list(dict.fromkeys(point.panel for point in points))
    series = list(dict.fromkeys(point.series for point in points))
    num_rows = 2 if any(point.metric == "tps" for point in points) else 1
    num_columns = min(len(panels), MOST_COLUMNS)
    num_bands = math.ceil(len(panels) / num_columns)
    with style.paper_style():
        width = style.COLUMN_WIDTH if len(panels) == 1 else style.TEXT_WIDTH
        figure = style.new_figure(width, (0.7 + 1.1 * num_rows) * num_bands)
        grid = figure.subplots(num_rows * num_bands, num_columns, squeeze=False)
        for number, panel in enumerate(panels):
            band, column = divmod(number, num_columns)
            cells = list(grid[num_rows * band : num_rows * (band + 1), column])
            _scaling_panel(cells, [point for point in points if point.panel == panel], series)
            style.panel_title(cells[0], number, task_title(panel, points[0].mini))
        for axes in grid[-num_rows:, len(panels) - num_columns * (num_bands - 1) :].flat:
            axes.remove()
        if len(series) > 1:
            grid[0, 0].legend()
        style.add_caption(figure, [drawn.mini_note(points), *drawn.caption(points), drawn.NO_PUBLISHED])
    return figure


def _scaling_panel(cells: Sequence[Axes], points: Sequence[Point], series: Sequence[str]) -> None:
    """Draws one task: its score, and below it its throughput if there is any."""
    values = sorted({point.x for point in points})
    for row, axes in enumerate(cells):
        shown = [point for point in points if (point.metric == "tps") == (row == 1)]
        for name in series:
            line = [point for point in shown if point.series == name]
            look = style.style_of(name, series)
            drawn.line(axes, line, [point.x for point in line], look, line[0].label if line else "")
        if shown:
            axes.set_ylabel(drawn.SCORES.get(shown[0].metric, shown[0].metric))
        axes.set_xscale("log")
        axes.set_xlim(values[0] / 1.5, values[-1] * 1.5)
        last = row == len(cells) - 1
        axes.set_xticks(values, [_amount(value) if last else "" for value in values], rotation=45)
        if last:
            axes.set_xlabel("Training samples")


def _amount(value: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:g}"
