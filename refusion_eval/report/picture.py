"""A replay as an animated picture: GIF or animated PNG."""

import os
from collections.abc import Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from refusion_eval.errors import ConfigError
from refusion_eval.report.frames import LOOKS, MASK, NEW, Frame, TextRun, joined
from refusion_eval.store.atomic_write import write_output

FORMATS = {".gif": "GIF", ".png": "PNG", ".apng": "PNG"}
# Characters in a line and lines of text at most: as wide as a column of a page and no taller than a screen.
COLUMNS, MOST_ROWS = 84, 30
LAST_SECONDS = 3.0

_SIZE, _HEIGHT, _PAD = 15, 24, 16
_PAPER, _INK, _MUTED, _LINE = "#ffffff", LOOKS["fixed"].ink, "#66737f", "#d9dfe6"


def check_format(path: str | os.PathLike[str]) -> str:
    """The format that a file's name asks for. Raises ConfigError if the format has no animations."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise ConfigError(f"{path}: a replay is written as {', '.join(FORMATS)}; give the file one of these endings")
    return FORMATS[suffix]


def write_animation(shown: Sequence[Frame], path: str | os.PathLike[str], title: str, *, seconds: float = 0.5) -> None:
    """Writes an animation that repeats, the last frame first, which a preview shows.

    Raises:
        StoreError: the file cannot be written.
    """
    kind = check_format(path)
    rows = max(len(_lines(frame.runs)) for frame in shown)
    images = [_draw(frame, title, min(rows, MOST_ROWS)) for frame in (shown[-1], *shown[:-1])]
    if kind == "GIF":  # one palette for all frames: that of a single frame would lack colours of the others
        images = [image.quantize(palette=_palette(), dither=Image.Dither.NONE) for image in images]
    durations = [round(1000 * max(seconds, LAST_SECONDS))] + [round(1000 * seconds)] * (len(images) - 1)
    content = BytesIO()
    images[0].save(content, kind, save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=False)
    write_output(path, content.getvalue())


@lru_cache
def _font(bold: bool) -> ImageFont.FreeTypeFont:
    name = "DejaVuSansMono-Bold.ttf" if bold else "DejaVuSansMono.ttf"  # of matplotlib, with a fixed width
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, _SIZE)


@lru_cache
def _palette() -> Image.Image:
    """All colours, and the shades between them and the paper that smooth letters need."""
    sheet = Image.new("RGB", (256, 8), _PAPER)
    draw = ImageDraw.Draw(sheet)
    pairs = [(look.ink, look.ground or _PAPER) for look in LOOKS.values()] + [(_MUTED, _PAPER), (_LINE, _PAPER)]
    for number, (ink, ground) in enumerate(pairs):
        for shade in range(24):
            mixed = Image.blend(Image.new("RGB", (1, 1), ground), Image.new("RGB", (1, 1), ink), shade / 23)
            draw.point([(number * 24 + shade, row) for row in range(8)], mixed.getpixel((0, 0)))
    return sheet.quantize(colors=255)


def _lines(runs: Sequence[TextRun]) -> list[list[TextRun]]:
    lines: list[list[TextRun]] = [[]]
    for run in runs:
        for letter in run.text.expandtabs(4):
            if letter == "\n" or len(lines[-1]) == COLUMNS:
                lines.append([])
            if letter != "\n":
                lines[-1].append(TextRun(run.state, letter))
    return [joined((letter.state, letter.text) for letter in line) for line in lines]


def _draw(frame: Frame, title: str, rows: int) -> Image.Image:
    cell, height = _font(False).getlength(MASK), _HEIGHT
    width = round(2 * _PAD + COLUMNS * cell)
    image = Image.new("RGB", (width, 2 * _PAD + height * (rows + 4)), _PAPER)
    draw = ImageDraw.Draw(image)
    draw.text((_PAD, _PAD), _fitted(title), _MUTED, _font(False))
    draw.text((_PAD, _PAD + height), _fitted(frame.headline), _INK, _font(True))
    draw.text((_PAD, _PAD + 2 * height), _fitted(frame.detail), _MUTED, _font(False))
    top = _PAD + 3 * height + 4
    draw.line([(_PAD, top - 4), (width - _PAD, top - 4)], _LINE)
    lines = _lines(frame.runs)
    busy = [number for number, line in enumerate(lines) if any(run.state not in ("fixed", "mask") for run in line)]
    first = max(0, min((busy[-1] if busy else 0) - rows // 2, len(lines) - rows))
    for number, line in enumerate(lines[first : first + rows]):
        _draw_line(draw, line, _PAD, top + number * height, cell)
    names = [TextRun("mask", f"{MASK} {LOOKS['mask'].name}   ")]
    for state in ("planned", "draft", NEW, "rejected"):
        names += [TextRun(state, LOOKS[state].name), TextRun("fixed", "   ")]
    _draw_line(draw, names, _PAD, top + rows * height + 4, cell)
    return image


def _draw_line(draw: ImageDraw.ImageDraw, runs: Sequence[TextRun], left: float, top: float, cell: float) -> None:
    for state, text in runs:
        look = LOOKS[state]
        right, bottom = left + cell * len(text), top + _HEIGHT - 4
        if look.ground:
            draw.rectangle([left, top - 1, right, bottom], fill=look.ground)
        if look.line == "box":
            draw.rectangle([left, top - 1, right - 1, bottom], outline=look.ink)
        elif look.line == "strike":
            draw.line([left, top + _SIZE * 0.62, right, top + _SIZE * 0.62], look.ink, 2)
        elif look.line == "dotted":
            for x in range(round(left), round(right), 4):
                draw.line([x, bottom - 1, x + 1, bottom - 1], look.ink, 2)
        for place, letter in enumerate(text):  # one by one, because wide letters of the font would shift the rest
            draw.text((left + place * cell, top), _drawable(letter), look.ink, _font(state == NEW))
        left = right


def _drawable(letter: str) -> str:
    """The letter, or a box for control characters and lone surrogates, which no font has."""
    return letter if letter.isprintable() else "\N{WHITE VERTICAL RECTANGLE}"


def _fitted(text: str) -> str:
    shown = "".join(map(_drawable, text))
    return shown if len(shown) <= COLUMNS else f"{shown[: COLUMNS - 1]}…"
