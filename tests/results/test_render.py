"""One table on a terminal, as Markdown, as LaTeX and as CSV."""

import csv
import io
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

from refusion_eval.metrics import Interval
from refusion_eval.results.render import (
    Section,
    Table,
    TableCell,
    TableRow,
    csv_cell,
    csv_records,
    csv_text,
    interval_text,
    latex_text,
    markdown_text,
    text_cells,
)
from refusion_eval.untrusted import visible

FIGURE = TableCell(text="1.0", low="0.5", high="1.5", n=3, emphasis="best", dagger=True)
TABLE = Table(
    title="A table",
    columns=("Name", "Score"),
    rows=[
        Section(text="Part"),
        TableRow(cells=(*text_cells("a_b"), FIGURE), origin="measured", begins_group=True),
        TableRow(cells=text_cells("a_b", "2"), origin="published", num_repeated=1),
        ("text|only", ""),
    ],
    notes=("First.", "", "Second."),
    name="my_table",
)


LITERAL = TableRow(cells=text_cells("2_3"), origin="published")


def printed(table):
    stream = io.StringIO()
    Console(file=stream, width=100).print(table.rich())
    return stream.getvalue()


def test_a_terminal_shows_every_figure_with_its_interval():
    text = printed(TABLE)
    for part in ("A table", "Part", "1.0\u2020 [0.5, 1.5]", "text|only", "First. Second."):
        assert part in text
    assert text.count("a_b") == 1  # what repeats the row above is not shown


def test_markdown_marks_best_and_published_figures():
    assert TABLE.markdown().splitlines() == [
        "## A table",
        "",
        "| Name | Score |",
        "| :-- | --: |",
        "| **Part** |  |",
        "| a_b | **1.0**\u2020 [0.5, 1.5] |",
        "|  | *2* |",
        "| text\\|only |  |",
        "",
        "First.",
        "",
        "Second.",
    ]


def test_markdown_escapes_what_it_would_not_show_as_it_is():
    assert markdown_text("a|b*c_d\ne") == r"a\|b\*c\_d e"
    assert "| *2\\_3* |" in Table(columns=("a_b",), rows=[LITERAL], literal=True).markdown()


def test_latex_has_the_intervals_in_a_line_of_their_own_unless_they_are_left_out():
    text = TABLE.latex()
    assert "\\textbf{1.0}$^\\dagger$ \\\\\n & {\\scriptsize {[}0.5, 1.5{]}} \\\\\n" in text
    assert "{[}0.5" not in TABLE.latex(intervals=False)
    assert r"\caption{A table.}" in text
    assert "First." not in text
    assert r"\label{tab:my-table}" in text
    assert r" & \textit{2} \\" in text


def test_notes_are_a_file_beside_the_table(tmp_path):
    written = TABLE.write(tmp_path)
    assert [path.name for path in written] == [f"my_table.{ending}" for ending in ("csv", "md", "tex", "txt")]
    assert (tmp_path / "my_table.txt").read_text(encoding="utf-8") == "First. Second.\n"
    assert "% notes: my_table.txt" in (tmp_path / "my_table.tex").read_text(encoding="utf-8")


def test_csv_has_bounds_and_items_in_columns_of_their_own():
    rows = list(csv.DictReader(io.StringIO(TABLE.csv())))
    assert rows[0] == {
        "origin": "measured",
        "Name": "a_b",
        "Score": "1.0\u2020",
        "Score ci_low": "0.5",
        "Score ci_high": "1.5",
        "Score n": "3",
    }
    assert rows[1]["Name"] == "a_b"


def test_an_interval_is_shown_as_far_as_there_is_one():
    assert interval_text(Interval(1, 0.5, 2, 9), 1) == "1.0 [0.5, 2.0]"
    assert interval_text(Interval(1, math.nan, math.nan, 1)) == "1.00"
    assert interval_text(None, missing="-") == interval_text(Interval(math.nan, 0, 0, 1), missing="-") == "-"


