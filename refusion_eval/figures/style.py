"""How every figure looks: sizes for a paper's column, and one style a system that survives greyscale.

Colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), told apart by all common kinds of colour
blindness; whatever has a colour of its own also has a marker and a line style of its own. Measured points are filled
and coloured, published ones hollow and grey.
"""

import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from refusion_eval.decoders import DECODERS
from refusion_eval.store.atomic_write import prepare_output

COLUMN_WIDTH, TEXT_WIDTH = 3.4, 6.9  # inches, of a two-column paper
DPI = 300

BLACK, GREY, LIGHT = "#000000", "#6b6b6b", "#d9d9d9"
BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY = "#E69F00", "#56B4E9"
SWEET_SPOT, SWEET_EDGE = "#e2ecf5", "#9db9d3"

_CAPTION_SIZE = 6.0
_CAPTION_LINE = 0.127  # inches; STIX has tall lines
_CAPTION_CHARACTERS = 28.0  # an inch

# STIX comes with matplotlib, so that a figure has the same bytes on machines with other fonts.
_RC = {
    "font.family": "STIXGeneral",
    "mathtext.fontset": "stix",
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.5,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "lines.linewidth": 1.1,
    "lines.markersize": 4.2,
    "hatch.linewidth": 0.5,
    "pdf.fonttype": 42,
    "pdf.compression": 9,
    "savefig.dpi": DPI,
}


@dataclass(frozen=True, slots=True)
class Look:
    """Of one series: colour, marker, and line style."""

    colour: str
    marker: str
    line: Any = "-"


# A system looks the same in every figure.
_LOOKS: Mapping[str, Look] = {
    **{name: Look(*astuple(decoder.style)[:3]) for name, decoder in DECODERS.items()},
    "qwen3": Look(BLACK, "s", (0, (5, 1.5))),
    "llama3": Look("#404040", "p", (0, (1, 1))),
    "refusion+left_to_right": Look(BLUE, "d", ":"),
    "refusion+recompute_kv": Look(SKY, "H", "--"),
    "qwen3_4b": Look(BLACK, "s", ":"),
    "qwen3_1.7b": Look(BLACK, "s", ":"),
    "qwen3_0.6b": Look(BLACK, "s", ":"),
}
# Ordered things, as masking ratios are: from dark to light.
ORDERED = (
    Look("#0b2c5c", "o", "-"),
    Look(BLUE, "s", (0, (5, 1.5))),
    Look(VERMILLION, "^", (0, (3, 1, 1, 1))),
    Look(ORANGE, "D", (0, (1, 1))),
    Look(GREY, "v", (0, (6, 2))),
)


def look_of(series: str, others: Sequence[str] = ()) -> Look:
    """The style of a system; one that has none takes a marker by its place among the others."""
    if series in _LOOKS:
        return _LOOKS[series]
    unknown = sorted(name for name in others if name not in _LOOKS)
    return Look(GREY, "*hHdp8"[unknown.index(series) % 6] if series in unknown else "*", (0, (1, 1)))


@contextmanager
def paper_style() -> Iterator[None]:
    """Matplotlib's settings while a figure is drawn; whatever the user's own say."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_RC)
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure.

    Args:
        width: inches.
        height: inches, without the caption.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def add_caption(figure: Figure, sentences: Sequence[str]) -> None:
    """Writes sentences below everything, and makes the figure higher by what they take. Called last.

    Args:
        figure: with all its axes.
        sentences: n, intervals, hardware.
    """
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(" ".join(filter(None, sentences)), int(width * _CAPTION_CHARACTERS), break_on_hyphens=False)
    room = len(lines) * _CAPTION_LINE + 0.14
    figure.set_size_inches(width, height + room)
    share = room / (height + room)
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0, share, 1, 1 - share))
    text = "\n".join(lines)
    figure.text(0.04 / width, share - 0.03 / (height + room), text, ha="left", va="top", size=_CAPTION_SIZE, color=GREY)


def panel_title(axes: Axes, number: int, text: str) -> None:
    """A letter and what the panel shows."""
    axes.set_title(f"({'abcdefghijkl'[number]}) {text}", loc="left")


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Writes STEM.png and STEM.pdf. Equal figures give equal bytes: neither file says when it was made.

    Raises:
        StoreError: the folder cannot be written to.
    """
    written = []
    for ending, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None, "Producer": None})):
        target = prepare_output(stem.with_name(f"{stem.name}.{ending}"))
        buffer = io.BytesIO()
        with paper_style():
            figure.savefig(buffer, format=ending, metadata=metadata)
        target.write_bytes(buffer.getvalue())
        written.append(target)
    return written
