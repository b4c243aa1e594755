"""A table as CSV, Markdown and LaTeX, from one layout."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from refusion_eval.figures.layout import Entry, Heading, Line, PaperTable
from refusion_eval.results.render import csv_text
from refusion_eval.store.atomic_write import write_output

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
    "\u2020": r"$^\dagger$",
    "\u2212": r"$-$",
    "\u00d7": r"$\times$",
    "\n": " ",
}
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~])")


def write_table(table: PaperTable, out: Path) -> list[Path]:
    """Writes OUT/NAME.csv, .md and .tex. Equal tables give equal bytes.

    Raises:
        StoreError: a file cannot be written.
    """
    files = {"csv": to_csv(table), "md": to_markdown(table), "tex": to_latex(table)}
    for ending, text in files.items():
        write_output(out / f"{table.name}.{ending}", text)
    return [out / f"{table.name}.{ending}" for ending in files]


def to_csv(table: PaperTable) -> str:
    """Every cell; beside columns of figures their bounds, items and marks, where there are any."""
    lines = table.lines
    with_bounds = [any(line.entries[place].low or line.entries[place].n for line in lines) for place in _places(table)]
    head = ["origin"]
    for name, bounded in zip(table.columns, with_bounds, strict=True):
        head += [name, *(f"{name} {what}" for what in ("ci_low", "ci_high", "n") if bounded)]
    rows = []
    for line in lines:
        cells: list[str] = [line.origin]
        for entry, bounded in zip(line.entries, with_bounds, strict=True):
            cells.append(entry.text + ("\u2020" if entry.dagger else ""))
            cells += [entry.low, entry.high, str(entry.n or "")] if bounded else []
        rows.append(cells)
    return csv_text(head, rows)


def to_markdown(table: PaperTable) -> str:
    """With its title as a heading; published figures in italics, best ones bold, second best underlined."""
    rules = [":--" if place < table.num_left else "--:" for place in _places(table)]
    body = [_markdown_row(row, len(table.columns)) for row in table.rows]
    lines = "".join(f"| {' | '.join(cells)} |\n" for cells in ([*map(markdown_text, table.columns)], rules, *body))
    return f"## {markdown_text(table.title)}\n\n{lines}\n{markdown_text(' '.join(table.caption))}\n"


def _markdown_row(row: Line | Heading, width: int) -> list[str]:
    if isinstance(row, Heading):
        return [f"**{markdown_text(row.text)}**", *[""] * (width - 1)]
    return [_markdown_cell(entry, row.origin == "published") for entry in row.shown]


def _markdown_cell(entry: Entry, italic: bool) -> str:
    if not entry.text:
        return ""
    text = _marked(markdown_text(entry.text), entry, italic, _MARKDOWN_MARKS)
    bounds = markdown_text(f" [{entry.low}, {entry.high}]") if entry.low else ""
    return text + ("\u2020" if entry.dagger else "") + bounds


_MARKDOWN_MARKS = {"best": ("**", "**"), "second": ("<u>", "</u>"), "italic": ("*", "*")}
_LATEX_MARKS = {"best": (r"\textbf{", "}"), "second": (r"\underline{", "}"), "italic": (r"\textit{", "}")}


def _marked(text: str, entry: Entry, italic: bool, marks: Mapping[str, tuple[str, str]]) -> str:
    """Escaped text with what an entry's emphasis, and then italics, put around it."""
    for mark in filter(None, (entry.emphasis, "italic" if italic else "")):
        before, after = marks[mark]
        text = f"{before}{text}{after}"
    return text


def markdown_text(text: str) -> str:
    """Text that Markdown leaves as it is."""
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split("\n")))


def to_latex(table: PaperTable) -> str:
    """A floating table over both columns; needs booktabs and graphicx. Intervals stand below their figures, smaller."""
    width = len(table.columns)
    alignment = "l" * table.num_left + "r" * (width - table.num_left)
    body: list[str] = []
    for row in table.rows:
        if isinstance(row, Heading):
            body += [r"\midrule", rf"\multicolumn{{{width}}}{{l}}{{\textbf{{{latex_text(row.text)}}}}} \\", r"\midrule"]
            continue
        if row.begins_group and body and body[-1] != r"\midrule":
            body.append(r"\addlinespace")
        body.append(" & ".join(_latex_cell(entry, row.origin == "published") for entry in row.shown) + r" \\")
    head = " & ".join(map(latex_text, table.columns))
    rule = [] if body and body[0] == r"\midrule" else [r"\midrule"]
    lines = [
        "% needs \\usepackage{booktabs,graphicx}",
        r"\begin{table*}[t]",
        r"\centering",
        rf"\caption{{{latex_text(table.title)}. {latex_text(' '.join(table.caption))}}}",
        rf"\label{{tab:{table.name.replace('_', '-')}}}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        rf"{head} \\",
        *rule,
        *body,
        r"\bottomrule",
        r"\end{tabular}}",
        r"\end{table*}",
    ]
    return "\n".join(lines) + "\n"


def _latex_cell(entry: Entry, italic: bool) -> str:
    if not entry.text:
        return ""
    text = _marked(latex_text(entry.text), entry, italic, _LATEX_MARKS)
    if entry.dagger:
        text += r"$^\dagger$"
    if entry.low:
        bounds = rf"{{\tiny {latex_text(f'[{entry.low}, {entry.high}]')}}}"
        return rf"\shortstack[r]{{{text}\\{bounds}}}"
    return text


def latex_text(text: str) -> str:
    """Text that LaTeX sets as it is."""
    return "".join(_LATEX.get(character, character) for character in text)


def _places(table: PaperTable) -> Sequence[int]:
    return range(len(table.columns))
