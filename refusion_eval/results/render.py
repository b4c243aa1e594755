"""`Table`: one table for a terminal, as Markdown, LaTeX and CSV; and `csv_text`, which writes all CSV of results."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table as RichTable

from refusion_eval.metrics.bootstrap import Interval
from refusion_eval.results.figure import Origin
from refusion_eval.store.atomic_write import write_output

Emphasis = Literal["", "best", "second"]
DAGGER = "\u2020"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCell:
    """One cell.

    Attributes:
        text: content; empty where nothing was measured or published.
        low: lower bound of the 95% interval as text; empty for none.
        high: upper bound of the same interval.
        n: benchmark items, 0 where that is not known.
        emphasis: best or second best of its column among figures of the same origin.
        dagger: whether a note below the table is about this cell.
    """

    text: str = ""
    low: str = ""
    high: str = ""
    n: int = 0
    emphasis: Emphasis = ""
    dagger: bool = False

    @property
    def plain(self) -> str:
        """Text, dagger and bounds without any markup."""
        return self.text and self.text + (DAGGER if self.dagger else "") + self.bounds

    @property
    def bounds(self) -> str:
        """The interval in brackets after a space; empty for none."""
        return f" [{self.low}, {self.high}]" if self.low else ""


EMPTY = TableCell()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One row.

    Attributes:
        cells: one for each column.
        origin: published figures are set in italics; empty for text.
        begins_group: whether there is a rule above the row.
        num_repeated: leading columns that repeat the row above. They are shown empty; the CSV has them in every row.
    """

    cells: Sequence[TableCell]
    origin: Origin | Literal[""] = ""
    begins_group: bool = False
    num_repeated: int = 0

    @property
    def shown(self) -> Sequence[TableCell]:
        """The cells as a reader is shown them."""
        return (*(EMPTY,) * self.num_repeated, *self.cells[self.num_repeated :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading across the table, above the rows that it is about."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table. Equal tables give equal bytes in every form.

    Attributes:
        title: what the table shows; empty for no heading.
        columns: headings.
        rows: rows in order; a plain sequence of strings is a row of text.
        num_left: number of leading columns that are flush left; the others are flush right.
        notes: paragraphs below the table.
        name: name of its files, and of its label in LaTeX.
        literal: whether Markdown has to show every text character by character, as names and settings of a paper need;
            otherwise texts may hold Markdown, and only separators of columns are escaped.
    """

    title: str = ""
    columns: Sequence[str]
    rows: Sequence[TableRow | Section | Sequence[str]]
    num_left: int = 1
    notes: Sequence[str] = ()
    name: str = "table"
    literal: bool = False

    @property
    def lines(self) -> list[TableRow]:
        """Rows without the headings."""
        return [row for row in map(_as_row, self.rows) if isinstance(row, TableRow)]

    @property
    def caption(self) -> str:
        """All notes in one line."""
        return " ".join(filter(None, self.notes))

    def rich(self) -> RichTable:
        """The table for a terminal."""
        table = RichTable(
            title=escape(self.title) or None, caption=escape(self.caption) or None, caption_justify="left"
        )
        for number, column in enumerate(self.columns):
            table.add_column(escape(column), justify="left" if number < self.num_left else "right")
        for number, row in enumerate(map(_as_row, self.rows)):
            if isinstance(row, Section):
                table.add_section()
                table.add_row(f"[bold]{escape(row.text)}")
                table.add_section()
                continue
            if row.begins_group and number:
                table.add_section()
            table.add_row(*(escape(cell.plain) for cell in row.shown))
        return table

    def markdown(self) -> str:
        """Markdown with the title as a heading; published figures italic, best ones bold, second best underlined."""
        shown = markdown_text if self.literal else _with_separators_escaped
        rules = [":--" if number < self.num_left else "--:" for number in range(len(self.columns))]
        body = [_markdown_row(_as_row(row), len(self.columns), shown) for row in self.rows]
        lines = "".join(f"| {' | '.join(cells)} |\n" for cells in ([*map(shown, self.columns)], rules, *body))
        heading = f"## {shown(self.title)}\n\n" if self.title else ""
        return heading + lines + "".join(f"\n{shown(note)}\n" for note in self.notes if note)

    def latex(self) -> str:
        """A floating table over both columns, for booktabs and graphicx. Intervals stand below their figures."""
        width = len(self.columns)
        body: list[str] = []
        for row in map(_as_row, self.rows):
            if isinstance(row, Section):
                heading = rf"\multicolumn{{{width}}}{{l}}{{\textbf{{{latex_text(row.text)}}}}} \\"
                body += [r"\midrule", heading, r"\midrule"]
                continue
            if row.begins_group and body and body[-1] != r"\midrule":
                body.append(r"\addlinespace")
            body.append(" & ".join(_latex_cell(cell, row.origin == "published") for cell in row.shown) + r" \\")
        head = " & ".join(map(latex_text, self.columns))
        lines = [
            "% needs \\usepackage{booktabs,graphicx}",
            r"\begin{table*}[t]",
            r"\centering",
            rf"\caption{{{latex_text(self.title)}. {latex_text(self.caption)}}}",
            rf"\label{{tab:{self.name.replace('_', '-')}}}",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{{'l' * self.num_left + 'r' * (width - self.num_left)}}}",
            r"\toprule",
            rf"{head} \\",
            *([] if body and body[0] == r"\midrule" else [r"\midrule"]),
            *body,
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table*}",
        ]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """Every cell as text; columns of bounds and items follow columns that have any."""
        lines = self.lines
        with_origin = any(line.origin for line in lines)
        bounded = [any(line.cells[at].low or line.cells[at].n for line in lines) for at in range(len(self.columns))]
        head = ["origin"] if with_origin else []
        for name, has_bounds in zip(self.columns, bounded, strict=True):
            head += [name, *(f"{name} {suffix}" for suffix in ("ci_low", "ci_high", "n") if has_bounds)]
        rows = []
        for line in lines:
            texts: list[str] = [line.origin] if with_origin else []
            for cell, has_bounds in zip(line.cells, bounded, strict=True):
                texts.append(cell.text + (DAGGER if cell.dagger else ""))
                texts += [cell.low, cell.high, str(cell.n or "")] if has_bounds else []
            rows.append(texts)
        return csv_text(head, rows)

    def write(self, folder: Path) -> list[Path]:
        """Writes FOLDER/NAME.csv, .md and .tex and returns their paths. Raises StoreError if one cannot be written."""
        files = {"csv": self.csv(), "md": self.markdown(), "tex": self.latex()}
        for ending, text in files.items():
            write_output(folder / f"{self.name}.{ending}", text)
        return [folder / f"{self.name}.{ending}" for ending in files]


def text_cells(*texts: str) -> tuple[TableCell, ...]:
    """Cells that hold text only."""
    return tuple(TableCell(text=text) for text in texts)


def interval_text(interval: Interval | None, digits: int = 2, missing: str = "") -> str:
    """Value and bounds as `1.00 [0.50, 1.50]`, `missing` without a value."""
    if interval is None or math.isnan(interval.value):
        return missing
    value = f"{interval.value:.{digits}f}"
    if math.isnan(interval.low):
        return value
    return f"{value} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def csv_text(columns: Sequence[str], rows: Iterable[Iterable[Any]], line_end: str = "\n") -> str:
    """A header and one line a row. Equal rows give equal bytes."""
    import pandas as pd  # half a second, which only commands that write CSV should pay

    table = [[csv_cell(value) for value in row] for row in rows]
    return pd.DataFrame(table, columns=list(columns), dtype=object).to_csv(index=False, lineterminator=line_end)


def csv_cell(value: Any) -> str:
    """A value as text: None and NaN are empty, floats have six significant digits, booleans are yes or no.

    A NUL is written as an escape, because it would end the line for some readers.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "" if math.isnan(value) else format(value, ".6g")
    return "" if value is None else str(value).replace("\0", "\\0")


def _as_row(row: TableRow | Section | Sequence[str]) -> TableRow | Section:
    return row if isinstance(row, TableRow | Section) else TableRow(cells=text_cells(*row))


_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~])")
_MARKDOWN_MARKS = {"best": ("**", "**"), "second": ("<u>", "</u>"), "italic": ("*", "*")}
_LATEX_MARKS = {"best": (r"\textbf{", "}"), "second": (r"\underline{", "}"), "italic": (r"\textit{", "}")}
_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "%": r"\%",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "[": "{[}",
    "]": "{]}",
    DAGGER: r"$^\dagger$",
    "\u2212": r"$-$",
    "\u00d7": r"$\times$",
    "\n": " ",
}


