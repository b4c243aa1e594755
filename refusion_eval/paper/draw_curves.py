"""Figures 3, 4, 6, 7 and 8: curves of measured points with their intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter

from refusion_eval.decoders import Style
from refusion_eval.metrics import Interval
from refusion_eval.paper import style
from refusion_eval.paper.formulas import MARGIN
from refusion_eval.paper.names import NO_PUBLISHED, benchmark_title, caption, count, mini_sentence, task_title
from refusion_eval.paper.points import DELTA_SCORE, DELTA_TPS, DISTANCES, is_better
from refusion_eval.paper.rows import OPERATING_POINT, REFERENCE, Point
from refusion_eval.results.cautions import that_hold
from refusion_eval.results.measurement import without_backbone
from refusion_eval.results.published import read_published
from refusion_eval.results.render import interval_text

MOST_COLUMNS = 4  # most columns of Figure 7

_SCORES = {"accuracy": "Accuracy (%)", "pass@1": "pass@1 (%)"}
_RING: Mapping = {
    "marker": "o",
    "markersize": 8.5,
    "markerfacecolor": "none",
    "markeredgecolor": style.BLACK,
    "markeredgewidth": 0.9,
    "linestyle": "none",
}
# Setting -> its name in print, and the claim in claims.csv that states the sweet spot.
_SETTINGS = {
    "tau_slot": (r"$\tau_{\mathrm{slot}}$", "P15"),
    "tau_token": (r"$\tau_{\mathrm{token}}$", "P16"),
    "slot_size": ("slot size $k$", "P17"),
    "block_size": ("block size $b$", "P18"),
}
_LEAST_RANGE = 6.0  # points of score in Figures 4 and 8, so that differences of single items look small
_SIZES = ("slot_size", "block_size")  # drawn on a logarithmic axis
_SHOWN, _NOT_DECIDED = "sweet spot", "not decided"
_SPOT: Mapping = {"facecolor": style.SWEET_SPOT, "edgecolor": style.SWEET_EDGE, "linewidth": 0.5}
_UNDECIDED: Mapping = {**_SPOT, "facecolor": "white", "edgecolor": style.UNDECIDED_EDGE, "hatch": "///"}


def draw_locality(points: Sequence[Point], width: style.Width | None = None) -> style.Drawing:
    """Figure 3: what a revealed token changes, by distance, with one panel for each model."""
    panels = list(dict.fromkeys(point.panel for point in points))
    series = sorted({point.series for point in points}, key=lambda name: float(name.partition("=")[2]))
    distances = [distance for distance in DISTANCES if any(point.x == distance for point in points)]
    inches = style.page_width(width, "one" if len(panels) == 1 else "two")
    stacked = inches == style.COLUMN_WIDTH
    with style.paper_style():
        figure = style.new_figure(inches, 2.2 * (len(panels) if stacked else 1) + 0.2)
        grid = figure.subplots(*((len(panels), 1) if stacked else (1, len(panels))), squeeze=False, sharey=True).flat
        for number, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
            for place, name in enumerate(series):
                curve = [point for point in points if (point.panel, point.series) == (panel, name)]
                look = style.ORDERED[place % len(style.ORDERED)]
                for side in (-1, 1):  # there is no distance 0, so the line has a gap
                    half = [point for point in curve if point.x * side > 0]
                    label = half[0].label if side < 0 and half and number == 0 else ""
                    _curve(axes, half, look, label, xs=[_place(point.x) for point in half])
            axes.axvline(0, color=style.BLACK, linewidth=0.6, linestyle=(0, (1, 1)))
            axes.set_xticks([_place(d) for d in distances], [f"{d}".replace("-", "\u2212") for d in distances])
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
            axes.set_xlabel("Distance from the revealed token" if not stacked or number == len(panels) - 1 else "")
            axes.set_ylabel("JS divergence (nats)" if stacked or number == 0 else "")
            style.panel_title(axes, number if len(panels) > 1 else None, panel)
        legend = figure.legend(loc="outside upper center", ncols=len(series), title="masked share", title_fontsize=7)
        for text in legend.get_texts():
            style.formula(text)
    plotted = (
        "Jensen-Shannon divergence in nats between a model's predictions before and after a token is revealed "
        "(vertical axis) by their distance from this token (horizontal axis), a panel for each model and a curve for "
        f"each share of masked tokens, {count((point.n for point in points), 'responses a point')}."
    )
    return style.drawing(figure, [plotted, mini_sentence(points), *caption(points), NO_PUBLISHED])


def _place(distance: float) -> float:
    """Position of a distance on the axis, where powers of two are evenly spaced on either side of 0."""
    return math.copysign(1 + math.log2(abs(distance)), distance)


def draw_frontier(points: Sequence[Point], width: style.Width | None = None) -> style.Drawing:
    """Figure 6: score against tokens per forward; a line joins the points of a system that none of its points beats."""
    series = style.in_order(point.series for point in points)
    with style.paper_style():
        figure = style.new_figure(style.page_width(width, "one"), 2.5)
        axes = figure.subplots()
        for name in series:
            curve = [point for point in points if point.series == name]
            look = style.style_of(name, series)
            # A line through all points would join the noise of single runs.
            _curve(axes, curve, replace(look, line="none"), curve[0].label, x_bars=True)
            best = unbeaten(curve)
            axes.plot([p.x for p in best], [p.y for p in best], color=look.colour, linestyle=look.line, zorder=2)
        axes.set_xlabel("Tokens per forward (TPF)")
        axes.set_ylabel(_SCORES.get(points[0].metric, points[0].metric))
        handles, labels = axes.get_legend_handles_labels()
        if any(point.mark == OPERATING_POINT for point in points):
            handles.append(Line2D([], [], **_RING))
            labels.append("operating point")
        figure.legend(handles, labels, loc="outside upper center", ncols=2, columnspacing=1.4)
    plotted = (
        "Score in percent (vertical axis) against tokens per forward (TPF, horizontal axis) on "
        f"{benchmark_title(points)}, a point for each setting, {count(point.n for point in points)}."
    )
    joined = "Lines join the points of a system than which no other of its points is better in both."
    return style.drawing(figure, [plotted, mini_sentence(points), joined, *caption(points), NO_PUBLISHED])


def unbeaten(points: Sequence[Point]) -> list[Point]:
    """The points to which no other is equal or better in both, from left to right (the Pareto frontier)."""
    frontier: list[Point] = []
    for point in sorted(points, key=lambda point: (-point.x, -point.y)):
        if not frontier or point.y > frontier[-1].y:
            frontier.append(point)
    return frontier[::-1]


def draw_scaling(points: Sequence[Point], width: style.Width | None = None) -> style.Drawing:
    """Figure 7: score above throughput by training samples; a column for each task, `MOST_COLUMNS` in a band."""
    panels = list(dict.fromkeys(point.panel for point in points))
    series = style.in_order(point.series for point in points)
    num_rows = 2 if any(point.metric == "tps" for point in points) else 1
    inches = style.page_width(width, "one" if len(panels) == 1 else "two")
    num_columns = min(len(panels), MOST_COLUMNS if inches == style.TEXT_WIDTH else MOST_COLUMNS // 2)
    num_bands = math.ceil(len(panels) / num_columns)
    with style.paper_style():
        figure = style.new_figure(inches, (0.5 + 1.0 * num_rows) * num_bands + 0.2)
        grid = figure.subplots(num_rows * num_bands, num_columns, squeeze=False, sharex=True)
        for row in range(num_rows):  # all axes of one quantity have one scale
            first, *others = grid[row::num_rows].flat
            for axes in others:
                axes.sharey(first)
        for number, panel in enumerate(panels):
            band, column = divmod(number, num_columns)
            cells = list(grid[num_rows * band : num_rows * (band + 1), column])
            _scaling_panel(cells, [point for point in points if point.panel == panel], series, is_first=column == 0)
            style.panel_title(cells[0], number, task_title(panel, points[0].mini))
        for axes in grid[-num_rows:, len(panels) - num_columns * (num_bands - 1) :].flat:
            axes.remove()
        if len(series) > 1:
            figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(series))
        figure.supxlabel("Training samples", size=8)
    speed = " and throughput in tokens per second (lower axes)" if num_rows == 2 else ""
    plotted = (
        f"Score in percent{' (upper axes)' if speed else ''}{speed} against the number of training samples (horizontal "
        f"axis, logarithmic), a panel for each task, {count(point.n for point in points)}."
    )
    return style.drawing(figure, [plotted, mini_sentence(points), *caption(points), NO_PUBLISHED])


def _scaling_panel(cells: Sequence[Axes], points: Sequence[Point], series: Sequence[str], *, is_first: bool) -> None:
    """Draws one task: its score, and below it its throughput if there is any. The first one names the axes."""
    values = sorted({point.x for point in points})
    for row, axes in enumerate(cells):
        shown = [point for point in points if (point.metric == "tps") == (row == 1)]
        for name in series:
            curve = [point for point in shown if point.series == name]
            _curve(axes, curve, style.style_of(name, series), curve[0].label if curve else "")
        if is_first:
            axes.set_ylabel("Tokens/s" if row == 1 else "Score (%)")
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(values[0] / 1.5, values[-1] * 1.5)
        # The first, the middle and the last value, which have room side by side.
        ticks = sorted({values[0], values[len(values) // 2], values[-1]})
        axes.set_xticks(ticks, [_amount(value) for value in ticks])
        axes.tick_params(labelleft=is_first, labelbottom=axes is cells[-1])


def _amount(value: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:g}"


def draw_swept(points: Sequence[Point], width: style.Width | None = None, margin: float = MARGIN) -> style.Drawing:
    """Figures 4 and 8: score and throughput minus the baseline's, with the sweet spot of each setting shaded."""
    panels = sorted(dict.fromkeys(point.panel for point in points), key=lambda name: [*_SETTINGS, name].index(name))
    every, further = points, [point for point in points if point.mark == REFERENCE]
    points, off = _with_off_on_the_axis([point for point in points if point.mark != REFERENCE])
    series = style.in_order(point.series for point in points)
    rows = ((DELTA_SCORE, "$\\Delta$ score (points)"), (DELTA_TPS, "$\\Delta$ TPS (tokens/s)"))
    inches = style.page_width(width, "one" if len(panels) == 1 else "two")
    stacked = inches == style.COLUMN_WIDTH and len(panels) > 1
    with style.paper_style():
        figure = style.new_figure(inches, 1.75 * len(panels) if stacked else 2.7)
        if stacked:  # a row for each setting
            grid = figure.subplots(len(panels), 2, sharex="row", sharey="col", squeeze=False).T
        else:
            grid = figure.subplots(2, len(panels), sharex="col", sharey="row", squeeze=False)
        for column, panel in enumerate(panels):
            for (metric, name), axes in zip(rows, grid[:, column], strict=True):
                _draw_sweet_spot(axes, panel, points, margin)
                axes.axhline(0, color=style.BLACK, linewidth=0.6, linestyle=(0, (4, 2)), zorder=1)
                for system in series:
                    key = (panel, metric, system)
                    curve = [point for point in points if (point.panel, point.metric, point.series) == key]
                    # Without lines, which would join the noise of single runs.
                    _curve(axes, curve, replace(style.style_of(system, series), line="none"))
                for point in further:
                    if (point.panel, point.metric) == (panel, metric):
                        _further_line(axes, point, further)
                style.formula(axes.yaxis.get_label())
                axes.set_ylabel(name if column == 0 or stacked else "")
                if stacked or metric == DELTA_TPS:
                    _setting_axis(axes, panel, points, off.get(panel))
            if len(panels) > 1:
                title = style.panel_title(grid[0, column], column, _SETTINGS.get(panel, (panel,))[0])
                if panel in _SETTINGS:
                    style.formula(title)
        low, high = grid[0, 0].get_ylim()
        if high - low < _LEAST_RANGE:
            middle = (low + high) / 2
            grid[0, 0].set_ylim(middle - _LEAST_RANGE / 2, middle + _LEAST_RANGE / 2)
        num_columns = 4 if inches == style.TEXT_WIDTH else 2
        legend = _swept_legend(points, further, margin)
        figure.legend(handles=legend, loc="outside upper center", ncols=num_columns, columnspacing=1.4)
        figure.align_ylabels(grid[:, 0])
    labels = {handle.get_label() for handle in legend}
    sides = ("left", "right") if stacked else ("upper", "lower")
    statements = {
        f"Score in points ({sides[0]} axes) and throughput in tokens per second ({sides[1]} axes) minus those of the "
        f"autoregressive baseline (AR, dashed) against the value of a setting (horizontal axis) on "
        f"{benchmark_title(points)}, {count(point.n for point in points)}.": True,
        **dict.fromkeys([mini_sentence(points), *_further_sentences(further), *caption(every)], True),
        "Shaded: values around the operating point that are shown to be faster than AR and no worse by more than "
        f"{margin:g} points (the lower bound of the first difference is above 0, that of the second above "
        f"\u2212{margin:g}).": _SHOWN in labels,
        f"Hatched: values around the operating point of which the data do not decide whether they are faster than AR "
        f"and no worse by more than {margin:g} points (each lies within the interval).": _NOT_DECIDED in labels,
        "Dotted: bounds of the sweet spot that the paper prints.": not points[0].mini,
    }
    return style.drawing(figure, that_hold(statements))


