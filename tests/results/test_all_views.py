"""Every view of runs says which runs lack samples, which were limited, and what is known of their speeds."""

import json
import re

import pytest
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.report.collect import collect
from refusion_eval.store.records import NO_CACHE, STOCK_GENERATE
from tests.report.conftest import NoSources
from tests.results.conftest import sample

WHOLE = {"mini_mbpp": 5, "mini_gsm8k": 5}
CONTINUES = "refusion-eval run --tasks mbpp,gsm8k --run-dir cut"
ONE_ROUND = "A speed of one round"


@pytest.fixture
def runs(write_run):
    """A complete run, a run of three items by a limit, and a run that was killed after two of its four items."""
    command = CONTINUES.split()

    def samples(num):
        return [sample(item, task="mini_mbpp", benchmark="mbpp") for item in range(num)]

    version = {"tasks": {"mini_mbpp": "1"}, "whole": WHOLE, "command": command}
    return [
        write_run("complete", samples(5), expected={"mini_mbpp": 5}, system="AR", decoder="autoregressive", **version),
        write_run("limited", samples(3), expected={"mini_mbpp": 3}, system="LLaDA", decoder="llada", **version),
        write_run(
            "cut",
            samples(2),
            expected={"mini_mbpp": 4, "mini_gsm8k": 4},
            **version | {"tasks": {"mini_mbpp": "1", "mini_gsm8k": "1"}},
        ),
    ]


def output(*words):
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False, env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    return " ".join(re.sub(r"[│|]", " ", done.stdout).split())


def text_of(folder, *endings):
    files = [file for file in sorted(folder.rglob("*")) if file.suffix[1:] in endings]
    assert files
    return {file.name: " ".join(file.read_text().replace("\\", "").split()) for file in files}


def assert_all(text):
    assert "unfinished 2 of 4" in text or "mini_mbpp 2 of 4" in text
    assert "limited 3 of 5" in text or "mini_mbpp 3 of 5" in text
    assert "mini_gsm8k 0 of 4" in text
    assert CONTINUES in text


def test_each_task_is_continued_by_the_command_that_asked_for_its_samples(write_run):
    sizes = {"gsm8k": (2, 5), "math": (1, 1), "mbpp": (1, 2)}
    commands = {name: f"refusion-eval run --tasks {name} --limit {asked}" for name, (_, asked) in sizes.items()}
    for name, (there, asked) in sizes.items():
        samples = [sample(item, task=f"mini_{name}") for item in range(there)]
        run = write_run("cut", samples, expected={f"mini_{name}": asked}, command=commands[name].split())
    for words in (("table", run), ("speed", run), ("compare", run, run)):
        shown = output(*words)
        for name, extent in {"gsm8k": "2 of 5", "mbpp": "1 of 2"}.items():
            advice = f"(to continue it: {commands[name]})."
            assert f"cut is unfinished: mini_{name} {extent} samples are there {advice}" in shown
        assert commands["math"] not in shown
    cells = collect([run], NoSources()).index["cells"]
    assert {
        (cell["task"], mark["advice"]) for cell in cells for mark in cell["marks"] if mark["kind"] == "unfinished"
    } == {("mini_gsm8k", commands["gsm8k"]), ("mini_mbpp", commands["mbpp"]), ("mean", commands["gsm8k"])}


def test_the_table_has_a_row_for_each_task_with_its_extent(runs, tmp_path):
    files = ("--markdown", tmp_path / "table.md", "--csv", tmp_path / "table.csv", "--latex", tmp_path / "table.tex")
    shown = output("table", *runs, *files)
    latex = " ".join(text_of(tmp_path, "tex", "txt").values()).replace("{[}", "[").replace("{]}", "]")
    for text in (shown, latex, *text_of(tmp_path, "md").values()):
        assert_all(text)
        assert "ReFusion [unfinished 2 of 4, limited 4 of 5" in text
        assert "ReFusion [unfinished 0 of 4, limited 4 of 5" in text
        assert ONE_ROUND in text
    for rows in (json.loads(output("table", *runs, "--json")),):
        extents = {(row["run_id"], row["task"]): (row["unfinished"], row["limited"]) for row in rows}
        assert extents["complete", "mini_mbpp"] == ("", "")
        assert extents["limited", "mini_mbpp"] == ("", "3 of 5")
        assert extents["cut", "mini_mbpp"] == ("2 of 4", "4 of 5")
        assert extents["cut", "mini_gsm8k"] == ("0 of 4", "4 of 5")
    assert "2 of 4" in (tmp_path / "table.csv").read_text()


def test_a_table_from_the_csv_says_the_same_but_the_command(runs, tmp_path):
    output("table", *runs, "--csv", tmp_path / "results.csv")
    text = output("speed", tmp_path / "results.csv")
    assert (
        "cut is unfinished: mini_gsm8k 0 of 4, mini_mbpp 2 of 4 samples are there (to continue it: run it again)."
        in text
    )


def test_compare_says_what_each_run_lacks(runs, tmp_path):
    words = ("compare", runs[1], runs[2], "--common-items")
    text = output(*words, "--markdown", tmp_path / "compare.md")
    for form in (text, *text_of(tmp_path, "md").values()):
        assert_all(form)
        assert ONE_ROUND in form
    (row,) = json.loads(output(*words, "--json"))
    assert (row["unfinished_before"], row["unfinished_after"]) == ("", "2 of 4")
    assert (row["limited_before"], row["limited_after"]) == ("3 of 5", "4 of 5")


