"""A protocol that is run on the embedded models: its records, its continuation, and what differs from it."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.protocol.compare import protocol_differences
from refusion_eval.protocol.spec import read_protocol
from refusion_eval.store.run_store import RunReader

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
def done(tmp_path_factory):
    """A protocol that was killed after its first record, and then continued: its file and its folder."""
    folder = tmp_path_factory.mktemp("protocol")
    (folder / "mine.yaml").write_text(FILE)
    command = [sys.executable, "-m", "refusion_eval", "protocol", "run", str(folder / "mine.yaml")]
    command += ["--out", str(folder / "out")]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while not num_recorded(folder / "out" / "runs" / "refusion"):
        assert first.poll() is None
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    (folder / "records").write_text(str(num_recorded(folder / "out" / "runs" / "refusion")))
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    (folder / "shown").write_text(again.stdout)
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
