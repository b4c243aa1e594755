import csv
import io
import re
from dataclasses import replace

import pytest

from refusion_eval.errors import ConfigError, StoreError
from refusion_eval.paper.tables import MINI_HEADING, NUMBERS, PUBLISHED_HEADING, paper_table
from refusion_eval.results.measured import read_measurements
from refusion_eval.results.measurement import AVERAGE, TASKS
from refusion_eval.results.published import published_measurements
from refusion_eval.results.render import Section, Table, TableCell, TableRow, latex_text, markdown_text, text_cells
from refusion_eval.results.results_file import write_csv
from tests.results.conftest import sample

FIRST = 3  # columns before the benchmarks


def lines_of(table, label):
    """Score and throughput lines of a system, by origin."""
    return {
        (line.origin, line.cells[2].text): line.cells[FIRST:] for line in table.lines if line.cells[0].text == label
    }


def test_published_figures_keep_their_printed_digits_and_stand_beside_measured_ones(made):
    table = paper_table(1, made["system"]("refusion", 80.0, 90.0))
    lines = lines_of(table, "ReFusion")
    assert [entry.text for entry in lines["published", "score"]][-2:] == ["68.20", "65.31"]
    assert lines["measured", "score"][0] == TableCell(text="80.0", low="79.0", high="81.0", n=200)
    of_refusion = [line.origin for line in table.lines if line.shown[0].text == "ReFusion"]
    assert of_refusion == ["published", "measured"]
    assert not any(entry.low for line in table.lines if line.origin == "published" for entry in line.cells)


def test_scores_of_several_samples_or_seeds_have_their_spread_in_every_form(made):
    cells = made["system"]("refusion", 80.0, 90.0, tasks=("gsm8k",))
    cells = [replace(one, seed_sd=1.26) if one.metric == "accuracy" else one for one in cells]
    table = paper_table(1, cells)
    assert r"80.0 ± 1.3 \[79.0, 81.0\]" in table.markdown()
    assert r"$\pm$ 1.3 {[}79.0, 81.0{]}" in table.latex()
    columns, *rows = csv.reader(io.StringIO(table.csv()))
    assert "1.3" in {row[columns.index("GSM8K sd")] for row in rows}
    assert "\u00b1: standard deviation of the scores" in table.caption
    without = paper_table(1, made["system"]("refusion", 80.0, 90.0, tasks=("gsm8k",)))
    assert "\u00b1" not in without.markdown()
    assert " sd" not in without.csv()


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_without_measurements_every_published_cell_is_there_and_nothing_else(number):
    artefact = {1: "table1", 2: "table2_v2", 3: "table3", 4: "table4"}[number]
    table = paper_table(number)
    assert {line.origin for line in table.lines} == {"published"}
    shown = sum(bool(entry.text) for line in table.lines for entry in line.cells[FIRST:])
    assert shown == len(published_measurements((artefact,))) > 0


def test_what_was_not_measured_is_empty_and_is_never_filled_from_the_paper(made):
    table = paper_table(1, made["system"]("refusion", 80.0, 90.0, tasks=("gsm8k",)))
    measured = lines_of(table, "ReFusion")["measured", "score"]
    by_task = dict(zip((*TASKS, AVERAGE), (entry.text for entry in measured), strict=True))
    assert by_task.pop("gsm8k") == "80.0"
    assert set(by_task.values()) == {""}
    assert "Not measured: Llama-3-8B-Instruct, Qwen3-8B" in table.caption


def test_an_average_is_shown_only_over_all_seven_benchmarks(made):
    for count, expected in ((6, ""), (7, "70.0")):
        cells = made["system"]("refusion", 80.0, 90.0)
        cells.append(made["cell"]("refusion", AVERAGE, "accuracy", 70.0, num_tasks=count))
        assert lines_of(paper_table(1, cells), "ReFusion")["measured", "score"][-1].text == expected


