"""What a task with gaps shows behind them: the suffix, none, or that of another item, the last two as controls."""

from collections.abc import Callable, Sequence
from typing import Any

from refusion_eval.benchmarks.rows import Row
from refusion_eval.errors import DataError

PREFIX_ONLY, WRONG_SUFFIX = "_prefix_only", "_wrong_suffix"  # the ends of names of tasks; "" for no control


def shown_suffix(control: str, row: Row) -> str:
    """The text behind the gap of a row, which `with_wrong_suffixes` made for the control of that name."""
    return "" if control == PREFIX_ONLY else str(row["wrong_suffix" if control else "suffix"])


def with_wrong_suffixes(
    rows: Sequence[Row], fits: Callable[[Row, Row], bool], lacking: str, id_column: str | None = None
) -> list[dict[str, Any]]:
    """The rows with `wrong_suffix`: that of the next row, from half a set further on, with another one that fits.

    Args:
        rows: of one file, each with its `suffix`.
        fits: whether the first row may lend its suffix to the second.
        lacking: the error where none fits, behind the item's name.
        id_column: the column of that name; None for the number of the row.

    Raises:
        DataError: no other row fits.
    """

    def wrong(number: int, row: Row) -> str:
        for other in (rows[(number + len(rows) // 2 + step) % len(rows)] for step in range(len(rows))):
            if other["suffix"] != row["suffix"] and fits(other, row):
                return str(other["suffix"])
        raise DataError(f"item {number if id_column is None else row[id_column]}: {lacking}")

    return [{**row, "wrong_suffix": wrong(number, row)} for number, row in enumerate(rows)]