def markdown_text(text: str) -> str:
    """Text in one line that Markdown shows as it is."""
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split("\n")))


def _with_separators_escaped(text: str) -> str:
    return text.replace("|", "\\|")


def latex_text(text: str) -> str:
    """Text that LaTeX sets as it is."""
    return "".join(_LATEX.get(character, character) for character in text)


def _markdown_row(row: TableRow | Section, width: int, shown: Callable[[str], str]) -> list[str]:
    if isinstance(row, Section):
        return [f"**{shown(row.text)}**", *[""] * (width - 1)]
    return [_markdown_cell(cell, row.origin == "published", shown) for cell in row.shown]


def _markdown_cell(cell: TableCell, italic: bool, shown: Callable[[str], str]) -> str:
    if not cell.text:
        return ""
    text = _marked(shown(cell.text), cell, italic, _MARKDOWN_MARKS)
    return text + (DAGGER if cell.dagger else "") + shown(cell.bounds)


def _latex_cell(cell: TableCell, italic: bool) -> str:
    if not cell.text:
        return ""
    text = _marked(latex_text(cell.text), cell, italic, _LATEX_MARKS) + (r"$^\dagger$" if cell.dagger else "")
    return rf"\shortstack[r]{{{text}\\{{\tiny {latex_text(cell.bounds.strip())}}}}}" if cell.low else text


def _marked(text: str, cell: TableCell, italic: bool, marks: Mapping[str, tuple[str, str]]) -> str:
    """Escaped text inside the marks of the cell's emphasis, and inside those of italics."""
    for mark in filter(None, (cell.emphasis, "italic" if italic else "")):
        before, after = marks[mark]
        text = f"{before}{text}{after}"
    return text