def test_another_benchmark_has_a_column_of_its_own_and_counts_in_the_average(made):
    cells = made["system"]("refusion", 80.0, 90.0, tasks=(*TASKS, "parts"), mini=True)
    cells.append(made["cell"]("refusion", AVERAGE, "accuracy", 70.0, num_tasks=8, mini=True))
    table = paper_table(2, cells)
    assert table.columns[-3:] == ("MBPP", "Parts", "Avg.")
    assert [entry.text for entry in lines_of(table, "ReFusion")["measured", "score"]][-2:] == ["80.0", "70.0"]
    published = [line for line in table.lines if line.origin == "published"]
    assert {line.cells[-2].text for line in published} == {""}
    assert all(len(line.cells) == len(table.columns) for line in table.lines)
    assert "The averages measured here are over 8 tasks." in table.caption


def test_best_and_second_best_are_marked_within_an_origin_where_their_difference_is_shown(made):
    cells = made["system"]("refusion", 80.0, 90.0, num_rounds=3) + made["system"]("llada", 79.0, 10.0, num_rounds=3)
    cells += made["system"]("qwen3", 70.0, 20.0, num_rounds=3)
    table = paper_table(1, cells)
    marks = {
        label: [lines_of(table, label)["measured", name][0].emphasis for name in ("score", "TPS")]
        for label in ("ReFusion", "LLaDA-8B-Instruct", "Qwen3-8B (AR)")
    }
    assert marks == {
        "ReFusion": ["", "best"],  # intervals of 1 point on either side overlap
        "LLaDA-8B-Instruct": ["", "second"],
        "Qwen3-8B (AR)": ["", ""],
    }
    assert lines_of(table, "ReFusion")["published", "score"][2].emphasis == "best"  # 84.91 on GSM8K


def test_no_speed_is_marked_beside_one_of_another_number_of_rounds(made):
    cells = made["system"]("refusion", 90.0, 90.0, num_rounds=3) + made["system"]("llada", 79.0, 10.0, num_rounds=1)
    entry = lines_of(paper_table(1, cells), "ReFusion")
    marks = [entry["measured", name][0].emphasis for name in ("score", "TPS")]
    assert marks == ["best", ""]


def test_equal_systems_are_both_best_where_the_next_one_is_shown_to_be_below(made):
    scores = {"refusion": 80.0, "llada": 80.0, "dream": 70.0}
    table = paper_table(1, [cell for name, score in scores.items() for cell in made["system"](name, score, 90.0)])
    labels = ("ReFusion", "LLaDA-8B-Instruct", "Dream-7B-Instruct")
    lines = [lines_of(table, label)["measured", "score"] for label in labels]
    assert [line[0].emphasis for line in lines] == ["best", "best", "second"]


def test_the_mark_of_two_runs_on_the_same_items_is_paired_and_that_of_csv_files_is_not(write_run, tmp_path):
    samples = [sample(item) for item in range(100)]
    better, worse = {str(n) for n in range(60)}, {str(n) for n in range(50)}
    runs = [write_run("a", samples, right=better, system="LLaDA"), write_run("b", samples, right=worse, system="Dream")]
    of_runs = read_measurements(runs)
    write_csv(of_runs, tmp_path / "results.csv")
    marks = []
    for measured in (of_runs, read_measurements([tmp_path / "results.csv"])):
        line = next(
            line
            for line in paper_table(1, measured).lines
            if line.cells[0].text == "LLaDA" and line.origin == "measured"
        )
        marks.append({cell.emphasis for cell in line.cells if cell.text == "60.0"})
    assert marks == [{"best"}, {""}]


