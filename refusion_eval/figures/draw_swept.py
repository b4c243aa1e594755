"""Figures 4 and 8: score and throughput against the autoregressive baseline, one varied setting in each column."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from refusion_eval.figures import drawn, style
from refusion_eval.figures.rows import OPERATING_POINT, Point
from refusion_eval.figures.versus import DELTA_SCORE, DELTA_TPS
from refusion_eval.results.published import read_published

# Setting -> its name in print, and the claim in claims.csv that states the sweet spot.
_SETTINGS = {
    "tau_slot": (r"$\tau_{\mathrm{slot}}$", "P15"),
    "tau_token": (r"$\tau_{\mathrm{token}}$", "P16"),
    "slot_size": ("slot size $k$", "P17"),
    "block_size": ("block size $b$", "P18"),
}
_LEAST_RANGE = 6.0  # points
_SIZES = ("slot_size", "block_size")  # drawn on a logarithmic axis


def draw_swept(points: Sequence[Point]) -> Figure:
    """Figures 4 and 8: score and throughput minus the baseline's, with the sweet spot of each setting shaded."""
    panels = sorted(dict.fromkeys(point.panel for point in points), key=lambda name: [*_SETTINGS, name].index(name))
    series = list(dict.fromkeys(point.series for point in points))
    rows = ((DELTA_SCORE, "$\\Delta$ score (points)"), (DELTA_TPS, "$\\Delta$ TPS (tokens/s)"))
    with style.paper_style():
        figure = style.new_figure(style.COLUMN_WIDTH if len(panels) == 1 else style.TEXT_WIDTH, 2.7)
        grid = figure.subplots(2, len(panels), sharex="col", sharey="row", squeeze=False)
        for column, panel in enumerate(panels):
            for (metric, name), axes in zip(rows, grid[:, column], strict=True):
                shown = [point for point in points if (point.panel, point.metric) == (panel, metric)]
                _sweet_spot(axes, panel, points)
                axes.axhline(0, color=style.BLACK, linewidth=0.6, linestyle=(0, (4, 2)), zorder=1)
                for system in series:
                    curve = [point for point in shown if point.series == system]
                    drawn.line(axes, curve, [point.x for point in curve], style.style_of(system, series), "")
                    drawn.ring(axes, curve)
                axes.set_ylabel(name if column == 0 else "")
            _setting_axis(grid[1, column], panel, points)
            if len(panels) > 1:
                style.panel_title(grid[0, column], column, _SETTINGS.get(panel, (panel,))[0])
        _widen(grid[0, 0])
        figure.legend(
            handles=_swept_legend(points),
            loc="outside upper center",
            ncols=4 if len(panels) > 1 else 2,
            columnspacing=1.4,
        )
        figure.align_ylabels(grid[:, 0])
        style.add_caption(
            figure,
            [
                f"{drawn.benchmark_title(points)}. $\\Delta$: minus the autoregressive baseline (AR).",
                drawn.mini_note(points),
                *drawn.caption(points),
                _spot_note(points),
            ],
        )
    return figure


def _widen(axes: Axes) -> None:
    """Widens the axis to a least range, so that differences of single items look small."""
    low, high = axes.get_ylim()
    if high - low < _LEAST_RANGE:
        middle = (low + high) / 2
        axes.set_ylim(middle - _LEAST_RANGE / 2, middle + _LEAST_RANGE / 2)


def _setting_axis(axes: Axes, panel: str, points: Sequence[Point]) -> None:
    values = sorted({point.x for point in points if point.panel == panel})
    if panel in _SIZES:
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xlim(values[0] / 2**0.4, values[-1] * 2**0.4)
    else:
        axes.set_xlim(min(values) - 0.04, max(values) + 0.04)
    axes.set_xlabel(_SETTINGS.get(panel, (panel,))[0])


