"""A protocol that is run on the embedded models: its records, its continuation, and what differs from it."""

import signal
import sqlite3
from contextlib import closing
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from refusion_eval.cli import app, evaluate, suite_runs
from refusion_eval.cli.plans import words_of
from refusion_eval.cli.protocol_runs import ProtocolRuns
from refusion_eval.lm_eval_plugin import any_task
from refusion_eval.protocol.compare import check_table, protocol_differences
from refusion_eval.protocol.spec import read_protocol
from refusion_eval.store.run_store import RunReader
from tests.faults.conftest import server
from tests.protocol.test_records import OTHER, STAMP
from tests.results.conftest import sample, write_run

__all__ = ["server", "write_run"]

FILE = """
tasks: [parts]
limit: 3
rounds: 1
baseline: ar
metrics: [accuracy, tpf]
systems:
  refusion: {arguments: {pretrained: embedded}, settings: {fuse: false}}
  ar: {arguments: {pretrained: embedded, decoder: autoregressive}}
"""


@pytest.fixture(scope="module")
def done(server, tmp_path_factory):
    """A protocol that was killed after its first record, and then continued: its file and its folder."""
    folder = tmp_path_factory.mktemp("protocol")
    (folder / "mine.yaml").write_text(FILE)
    command = ["protocol", "run", str(folder / "mine.yaml"), "--out", str(folder / "out")]
    first = server.start(command)
    while not num_recorded(folder / "out" / "runs" / "refusion"):
        assert first.poll() is None, first.output()
    first.kill(signal.SIGKILL)
    first.wait()
    (folder / "records").write_text(str(num_recorded(folder / "out" / "runs" / "refusion")))
    status, shown = server.run(command)
    assert status == 0, shown
    (folder / "shown").write_text(shown)
    return folder


def num_recorded(run_dir):
    try:
        with closing(sqlite3.connect(f"file:{run_dir}/records.sqlite?mode=ro", uri=True)) as connection:
            return connection.execute("SELECT count(*) FROM samples").fetchone()[0]
    except sqlite3.Error:  # not there yet
        return 0


def test_a_killed_protocol_is_continued_without_repeating_a_sample(done):
    assert int((done / "records").read_text()) >= 1
    label = read_protocol(str(done / "mine.yaml")).label
    for system in ("refusion", "ar"):
        with closing(sqlite3.connect(done / "out" / "runs" / system / "records.sqlite")) as connection:
            assert connection.execute("SELECT count(*), max(attempts) FROM samples").fetchone() == (3, 1)
        with RunReader.open(done / "out" / "runs" / system) as reader:
            assert {one.protocol for one in reader.samples()} == {label}


def test_its_table_names_it_and_has_the_metrics_that_it_reports(done):
    shown = (done / "shown").read_text()
    assert f"Protocol: {read_protocol(str(done / 'mine.yaml')).label}." in " ".join(shown.split())
    assert "Accuracy %" in shown
    assert "TPS" not in (done / "out" / "table.md").read_text().partition("\n")[0]
    check = CliRunner().invoke(app, ["protocol", "check", str(done / "mine.yaml"), "--out", str(done / "out")])
    assert "(recorded)" in check.output


def test_a_run_of_a_protocol_differs_in_nothing_and_from_another_in_what_was_changed(done):
    run_dir = str(done / "out" / "runs" / "refusion")
    assert protocol_differences(str(done / "mine.yaml"), run_dir) == []
    other = done / "other.yaml"
    other.write_text(FILE.replace("limit: 3", "limit: 4").replace("fuse: false", "fuse: false, tau_token: 0.9"))
    label, *found = protocol_differences(run_dir, str(other))
    assert label.startswith(f'protocol: {run_dir} "mine@')
    assert found == [
        f"limit: {run_dir} 3, {other} 4",
        f"settings.mini_parts.tau_token: {run_dir} 0.2, {other} 0.9",
    ]


