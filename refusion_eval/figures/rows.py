"""What a figure is drawn from: rows with a CSV file of their own, so that a picture can be drawn again and checked."""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from refusion_eval.errors import DataError
from refusion_eval.results.figure import Origin
from refusion_eval.results.render import csv_text
from refusion_eval.store.atomic_write import write_output

OPERATING_POINT, BASELINE = "operating point", "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of a plot.

    Attributes:
        task: benchmark that it is about; of several, and in Figure 3, the panels say it.
        panel: what is drawn in one pair of axes.
        series: what is drawn in one style: a system's key, or a masking ratio.
        label: of the series, for readers.
        origin: published, or measured by this project.
        metric: what y is.
        x, x_low, x_high: abscissa and its 95% interval; NaN bounds for none.
        y, y_low, y_high: ordinate and its interval.
        n: benchmark items (responses in Figure 3); 0 where not published.
        mark: `OPERATING_POINT`, `BASELINE`, or empty.
        hardware: machine of the speed, if there is one in it.
        mini: whether it is about a synthetic look-alike of a benchmark.
        fused: whether it was measured with fused forwards, which the paper has not.
        note: what a reader must know; drawn as a dagger and named below the figure.
    """

    task: str = ""
    panel: str
    series: str
    label: str
    origin: Origin
    metric: str
    x: float
    x_low: float = math.nan
    x_high: float = math.nan
    y: float
    y_low: float = math.nan
    y_high: float = math.nan
    n: int = 0
    mark: str = ""
    hardware: str = ""
    mini: bool = False
    fused: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCell:
    """One position of a decoded text at one moment.

    Attributes:
        panel: number of the moment, from 1.
        title: of the moment.
        position: in the response.
        text: what stands there; empty for a mask.
        final: what stands there in the end.
        state: as the replay has it: mask, planned, draft, fixed, rejected.
        order: the how-manieth moment of becoming final this position had part in, from 1; 0 if it is not final.
        forward: that moment's forward, -1 if it is not final.
        slot: first position of its slot.
        task: of the sample.
        item: of the sample.
        system: that decoded it.
        settings: in force, in words.
        mini: whether the task is a synthetic look-alike.
    """

    panel: int
    title: str
    position: int
    text: str
    final: str
    state: str
    order: int
    forward: int
    slot: int
    task: str
    item: str
    system: str
    settings: str
    mini: bool


Row = TypeVar("Row", Point, TokenCell)


def columns_of(kind: type[Row]) -> tuple[str, ...]:
    """Column names of a file of such rows."""
    return tuple(one.name for one in fields(kind))


def write_rows(path: Path, kind: type[Row], rows: Iterable[Row]) -> None:
    """Writes rows; equal rows give equal bytes.

    Raises:
        StoreError: the file cannot be written.
    """
    write_output(path, csv_text(columns_of(kind), map(astuple, rows)))


def is_rows_file(path: Path, kind: type[Row]) -> bool:
    """Whether a file was written by `write_rows` with this kind of row."""
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace", newline="") as stream:
        return stream.readline().strip() == ",".join(columns_of(kind))


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Rows that `write_rows` wrote.

    Raises:
        DataError: the file cannot be read, lacks a column, or has a value of the wrong type; says which.
    """
    types = {one.name: one.type for one in fields(kind)}
    return [
        kind(**{name: _value(record[name], types[name], f"{path}, line {number}, {name}") for name in types})
        for number, record in read_records(path, tuple(types))
    ]


def read_records(path: Path, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """Lines of a CSV file by number.

    Args:
        path: the file.
        columns: those that must be there; others may.

    Raises:
        DataError: the file cannot be read, is empty, or lacks a column or a cell.
    """
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            records = [(reader.line_num, record) for record in reader]
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read ({error})") from error
    if missing:
        raise DataError(f"{path} lacks the columns {', '.join(missing)}")
    if not records:
        raise DataError(f"{path} has no rows, so there is nothing to draw")
    for number, record in records:
        if any(record[name] is None for name in columns):
            raise DataError(f"{path}, line {number} has too few cells; was it written to the end?")
    return records


def number(text: str, where: str) -> float:
    """A number of a CSV file, NaN for an empty cell.

    Raises:
        DataError: it is none.
    """
    try:
        return float(text) if text else math.nan
    except ValueError as error:
        raise DataError(f"{where}: {text!r} is no number") from error


def _value(text: str, kind: Any, where: str) -> Any:
    if kind is float:
        return number(text, where)
    if kind is int:
        return int(number(text, where))
    return text == "yes" if kind is bool else text
