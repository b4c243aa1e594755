"""A table of the paper as data: text and figures in cells, each with where it comes from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from refusion_eval.results.figure import Origin

Emphasis = Literal["", "best", "second"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One cell.

    Attributes:
        text: what stands there; empty where nothing was measured or published.
        low, high: bounds of the 95% interval, as text; empty for none.
        n: benchmark items, 0 where there are none or that is not known.
        emphasis: best or second best of its column among figures of the same origin.
        dagger: whether a note below the table is about it.
    """

    text: str = ""
    low: str = ""
    high: str = ""
    n: int = 0
    emphasis: Emphasis = ""
    dagger: bool = False


EMPTY = Entry()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row.

    Attributes:
        entries: one a column.
        origin: published figures are set in italics; empty for text.
        begins_group: whether there is a rule above it.
        num_repeated: columns, the first ones, that say what the row above says: a reader is shown nothing there, while
            the CSV has them in every row.
    """

    entries: Sequence[Entry]
    origin: Origin | Literal[""] = ""
    begins_group: bool = False
    num_repeated: int = 0

    @property
    def shown(self) -> Sequence[Entry]:
        """The entries as a reader is shown them."""
        return (*(EMPTY,) * self.num_repeated, *self.entries[self.num_repeated :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """A line across the table, above the rows that it is about."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperTable:
    """One table.

    Attributes:
        name: of its files: table1, or table1_mini.
        title: what it shows.
        columns: headings.
        num_left: columns, the first ones, that are flush left; all others are flush right.
        rows: in order.
        caption: sentences below the title: intervals, n, hardware, marks, defects of the source.
    """

    name: str
    title: str
    columns: Sequence[str]
    num_left: int
    rows: Sequence[Line | Heading]
    caption: Sequence[str]

    @property
    def lines(self) -> list[Line]:
        """Rows without the headings."""
        return [row for row in self.rows if isinstance(row, Line)]


def texts(*cells: str) -> tuple[Entry, ...]:
    """Cells that are text."""
    return tuple(Entry(text=cell) for cell in cells)
