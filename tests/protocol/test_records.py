"""What records, tables and data frames say of a protocol, and that protocols are never merged."""

import csv
import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.errors import StoreError
from refusion_eval.exports.source import file_name, read_exported
from refusion_eval.paper.judge import judge_all
from refusion_eval.paper.tables import paper_table
from refusion_eval.report.collect import collect
from refusion_eval.results.compare import compare_runs
from refusion_eval.results.data_frames import figures, load
from refusion_eval.results.measured import read_measurements, run_measurements
from refusion_eval.results.seeds import means_over_seeds
from refusion_eval.store.run_store import RunReader
from tests.report.conftest import NoSources
from tests.results.conftest import cell, sample, write_run

__all__ = ["write_run"]

STAMP = {"label": "mine@aaaaaaaaaaaa", "hash": "aaaaaaaaaaaa0", "system": "refusion", "content": {}}
OTHER = STAMP | {"label": "mine@bbbbbbbbbbbb", "hash": "bbbbbbbbbbbb0"}


def samples(**changes):
    return [sample(item, **changes) for item in range(4)]


def test_every_record_of_a_protocol_names_it(write_run):
    with RunReader.open(write_run("a", samples(), protocol=STAMP)) as reader:
        assert {one.protocol for one in reader.samples()} == {STAMP["label"]}
        assert reader.run.manifest.protocol == STAMP
        assert [process["protocol"] for process in reader.run.processes.values()] == [STAMP]


def test_records_without_a_protocol_are_as_before(write_run):
    run_dir = write_run("a", samples())
    with RunReader.open(run_dir) as reader:
        assert all("protocol" not in json.loads(one.body()) for one in reader.samples())
    written = json.loads((run_dir / "run.json").read_text())
    assert "protocol" not in written["manifest"]
    assert not any("protocol" in process for process in written["processes"].values())