def test_a_table_of_chosen_rows_has_no_heading_and_no_column_without_figures(made):
    cells = made["system"]("refusion", 80.0, 90.0, tasks=("gsm8k",), mini=True)
    table = paper_table(1, cells, systems=["ReFusion"]).without_empty_columns()
    assert [row.text for row in table.rows if isinstance(row, Section)] == [PUBLISHED_HEADING, MINI_HEADING]
    renamed = [replace(one, system="other", label="Other") for one in cells]
    table = paper_table(1, renamed, systems=["Other"]).without_empty_columns()
    assert [row.text for row in table.rows if isinstance(row, Section)] == [MINI_HEADING]
    assert table.columns == ["System", "Origin", "Figure", "GSM8K"]
    assert "Paper" not in table.caption
    assert {len(line.cells) for line in table.lines} == {4}
    assert table.num_left == 3


def test_autoregressive_systems_stand_apart_in_table_1_and_are_marked_where_they_are_above():
    lines = {name: lines_of(paper_table(1), name)["published", "score"] for name in ("ReFusion", "Qwen3-8B (AR)")}
    assert {cell.emphasis for cell in lines["ReFusion"]} == {"best"}
    by_task = dict(zip(TASKS, (cell.emphasis for cell in lines["Qwen3-8B (AR)"]), strict=False))
    assert [task for task, mark in by_task.items() if not mark] == ["gsm8k", "mbpp"]
    assert set(by_task.values()) == {"above", ""}
    markdown = paper_table(1).markdown()
    assert "| Qwen3-8B (AR) | paper | score | *67.25* | *90.36* | 81.96 |" in markdown
    assert "(italics)" not in markdown


def test_table_2_prints_the_version_that_is_asked_for():
    averages = {paper: lines_of(paper_table(2, paper=paper), "LLaDA (Retrained)") for paper in ("v1", "v2")}
    assert [each["published", "score"][-1].text for each in averages.values()] == ["14.43", "47.41"]
    assert "Published values are the first version's" in paper_table(2, paper="v1").caption


def test_half_written_runs_are_marked_named_and_never_best(made):
    cells = made["system"]("refusion", 90.0, 90.0, unfinished="1 of 2") + made["system"]("llada", 80.0, 10.0)
    table = paper_table(1, cells)
    entry = lines_of(table, "ReFusion")["measured", "score"][0]
    assert (entry.dagger, entry.emphasis) == (True, "")
    assert "run-refusion is unfinished" in table.caption
    assert "Samples are missing" in table.caption
    assert "80.0" in table.markdown()


def test_mini_results_have_a_part_and_a_file_name_of_their_own(made):
    cells = made["system"]("refusion", 80.0, 90.0, mini=True)
    cells += made["system"]("autoregressive_sft", 90.0, 50.0, mini=True)
    for number in (1, 2, 4, 6, 7):
        table = paper_table(number, cells)
        assert table.name == f"table{number}_mini"
        assert "mini" in table.title
    table = paper_table(2, cells)
    headings = [place for place, row in enumerate(table.rows) if isinstance(row, Section)]
    below = [row.origin for row in table.rows[headings[1] :] if isinstance(row, TableRow)]
    assert len(headings) == 2
    assert set(below) == {"measured"}
    labels = [row.shown[0].text for row in table.rows[headings[1] :] if isinstance(row, TableRow)]
    assert labels[::2] == ["autoregressive_sft (AR)", "ReFusion"]  # in the order of the paper's table


def test_table_4_needs_the_ablation_and_table_1_leaves_it_out(made):
    variant = "refusion+recompute_kv"
    cells = made["system"]("refusion", 80.0, 90.0) + made["system"](variant, 79.0, 70.0)
    label = "ReFusion w/ KV Re-computation"
    assert lines_of(paper_table(4, cells), label)["measured", "TPS"][0].text == "70.0"
    assert ("measured", "TPS") not in lines_of(paper_table(1, cells), label)


def test_a_checkpoint_of_another_backbone_never_takes_the_papers_row(made):
    cells = made["system"]("refusion", 80.0, 90.0, backbone="embedded")
    for number in (1, 2, 3, 4, 7):
        assert not any(key[0] == "measured" for key in lines_of(paper_table(number, cells), "ReFusion"))
    assert ("measured", "score") in lines_of(paper_table(1, cells), "ReFusion on embedded")


