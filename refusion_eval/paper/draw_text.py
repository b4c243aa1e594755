"""Figures 5 and 9: a decoded text with each token in a box, coloured by its order or drawn at several moments."""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap, to_hex
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from refusion_eval.paper import style
from refusion_eval.paper.rows import TokenCell

_MONO = "DejaVu Sans Mono"  # comes with matplotlib
_CHARACTER, _LINE = 0.602, 1.75  # width and height of a character in units of the font size
_POINTS = 72.0
_LEAST_LINES = 4  # height that the colour bar needs

# state -> name, face, edge, text, hatch. The states differ in darkness, hatching and lines, not only in hue.
_STATES = {
    "mask": ("masked", "#ffffff", "#d0d0d0", style.GREY, ""),
    "planned": ("planned slot", "#ffffff", style.BLUE, style.GREY, "...."),
    "draft": ("drafted", "#fdeecb", style.ORANGE, style.BLACK, ""),
    "new": ("accepted now", "#0b4f8a", "#0b4f8a", "#ffffff", ""),
    "fixed": ("accepted before", "#c9dff0", "#9fbfd8", style.BLACK, ""),
    "rejected": ("rejected", "#ffffff", style.VERMILLION, style.VERMILLION, ""),
}


def draw_order(cells: Sequence[TokenCell], width: style.Width | None = None) -> style.Drawing:
    """Figure 5: the text. Later tokens are darker, and the number of the step stands above the start of each slot."""
    size, line = 6.5, _LINE + 0.35
    page = style.page_width(width, "one" if _longest_line(cells) <= _characters(style.COLUMN_WIDTH, size) else "two")
    characters = _characters(page, size)
    placed = lay_out(cells, characters)
    num_moments = max(cell.order for cell in cells)
    # From light to dark, so that greyscale keeps the order; both ends differ from paper and text. One colour a step.
    colours = LinearSegmentedColormap.from_list("order", colormaps["YlGnBu"](np.linspace(0.08, 0.95, 64)), num_moments)
    norm = BoundaryNorm(np.arange(0.5, num_moments + 1), num_moments)
    with style.paper_style():
        num_lines = max(*(token.line + 1 for token in placed), _LEAST_LINES)
        figure = style.new_figure(page, num_lines * size * line / _POINTS + 0.15)
        axes = figure.subplots()
        _page(axes, characters, line, num_lines)
        before = (0, -1)  # step and slot of the token before
        for token in placed:
            face = to_hex(colours(norm(token.cell.order)))
            _box(axes, token, ("", face, "none", "#ffffff" if _is_dark(face) else style.BLACK, ""), size, line)
            if (token.cell.order, token.cell.slot) != before:
                x, y = token.column * _CHARACTER, token.line * line + 0.3
                axes.text(x, y, str(token.cell.order), size=4.2, va="center", color=style.GREY)
            before = (token.cell.order, token.cell.slot)
        ticks = MaxNLocator(5, integer=True)
        scale = figure.colorbar(ScalarMappable(norm, colours), ax=axes, pad=0.01, aspect=25, fraction=0.05, ticks=ticks)
        scale.set_label("decoding step", size=7)
        scale.ax.tick_params(labelsize=6.5, length=2)
        scale.outline.set_linewidth(0.4)
    sentences = [
        *_about(cells[0], "each token coloured by the step in which it became final"),
        f"{len(cells)} tokens in {num_moments} steps; the number at the head of a slot, and the darkness, say in "
        f"which step its tokens became final. {_reading_order(cells)}",
    ]
    return style.drawing(figure, sentences)


def _reading_order(cells: Sequence[TokenCell]) -> str:
    """How many neighbours came in reading order: of all tokens, and of the tokens where one slot meets the next."""
    tokens = list(itertools.pairwise(cells))
    slots = [(a, b) for a, b in tokens if a.slot != b.slot]
    pairs_by_name = {"tokens": tokens} | ({"slots": slots} if 0 < len(slots) < len(tokens) else {})
    counts = []
    for name, pairs in pairs_by_name.items():
        counts.append(f"{sum(a.order <= b.order for a, b in pairs)} of {len(pairs)} neighbouring {name}")
    return f"{' and '.join(counts)} came in reading order."