def _further_line(axes: Axes, point: Point, further: Sequence[Point]) -> None:
    """Draws a further autoregressive system across the axes, with its marker and interval at the right edge."""
    look = _further_look(point, further)
    across: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "color": look["color"]}
    axes.plot([0, 1], [point.y] * 2, linestyle=look["linestyle"], linewidth=look["linewidth"], zorder=2, **across)
    bars = style.bars([point], "y")
    end: dict[str, Any] = {
        "marker": look["marker"],
        "markersize": 4,
        "clip_on": False,
        "elinewidth": 0.7,
        "capsize": 1.6,
        "zorder": 3,
    }
    axes.errorbar([1], [point.y], yerr=bars, linestyle="none", **end, **across)


def _further_look(point: Point, further: Sequence[Point]) -> dict[str, Any]:
    look = style.style_of(point.series, [other.series for other in further])
    return {"color": look.colour, "marker": look.marker, "linestyle": (0, (1, 1)), "linewidth": 1.2}


def _further_sentences(further: Sequence[Point]) -> list[str]:
    """What a caption says of the further autoregressive systems: each one's differences from the baseline."""
    differences: dict[str, dict[str, str]] = {}
    for point in further:
        text = interval_text(Interval(point.y, point.y_low, point.y_high, point.n))
        differences.setdefault(point.label, {})[point.metric] = text
    return [
        f"{label} (horizontal dotted line) is a further autoregressive system: {found[DELTA_SCORE]} points of score "
        f"and {found[DELTA_TPS]} tokens per second from the baseline; sweet spots are against the baseline alone."
        for label, found in differences.items()
    ]