VALUES = st.one_of(st.none(), st.booleans(), st.floats(), st.integers())
# Texts that begin like formulas, and such that already begin with an apostrophe.
TEXTS = st.one_of(
    st.text(), st.builds("{}{}".format, st.sampled_from(["=", "'=", "''+", "-", "@", "\t", "\r"]), st.text())
)


@given(st.lists(st.tuples(TEXTS, VALUES), max_size=5))
def test_csv_is_what_the_standard_library_writes(rows):
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("a", "b"))
    writer.writerows([[csv_cell(value) for value in row] for row in rows])
    assert csv_text(("a", "b"), rows) == stream.getvalue()


@pytest.mark.parametrize(
    ("value", "cell"),
    [(None, ""), (True, "yes"), (False, "no"), (math.nan, ""), (-1 / 3, "-0.333333"), (-5, "-5"), ("-5e3", "-5e3")],
)
def test_numbers_and_missing_values_have_one_form_in_csv(value, cell):
    assert csv_cell(value) == cell


@given(st.lists(TEXTS, min_size=1, max_size=5))
def test_a_text_comes_back_from_csv_and_is_no_formula_in_it(texts):
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="") as file:
        file.write(csv_text(("a", "b"), [(text, "x") for text in texts]))
        file.flush()
        columns, records = csv_records(file.name)
        _, *lines = csv.reader(io.StringIO(Path(file.name).read_bytes().decode(), newline=""))
    assert columns == ["a", "b"]
    assert [record["a"] for _, record in records] == [visible(text, keep="\t\n") for text in texts]
    for cell, _ in lines:
        if re.match(r"[=+\-@\t\r\n](?s:.)", cell):
            float(cell)


HOSTILE = "=1+1 \x1b]0;title\x07\x9b31m\u202e\n# heading <img src=x onerror=alert(1)> [x](javascript:a) `a` \\<b> | c"


def test_no_text_of_a_stranger_acts_on_a_terminal_a_spreadsheet_or_a_page():
    table = Table(title=HOSTILE, columns=("a", HOSTILE), rows=[(HOSTILE, "1")], notes=(HOSTILE,))
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", printed(table))
    assert "\\x1b]0;title\\x07" in printed(table).replace("\n", "")
    for line in csv.reader(io.StringIO(table.csv())):
        assert not any(cell.startswith("=") for cell in line)
    html = MarkdownIt("commonmark").enable("table").render(table.markdown())
    assert not re.search("<(?!/?(h2|p|table|thead|tbody|tr|th|td)\\b)", html), html
    assert html.count("<td") == 2
    assert html.count("heading &lt;img src=x onerror=alert(1)&gt; [x](javascript:a) `a` \\&lt;b&gt; | c") == 4
    assert "\n" not in latex_text(HOSTILE)
    assert "\x1b" not in table.latex()


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_table_fits_the_terminal_and_breaks_no_name_or_number(width):
    rows = [
        ("mini_arc_challenge", "a system with a long name", "100.0 [61.0, 100.0]", "1345.1 [1119.6, 1650.6]", "")
    ] * 2
    table = Table(columns=("Task", "System", "Accuracy %", "TPS", "Empty"), rows=rows, num_left=2)
    terminal = Console(width=width, file=io.StringIO(), record=True)
    terminal.print(table.rich(width))
    text = terminal.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert all(word in text for word in ("mini_arc_challenge", "1345.1", "[1119.6,", "100.0", "Accuracy"))
    assert "Empty" not in text
    assert ("[1119.6, 1650.6]" in text) == (width > 80)


def test_csv_needs_no_data_frames_and_has_their_bytes():
    columns, rows = ("a", 'b "c"'), [("x,y", 'say "hi"'), ("line\nline", None), (1.5, ""), ("", True)]
    cells = [[csv_cell(value) for value in row] for row in rows]
    frame = pandas.DataFrame(cells, columns=columns, dtype=object)
    assert csv_text(columns, rows) == frame.to_csv(index=False)
    program = "import sys; from refusion_eval.results.render import csv_text; csv_text(('a',), [('b',)]);"
    done = subprocess.run(
        [sys.executable, "-c", f"{program} print('pandas' in sys.modules)"], capture_output=True, check=True
    )
    assert done.stdout == b"False\n"
