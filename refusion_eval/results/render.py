"""Tables for a terminal, as Markdown, LaTeX and CSV, and the CSV file of measurements."""

import csv
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table as RichTable

from refusion_eval.metrics import Interval
from refusion_eval.results.measurement import Origin
from refusion_eval.store.atomic_write import write_output
from refusion_eval.untrusted import read_plain, visible

Emphasis = Literal["", "best", "second", "above"]
DAGGER = "\u2020"

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~])")
# A bracket makes a link only before a bracket or a colon; those of intervals stay as they are.
_MARKDOWN_PROSE = re.compile(r"[\\`<>|]|\](?=[\[(:])")
_MARKDOWN_MARKS = {"best": "**%s**", "second": "<u>%s</u>", "above": "*%s*", "italic": "*%s*"}
_LATEX_MARKS = {"best": r"\textbf{%s}", "second": r"\underline{%s}", "above": r"\textit{%s}", "italic": r"\textit{%s}"}
_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "{}$&#_%"}
    | {
        "\\": r"\textbackslash{}",
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
        "\u0394": r"$\Delta$",
        "\u00d7": r"$\times$",
        "\u00b1": r"$\pm$",
    }
)


def _shown(text: str) -> str:
    return escape(visible(text))


def markdown_text(text: str) -> str:
    """Text in one line that Markdown shows as it is."""
    return _MARKDOWN.sub(r"\\\1", visible(" ".join(text.split("\n"))))


def markdown_prose(text: str) -> str:
    """Text in one line that makes no tag, link, code or cell in Markdown; emphasis stays, and names are readable."""
    return _MARKDOWN_PROSE.sub(r"\\\g<0>", visible(" ".join(text.split("\n"))))


def markdown_source(text: str) -> str:
    """Markdown of this project, in which only separators of columns are escaped."""
    return text.replace("|", "\\|")


def latex_text(text: str) -> str:
    return visible(" ".join(text.split("\n"))).translate(_LATEX)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCell:
    """One cell, with its spread over samples or seeds and the bounds of its 95% interval, as texts.

    It has a dagger if a note below the table is about it.
    """

    text: str = ""
    low: str = ""
    high: str = ""
    spread: str = ""
    n: int = 0
    emphasis: Emphasis = ""
    dagger: bool = False

    @property
    def plain(self) -> str:
        return self.text and self.text + (DAGGER if self.dagger else "") + self.bounds

    @property
    def bounds(self) -> str:
        """The spread and the interval in brackets, each after a space; empty for none."""
        interval = f" [{self.low}, {self.high}]" if self.low else ""
        return f" ± {self.spread}{interval}" if self.spread else interval

    def marked(self, escape: Callable[[str], str], italic: bool, marks: Mapping[str, str], dagger: str) -> str:
        """The escaped text inside the marks of its emphasis and of italics, and the dagger; empty without a text."""
        escaped = escape(self.text)
        for mark in filter(None, (self.emphasis, "italic" if italic else "")):
            escaped = marks[mark] % escaped
        return escaped + (dagger if self.dagger else "") if self.text else ""


