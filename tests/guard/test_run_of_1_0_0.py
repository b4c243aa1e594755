"""Run directories of version 1.0.0: finished runs are read, and one whose process was killed is continued."""

import base64
import csv
import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.results.collapse import SIGNS
from refusion_eval.store.records import Sample
from refusion_eval.store.run_store import RunReader
from tests.guard.stored import RECORDS, check, differences, without_mean_tpf

DATA = Path(__file__).resolve().parents[1] / "data"
NUM_ITEMS = 4
NEW_METRICS = ("cut", "collapsed", *SIGNS)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A copy of the stored run directories, because reading one may write into it."""
    return Path(shutil.copytree(DATA / "run_1.0.0", tmp_path / "runs"))


def command(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def samples(run_dir: Path) -> list[Sample]:
    with RunReader.open(run_dir) as run:
        return list(run.samples())


def rows(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a CSV by task and metric, without remarks in words, and without metrics that 1.0.0 did not have."""
    with path.open(newline="") as file:
        read = {
            f"{row['system']} {row['task']} {row['metric']}": row
            for row in csv.DictReader(file)
            if row["metric"] not in NEW_METRICS
        }
    kept = without_mean_tpf(read)
    return {name: {key: _number(row[key]) for key in row if key != "note"} for name, row in kept.items()}


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


@pytest.mark.parametrize("name", ["complete", "complete_autoregressive"])
def test_the_table_has_the_rows_that_the_run_wrote(runs: Path, tmp_path: Path, name: str) -> None:
    command("table", runs / name, "--csv", tmp_path / "rows.csv")
    found = rows(tmp_path / "rows.csv")
    assert len(found) > 30
    assert list(differences(rows(runs / name / "results.csv"), found)) == []


RATIO = ("speed_ratio", "speed_ratio_ci_low", "speed_ratio_ci_high", "no_speed")


def test_two_runs_are_compared_as_stored(runs: Path) -> None:
    said = json.loads(command("compare", runs / "complete_autoregressive", runs / "complete", "--json"))
    # These have another rule since (Tango's interval; a ratio of speeds needs runs in turns); what they have to be is
    # tested with the rule.
    renewed = {"difference_ci_low", "difference_ci_high", "detectable", *RATIO}
    assert {row[name] for row in said for name in RATIO if name != "no_speed"} == {None}
    stored = json.loads((RECORDS / "compare_1.0.0.json").read_text())
    kept = {task: {name: row[name] for name in row if name not in renewed} for task, row in stored.items()}
    assert len(kept["mini_gsm8k"]) > 10
    assert list(differences(kept, {row["task"]: row for row in said})) == []


def test_rescoring_changes_no_verdict(runs: Path) -> None:
    before = rows(runs / "complete" / "results.csv")
    command("rescore", runs / "complete", "--out", runs / "rescored")
    command("table", runs / "complete", "--csv", runs / "after.csv")
    assert list(differences(before, rows(runs / "after.csv"))) == []
    with (runs / "rescored" / "complete" / "ours.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(samples(runs / "complete"))


def test_the_page_shows_every_answer(runs: Path, tmp_path: Path) -> None:
    command("report", runs / "complete", runs / "complete_autoregressive", "--out", tmp_path / "page.html")
    chunks = re.findall(r">(H4sI[A-Za-z0-9+/=]+)</script>", (tmp_path / "page.html").read_text())
    shown = "".join(gzip.decompress(base64.b64decode(chunk)).decode() for chunk in chunks)
    for run in ("complete", "complete_autoregressive"):
        for sample in samples(runs / run):
            assert json.dumps(sample.text)[1:-1] in shown


@pytest.mark.usefixtures("weights")
def test_the_run_that_was_killed_is_continued_with_each_sample_once(runs: Path) -> None:
    recorded = samples(runs / "interrupted")
    assert len(recorded) == NUM_ITEMS // 2
    options = ["--decoder", "refusion", "--attention", "sdpa", "--device", "cpu", "--dtype", "float32", "--warmup", "0"]
    options += [word for name in ("gen_length=32", "slot_size=4", "block_size=16") for word in ("--set", name)]
    options += ["--model", str(DATA / "parity" / "tiny"), "--tasks", "refusion_gsm8k", "--data", str(runs / "rows")]
    command("run", *options, "--run-dir", runs / "interrupted")
    continued = samples(runs / "interrupted")
    assert continued[: len(recorded)] == recorded
    assert [sample.item_id for sample in continued] == [str(number) for number in range(NUM_ITEMS)]
    figures = rows(runs / "interrupted" / "results.csv")
    assert figures["ReFusion refusion_gsm8k accuracy"]["n"] == NUM_ITEMS
    check("continued_1.0.0", {sample.item_id: {"text": sample.text, "tokens": sample.tokens} for sample in continued})
    command("run", *options, "--run-dir", runs / "interrupted")
    assert samples(runs / "interrupted") == continued
