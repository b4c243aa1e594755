"""The rows that a figure is drawn from, and their CSV file, from which the figure can be drawn again and checked."""

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from refusion_eval.errors import DataError
from refusion_eval.results.cautions import Conditions
from refusion_eval.results.measurement import Origin
from refusion_eval.results.render import csv_records, csv_text
from refusion_eval.store.atomic_write import write_output
from refusion_eval.untrusted import open_plain

_LONGEST_LINE = 1 << 16
OPERATING_POINT, BASELINE = "operating point", "baseline"
REFERENCE = "reference"  # a further autoregressive run of a sweep, which has no value of the setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of a plot, with 95% intervals (NaN for none) and a note that a dagger points to.

    All points of a series (a system, or a masking ratio) are drawn in one style. `n` counts benchmark items, or
    responses in Figure 3. `pairing` says of a difference whether it is paired by item.
    """

    task: str = ""
    panel: str
    series: str
    label: str
    origin: Origin = "measured"
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
    pairing: str = ""
    limited: str = ""
    num_rounds: int = 0  # 0 for a point that shows no speed
    slowed_by: str = ""
    attention: str = ""
    protocol: str = ""
    scored_on: str = ""  # card of the score of a point that shows no speed

    @property
    def conditions(self) -> Conditions:
        # Captions say themselves whether points are mini, and which were limited.
        return Conditions.of(
            self, card=self.scored_on, is_score=True, is_speed=self.num_rounds > 0, mini=False, limited=""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCell:
    """One position of a decoded text at one moment; `order` is the 1-based step that made it final, 0 for none yet."""

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


def write_rows(path: Path, kind: type[Row], rows: Iterable[Row]) -> None:
    """Writes rows. Equal rows give equal bytes. Raises StoreError if the file cannot be written."""
    write_output(path, csv_text(list(_types(kind)), map(astuple, rows)))


def first_line(path: Path) -> str:
    """The first line of a plain file, without its end, as far as it is UTF-8."""
    with open_plain(path) as file:
        return file.readline(_LONGEST_LINE).decode("utf-8", "replace").strip()


def is_rows_file(path: Path, kind: type) -> bool:
    """Whether `write_rows` wrote the file with this kind of row."""
    return path.is_file() and first_line(path).split(",") == list(_types(kind))


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """Rows that `write_rows` wrote. Raises DataError as `read_records`."""
    return [kind(**record) for _, record in read_records(path, _types(kind))]


def read_records(path: Path, types: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The records of a CSV file, each with its file and line for messages; columns without a type are read as text.

    Raises DataError if the file cannot be read, is empty, lacks a column or a cell, or a cell holds no number.
    """
    try:
        columns, numbered = csv_records(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read ({error})") from error
    if missing := [name for name in types if name not in columns]:
        raise DataError(f"{path} lacks the columns {', '.join(missing)}")
    if not numbered:
        raise DataError(f"{path} has no rows, so there is nothing to draw")
    records = [(f"{path}, line {line}", record) for line, record in numbered]
    for where, record in records:
        if any(record[name] is None for name in types):
            raise DataError(f"{where} has too few cells; was it written to the end?")
    return [
        (where, record | {name: _value(record[name], kind, f"{where}, {name}") for name, kind in types.items()})
        for where, record in records
    ]


def number(text: str, where: str) -> float:
    """The number that a text holds, NaN for an empty one. Raises DataError if it holds none."""
    try:
        return float(text or "nan")
    except ValueError as error:
        raise DataError(f"{where}: {text!r} is not a number") from error


def _types(kind: type) -> dict[str, Any]:
    return {field.name: field.type for field in fields(kind)}


def _value(text: str, kind: Any, where: str) -> Any:
    if kind in (int, float):
        value = number(text, where)
        return value if math.isnan(value) else kind(value)
    return text == "yes" if kind is bool else text