def draw_steps(cells: Sequence[TokenCell], width: style.Width | None = None) -> style.Drawing:
    """Figure 9: the same text at several moments, one panel for each."""
    size = 5.4
    panels = sorted({cell.panel for cell in cells})
    inches = style.page_width(width, "two")
    most = 3 if inches == style.TEXT_WIDTH else 1
    fits = [number for number in range(most, 0, -1) if _longest_line(cells) <= _characters(inches / number, size)]
    columns = min(len(panels), fits[0] if fits else min(most, 2))
    columns = next(number for number in range(columns, 0, -1) if number == 1 or len(panels) % number != 1)
    characters = _characters(inches / columns, size)
    layouts = {panel: lay_out([cell for cell in cells if cell.panel == panel], characters) for panel in panels}
    num_lines = max(token.line for placed in layouts.values() for token in placed) + 1
    rows = -(-len(panels) // columns)
    with style.paper_style():
        height = rows * (num_lines * size * _LINE / _POINTS + 0.3) + 0.3
        figure = style.new_figure(inches, height)
        grid = figure.subplots(rows, columns, squeeze=False)
        previous: dict[int, str] = {}
        for number, panel in enumerate(panels):
            axes = grid[number // columns, number % columns]
            _page(axes, characters, _LINE, num_lines)
            for token in layouts[panel]:
                state = token.cell.state
                if state == "fixed" and previous.get(token.cell.position) != "fixed":
                    state = "new"
                _box(axes, token, _STATES[state], size, _LINE)
            previous = {token.cell.position: token.cell.state for token in layouts[panel]}
            style.panel_title(axes, number, layouts[panel][0].cell.title)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        shown = {cell.state for cell in cells} | {"new"}
        handles = [
            Patch(facecolor=face, edgecolor=edge, hatch=hatch, label=name)
            for state, (name, face, edge, _, hatch) in _STATES.items()
            if state in shown
        ]
        num_columns = len(handles) if most > 1 else 3
        figure.legend(handles=handles, loc="outside upper center", ncols=num_columns, handlelength=1.4)
    return style.drawing(
        figure,
        [*_about(cells[0], f"at {len(panels)} moments of its decoding"), "Accepted now: since the panel before."],
    )


class Placed(NamedTuple):
    cell: TokenCell
    line: int
    column: int
    length: int
    text: str


def lay_out(cells: Sequence[TokenCell], width: int) -> list[Placed]:
    """Places every token in lines of the final text, at its final place at every moment; the rest is cut."""
    placed = []
    line = column = 0
    for cell in cells:
        # A line break is shown as an arrow at the end of its line. An empty token takes one character.
        final = cell.final.replace("\r", "").replace("\t", "    ") or "\u00b7"
        draft = cell.text.replace("\n", "\u21b5").replace("\t", "    ")
        used = 0
        for part in filter(None, re.split("(\n)", final)):
            shown = "\u21b5" if part == "\n" else part
            is_final = cell.state == "fixed" or (part == "\n" and cell.text == cell.final)
            for chunk in (shown[at : at + width] for at in range(0, len(shown), width)):
                if column + len(chunk) > width:
                    line, column = line + 1, 0
                text = chunk if is_final else draft[used : used + len(chunk)]
                placed.append(Placed(cell, line, column, len(chunk), text))
                used += len(chunk)
                column += len(chunk)
            if part == "\n":
                line, column = line + 1, 0
    return placed


def _characters(inches: float, size: float) -> int:
    """Number of characters of a font size in one line of axes of that width, without margins and colour bar."""
    return int((inches - 0.45) * _POINTS / (size * _CHARACTER))


def _longest_line(cells: Sequence[TokenCell]) -> int:
    final = "".join(cell.final for cell in cells if cell.panel == cells[0].panel)
    return max(len(line) + 1 for line in final.replace("\t", "    ").split("\n"))


def _page(axes: Axes, width: int, line: float, num_lines: int) -> None:
    """Axes in units of the font size, the first line at the top."""
    axes.set_xlim(0, width * _CHARACTER)
    axes.set_ylim(num_lines * line, -0.2)
    axes.set_axis_off()


def _box(axes: Axes, token: Placed, look: tuple[str, str, str, str, str], size: float, line: float) -> None:
    """Draws one token, or the part of it in one line; the look is that of `_STATES`."""
    _, face, edge, ink, hatch = look
    extent = max(token.length, 1) * _CHARACTER
    left, top = token.column * _CHARACTER, token.line * line + (line - 1.45)
    box = Rectangle((left + 0.03, top), extent - 0.06, 1.35, facecolor=face, edgecolor=edge, linewidth=0.4, hatch=hatch)
    box.set_linestyle("--" if look is _STATES["draft"] else "-")
    axes.add_patch(box)
    middle = top + 0.70
    # One text for each character, so that the grid is monospaced whatever advance widths the renderer has.
    for place, character in enumerate(token.text):
        if character != " ":
            x = left + (place + 0.5) * _CHARACTER
            text = axes.text(x, middle, character, size=size, family=_MONO, color=ink, parse_math=False)
            text.set(ha="center", va="center_baseline")
    if look is _STATES["rejected"]:
        axes.plot([left, left + extent], [middle, middle], color=ink, linewidth=0.6)


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _about(cell: TokenCell, shown: str) -> list[str]:
    return [
        f"Response of {cell.system} to item {cell.item} of {cell.task} ({cell.settings}), {shown}.",
        "Mini task: a synthetic look-alike, not the real benchmark." if cell.mini else "",
    ]
