"""The CSV file of figures: one row a figure, six significant digits, and nothing that says when it was written."""

import csv
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from refusion_eval.errors import StoreError
from refusion_eval.results.figure import (
    AVERAGE,
    HALF_WRITTEN,
    MEAN_OVER,
    MEAN_TASK,
    MINI_NOTE,
    NOT_SCORED,
    UNISOLATED,
    Figure,
)
from refusion_eval.results.published import system_key
from refusion_eval.results.render import csv_text
from refusion_eval.store.atomic_write import write_output

SETTING_PREFIX = "setting_"
# Columns before and after those of the settings. `system` is the figure's label.
_IDENTITY = ("run_id", "system", "backbone", "task", "n", "metric", "value", "ci_low", "ci_high", "unit")
_CONDITIONS = ("batch_size", "dtype", "device")
_TOTALS = ("forwards", "tokens", "seconds", "benchmark", "mini", "samples", "errors", "attention", "hardware", "note")
_ADDED_LATER = ("task_version",)  # files of earlier versions lack these columns
_COLUMNS = (*_IDENTITY, *_CONDITIONS, *_TOTALS, *_ADDED_LATER)


def csv_columns(figures: Sequence[Figure]) -> list[str]:
    """Column names in order: identity and figure, conditions, settings of all figures, totals and provenance."""
    settings = sorted({SETTING_PREFIX + name for figure in figures for name in figure.settings})
    return [*_IDENTITY, *_CONDITIONS, *settings, *_TOTALS, *_ADDED_LATER]


def csv_values(figure: Figure) -> dict[str, Any]:
    """The columns of one figure."""
    values = {name: getattr(figure, name) for name in _COLUMNS}
    values |= {"system": figure.label, "benchmark": "" if figure.is_mean else figure.benchmark}
    return values | {SETTING_PREFIX + name: value for name, value in figure.settings.items()}


def write_csv(figures: Sequence[Figure], path: str | os.PathLike[str]) -> None:
    """Writes figures atomically. Equal figures give equal bytes.

    Raises:
        StoreError: the file cannot be written.
    """
    columns = csv_columns(figures)
    rows = (csv_values(figure) for figure in figures)
    write_output(path, csv_text(columns, ([row.get(column) for column in columns] for row in rows)))


def read_csv(path: str | os.PathLike[str]) -> list[Figure]:
    """The figures of a file that `write_csv` wrote.

    Raises:
        StoreError: the file is missing or holds no row, or a column is missing or has a wrong value.
    """
    try:
        with open(path, encoding="utf-8", newline="") as stream:
            records = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StoreError(f"{path} cannot be read ({error}); write it with the table command") from error
    if not records:
        raise StoreError(f"{path} holds no rows of results; write it with the table command")
    return [_figure(record, path) for record in records]


def _figure(record: Mapping[str, str], path: str | os.PathLike[str]) -> Figure:
    if missing := [name for name in _COLUMNS if record.get(name) is None and name not in _ADDED_LATER]:
        raise StoreError(f"{path} lacks the columns {', '.join(missing)}; write it with the table command")
    values: dict[str, Any] = {name: record.get(name) or "" for name in _COLUMNS}
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
    label, task = values.pop("system"), values["task"]
    notes = tuple(note for note in values.pop("note").split("; ") if note and note != MINI_NOTE)
    values |= {"mini": record["mini"] == "yes"}
    values |= {"benchmark": AVERAGE if task == MEAN_TASK else values["benchmark"] or task}
    return Figure(
        origin="measured",
        system=system_key(label, values["backbone"], settings),
        label=label,
        settings=settings,
        notes=notes,
        **_facts(notes),
        **values,
    )


def _facts(notes: Sequence[str]) -> dict[str, Any]:
    """The facts that the file has no columns for, read back from the sentences that state them."""
    means = (re.match(rf"{MEAN_OVER} (\d+) tasks", note) for note in notes)
    return {
        "finished": not any(note.startswith(HALF_WRITTEN) for note in notes),
        "scored": not any(note.endswith(NOT_SCORED) for note in notes),
        "isolated": UNISOLATED not in notes,
        "num_tasks": next((int(match[1]) for match in means if match), 1),
    }
