"""Tables for a terminal, as Markdown, LaTeX and CSV, and the CSV file of measurements."""

import csv
import io
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table as RichTable

from refusion_eval.benchmarks import OURS
from refusion_eval.errors import StoreError
from refusion_eval.metrics import Interval
from refusion_eval.results.measurement import AVERAGE, MEAN_TASK, MINI_NOTE, Measurement, Origin, system_key
from refusion_eval.runs.model_args import decoder_of_system
from refusion_eval.store.atomic_write import write_output
from refusion_eval.untrusted import read_plain, visible

Emphasis = Literal["", "best", "second", "above"]
DAGGER = "\u2020"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCell:
    """One cell, with the bounds of its 95% interval as text; with a dagger if a note below the table is about it."""

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
    """One row; published rows are set in italics unless the table says otherwise.

    The first `num_repeated` cells repeat the row above: they are shown empty, and the CSV has them in every row.
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
        literal: whether Markdown has to show every text character by character, as names and settings of a paper need;
            otherwise only characters are escaped that could make a tag, a link, code or another cell.
        of_ours: whether the texts hold Markdown of this project; then only separators of columns are escaped.
    """

    title: str = ""
    columns: Sequence[str]
    rows: Sequence[TableRow | Section | Sequence[str]]
    num_left: int = 1
    notes: Sequence[str] = ()
    name: str = "table"
    literal: bool = False
    of_ours: bool = False
    published_in_italics: bool = True
    formulas: Mapping[str, str] = field(default_factory=dict)

    @property
    def lines(self) -> list[TableRow]:
        """Rows without the headings."""
        return [row for row in map(_as_row, self.rows) if isinstance(row, TableRow)]

    @property
    def caption(self) -> str:
        """All notes in one line."""
        return " ".join(filter(None, self.notes))

    def rich(self, width: int | None = None) -> RichTable:
        """The table for a terminal of `width` columns, without columns that are empty in every row."""
        rows = list(map(_as_row, self.rows))
        full = [row.shown for row in rows if isinstance(row, TableRow)]
        used = [not full or any(cells[at].text for cells in full) for at in range(len(self.columns))]
        table = RichTable(
            title=_shown(self.title) or None, caption=_shown(self.caption) or None, caption_justify="left"
        )
        texts = [
            [visible(column), *(visible(cells[at].plain) for cells in full)]
            for at, column in enumerate(self.columns)
            if used[at]
        ]
        widths = iter(_fitted(texts, width))
        for number, column in enumerate(self.columns):
            if used[number]:
                justify: Literal["left", "right"] = "left" if number < self.num_left else "right"
                table.add_column(_shown(column), justify=justify, width=next(widths), overflow="fold")
        for number, row in enumerate(rows):
            if isinstance(row, Section):
                table.add_section()
                table.add_row(f"[bold]{_shown(row.text)}")
                table.add_section()
                continue
            if row.begins_group and number:
                table.add_section()
            table.add_row(*(_shown(cell.plain) for cell in compress(row.shown, used)))
        return table

    def markdown(self) -> str:
        """Markdown with the title as a heading; best figures bold, second best underlined."""
        rules = [":--" if number < self.num_left else "--:" for number in range(len(self.columns))]
        lines = [[self._markdown_text(column) for column in self.columns], rules]
        for row in map(_as_row, self.rows):
            if isinstance(row, Section):
                lines.append([f"**{self._markdown_text(row.text)}**", *[""] * (len(self.columns) - 1)])
            else:
                lines.append([self._markdown_cell(cell, self._is_italic(row)) for cell in row.shown])
        heading = f"## {self._markdown_text(self.title)}\n\n" if self.title else ""
        notes = "".join(f"\n{self._markdown_text(note)}\n" for note in self.notes if note)
        return heading + "".join(f"| {' | '.join(line)} |\n" for line in lines) + notes

    def _is_italic(self, row: TableRow) -> bool:
        return self.published_in_italics and row.origin == "published"

    def _markdown_text(self, text: str) -> str:
        if self.of_ours:
            return text.replace("|", "\\|")
        return markdown_text(text) if self.literal else markdown_prose(text)

    def _markdown_cell(self, cell: TableCell, italic: bool) -> str:
        if not cell.text:
            return ""
        text = _marked(self._markdown_text(cell.text), cell, italic, _MARKDOWN_MARKS)
        return text + (DAGGER if cell.dagger else "") + self._markdown_text(cell.bounds)

    def latex(self, *, intervals: bool = True) -> str:
        """A floating table over both columns, for amsmath, booktabs and graphicx, with the title as its caption."""
        width = len(self.columns)
        body: list[str] = []
        for row in map(_as_row, self.rows):
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
            rf"\caption{{{latex_text(self.title)}.}}",
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
        cells = [self._latex_cell(cell, self._is_italic(row)) for cell in row.shown]
        bounds = [rf"{{\scriptsize {latex_text(cell.bounds.strip())}}}" if cell.low else "" for cell in row.shown]
        lines = [cells, *([bounds] if intervals and any(bounds) else [])]
        return [" & ".join(line) + r" \\" for line in lines]

    def _latex_text(self, text: str) -> str:
        return self.formulas.get(text) or latex_text(text)

    def _latex_cell(self, cell: TableCell, italic: bool) -> str:
        if not cell.text:
            return ""
        text = _marked(self._latex_text(cell.text), cell, italic, _LATEX_MARKS)
        return text + (r"$^\dagger$" if cell.dagger else "")

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

    def write(self, folder: Path, *, intervals: bool = True) -> list[Path]:
        """Writes FOLDER/NAME.csv, .md and .tex, and the notes, if there are any, as .txt."""
        files = {"csv": self.csv(), "md": self.markdown(), "tex": self.latex(intervals=intervals)}
        if self.caption:
            files["txt"] = f"{self.caption}\n"
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
    text = io.StringIO()
    csv.writer(text, lineterminator=line_end).writerows([csv_cell(value) for value in row] for row in (columns, *rows))
    return text.getvalue()