def test_fused_forwards_are_named_below_the_table(made):
    of_release = {"fuse": "null", "release_compatible": "true"}
    assert not made["cell"]("refusion", "mbpp", "tps", 90.0, settings=of_release).fused
    for fuse, shown in (("true", True), ("null", True), ("false", False)):
        cells = made["system"]("refusion", 80.0, 90.0, settings={"fuse": fuse})
        assert ["Fused: fewer forwards" in paper_table(number, cells).caption for number in (1, 4, 7)] == [shown] * 3


def test_table_6_marks_what_differs_from_the_paper(made):
    table = paper_table(6)
    assert not any(entry.dagger for line in table.lines for entry in line.cells)
    settings = {"gen_length": "512", "slot_size": "8", "block_size": "128", "tau_slot": "0.9", "tau_token": "0.4"}
    table = paper_table(6, [made["cell"]("refusion", "gsm8k", "accuracy", 80.0, settings=settings)])
    (line,) = (line for line in table.lines if line.cells[1].text == "run-refusion")
    assert [entry.text for entry in line.cells if entry.dagger] == ["8"]


def test_table_7_averages_throughput_over_the_two_code_benchmarks(made):
    cells = made["system"]("refusion", 80.0, 90.0, tasks=("humaneval",))
    assert paper_table(7, cells).lines[-1].cells[5].text == ""
    cells += made["system"]("refusion", 80.0, 70.0, tasks=("mbpp",))
    assert paper_table(7, cells).lines[-1].cells[5].text == "80.0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hardware": "Other CPU"}, "speeds from different machines"),
        ({"task_version": "2"}, "in several versions"),
        ({"mini": True}, "mini look-alikes"),
    ],
)
def test_what_may_not_stand_in_one_table_is_refused_by_name(made, change, message):
    cells = made["system"]("refusion", 80.0, 90.0) + made["system"]("qwen3", 70.0, 20.0, **change)
    with pytest.raises(StoreError, match=message) as refused:
        paper_table(1, cells)
    assert "run-qwen3" in str(refused.value)


def test_one_system_of_two_runs_is_refused_by_name(made):
    cells = made["system"]("refusion", 80.0, 90.0) + made["system"]("refusion", 70.0, 90.0, run_id="again")
    with pytest.raises(StoreError, match="is there twice \\(again and run-refusion\\)"):
        paper_table(1, cells)


def test_there_is_no_table_8():
    with pytest.raises(ConfigError, match="its tables are 1 to 7"):
        paper_table(8)


NASTY = r"a_b & 50% $x$ #1 {y} ~z ^w \q <t> | [u] * `v`"


def nasty_table():
    figure = TableCell(text="1.0", low="0.5", high="1.5", n=3, emphasis="best")
    row = TableRow(cells=(*text_cells(NASTY), figure), origin="measured")
    return Table(
        name="t", title=NASTY, columns=("a_b", "x%"), num_left=1, rows=[row], notes=[NASTY], escape=markdown_text
    )


def test_latex_escapes_every_special_character():
    text = latex_text(NASTY)
    assert not re.search(r"(?<!\\)[&%$#_]", text.replace("$^\\dagger$", ""))
    assert "\\textbackslash{}q" in text
    assert not set(text) & {"<", ">", "|", "~", "^"}


@pytest.mark.parametrize("table", [*(paper_table(number) for number in NUMBERS), nasty_table()], ids=lambda t: t.name)
def test_latex_is_whole(table):
    text = table.latex()
    plain = re.sub(r"\\[\\{}&%$#_]", lambda match: "\n" if match[0] == "\\\\" else "", text)
    assert plain.count("{") == plain.count("}")
    assert re.findall(r"\\begin\{(\w+\*?)\}", text) == re.findall(r"\\end\{(\w+\*?)\}", text)[::-1]
    for rule in ("\\toprule", "\\midrule", "\\bottomrule"):
        assert rule in text
    body = text[text.index("\\toprule") : text.index("\\bottomrule")]
    rows = [row for row in body.splitlines() if row.endswith("\\\\") and "\\multicolumn" not in row]
    rows = [row for row in rows if "\\scriptsize" not in row]  # lines of intervals
    assert len(rows) == len(table.lines) + 1
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(table.columns) - 1}
    assert all(ord(character) < 128 for character in text)


