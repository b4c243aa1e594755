"""The commands and the scripts."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from refusion_eval.cli import app, results
from refusion_eval.errors import DataError
from refusion_eval.paper.moments import generation_order, longest_sample, step_by_step
from refusion_eval.paper.studies import CASE_STUDY, MOST_SLOTS, MOST_TOKENS, sort_sources
from refusion_eval.paper.style import style_of
from refusion_eval.report.sample import find_sample, speller_of

from ..report.conftest import make_sample, make_score, write_run

ROOT = Path(__file__).resolve().parents[2]
RUNNER = CliRunner()


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "plots" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_and_figures_by_command(tmp_path):
    done = RUNNER.invoke(
        app, ["paper-table", "1,4", str(ROOT / "results/embedded/results.csv"), "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"table1_mini.{ending}" for ending in ("csv", "md", "tex", "txt")),
        *(f"table4_mini.{ending}" for ending in ("csv", "md", "tex", "txt")),
    ]
    done = RUNNER.invoke(app, ["plot", "1", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "figure1.pdf").is_file()
    assert "figure9" in RUNNER.invoke(app, ["plot", "list"]).output


def test_one_row_is_printed_for_a_table_that_is_there(tmp_path):
    table = ["paper-table", "1", str(ROOT / "results/embedded/artefacts/results.csv"), "--out", str(tmp_path / "out")]
    done = RUNNER.invoke(app, [*table, "--row", "ReFusion", "--no-intervals"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.count(" & ") for line in lines] == [9, 9]
    assert lines[0].startswith("ReFusion & ")
    assert lines[1].startswith(" & ")
    assert not (tmp_path / "out").exists()
    with_intervals = RUNNER.invoke(app, [*table, "--row", "ReFusion"]).stdout.splitlines()
    assert len(with_intervals) == 4
    assert RUNNER.invoke(app, [*table, "--rows", "LLaDA,ReFusion"]).exit_code == 0
    assert "\nBD3-LM" not in (tmp_path / "out" / "table1_mini.tex").read_text(encoding="utf-8")
    assert "was not measured" in str(RUNNER.invoke(app, ["paper-table", "1", "--row", "ReFusion"]).exception)
    assert "name tables by number" in str(RUNNER.invoke(app, ["paper-table", ","]).exception)


def test_the_overview_has_the_style_of_the_figures_and_its_caption_beside_it(made, tmp_path):
    systems = ("refusion", "esolm", "autoregressive", "autoregressive_sft", "bd3lm", "llada")
    cells = [cell for name in systems for cell in made["system"](name, 80.0, 90.0)]
    load("overview").draw(cells, tmp_path / "overview.png")
    caption = (tmp_path / "overview.txt").read_text(encoding="utf-8")
    assert caption.startswith("Accuracy, tokens per forward and tokens per second at batch 1 of every system")
    assert "(n = 200 items a task), with 95% intervals" in caption
    assert "Hardware: Test CPU. A speed of one round" in caption
    with Image.open(tmp_path / "overview.png") as picture:
        colours = {colour for count, colour in picture.convert("RGB").getcolors(1 << 24) if count > 100}
    shown = {tuple(bytes.fromhex(style_of(name, systems).colour.removeprefix("#"))) for name in systems}
    assert len(shown) == len(systems)  # no two systems have one colour
    assert shown <= colours


def run_script(name, *arguments):
    script = [sys.executable, ROOT / "plots" / f"{name}.py", *map(str, arguments)]
    return subprocess.run(script, capture_output=True, text=True, cwd=ROOT)


def test_table_8_has_the_answers_to_one_problem_side_by_side(tmp_path):
    texts = {"A": "def f(x):\n    return x", "B": "A word " * 20, "C": "no"}
    for name, text in texts.items():
        sample = make_sample("7", text=text)
        write_run(tmp_path / name, [sample], [make_score(sample, float(name == "A"))], system=f"System {name}")
    runs = [str(tmp_path / name) for name in texts]
    done = RUNNER.invoke(app, ["paper-table", "8", *runs, "--item", "7", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    lines = (tmp_path / "out" / "table8.md").read_text(encoding="utf-8").splitlines()
    assert lines[2] == "| System A | System B | System C |"
    assert lines[4].startswith("| def f(x): | A word A word")
    assert lines[5].startswith(f"| {4 * chr(0xA0)}return x | ")
    assert (
        lines[-1] == "| right; 4 tokens in 5 forwards | wrong; 4 tokens in 5 forwards | wrong; 4 tokens in 5 forwards |"
    )


def test_table_8_shows_a_text_of_a_server_too(tmp_path):
    ours, served = make_sample("7"), make_sample("7", text="Served.", tokens=None, trace=None, num_forwards=0)
    for name, sample in (("ours", ours), ("served", served)):
        write_run(tmp_path / name, [sample], system=name)
    runs = [str(tmp_path / name) for name in ("ours", "served")]
    done = RUNNER.invoke(app, ["paper-table", "8", *runs, "--item", "7", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.exception
    lines = (tmp_path / "out" / "table8.md").read_text(encoding="utf-8").splitlines()
    assert lines[4].endswith("| Served. |")
    assert lines[-1].endswith("| right; 4 tokens |")


def test_table_8_is_of_one_problem(tmp_path):
    for name, number in (("a", "7"), ("b", "8")):
        write_run(tmp_path / name, [make_sample(number, item_id="7")])
    runs = [str(tmp_path / name) for name in "ab"]
    assert "is another problem" in str(RUNNER.invoke(app, ["paper-table", "8", *runs, "--item", "7"]).exception)
    assert "--item ID" in str(RUNNER.invoke(app, ["paper-table", "8", *runs]).exception)
    assert "--item ID" in str(RUNNER.invoke(app, ["paper-table", "1,8", *runs, "--item", "7"]).exception)


def test_the_case_study_is_decoded_and_drawn_by_one_command(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "NUM_CASES", 1)
    done = RUNNER.invoke(app, ["plot", "figure5", "--model", "embedded", "--task", "gsm8k", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    _, sample = find_sample(tmp_path / "case_study")
    settings = {name: sample.settings[name] for name in (*CASE_STUDY, "fuse")}
    assert settings == {"slot_size": 4, "block_size": 16, "tau_slot": 0.6, "tau_token": 0.3, "fuse": False}
    assert (tmp_path / f"figure5_mini_gsm8k_{sample.item_id}.pdf").is_file()
    runs, counted = sort_sources([tmp_path / "case_study"])
    assert (runs, {figure.metric for figure in counted}) == ([], {MOST_SLOTS, MOST_TOKENS})
    refused = RUNNER.invoke(app, ["plot", "figure4", "--model", "embedded", "--out", str(tmp_path)])
    assert "name no sources with it" in str(refused.exception)


def test_settings_of_the_case_study_may_be_others(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "NUM_CASES", 1)
    ordered = ["plot", "figure5", "--out", str(tmp_path), "--set", "block_size=96", "--set", "tau_slot=1"]
    done = RUNNER.invoke(app, [*ordered, "--model", "embedded", "--task", "arc_challenge"])
    assert done.exit_code == 0, done.output
    _, sample = find_sample(tmp_path / "case_study")
    settings = {name: sample.settings[name] for name in (*CASE_STUDY, "fuse")}
    assert settings == {"slot_size": 4, "block_size": 96, "tau_slot": 1.0, "tau_token": 0.3, "fuse": False}
    refused = RUNNER.invoke(app, [*ordered, str(tmp_path / "case_study")])
    assert "--set is for --model" in str(refused.exception)


@pytest.mark.process
def test_a_script_makes_one_artefact_from_csv(made, tmp_path):
    run_script("figure3", made["locality"](tmp_path / "l.csv"), "--out", tmp_path)
    run_script("table5", "--out", tmp_path)
    picture = tmp_path / "overview.png"
    drawn = run_script("overview", ROOT / "results/embedded/results.csv", "--out", picture)
    assert drawn.stdout.split() == [str(picture), str(picture.with_suffix(".txt"))]
    assert {path.name for path in tmp_path.iterdir()} >= {"figure3_mini.png", "table5.tex", "table5.md"}


@pytest.mark.process
def test_a_script_refuses_in_one_line(tmp_path):
    done = run_script("figure4", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")  # on a slow machine after a line about reading


ORDER = [
    ["forward", 0, "plan", 4, 0],
    ["select", 0, "slot", [0, 2], [0.9, 0.8], [0, 2]],
    ["draft", 0, [0, 1, 2, 3], [5, 6, 7, 8]],
    ["forward", 1, "verify", 4, 0],
    ["fix", 1, [2, 3], [7, 8]],
    ["forward", 2, "verify", 2, 2],
    ["fix", 2, [0, 1], [5, 9]],
    ["stop", 2, "eos", 4],
]


def found(tmp_path, task="mini_gsm8k"):
    """A sample with that trace, as it is found in a run."""
    sample = make_sample("7", task=task, trace=ORDER, tokens=[5, 9, 7, 8], num_tokens=4)
    return find_sample(write_run(tmp_path / "run", [make_sample("6"), sample]), task, "7")


def spelled(tokens):
    return "".join(f"<{token}>" for token in tokens)


def test_the_order_of_generation_comes_from_the_trace(tmp_path):
    run, sample = found(tmp_path)
    cells = generation_order(run.manifest.system, sample, speller_of(sample, spelled))
    assert [(cell.final, cell.order, cell.forward, cell.slot) for cell in cells] == [
        ("<5>", 2, 2, 0),
        ("<9>", 2, 2, 0),
        ("<7>", 1, 1, 2),
        ("<8>", 1, 1, 2),
    ]


def test_the_panels_are_plan_draft_and_acceptances(tmp_path):
    run, sample = found(tmp_path)
    cells = step_by_step(run.manifest.system, sample, speller_of(sample, spelled))
    panels = {}
    for cell in cells:
        panels.setdefault(cell.title, []).append((cell.state, cell.text))
    assert panels == {
        "forward 1 of 3: planned": [("planned", "")] * 4,
        "forward 1 of 3: drafted": [("draft", f"<{token}>") for token in (5, 6, 7, 8)],
        "forward 2 of 3: accepted": [("rejected", "<5>"), ("rejected", "<6>"), ("fixed", "<7>"), ("fixed", "<8>")],
        "forward 3 of 3: accepted": [("fixed", f"<{token}>") for token in (5, 9, 7, 8)],
    }


def test_a_sample_of_many_steps_is_shown_unless_another_is_named(tmp_path):
    short = make_sample("7", trace=ORDER, tokens=[5, 9, 7, 8], num_tokens=4)
    one = make_sample("5", trace=[*ORDER[:5], ["stop", 1, "eos", 4]], tokens=[7, 8], num_tokens=2)
    sealed = make_sample("9", task="refusion_gpqa", trace=ORDER, tokens=[5, 9, 7, 8])
    run = write_run(tmp_path / "run", [sealed, one, short])
    assert longest_sample(run, None) == ("mini_gsm8k", "7")
    assert longest_sample(run, "refusion_gpqa") == ("refusion_gpqa", None)


def test_a_right_answer_is_shown_rather_than_a_wrong_one_of_more_steps(tmp_path):
    wrong = make_sample("7", trace=ORDER, tokens=[5, 9, 7, 8], num_tokens=4)
    right = make_sample("5", trace=[*ORDER[:5], ["stop", 1, "eos", 4]], tokens=[7, 8], num_tokens=2)
    run = write_run(tmp_path / "run", [wrong, right], [make_score(wrong, value=0.0), make_score(right, value=1.0)])
    assert longest_sample(run, None) == ("mini_gsm8k", "5")


def test_sealed_questions_are_refused(tmp_path):
    run, sample = found(tmp_path, task="refusion_gpqa")
    with pytest.raises(DataError, match="GPQA's authors ask"):
        generation_order(run.manifest.system, sample, speller_of(sample, spelled))