def test_a_run_without_a_protocol_is_compared_with_the_system_that_it_is(done, tmp_path):
    command = ["run", "--decoder", "autoregressive", "--tasks", "parts", "--limit", "1", "--run-dir", str(tmp_path)]
    assert CliRunner().invoke(app, command).exit_code == 0
    file = str(done / "mine.yaml")
    assert protocol_differences(file, str(tmp_path)) == [f"limit: {file} 3, {tmp_path} 1"]


def test_samples_of_an_item_are_one_item_of_a_limit(tmp_path):
    """Also where the run began with fewer of them."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "tasks: [parts]\nlimit: 2\nrounds: 1\nsystems:\n"
        "  ar: {arguments: {pretrained: embedded, decoder: autoregressive, samples: 2}, settings: {temperature: 0.7}}\n"
    )
    command = ["run", "--decoder", "autoregressive", "--tasks", "parts", "--limit", "2", "--set", "temperature=0.7"]
    for number in "12":
        done = CliRunner().invoke(app, [*command, "--samples", number, "--run-dir", str(tmp_path / "run")])
        assert done.exit_code == 0, done.output
    assert protocol_differences(str(file), str(tmp_path / "run")) == []
    assert check_table(read_protocol(str(file)), tmp_path).lines[0].cells[4].text == "4"


SEEDED = FILE.replace("limit: 3", "limit: 2\nseeds: [0, 1]").replace("rounds: 1", "rounds: 2")
SEEDED = SEEDED.replace("decoder: autoregressive}", "decoder: autoregressive, batch_size: 2}")


@pytest.fixture
def seeded(tmp_path, monkeypatch):
    """A folder to work in, with a protocol of two seeds and two rounds."""
    (tmp_path / "mine.yaml").write_text(SEEDED)
    monkeypatch.chdir(tmp_path)
    return CliRunner()


def test_a_run_of_one_system_is_that_of_the_whole_protocol(seeded):
    done = seeded.invoke(app, ["run", "--protocol", "mine.yaml:ar", "--seed", "1"])
    assert done.exit_code == 0, done.output
    planned = seeded.invoke(app, ["protocol", "run", "mine.yaml", "--dry-run"]).output
    folder = planned.partition("--protocol mine.yaml:ar --seed 1 ")[0].rpartition("--run-dir ")[2].strip()
    with RunReader.open(folder) as reader:
        assert {one.protocol for one in reader.samples()} == {read_protocol("mine.yaml").label}
        assert sorted(reader.run.round(one.process_id) for one in reader.samples()) == [1, 2]
    assert protocol_differences("mine.yaml", folder) == []


def test_rounds_are_those_of_a_protocol(seeded):
    refused = seeded.invoke(app, ["run", "--tasks", "parts", "--rounds", "2"])
    assert "--rounds is for --protocol" in str(refused.exception)


def test_an_option_beside_a_protocol_is_obeyed_or_refused(seeded, monkeypatch):
    class Stop(Exception):
        pass

    def stop(run, **more):
        raise Stop(run.args)

    monkeypatch.setattr(any_task, "evaluate_any", stop)

    def run(*options):
        return seeded.invoke(app, ["run", "--protocol", "mine.yaml:ar", *options])

    plain, *changed = (
        run(*options).exception.args[0]
        for options in ((), ("--batch-size", "1"), ("--no-cuda-graphs",), ("--limit", "9"), ("--tasks", "math"))
    )
    assert plain.batch_size == 2
    assert changed[0].batch_size == 1
    labels = [args.protocol["label"] for args in (plain, *changed)]
    assert len(set(labels)) == 5
    assert [args.run_dir for args in (plain, *changed)] == [
        f"results/protocols/{label.replace('@', '-')}/runs/ar-seed0" for label in labels
    ]
    elsewhere = run("--tracker", "wandb", "--run-dir", "here").exception.args[0]
    assert (elsewhere.tracker, elsewhere.run_dir, elsewhere.protocol["label"]) == ("wandb", "here", labels[0])
    for options, name in ((("--thought-budget", "5"), "thought-budget"), (("--samples", "1"), "samples")):
        assert f"decides {name}: leave it out" in str(run(*options).exception)


def test_fewer_tasks_or_items_are_a_part_of_a_protocol(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(FILE.replace("rounds: 1", "rounds: 2"))
    whole = read_protocol(str(path))
    (task,) = whole.task_names("ar")
    for tasks, limit in (((), 2), ((task,), None), ((task,), 3)):
        part = whole.part(tasks, limit)
        assert (part.label, part.content()) == (whole.label, whole.content())
        assert (part.limit, part.task_names("ar")) == (limit or 3, [task])
    every = read_protocol("eval")
    assert every.part(("parts",), None).label == every.part(("mini_parts", "math"), 2).label == every.label
    assert whole.part((), 4).label != whole.label
    assert whole.part(("math",), None).label != whole.label
    # One item is decoded in one round, whatever the protocol's number of rounds is.
    given = {"tasks": "", "limit": 1, "rounds": 1}
    assert ProtocolRuns(SimpleNamespace(**given), str(path)).protocol.label == whole.label
    assert ProtocolRuns(SimpleNamespace(**given | {"rounds": 5}), str(path)).protocol.label != whole.label


@pytest.mark.parametrize(
    ("rounds", "limit"), [(None, None), (None, 2), (1, 4), (2, 1), (2, None), (3, 4), (5, 2), (5, 4), (5, None)]
)
def test_a_suite_and_the_runs_that_it_starts_are_of_one_protocol(rounds, limit, monkeypatch):
    started, read = [], []
    monkeypatch.setattr(suite_runs, "carry_out", lambda plan, **_: started.append(plan) or 0)
    monkeypatch.setattr(suite_runs, "run_command", lambda *words: 0)
    options = {"rounds": rounds, "limit": limit, "tasks": "parts", "data": None, "sandbox": "auto"}
    suite = ProtocolRuns(SimpleNamespace(**options, dry_run=False, as_json=False, no_baseline=False), "eval")
    suite.run()
    assert len(started) == 4 * min(rounds or 3, limit or 5)
    assert {plan.runs[0].args.protocol["label"] for plan in started} == {suite.label}
    # The commands that are printed make the same runs.
    monkeypatch.setattr(evaluate, "carry_out", lambda plan, **_: read.append(plan) or 0)
    for plan in (started[0], started[-1]):
        words = words_of("run", {**plan.runs[0].options, "turn": str(plan.turns[0])})
        assert CliRunner().invoke(app, words).exit_code == 0
    assert list(map(facts_of, read)) == [facts_of(started[0]), facts_of(started[-1])]


def facts_of(plan):
    (run,) = plan.runs
    return asdict(replace(run, options={}, name="")), plan.turns


def test_a_protocol_is_not_continued_in_the_folder_of_another_or_of_a_run(done):
    other = done / "lesser.yaml"
    other.write_text(FILE.replace("limit: 3", "limit: 2"))
    table = (done / "out" / "table.md").read_bytes()
    for folder, said in (("out", "runs has records of mine@"), ("out/runs/ar", "ar is itself a run directory")):
        again = CliRunner().invoke(app, ["protocol", "run", str(other), "--out", str(done / folder)])
        assert again.exit_code == 1
        assert said in str(again.exception)
        assert "give another folder with --out" in str(again.exception)
    assert (done / "out" / "table.md").read_bytes() == table
    (done / "renamed.yaml").write_text(FILE)
    renamed = ["protocol", "run", str(done / "renamed.yaml"), "--out", str(done / "out"), "--dry-run"]
    assert CliRunner().invoke(app, renamed).exit_code == 0


def test_a_suite_goes_on_beside_the_records_of_another_protocol_and_says_so(write_run, tmp_path):
    for system, stamp in (("refusion-fused", STAMP), ("refusion-verifier", OTHER), ("autoregressive", {})):
        write_run(f"runs/embedded-{system}", [sample(1)], protocol=stamp)
    suite = CliRunner().invoke(app, ["suite", "--dry-run", "--results", str(tmp_path)])
    assert suite.exit_code == 0
    labels = f"{STAMP['label']}, {OTHER['label']}, no protocol"
    assert f"note: {tmp_path}/runs has records of {labels}, and this is eval@" in suite.stderr
    assert "give another folder with --results" in suite.stderr