def _with_off_on_the_axis(points: Sequence[Point]) -> tuple[list[Point], dict[str, float]]:
    """The points with a place on the axis for a setting that is off, whose value is infinite; panel -> that place."""
    off: dict[str, float] = {}
    for panel in {point.panel for point in points if math.isinf(point.x)}:
        values = [point.x for point in points if point.panel == panel and not math.isinf(point.x)] or [1.0]
        low, high = min(values), max(values)
        off[panel] = 2 * high if panel in _SIZES else high + 0.15 * (high - low or 1.0)
    return [replace(point, x=off[point.panel]) if math.isinf(point.x) else point for point in points], off


def _setting_axis(axes: Axes, panel: str, points: Sequence[Point], off: float | None) -> None:
    values = sorted({point.x for point in points if point.panel == panel})
    if panel in _SIZES:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xlim(values[0] / 2**0.4, values[-1] * 2**0.4)
    else:
        axes.set_xlim(min(values) - 0.04, max(values) + 0.04)
    if off is not None:
        axes.set_xticks(values, ["off" if value == off else f"{value:g}" for value in values])
    axes.set_xlabel(_SETTINGS.get(panel, (panel,))[0])
    if panel in _SETTINGS:
        style.formula(axes.xaxis.get_label())


def sweet_spot(
    points: Sequence[Point], panel: str, series: str, margin: float = MARGIN, *, undecided: bool = False
) -> tuple[float, float] | None:
    """The least and greatest value around the operating point that are shown to be better than the baseline, or None.

    With `undecided`, values count too of which the data do not decide whether they are better.
    """
    curve = [point for point in points if (point.panel, point.series) == (panel, series)]

    def bounds(metric: str) -> dict[float, float]:
        """A value without an interval is undecided."""
        of_metric = {point.x: point for point in curve if point.metric == metric}
        name, unknown = ("y_high", math.inf) if undecided else ("y_low", -math.inf)
        numbers = {x: getattr(point, name) for x, point in of_metric.items()}
        return {x: unknown if math.isnan(number) else number for x, number in numbers.items()}

    score, tps = bounds(DELTA_SCORE), bounds(DELTA_TPS)
    values = sorted(score.keys() & tps.keys())
    good = [is_better(score[value], tps[value], margin) for value in values]
    operating = [value for value in values if any(p.x == value and p.mark == OPERATING_POINT for p in curve)]
    if not operating or not good[values.index(operating[0])]:
        return None
    low = high = values.index(operating[0])
    while low > 0 and good[low - 1]:
        low -= 1
    while high + 1 < len(values) and good[high + 1]:
        high += 1
    return values[low], values[high]