def test_markdown_escapes_what_it_would_read():
    assert markdown_text("a|b*c_d") == r"a\|b\*c\_d"
    text = nasty_table().markdown()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3}


def test_csv_has_bounds_and_items_of_measured_figures_only(made):
    records = list(csv.DictReader(io.StringIO(paper_table(1, made["system"]("refusion", 80.0, 90.0)).csv())))
    published = next(row for row in records if row["origin"] == "published")
    measured = next(row for row in records if row["origin"] == "measured")
    assert (published["GSM8K ci_low"], published["GSM8K n"]) == ("", "")
    assert (measured["GSM8K"], measured["GSM8K ci_low"], measured["GSM8K n"]) == ("80.0", "79.0", "200")


@pytest.mark.parametrize("number", [1, 6])
def test_a_row_of_the_csv_says_by_itself_what_it_is_about(made, number):
    table = paper_table(number, made["system"]("refusion", 80.0, 90.0))
    records = list(csv.DictReader(io.StringIO(table.csv())))
    assert all(record[name] for record in records for name in table.columns[:2])
    shown = [row.split("|")[1].strip() for row in table.markdown().splitlines() if row.startswith("|")]
    assert shown.count("") == sum(line.num_repeated > 0 for line in table.lines) > 0


def test_table_3_has_no_mini_part_as_the_embedded_family_has_no_such_systems(made):
    cells = made["system"]("refusion", 80.0, 90.0, mini=True) + made["system"]("dream", 80.0, 90.0, mini=True)
    table = paper_table(3, cells)
    assert table.name == "table3"
    assert {line.origin for line in table.lines} == {"published"}
    assert "Nothing was measured." in table.caption


def test_tables_are_written_in_three_forms_with_equal_bytes(made, tmp_path):
    for folder in ("one", "two"):
        paths = paper_table(1, made["system"]("refusion", 80.0, 90.0)).write(tmp_path / folder)
    assert [path.name for path in paths] == ["table1.csv", "table1.md", "table1.tex", "table1.txt"]
    assert all((tmp_path / "one" / path.name).read_bytes() == path.read_bytes() for path in paths)


def labels_of(table):
    return list(dict.fromkeys(line.cells[0].text for line in table.lines))


def test_refusion_is_the_last_system_unless_rows_are_chosen(made):
    cells = made["system"]("refusion", 80.0, 90.0) + made["system"]("esolm", 70.0, 20.0)
    assert labels_of(paper_table(1, cells))[-2:] == ["esolm", "ReFusion"]
    chosen = paper_table(1, cells, systems=["ReFusion", "esolm", "llada"])
    assert labels_of(chosen) == ["ReFusion", "esolm", "LLaDA-8B-Instruct"]
    assert lines_of(chosen, "esolm")["measured", "score"][0].emphasis == "second"  # among the rows that are shown
    with pytest.raises(ConfigError, match="Table 1 has no system 'nope'; it has Llama-3-8B-Instruct, "):
        paper_table(1, cells, systems=["nope"])
    with pytest.raises(ConfigError, match="Table 6 compares no systems"):
        paper_table(6, systems=["ReFusion"])


def test_formulas_are_set_as_formulas():
    designs, settings = paper_table(5).latex(), paper_table(6).latex()
    assert r"\binom{L}{l} \approx 2^L$" in designs
    assert "sum" not in designs.replace(r"\sum", "")
    assert r"$\tau_{\mathrm{slot}}$ & $\tau_{\mathrm{token}}$ & $k$ & $b$" in settings
    assert "BD3-LMs: k = block size; ReFusion: k = slot size" in paper_table(5).caption
