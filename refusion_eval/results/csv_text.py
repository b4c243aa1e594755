"""Rows as CSV, the same everywhere: equal rows give equal bytes."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any


def csv_text(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """A header and one line a row."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(map(csv_cell, row) for row in rows)
    return text.getvalue()


def csv_cell(value: Any) -> str:
    """A value as text: what is missing or not a number is empty, floats have six digits, and no NUL ends a line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "" if math.isnan(value) else format(value, ".6g")
    return "" if value is None else str(value).replace("\0", "\\0")