def widened(low: float, high: float, values: Sequence[float], *, is_size: bool) -> tuple[float, float]:
    """The bounds of the shade of a range, which has an area if it is a single value, and covers no value beyond it."""
    margin, scaled, back = (0.25, math.log2, math.exp2) if is_size else (0.02, float, float)  # sizes: a log axis
    first, last, others = scaled(low), scaled(high), [scaled(value) for value in values]
    return (
        back(max([first - margin, *((other + first) / 2 for other in others if other < first)])),
        back(min([last + margin, *((other + last) / 2 for other in others if other > last)])),
    )


def _draw_sweet_spot(axes: Axes, panel: str, points: Sequence[Point], margin: float) -> None:
    """Shades the measured sweet spot, and marks the bounds of the published one beside real benchmarks."""
    for undecided in (True, False):  # what is shown covers the rest
        if spot := sweet_spot(points, panel, _main_series(points), margin, undecided=undecided):
            low, high = widened(*spot, [point.x for point in points if point.panel == panel], is_size=panel in _SIZES)
            axes.axvspan(low, high, zorder=0, **(_UNDECIDED if undecided else _SPOT))
    claim = _SETTINGS.get(panel, ("", ""))[1]
    text = next((row["published"] for row in read_published("claims.csv") if row["id"] == claim), "")
    bounds = text.strip("{}").replace("..", ",").split(",")
    if len(bounds) == 2 and not points[0].mini:
        for bound in bounds:
            axes.axvline(float(bound), color=style.GREY, linewidth=0.8, linestyle=(0, (1, 1.5)), zorder=1)


