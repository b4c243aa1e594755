"""Figures 5 and 9: a decoded text with each token in a box, coloured by its order or drawn at several moments."""

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from refusion_eval.figures import style
from refusion_eval.figures.moments import Placed, lay_out
from refusion_eval.figures.rows import TokenCell

_MONO = "DejaVu Sans Mono"  # comes with matplotlib
_CHARACTER, _LINE = 0.602, 1.75  # width and height of a character in units of the font size
_POINTS = 72.0
_LEAST_LINES = 4  # height that the colour bar needs

# state -> face, edge, text, hatch. The states differ in darkness and hatching, not only in hue.
_STATES = {
    "mask": ("#ffffff", "#d0d0d0", style.GREY, ""),
    "planned": ("#ffffff", style.BLUE, style.GREY, "...."),
    "draft": ("#fdeecb", style.ORANGE, style.BLACK, "////"),
    "fixed": ("#c9dff0", "#9fbfd8", style.BLACK, ""),
    "new": ("#0b4f8a", "#0b4f8a", "#ffffff", ""),
    "rejected": ("#ffffff", style.VERMILLION, style.VERMILLION, ""),
}
_NAMES = {
    "mask": "masked",
    "planned": "planned slot",
    "draft": "drafted",
    "new": "accepted now",
    "fixed": "accepted before",
    "rejected": "rejected",
}


def draw_order(cells: Sequence[TokenCell]) -> Figure:
    """Figure 5: the text. Later tokens are darker, and the number of the step stands above the start of each slot."""
    size = 6.5
    page = style.COLUMN_WIDTH if _longest_line(cells) <= _characters(style.COLUMN_WIDTH, size) else style.TEXT_WIDTH
    width = _characters(page, size)
    placed = lay_out(cells, width)
    num_moments = max(cell.order for cell in cells)
    norm = Normalize(1, max(num_moments, 2))
    # From light to dark, so that greyscale keeps the order; both ends differ from paper and text.
    colours = LinearSegmentedColormap.from_list("order", colormaps["YlGnBu"](np.linspace(0.08, 0.95, 64)))
    with style.paper_style():
        num_lines = max(*(token.line + 1 for token in placed), _LEAST_LINES)
        figure = style.new_figure(page, num_lines * size * (_LINE + 0.35) / _POINTS + 0.15)
        axes = figure.subplots()
        _page(axes, placed, width, _LINE + 0.35, num_lines)
        before: tuple[int, int] | None = None
        for token in placed:
            share = norm(token.cell.order)
            face = to_hex(colours(share))
            _box(axes, token, face, "none", "#ffffff" if _is_dark(face) else style.BLACK, "", size, _LINE + 0.35)
            if (token.cell.order, token.cell.slot) != before:
                at = (token.column * _CHARACTER, token.line * (_LINE + 0.35))
                axes.text(at[0], at[1] + 0.3, str(token.cell.order), size=4.2, va="center", color=style.GREY)
            before = (token.cell.order, token.cell.slot)
        scale = figure.colorbar(
            ScalarMappable(norm, colours),
            ax=axes,
            pad=0.01,
            aspect=25,
            fraction=0.05,
            ticks=MaxNLocator(5, integer=True),
        )
        scale.set_label("decoding step", size=7)
        scale.ax.tick_params(labelsize=6.5, length=2)
        scale.outline.set_linewidth(0.4)
        first = cells[0]
        in_order = sum(a.order <= b.order for a, b in itertools.pairwise(cells))
        sentences = [
            *_about(first),
            f"{len(cells)} tokens in {num_moments} steps; the number at the head of a slot, and the darkness, say in "
            f"which step its tokens became final. {in_order} of {len(cells) - 1} neighbours came in reading order.",
        ]
        style.add_caption(figure, sentences)
    return figure