def sweet_spot(points: Sequence[Point], panel: str, series: str) -> tuple[float, float] | None:
    """The range of a setting around the operating point with a score and a throughput like the baseline's or better.

    The range consists of neighbouring values, the operating point among them. At each of them the score is not worse
    than the baseline's (the upper bound of the difference, or the difference itself without an interval, is at least 0)
    and the throughput is higher (the lower bound of the difference is above 0).

    Returns:
        The least and the greatest value; None if the operating point does not qualify or is not known.
    """
    curve = [point for point in points if (point.panel, point.series) == (panel, series)]
    score = {point.x: _bound(point, "high") for point in curve if point.metric == DELTA_SCORE}
    speed = {point.x: _bound(point, "low") for point in curve if point.metric == DELTA_TPS}
    values = sorted(score.keys() & speed.keys())
    good = [score[value] >= 0 and speed[value] > 0 for value in values]
    operating = [value for value in values if any(p.x == value and p.mark == OPERATING_POINT for p in curve)]
    if not operating or not good[values.index(operating[0])]:
        return None
    low = high = values.index(operating[0])
    while low > 0 and good[low - 1]:
        low -= 1
    while high + 1 < len(values) and good[high + 1]:
        high += 1
    return values[low], values[high]


def _bound(point: Point, side: str) -> float:
    bound = point.y_high if side == "high" else point.y_low
    return point.y if math.isnan(bound) else bound


def _sweet_spot(axes: Axes, panel: str, points: Sequence[Point]) -> None:
    spot = sweet_spot(points, panel, _main_series(points))
    if spot is not None:
        low, high = _widened(panel, *spot)
        axes.axvspan(low, high, facecolor=style.SWEET_SPOT, edgecolor=style.SWEET_EDGE, linewidth=0.5, zorder=0)
    if not points[0].mini and (published := _published_spot(panel)):
        for value in published:
            axes.axvline(value, color=style.GREY, linewidth=0.8, linestyle=(0, (1, 1.5)), zorder=1)


def _widened(panel: str, low: float, high: float) -> tuple[float, float]:
    """The range extended beyond its ends, so that a range of a single value has an area."""
    return (low / 2**0.25, high * 2**0.25) if panel in _SIZES else (low - 0.02, high + 0.02)


def _published_spot(panel: str) -> tuple[float, float] | None:
    claim = _SETTINGS.get(panel, ("", ""))[1]
    text = next((row["published"] for row in read_published("claims.csv") if row["id"] == claim), "")
    bounds = text.strip("{}").replace("..", ",").split(",")
    return (float(bounds[0]), float(bounds[1])) if len(bounds) == 2 else None


def _main_series(points: Sequence[Point]) -> str:
    """ReFusion, also if it was made from another backbone than the paper's; else the first series."""
    names = [point.series for point in points]
    return next((name for name in names if name == "refusion" or name.startswith("refusion on ")), names[0])


def _spot_note(points: Sequence[Point]) -> str:
    text = (
        "Shaded: values around the operating point with a score no worse than AR's (the upper bound of the difference "
        "is at least 0) and a higher throughput (its lower bound is above 0)."
    )
    return text if points[0].mini else f"{text} Dotted: bounds of the sweet spot that the paper prints."


def _swept_legend(points: Sequence[Point]) -> list[Line2D | Patch]:
    names = list(dict.fromkeys((point.series, point.label) for point in points))
    looks = [(style.style_of(system, [name for name, _ in names]), label) for system, label in names]
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=look.colour, marker=look.marker, linestyle=look.line, label=label) for look, label in looks
    ]
    if any(point.mark == OPERATING_POINT for point in points):
        handles.append(Line2D([], [], **drawn.RING, label="operating point"))
    handles.append(Line2D([], [], color=style.BLACK, linewidth=0.6, linestyle=(0, (4, 2)), label="AR baseline"))
    if any(sweet_spot(points, panel, _main_series(points)) for panel in {point.panel for point in points}):
        handles.append(Patch(facecolor=style.SWEET_SPOT, edgecolor=style.SWEET_EDGE, linewidth=0.5, label="sweet spot"))
    return handles
