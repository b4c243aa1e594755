"""How every figure looks: sizes for the column of a paper, and one style for each system that survives greyscale.

Colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which differ under all common kinds of colour
blindness. Whatever has a colour of its own also has its own marker and line style. Measured points are filled and
coloured, published ones hollow and grey.
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from string import ascii_letters
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from refusion_eval.decoders import DECODERS, Style
from refusion_eval.paper.rows import Point
from refusion_eval.results.measurement import base_of_key
from refusion_eval.store.atomic_write import write_output

COLUMN_WIDTH, TEXT_WIDTH = 3.4, 6.9  # inches, of a two-column paper

BLACK, DARK, GREY = "#000000", "#404040", "#6b6b6b"
BLUE, VERMILLION, ORANGE, SKY = "#0072B2", "#D55E00", "#E69F00", "#56B4E9"
SWEET_SPOT, SWEET_EDGE, UNDECIDED_EDGE = "#e2ecf5", "#9db9d3", "#d3dfea"

Width = Literal["one", "two"]  # columns of a paper that a figure takes

_SETTINGS = Path(__file__).with_name("paper.mplstyle")

# A system has the same style in every figure.
_STYLES: Mapping[str, Style] = {
    **{name: decoder.style for name, decoder in DECODERS.items()},
    "qwen3": Style(BLACK, "s", (0, (5, 1.5))),
    "llama3": Style(DARK, "p", (0, (1, 1))),
    "autoregressive_sft": Style(DARK, "P", (0, (3, 1))),
    "refusion+left_to_right": Style(BLUE, "d", ":"),
    "refusion+slots_in_order": Style(BLUE, "<", ":"),
    "refusion+slots_at_random": Style(BLUE, "v", ":"),
    "refusion+recompute_kv": Style(SKY, "H", "--"),
    "refusion+fused": Style(BLUE, "X", (0, (5, 1.5))),
    "refusion+verifier": Style(SKY, "*", (0, (5, 1.5))),
    "bd3lm+merged": replace(DECODERS["bd3lm"].style, marker="X", line=(0, (5, 1.5))),
    "qwen3_4b": Style(BLACK, "s", ":"),
    "qwen3_1.7b": Style(BLACK, "s", ":"),
    "qwen3_0.6b": Style(BLACK, "s", ":"),
}
# For ordered series such as masking ratios: from dark to light.
ORDERED = (
    Style("#0b2c5c", "o", "-"),
    Style(BLUE, "s", (0, (5, 1.5))),
    Style(VERMILLION, "^", (0, (3, 1, 1, 1))),
    Style(ORANGE, "D", (0, (1, 1))),
    Style(GREY, "v", (0, (6, 2))),
)


def style_of(series: str, others: Sequence[str] = ()) -> Style:
    """The style of a system. A system without one gets a marker by its place among the others without one."""
    if series in _STYLES:
        return _STYLES[series]
    unknown = sorted(name for name in others if name not in _STYLES)
    marker = "*hHdp8"[unknown.index(series) % 6] if series in unknown else "*"
    return Style(GREY, marker, (0, (1, 1)))


def page_look(series: str, decoder: str) -> dict[str, Any]:
    """The style of a system for the report page, that of its decoder where it has none of its own."""
    style = _STYLES.get(series) or _STYLES.get(decoder) or style_of(series)
    dashes = {"-": (), ":": (1, 2), "--": (6, 3)}[style.line] if isinstance(style.line, str) else style.line[1]
    return {"colour": style.colour, "marker": style.marker, "dashes": list(dashes)}


def in_order(series: Iterable[str]) -> list[str]:
    """Systems in the order of every legend and axis: autoregressive ones first, ReFusion and its variants last."""

    def place(name: str) -> tuple[int, str]:
        base = base_of_key(name)
        if base == "refusion":
            return len(DECODERS), name
        if base in DECODERS:
            return DECODERS[base].style.order, name
        return (1 if style_of(name).colour in (BLACK, DARK) else len(DECODERS) - 1), name

    return sorted(dict.fromkeys(series), key=place)


class Drawing(NamedTuple):
    """A figure without any sentence on it, and the caption that belongs below it."""

    figure: Figure
    caption: str


def drawing(figure: Figure, sentences: Sequence[str]) -> Drawing:
    return Drawing(figure, " ".join(filter(None, sentences)))


def page_width(width: Width | None, default: Width) -> float:
    return COLUMN_WIDTH if (width or default) == "one" else TEXT_WIDTH


@contextmanager
def paper_style() -> Iterator[None]:
    with mpl.rc_context():
        mpl.rc_file(_SETTINGS)
        yield


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panel_title(axes: Axes, number: int | None, text: str) -> Text:
    """Writes the letter of a panel, if it has a number, and what the panel shows."""
    return axes.set_title(text if number is None else f"({ascii_letters[number]}) {text}", loc="left")


def formula(text: Text) -> None:
    """Sets the formulas between dollar signs in a text of this project; all other texts are drawn as they are."""
    text.set_parse_math(True)


def in_legend(label: str) -> str:
    """A label that a legend shows; matplotlib leaves out those that begin with an underscore."""
    return f" {label}" if label.startswith("_") else label


def bars(points: Sequence[Point], axis: str) -> np.ndarray:
    """Lengths of error bars, [2, points]; NaN, which draws nothing, where there is no interval."""
    value, low, high = (np.array([getattr(point, axis + bound) for point in points]) for bound in ("", "_low", "_high"))
    return np.maximum([value - low, high - value], 0)


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Writes STEM.png and STEM.pdf. Equal figures give equal bytes, because neither file holds a date."""
    written = []
    for ending, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None, "Producer": None})):
        buffer = io.BytesIO()
        with paper_style():
            figure.savefig(buffer, format=ending, metadata=metadata)
        written.append(stem.with_name(f"{stem.name}.{ending}"))
        write_output(written[-1], buffer.getvalue())
    return written
