"""One figure of a table as a record, and the CSV file of such rows.

The file depends on the rows alone: figures have six significant digits, and nothing says when it was made.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from refusion_eval.errors import StoreError
from refusion_eval.metrics.bootstrap import Interval
from refusion_eval.results.csv_text import csv_text
from refusion_eval.store.atomic_write import write_output

MEAN_TASK = "mean"
SETTING_PREFIX = "setting_"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One figure. `forwards`, `tokens` and `seconds` are totals over the samples it rests on.

    Attributes:
        run_id: name of the run directory.
        system: name of the system.
        backbone: model it was made from.
        task: task, or `MEAN_TASK` for the unweighted mean over the run's tasks.
        n: benchmark items.
        metric: what was measured.
        value: the figure.
        ci_low: lower bound of its 95% bootstrap interval, NaN if one item gives none.
        ci_high: upper bound.
        unit: of the figure.
        batch_size: requests run at the same time; several joined by `|`.
        dtype: of weights and cache.
        device: `cpu` or `cuda`.
        forwards: model calls.
        tokens: tokens kept.
        seconds: decoding time.
        benchmark: what the task belongs to.
        mini: whether the task is a synthetic look-alike.
        samples: samples, when an item has several more than `n`.
        errors: samples that failed and are in no figure.
        attention: attention backend.
        hardware: machines of the task's samples.
        note: what a reader must know.
        task_version: version of the task; of a mean over tasks those of all, joined by `|`.
        settings: decoder settings in force, columns `setting_...`.
    """

    run_id: str
    system: str
    backbone: str
    task: str
    n: int
    metric: str
    value: float
    ci_low: float
    ci_high: float
    unit: str
    batch_size: str
    dtype: str
    device: str
    forwards: int
    tokens: int
    seconds: float
    benchmark: str
    mini: bool
    samples: int
    errors: int
    attention: str
    hardware: str
    note: str
    task_version: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def interval(self) -> Interval:
        """Value and bounds."""
        return Interval(self.value, self.ci_low, self.ci_high, self.n)


def write_csv(rows: Sequence[TableRow], path: str | os.PathLike[str]) -> None:
    """Writes rows atomically. Equal rows give equal bytes.

    Raises:
        StoreError: the file cannot be written.
    """
    columns = csv_columns(rows)
    cells = ({**{name: getattr(row, name) for name in _FIELDS}, **_setting_columns(row)} for row in rows)
    write_output(path, csv_text(columns, ([of_row.get(column) for column in columns] for of_row in cells)))


def read_csv(path: str | os.PathLike[str]) -> list[TableRow]:
    """Rows of a file that `write_csv` wrote.

    Raises:
        StoreError: the file is missing or holds no row, or a column is missing.
    """
    try:
        with open(path, encoding="utf-8", newline="") as stream:
            records = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StoreError(f"{path} cannot be read ({error}); write it with the table command") from error
    if not records:
        raise StoreError(f"{path} holds no rows of results; write it with the table command")
    return [_row_of(record, path) for record in records]


def csv_columns(rows: Sequence[TableRow]) -> list[str]:
    """Column names in order: identity and figure, settings of all rows, totals, provenance."""
    settings = sorted({name for row in rows for name in _setting_columns(row)})
    after = _FIELDS.index("forwards")
    return [*_FIELDS[:after], *settings, *_FIELDS[after:]]


_FIELDS = tuple(one.name for one in fields(TableRow) if one.name != "settings")
_LATER = ("task_version",)  # columns that files of earlier versions lack


def _setting_columns(row: TableRow) -> dict[str, str]:
    return {SETTING_PREFIX + name: value for name, value in row.settings.items()}


def _row_of(record: Mapping[str, str], path: str | os.PathLike[str]) -> TableRow:
    if missing := [name for name in _FIELDS if record.get(name) is None and name not in _LATER]:
        raise StoreError(f"{path} lacks the columns {', '.join(missing)}; write it with the table command")
    values: dict[str, Any] = {name: record.get(name) or "" for name in _FIELDS}
    try:
        values |= {name: int(record[name]) for name in ("n", "forwards", "tokens", "samples", "errors")}
        values |= {name: float(record[name] or "nan") for name in ("value", "ci_low", "ci_high", "seconds")}
    except ValueError as error:
        raise StoreError(f"{path}: {error}; write it with the table command") from error
    settings = {
        column.removeprefix(SETTING_PREFIX): cell
        for column, cell in record.items()
        if column.startswith(SETTING_PREFIX) and cell
    }
    return TableRow(**{**values, "mini": record["mini"] == "yes", "settings": settings})