def _main_series(points: Sequence[Point]) -> str:
    """ReFusion, also if it was made from another backbone than the paper's; else the first series."""
    names = [point.series for point in points]
    return next((name for name in names if without_backbone(name) == "refusion"), names[0])


def _swept_legend(points: Sequence[Point], further: Sequence[Point], margin: float) -> list[Line2D | Patch]:
    labels = {point.series: point.label for point in points}
    handles: list[Line2D | Patch] = []
    for system in style.in_order(labels):
        look = style.style_of(system, list(labels))
        handles.append(Line2D([], [], color=look.colour, marker=look.marker, linestyle="none", label=labels[system]))
    if any(point.mark == OPERATING_POINT for point in points):
        handles.append(Line2D([], [], **_RING, label="operating point"))
    handles.append(Line2D([], [], color=style.BLACK, linewidth=0.6, linestyle=(0, (4, 2)), label="AR baseline"))
    for label, point in {point.label: point for point in further}.items():
        dagger = "\u2020" if point.note else ""
        handles.append(Line2D([], [], label=style.in_legend(label + dagger), **_further_look(point, further)))
    panels, main = {point.panel for point in points}, _main_series(points)
    shown, possible = (
        {panel: sweet_spot(points, panel, main, margin, undecided=undecided) for panel in panels}
        for undecided in (False, True)
    )
    handles += [Patch(label=_SHOWN, **_SPOT)] if any(shown.values()) else []
    handles += [Patch(label=_NOT_DECIDED, **_UNDECIDED)] if possible != shown else []
    return handles


def _curve(
    axes: Axes, points: Sequence[Point], look: Style, label: str = "", *, xs: Sequence[float] = (), x_bars: bool = False
) -> None:
    """Draws a curve with its intervals; a ring marks operating points, and a dagger stands above points with a note."""
    if not points:
        return
    xs = xs or [point.x for point in points]
    drawn = axes.errorbar(
        xs,
        [point.y for point in points],
        xerr=style.bars(points, "x") if x_bars else None,
        yerr=style.bars(points, "y"),
        marker=look.marker,
        linestyle=look.line,
        color=look.colour,
        markeredgecolor=style.BLACK,
        markeredgewidth=0.4,
        elinewidth=0.7,
        capsize=1.6,
        zorder=3,
    )
    if label:
        drawn.lines[0].set_label(style.in_legend(label))  # of the curve alone, so that the legend shows no bars
    for x, point in zip(xs, points, strict=True):
        if point.note:
            axes.annotate("\u2020", (x, point.y), (0, 4), textcoords="offset points", ha="center", size=8)
        if point.mark == OPERATING_POINT:
            axes.plot([x], [point.y], zorder=4, **_RING)