def table(*run_dirs, options=()):
    done = CliRunner().invoke(app, ["table", *map(str, run_dirs), *options], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_a_table_names_the_protocol_and_tells_two_apart(write_run, tmp_path):
    one, other = write_run("a", samples(), protocol=STAMP), write_run("b", samples(), protocol=OTHER)
    shown = table(one, options=["--latex", str(tmp_path / "t.tex"), "--csv", str(tmp_path / "t.csv")])
    assert f"Protocol: {STAMP['label']}." in shown
    assert f"Protocol: {STAMP['label']}." in (tmp_path / "t.txt").read_text()
    with (tmp_path / "t.csv").open(newline="") as file:
        assert {row["protocol"] for row in csv.DictReader(file)} == {STAMP["label"]}
    assert {entry.protocol for entry in read_measurements([tmp_path / "t.csv"])} == {STAMP["label"]}
    both = table(one, other)
    assert f"ReFusion, {STAMP['label']}" in both
    assert f"ReFusion, {OTHER['label']}" in both
    assert "ReFusion, no protocol" in table(one, write_run("c", samples()))


def test_a_task_of_which_no_sample_is_there_yet_belongs_to_the_protocol_too(write_run):
    begun = write_run("a", samples(), protocol=STAMP, tasks={"mini_gsm8k": "1", "mini_parts": "1"})
    assert {entry.protocol for entry in run_measurements([begun])} == {STAMP["label"]}
    assert "no protocol" not in table(begun)


@pytest.fixture
def continued(write_run):
    """A run of two tasks that was begun under one protocol, and continued under another one and without any."""
    tasks = ("mini_gsm8k", "mini_parts")
    for number, changes in enumerate(({"protocol": STAMP}, {"protocol": OTHER}, {})):
        more = [sample(f"{number}{item}", task=task) for task in tasks for item in range(number + 1)]
        run_dir = write_run("a", more, right={f"{number}0"}, **changes)
    return run_dir


def test_a_run_that_was_continued_under_another_protocol_has_a_row_and_a_mean_for_each(continued):
    found = {
        (entry.task, entry.protocol): (entry.n, round(entry.value))
        for entry in run_measurements([continued])
        if entry.metric == "accuracy"
    }
    by_protocol = {STAMP["label"]: (1, 100), OTHER["label"]: (2, 50), "": (3, 33)}
    rows = {(task, name): row for task in ("mini_gsm8k", "mini_parts") for name, row in by_protocol.items()}
    assert found == rows | {("mean", name): (2 * row[0], row[1]) for name, row in by_protocol.items()}
    shown = table(continued)
    assert f"Protocols: {STAMP['label']}, {OTHER['label']}." in shown
    assert all(shown.count(f"ReFusion, {name or 'no protocol'}") == 3 for name in by_protocol)


def test_a_row_beside_those_of_other_protocols_is_limited_to_its_samples(write_run):
    for number, stamp in enumerate((STAMP, OTHER)):
        run_dir = write_run(
            "a", samples()[2 * number :][:2], protocol=stamp, expected={"mini_gsm8k": 4}, whole={"mini_gsm8k": 4}
        )
    measured = run_measurements([run_dir])
    assert {(entry.unfinished, entry.limited) for entry in measured} == {("", "2 of 4")}
    assert set(load(run_dir)["limited"]) == {"2 of 4"}
    assert table(run_dir).count("[limited 2 of 4]") == 2


def test_pages_and_exports_have_a_row_for_each_protocol_of_a_run(continued, tmp_path):
    cells = collect([continued], NoSources()).index["cells"]
    wanted = [("", 3), (STAMP["label"], 1), (OTHER["label"], 2)]
    assert [(cell["settings"].get("protocol", ""), cell["samples"]) for cell in cells] == [
        *wanted,
        *wanted,
        *((name, 2 * number) for name, number in wanted),
    ]
    exported = list(read_exported([continued]))
    assert [(task.origin.get("protocol", ""), task.measurements[0].n) for task in exported] == [*wanted, *wanted]
    assert len({file_name(task, exported) for task in exported}) == 6


def test_a_protocol_whose_file_was_renamed_is_one_row(write_run):
    write_run("a", samples()[:2], protocol=STAMP)
    run_dir = write_run("a", samples()[2:], protocol=STAMP | {"label": STAMP["label"].replace("mine", "ours")})
    (score,) = (entry for entry in run_measurements([run_dir]) if entry.metric == "accuracy")
    assert (score.n, score.protocol) == (4, f"{STAMP['label']}|ours@aaaaaaaaaaaa")


def test_data_frames_and_exports_have_the_protocol(write_run):
    run_dir = write_run("a", samples(), protocol=STAMP)
    assert set(load(run_dir)["protocol"]) == {STAMP["label"]}
    assert set(figures(run_dir)["protocol"]) == {STAMP["label"]}
    done = CliRunner().invoke(app, ["export", str(run_dir)])
    assert {json.loads(line)["protocol"] for line in done.stdout.splitlines()} == {STAMP["label"]}


def test_seeds_under_different_protocols_have_no_mean(write_run):
    def runs(second):
        seeded = [samples(settings={"seed": seed}) for seed in (1, 2)]
        return [write_run(f"{second['label']}-{n}", seeded[n], protocol=(STAMP, second)[n]) for n in (0, 1)]

    assert means_over_seeds(run_measurements(runs(STAMP)))
    assert means_over_seeds(run_measurements(runs(OTHER))) == []


def test_the_papers_table_has_a_row_for_each_protocol():
    one = cell("refusion", "gsm8k", "accuracy", 50.0, run_id="a", protocol=STAMP["label"], backbone="Qwen3-8B", n=9)
    other = replace(one, run_id="b", value=60.0, protocol=OTHER["label"])
    text = paper_table(1, [one, other]).markdown()
    assert f"refusion under {STAMP['label']}" in text
    assert f"refusion under {OTHER['label']}" in text
    assert f"Protocols: {STAMP['label']}, {OTHER['label']}." in text
    assert "ReFusion" not in text.partition("Not measured: ")[2]
    assert " under " not in paper_table(1, [one]).markdown()


def test_claims_are_not_judged_by_two_protocols_at_once():
    timed = [
        cell("refusion", "gsm8k", "tps", 50.0, run_id=run, protocol=stamp["label"], mini=True)
        for run, stamp in (("a", STAMP), ("b", OTHER))
    ]
    labels = f"{STAMP['label']} and b under {OTHER['label']}"
    with pytest.raises(StoreError, match=f"is there twice \\(a under {labels}\\)"):
        judge_all(timed)
    judge_all([replace(entry, protocol="") for entry in timed])  # rounds of one system


def test_a_comparison_names_the_protocols(write_run):
    comparison = compare_runs(write_run("a", samples(), protocol=STAMP), write_run("b", samples(), protocol=OTHER))
    assert f'protocol: A "{STAMP["label"]}", B "{OTHER["label"]}"' in comparison.settings
    assert f"Protocols: {STAMP['label']}, {OTHER['label']}." in comparison.notes
