"""Rows of text as a table: on a terminal and as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.markup import escape
from rich.table import Table

from refusion_eval.metrics.bootstrap import Interval
from refusion_eval.results.summary import shown


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table whose cells are text already.

    Attributes:
        title: above it.
        headings: of the columns.
        rows: as many cells each.
        num_left: columns, the first ones, that are flush left; all others are flush right.
        notes: sentences below it.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_left: int = 1
    notes: Sequence[str] = field(default_factory=tuple)

    def rich(self) -> Table:
        """For a terminal."""
        table = Table(title=escape(self.title), caption=escape(" ".join(self.notes)) or None, caption_justify="left")
        for number, heading in enumerate(self.headings):
            table.add_column(escape(heading), justify="left" if number < self.num_left else "right")
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def markdown(self) -> str:
        """As Markdown, with its title as a heading."""
        rules = [":--" if number < self.num_left else "--:" for number in range(len(self.headings))]
        body = [[cell.replace("|", "\\|") for cell in row] for row in self.rows]
        lines = "".join(f"| {' | '.join(cells)} |\n" for cells in (self.headings, rules, *body))
        return "\n".join([f"## {self.title}\n", lines, *(f"{note}\n" for note in self.notes)])


def figure(interval: Interval | None, digits: int = 2) -> str:
    """Value and bounds; empty if there is none, so that what was not measured is not written."""
    return "" if interval is None else shown(interval, digits)