def csv_cell(value: Any) -> str:
    """A value as text: None and NaN are empty, floats have six significant digits, booleans are yes or no.

    Characters that act on a terminal are written as escapes. A text that a spreadsheet would compute, because it begins
    as a formula does and is not a number, gets an apostrophe in front, which `csv_records` takes away.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "" if math.isnan(value) else format(value, ".6g")
    text = "" if value is None else visible(str(value), keep="\t\n")
    return f"'{text}" if _FORMULA.match(text) and not _is_number(text) else text


# What begins a formula, also in its wide form. Apostrophes before it belong to it: taking one away gives the text back.
_FORMULA = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20](?s:.)")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return not text[0].isspace()


def csv_records(path: str | os.PathLike[str]) -> tuple[list[str], list[tuple[int, dict[str, Any]]]]:
    """The columns of a CSV file that `csv_text` made, and its records with the numbers of their last lines.

    A record that is too short has None where a cell is missing.

    Raises:
        OSError: the file is missing, too large, or no plain file.
        UnicodeDecodeError, csv.Error: it is no CSV in UTF-8.
    """
    reader = csv.DictReader(io.StringIO(read_plain(path).decode("utf-8"), newline=""))
    records = [
        (
            reader.line_num,
            {
                name: cell[1:] if cell and _QUOTED.match(cell) else cell
                for name, cell in record.items()
                if name is not None
            },
        )
        for record in reader
    ]
    return list(reader.fieldnames or ()), records


_QUOTED = re.compile(f"'{_FORMULA.pattern}")


def _fitted(columns: Sequence[Sequence[str]], width: int | None) -> list[int | None]:
    """Widths of columns, given by their texts, on a terminal; None leaves a column as it is.

    Where the texts do not fit, they are broken between words. Intervals stay on one line if there is room.
    """
    natural = [max(map(len, texts)) for texts in columns]
    room = math.inf if width is None else width - 3 * len(columns) - 1  # each cell stands between spaces and rules
    for word, most in ((r"\[[^\]\n]*\]|\S+", 24), (r"\S+", 24), (r"\S+", 12)):
        words = [re.findall(word, "\n".join(texts)) for texts in columns]
        least = [min(max(map(len, found), default=1), most) for found in words]
        if sum(least) <= room < sum(natural):
            share = (room - sum(least)) / (sum(natural) - sum(least))
            return [low + int(share * (high - low)) for low, high in zip(least, natural, strict=True)]
    return [None] * len(columns)


def _as_row(row: TableRow | Section | Sequence[str]) -> TableRow | Section:
    return row if isinstance(row, TableRow | Section) else TableRow(cells=text_cells(*row))


_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~])")
# A bracket makes a link only before a bracket or a colon; those of intervals stay as they are.
_MARKDOWN_PROSE = re.compile(r"[\\`<>|]|\](?=[\[(:])")
_MARKDOWN_MARKS = {"best": ("**", "**"), "second": ("<u>", "</u>"), "above": ("*", "*"), "italic": ("*", "*")}
_LATEX_MARKS = {
    "best": (r"\textbf{", "}"),
    "second": (r"\underline{", "}"),
    "above": (r"\textit{", "}"),
    "italic": (r"\textit{", "}"),
}
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
    }
)


def _shown(text: str) -> str:
    """Text that rich and the terminal show as it is."""
    return escape(visible(text))


def markdown_text(text: str) -> str:
    """Text in one line that Markdown shows as it is."""
    return _MARKDOWN.sub(r"\\\1", visible(" ".join(text.split("\n"))))


def markdown_prose(text: str) -> str:
    """Text in one line that makes no tag, link, code or cell in Markdown; emphasis stays, and names are readable."""
    return _MARKDOWN_PROSE.sub(r"\\\g<0>", visible(" ".join(text.split("\n"))))


def latex_text(text: str) -> str:
    """Text that LaTeX sets as it is."""
    return visible(" ".join(text.split("\n"))).translate(_LATEX)


def _marked(text: str, cell: TableCell, italic: bool, marks: Mapping[str, tuple[str, str]]) -> str:
    """Escaped text inside the marks of the cell's emphasis, and inside those of italics."""
    for mark in filter(None, (cell.emphasis, "italic" if italic else "")):
        before, after = marks[mark]
        text = f"{before}{text}{after}"
    return text