EMPTY = TableCell()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One row; published rows are set in italics unless the table says otherwise."""

    cells: Sequence[TableCell]
    origin: Origin | Literal[""] = ""
    begins_group: bool = False
    num_repeated: int = 0  # first cells that repeat the row above: shown empty, and written in every row of the CSV

    @property
    def shown(self) -> Sequence[TableCell]:
        return (*(EMPTY,) * self.num_repeated, *self.cells[self.num_repeated :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading across the table, above the rows that it is about."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table. Equal tables give equal bytes in every form."""

    title: str = ""
    columns: Sequence[str]
    rows: Sequence[TableRow | Section | Sequence[str]]
    num_left: int = 1
    notes: Sequence[str] = ()
    name: str = "table"
    escape: Callable[[str], str] = markdown_prose  # of all texts in Markdown
    published_in_italics: bool = True
    formulas: Mapping[str, str] = field(default_factory=dict)
    caption_title: str = ""  # caption in LaTeX, where it is not the title

    @property
    def entries(self) -> list[TableRow | Section]:
        """Rows and headings, the rows that are given as texts made of cells."""
        rows = (row if isinstance(row, TableRow | Section) else TableRow(cells=text_cells(*row)) for row in self.rows)
        return list(rows)

    @property
    def lines(self) -> list[TableRow]:
        return [row for row in self.entries if isinstance(row, TableRow)]

    @property
    def caption(self) -> str:
        return " ".join(filter(None, self.notes))

    def _used(self) -> list[int]:
        """The numbers of the columns that have a text in any row; all of them in a table without rows."""
        lines = self.lines
        return [at for at in range(len(self.columns)) if not lines or any(row.cells[at].text for row in lines)]

    def without_empty_columns(self) -> "Table":
        used = self._used()
        rows = [
            row if isinstance(row, Section) else replace(row, cells=[row.cells[at] for at in used])
            for row in self.entries
        ]
        num_left = sum(at < self.num_left for at in used)
        return replace(self, columns=[self.columns[at] for at in used], rows=rows, num_left=num_left)

    def rich(self, width: int | None = None) -> RichTable:
        """The table for a terminal of `width` columns, without columns that are empty in every row."""
        full = [row.shown for row in self.lines]
        used = self._used()
        texts = [[visible(self.columns[at]), *(visible(cells[at].plain) for cells in full)] for at in used]
        title, caption = _shown(self.title) or None, _shown(self.caption) or None
        table = RichTable(title=title, caption=caption, caption_justify="left")
        for at, fitted in zip(used, _fitted(texts, width), strict=True):
            justify: Literal["left", "right"] = "left" if at < self.num_left else "right"
            table.add_column(_shown(self.columns[at]), justify=justify, width=fitted, overflow="fold")
        for number, row in enumerate(self.entries):
            if isinstance(row, Section):
                table.add_section()
                table.add_row(f"[bold]{_shown(row.text)}")
                table.add_section()
                continue
            if row.begins_group and number:
                table.add_section()
            table.add_row(*(_shown(row.shown[at].plain) for at in used))
        return table

    def markdown(self) -> str:
        """Markdown with the title as a heading; best figures bold, second best underlined."""
        rules = [":--" if number < self.num_left else "--:" for number in range(len(self.columns))]
        lines = [list(map(self.escape, self.columns)), rules]
        for row in self.entries:
            if isinstance(row, Section):
                lines.append([f"**{self.escape(row.text)}**", *[""] * (len(self.columns) - 1)])
            else:
                lines.append([self._markdown_cell(cell, self._is_italic(row)) for cell in row.shown])
        heading = f"## {self.escape(self.title)}\n\n" if self.title else ""
        notes = "".join(f"\n{self.escape(note)}\n" for note in self.notes if note)
        return heading + "".join(f"| {' | '.join(line)} |\n" for line in lines) + notes

    def _is_italic(self, row: TableRow) -> bool:
        return self.published_in_italics and row.origin == "published"

    def _markdown_cell(self, cell: TableCell, italic: bool) -> str:
        text = cell.marked(self.escape, italic, _MARKDOWN_MARKS, DAGGER)
        return text and text + self.escape(cell.bounds)

    def latex(self, *, intervals: bool = True) -> str:
        """A floating table over both columns, for amsmath, booktabs and graphicx, with the title as its caption."""
        width = len(self.columns)
        body: list[str] = []
        for row in self.entries:
            if isinstance(row, Section):
                heading = rf"\multicolumn{{{width}}}{{l}}{{\textbf{{{latex_text(row.text)}}}}} \\"
                body += [*([] if body[-1:] == [r"\midrule"] else [r"\midrule"]), heading, r"\midrule"]
                continue
            if row.begins_group and body and body[-1] != r"\midrule":
                body.append(r"\addlinespace")
            body += self.latex_lines(row, intervals=intervals)
        head = " & ".join(map(self._latex_text, self.columns))
        lines = [
            "% needs \\usepackage{amsmath,booktabs,graphicx}",
            *([f"% notes: {self.name}.txt"] if self.caption else []),
            r"\begin{table*}[t]",
            r"\centering",
            rf"\caption{{{latex_text(self.caption_title or self.title)}.}}",
            rf"\label{{tab:{self.name.replace('_', '-')}}}",
            r"\footnotesize\setlength{\tabcolsep}{3pt}",
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

    def latex_lines(self, row: TableRow, *, intervals: bool = True) -> list[str]:
        """The line of a row, and below it the line of its intervals if it has any."""
        italic, dagger = self._is_italic(row), r"$^\dagger$"
        cells = [cell.marked(self._latex_text, italic, _LATEX_MARKS, dagger) for cell in row.shown]
        bounds = [rf"{{\scriptsize {latex_text(cell.bounds.strip())}}}" if cell.bounds else "" for cell in row.shown]
        lines = [cells, *([bounds] if intervals and any(bounds) else [])]
        return [" & ".join(line) + r" \\" for line in lines]

    def _latex_text(self, text: str) -> str:
        return self.formulas.get(text) or latex_text(text)

    def csv(self) -> str:
        """Every cell as text; columns of bounds and items follow columns that have any."""
        lines = self.lines
        with_origin = any(line.origin for line in lines)
        bounded = [any(line.cells[at].low or line.cells[at].n for line in lines) for at in range(len(self.columns))]
        spread = [any(line.cells[at].spread for line in lines) for at in range(len(self.columns))]
        head = ["origin"] if with_origin else []
        for name, has_bounds, has_spread in zip(self.columns, bounded, spread, strict=True):
            head += [name, *(f"{name} {suffix}" for suffix in ("ci_low", "ci_high", "n") if has_bounds)]
            head += [f"{name} sd"] if has_spread else []
        rows = []
        for line in lines:
            texts: list[str] = [line.origin] if with_origin else []
            for cell, has_bounds, has_spread in zip(line.cells, bounded, spread, strict=True):
                texts.append(cell.text + (DAGGER if cell.dagger else ""))
                texts += [cell.low, cell.high, str(cell.n or "")] if has_bounds else []
                texts += [cell.spread] if has_spread else []
            rows.append(texts)
        return csv_text(head, rows)

    def write_latex(self, path: Path) -> None:
        """Writes the table to a file of LaTeX, whose name is its label, and the notes beside it as .txt."""
        named = replace(self.without_empty_columns(), name=path.stem)
        write_output(path, named.latex())
        if self.caption:
            write_output(path.with_suffix(".txt"), f"{self.caption}\n")

    def write(self, folder: Path, *, intervals: bool = True) -> list[Path]:
        """Writes FOLDER/NAME.csv, .md and .tex, and the notes, if there are any, as .txt."""
        texts = {"csv": self.csv(), "md": self.markdown(), "tex": self.latex(intervals=intervals)}
        texts |= {"txt": f"{self.caption}\n"} if self.caption else {}
        files = {folder / f"{self.name}.{ending}": text for ending, text in texts.items()}
        for file, text in files.items():
            write_output(file, text)
        return list(files)


def text_cells(*texts: str) -> tuple[TableCell, ...]:
    return tuple(TableCell(text=text) for text in texts)


def interval_text(interval: Interval | None, digits: int = 2, missing: str = "") -> str:
    """Value and bounds as `1.00 [0.50, 1.50]`, `missing` without a value."""
    if interval is None or math.isnan(interval.value):
        return missing
    value = f"{interval.value:.{digits}f}"
    if math.isnan(interval.low):
        return value
    return f"{value} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def interval_cells(name: str, interval: Interval | None) -> dict[str, float | None]:
    """Value and bounds by the names of their columns."""
    values = (None, None, None) if interval is None else (interval.value, interval.low, interval.high)
    return dict(zip((name, f"{name}_ci_low", f"{name}_ci_high"), values, strict=True))


def csv_text(columns: Sequence[str], rows: Iterable[Iterable[Any]], line_end: str = "\n") -> str:
    """A header and one line a row. Equal rows give equal bytes."""
    text = io.StringIO()
    csv.writer(text, lineterminator=line_end).writerows([csv_cell(value) for value in row] for row in (columns, *rows))
    return text.getvalue()


def cell_text(value: Any) -> str:
    """A value as text: None and NaN are empty, floats have six significant digits, booleans are yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "" if math.isnan(value) else format(value, ".6g")
    # Characters that act on a terminal are written as escapes.
    return "" if value is None else visible(str(value), keep="\t\n")


def csv_cell(value: Any) -> str:
    # A text that a spreadsheet would compute, because it begins as a formula does and is not a number, gets an
    # apostrophe in front, which `csv_records` takes away.
    text = cell_text(value)
    return f"'{text}" if _FORMULA.match(text) and not _is_number(text) else text


# What begins a formula, also in its wide form. Apostrophes before it belong to it: taking one away gives the text back.
_FORMULA = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20](?s:.)")
_QUOTED = re.compile(f"'{_FORMULA.pattern}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return not text[0].isspace()


def csv_records(path: str | os.PathLike[str]) -> tuple[list[str], list[tuple[int, dict[str, Any]]]]:
    """The columns of a file that `csv_text` made, and its records (None for a missing cell) with their last lines."""
    # Raises OSError for a file that is missing, too large or not plain; UnicodeDecodeError or csv.Error for no CSV.
    reader = csv.DictReader(io.StringIO(read_plain(path).decode("utf-8"), newline=""))
    records = []
    for record in reader:
        record.pop(None, None)  # cells beyond the last column
        cells = {name: cell[1:] if cell and _QUOTED.match(cell) else cell for name, cell in record.items()}
        records.append((reader.line_num, cells))
    return list(reader.fieldnames or ()), records


def _fitted(columns: Sequence[Sequence[str]], width: int | None) -> list[int | None]:
    """Widths of columns, given by their texts, on a terminal; None leaves a column as it is."""
    # Where the texts do not fit, they are broken between words. Intervals stay on one line if there is room.
    natural = [max(map(len, texts)) for texts in columns]
    room = math.inf if width is None else width - 3 * len(columns) - 1  # each cell stands between spaces and rules
    for word, most in ((r"\[[^\]\n]*\]|\S+", 24), (r"\S+", 24), (r"\S+", 12)):
        words = [re.findall(word, "\n".join(texts)) for texts in columns]
        least = [min(max(map(len, of_column), default=1), most) for of_column in words]
        if sum(least) <= room < sum(natural):
            share = (room - sum(least)) / (sum(natural) - sum(least))
            return [low + int(share * (high - low)) for low, high in zip(least, natural, strict=True)]
    return [None] * len(columns)