def draw_steps(cells: Sequence[TokenCell]) -> Figure:
    """Figure 9: the same text at several moments, one panel for each."""
    size = 5.4
    panels = sorted({cell.panel for cell in cells})
    fits = [number for number in (3, 2) if _longest_line(cells) <= _characters(style.TEXT_WIDTH / number, size)]
    columns = min(len(panels), fits[0] if fits else 2)
    width = _characters(style.TEXT_WIDTH / columns, size)
    layouts = {panel: lay_out([cell for cell in cells if cell.panel == panel], width) for panel in panels}
    num_lines = max(token.line for placed in layouts.values() for token in placed) + 1
    rows = -(-len(panels) // columns)
    with style.paper_style():
        height = rows * (num_lines * size * _LINE / _POINTS + 0.3) + 0.3
        figure = style.new_figure(style.TEXT_WIDTH, height)
        grid = figure.subplots(rows, columns, squeeze=False)
        previous: dict[int, str] = {}
        for number, panel in enumerate(panels):
            axes = grid[number // columns, number % columns]
            _page(axes, layouts[panel], width, _LINE, num_lines)
            for token in layouts[panel]:
                state = token.cell.state
                if state == "fixed" and previous.get(token.cell.position) != "fixed":
                    state = "new"
                face, edge, ink, hatch = _STATES[state]
                _box(axes, token, face, edge, ink, hatch, size, _LINE, struck=state == "rejected")
            previous = {token.cell.position: token.cell.state for token in layouts[panel]}
            style.panel_title(axes, number, layouts[panel][0].cell.title)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        shown = {cell.state for cell in cells} | {"new"}
        handles = [
            Patch(
                facecolor=_STATES[state][0], edgecolor=_STATES[state][1], hatch=_STATES[state][3], label=_NAMES[state]
            )
            for state in _NAMES
            if state in shown
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), handlelength=1.4)
        style.add_caption(figure, [*_about(cells[0]), "Accepted now: since the panel before."])
    return figure


def _characters(inches: float, size: float) -> int:
    """Number of characters of a font size in one line of axes of that width, without margins and colour bar."""
    return int((inches - 0.45) * _POINTS / (size * _CHARACTER))


def _longest_line(cells: Sequence[TokenCell]) -> int:
    final = "".join(cell.final for cell in cells if cell.panel == cells[0].panel)
    return max(len(line) + 1 for line in final.replace("\t", "    ").split("\n"))


def _page(axes: Axes, placed: Sequence[Placed], width: int, line: float, num_lines: int | None = None) -> None:
    """Axes in units of the font size, the first line at the top."""
    lines = num_lines or max(token.line for token in placed) + 1
    axes.set_xlim(0, width * _CHARACTER)
    axes.set_ylim(lines * line, -0.2)
    axes.set_axis_off()


def _box(
    axes: Axes,
    token: Placed,
    face: str,
    edge: str,
    ink: str,
    hatch: str,
    size: float,
    line: float,
    *,
    struck: bool = False,
) -> None:
    """Draws one token, or the part of it in one line."""
    extent = max(token.length, 1) * _CHARACTER
    left, top = token.column * _CHARACTER, token.line * line + (line - 1.45)
    axes.add_patch(
        Rectangle((left + 0.03, top), extent - 0.06, 1.35, facecolor=face, edgecolor=edge, linewidth=0.4, hatch=hatch)
    )
    middle = top + 0.70
    # One text for each character, so that the grid is monospaced whatever advance widths the renderer has.
    for place, character in enumerate(token.text):
        if character != " ":
            x = left + (place + 0.5) * _CHARACTER
            text = axes.text(x, middle, character, size=size, family=_MONO, color=ink, parse_math=False)
            text.set(ha="center", va="center_baseline")
    if struck:
        axes.plot([left, left + extent], [middle, middle], color=ink, linewidth=0.6)


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _about(cell: TokenCell) -> list[str]:
    return [
        "Mini task: a synthetic look-alike, not the real benchmark." if cell.mini else "",
        f"{cell.system} on {cell.task}, item {cell.item}; {cell.settings}.",
    ]