SETTING_PREFIX = "setting_"
# Columns of the CSV file of measurements before and after those of the settings. `system` is the label.
_BEFORE_SETTINGS = (
    *("run_id", "system", "backbone", "task", "n", "metric", "value", "ci_low", "ci_high", "unit"),
    *("batch_size", "dtype", "device"),
)
_AFTER_SETTINGS = (
    *("forwards", "tokens", "seconds", "benchmark", "mini", "samples", "errors", "attention", "hardware", "note"),
    "task_version",
)
_COLUMNS = (*_BEFORE_SETTINGS, *_AFTER_SETTINGS)
# Columns that are there where a measurement has another value than this: those of files and data frames, ...
_WHERE_USED = {"prompts": OURS, "num_cut": 0, "num_rounds": 1, "num_refused": 0}
# ... and those of files alone, after all others.
_USUAL_FACTS = {
    "num_tasks": 1,
    "finished": True,
    "scored": True,
    "isolated": True,
    "generate": False,
    "slowed_by": "",
    "same_decode_as": "",
}


def csv_columns(measurements: Sequence[Measurement]) -> list[str]:
    """Column names in order: identity and number, conditions, settings of all, totals and provenance."""
    settings = sorted({SETTING_PREFIX + name for entry in measurements for name in entry.settings})
    return [*_BEFORE_SETTINGS, *settings, *_AFTER_SETTINGS, *_unusual(_WHERE_USED, measurements)]