def test_speed_has_a_row_for_each_task_with_its_extent(runs, tmp_path):
    text = output("speed", *runs, "--markdown", tmp_path / "speed.md")
    for form in (text, *text_of(tmp_path, "md").values()):
        assert_all(form)
        assert ONE_ROUND in form
    rows = {(row["run_id"], row["task"]): row for row in json.loads(output("speed", *runs, "--json"))}
    assert rows["cut", "mbpp"]["unfinished"] == "2 of 4"
    assert rows["cut", "gsm8k"]["unfinished"] == "0 of 4"
    assert rows["limited", "mbpp"]["limited"] == "3 of 5"
    assert rows["limited", "mbpp"]["num_rounds"] == 1


def test_the_page_marks_each_task(runs, tmp_path):
    done = CliRunner().invoke(app, ["report", *map(str, runs), "--out", str(tmp_path / "page.html")])
    assert "note: cut is unfinished: mini_gsm8k 0 of 4, mini_mbpp 2 of 4" in done.stderr
    text = (tmp_path / "page.html").read_text()
    for mark in ("unfinished 2 of 4", "unfinished 0 of 4", "limited 3 of 5"):
        assert f'"{mark}"' in text
    assert CONTINUES in text
    assert ONE_ROUND in text


def test_figures_tables_and_claims_of_the_paper_say_so_below(runs, tmp_path):
    done = CliRunner().invoke(app, ["plot", "figure1", *map(str, runs), "--out", str(tmp_path / "figures")])
    assert "note: cut is unfinished: mini_gsm8k 0 of 4, mini_mbpp 2 of 4" in done.stderr
    output("paper-table", "1", *runs, "--out", tmp_path / "tables")
    claims = output("claims", *runs, "--out", tmp_path / "claims")
    (caption,) = text_of(tmp_path / "figures", "txt").values()
    assert "cut lacks samples (2 of 4)" in caption
    assert "Limited: mini_mbpp 3 of 5 (LLaDA), mini_mbpp 4 of 5 (ReFusion) samples" in caption
    assert ONE_ROUND in caption
    notes = text_of(tmp_path / "tables", "txt", "md")
    for text in (claims, *notes.values(), text_of(tmp_path / "claims", "md")["claims.md"]):
        assert_all(text)
        assert ONE_ROUND in text
    for text in notes.values():
        assert "Fewer items than in another row: LLaDA (MBPP), ReFusion (MBPP)." in text


def test_every_exported_sample_has_the_extent_of_its_task(runs, tmp_path):
    output("export", *runs, "--out", tmp_path / "samples.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    extents = {row["run_id"]: (row["unfinished"], row["limited"]) for row in rows}
    assert extents == {"complete": ("", ""), "limited": ("", "3 of 5"), "cut": ("2 of 4", "4 of 5")}


def test_a_run_stopped_before_its_first_sample_is_unfinished_in_every_view(runs, write_run, tmp_path):
    early = write_run("early", [], tasks={"mini_mbpp": "1"}, command=CONTINUES.split())
    said = f"early is unfinished: mini_mbpp 0 of 1 samples are there (to continue it: {CONTINUES})"
    assert said in output("table", early)
    assert said in output("speed", early, runs[0])
    for words in (("export", early), ("plot", "figure1", early, runs[0], "--out", tmp_path)):
        assert said in " ".join(CliRunner().invoke(app, [*map(str, words)]).stderr.split())
    assert said in str(CliRunner().invoke(app, ["speed", str(early)]).exception)
    assert "no sample yet" in str(CliRunner().invoke(app, ["compare", str(early), str(runs[0])]).exception)
    assert "early is unfinished" in text_of_table(runs[0], early, tmp_path)


def test_a_speed_without_a_cache_says_so_wherever_it_stands(runs, write_run, tmp_path):
    samples = [sample(item, task="mini_mbpp", benchmark="mbpp") for item in range(5)]
    arguments = {"backend": "transformers"}
    mine = write_run(
        "mine", samples, system="Mine", decoder="autoregressive", arguments=arguments, command=CONTINUES.split()
    )
    stock = write_run("stock", samples, system="Stock", decoder=STOCK_GENERATE, arguments=arguments)
    files = ("--markdown", tmp_path / "a.md", "--csv", tmp_path / "a.csv", "--latex", tmp_path / "a.tex")
    shown = [output("table", mine, *files), output("speed", mine), output("compare", runs[0], mine)]
    shown += [output(command, mine, "--json") for command in ("table", "speed")]
    output("paper-table", "1", mine, "--out", tmp_path / "paper")
    output("plot", "figure1", mine, "--out", tmp_path / "figures")
    output("report", mine, "--out", tmp_path / "page.html")
    written = text_of(tmp_path, "md", "csv", "txt", "html")
    captions = [text_of(tmp_path / folder, "txt") for folder in ("figures", "paper")]
    shown += [written[name] for name in ("a.md", "a.csv", "a.txt", "page.html")]
    for text in (*shown, *(text for of_folder in captions for text in of_folder.values())):
        assert NO_CACHE in text
    assert NO_CACHE not in output("table", stock)  # its loop is that of transformers, which has a cache


def text_of_table(*words):
    *run_dirs, folder = words
    output("paper-table", "1", *run_dirs, "--out", folder / "tables")
    return text_of(folder / "tables", "txt")["table1_mini.txt"]