def _unusual(usual: Mapping[str, Any], measurements: Sequence[Measurement]) -> list[str]:
    return [name for name, value in usual.items() if any(getattr(one, name) != value for one in measurements)]


def csv_values(measurement: Measurement) -> dict[str, Any]:
    """The columns of one measurement."""
    values = {name: getattr(measurement, name) for name in (*_COLUMNS, *_WHERE_USED)}
    values |= {"system": measurement.label, "benchmark": "" if measurement.is_mean else measurement.benchmark}
    return values | {SETTING_PREFIX + name: value for name, value in measurement.settings.items()}


def write_csv(measurements: Sequence[Measurement], path: str | os.PathLike[str]) -> None:
    """Writes one row a measurement: six significant digits, and nothing that says when it was written.

    Equal measurements give equal bytes. Raises StoreError if the file cannot be written.
    """
    write_output(path, csv_text(*measurement_cells(measurements)))


def measurement_cells(measurements: Sequence[Measurement]) -> tuple[list[str], list[list[Any]]]:
    """Column names of a results file, and the values of every measurement in their order."""
    facts = _unusual(_USUAL_FACTS, measurements)
    # A user may give a run any name, also that of a system with another decoder.
    if not all(one.generate or one.decoder in ("", decoder_of_system(one.base_system)) for one in measurements):
        facts.append("decoder")
    columns = [*csv_columns(measurements), *facts]
    rows = (csv_values(one) | {name: getattr(one, name) for name in facts} for one in measurements)
    return columns, [[row.get(column) for column in columns] for row in rows]


def read_csv(path: str | os.PathLike[str]) -> list[Measurement]:
    """The measurements of a file that `write_csv` wrote.

    Raises:
        StoreError: the file is missing or holds no row, or a column is missing or has a wrong value.
    """
    try:
        _, records = csv_records(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StoreError(f"{path} cannot be read ({error}); write it with the table command") from error
    if not records:
        raise StoreError(f"{path} holds no rows of results; write it with the table command")
    return [_measurement(record, path) for _, record in records]


def _measurement(record: Mapping[str, str], path: str | os.PathLike[str]) -> Measurement:
    if missing := [name for name in _COLUMNS if record.get(name) is None]:
        raise StoreError(f"{path} lacks the columns {', '.join(missing)}; write it with the table command")
    values: dict[str, Any] = {name: record[name] for name in _COLUMNS}
    usual = _WHERE_USED | _USUAL_FACTS
    try:
        values |= {name: int(record[name]) for name in ("n", "forwards", "tokens", "samples", "errors")}
        values |= {name: float(record[name] or "nan") for name in ("value", "ci_low", "ci_high", "seconds")}
        values |= {name: _fact(record[name], usual[name]) for name in usual if record.get(name)}
    except ValueError as error:
        raise StoreError(f"{path}: {error}; write it with the table command") from error
    settings = {
        column.removeprefix(SETTING_PREFIX): cell
        for column, cell in record.items()
        if column.startswith(SETTING_PREFIX) and cell
    }
    label, task, generate = values.pop("system"), values["task"], values.pop("generate", False)
    notes = tuple(note for note in values.pop("note").split("; ") if note and note != MINI_NOTE)
    values |= {
        "mini": record["mini"] == "yes",
        "benchmark": AVERAGE if task == MEAN_TASK else values["benchmark"] or task,
        "decoder": record.get("decoder") or "",
    }
    system = system_key(label, values["backbone"], settings, generate=generate)
    return Measurement(origin="measured", system=system, label=label, settings=settings, notes=notes, **values)


def _fact(cell: str, usual: Any) -> Any:
    """A cell as the type of its usual value."""
    return cell == "yes" if isinstance(usual, bool) else int(cell) if isinstance(usual, int) else cell
