"""What commands leave behind is what it was: runs, verdicts, tables and files, against stored records.

The quick part is `-m "not slow"`, all of it `-m ""`. Records are made by `python -m tests.guard.make_records`.
"""

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.guard import cases, records
from tests.guard.outcomes import Outcomes

MOST_SHOWN = 20


def slow(names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return Outcomes(tmp_path_factory.mktemp("guard"))


@pytest.fixture(scope="module")
def quick(outcomes):
    outcomes.execute([run.name for run in cases.QUICK_RUNS], list(cases.QUICK_TEXTS))
    return outcomes


@pytest.fixture(scope="module")
def full(outcomes):
    outcomes.execute([run.name for run in cases.FULL_RUNS], [n for n in cases.TEXTS if n not in cases.QUICK_TEXTS])
    return outcomes


@pytest.fixture(scope="module")
def lm_eval(outcomes):
    outcomes.execute_lm_eval(list(cases.LM_EVAL))
    return outcomes


@pytest.fixture(scope="module")
def continued(outcomes):
    return outcomes.continue_stored()


def assert_same(name: str, now: dict, left_out: tuple[str, ...] = ()) -> None:
    """Fails with one line for every entry that is not what the record says."""
    stored = json.loads((cases.RECORDS / f"{name}.json").read_text())
    if json.loads((cases.RECORDS / "machine.json").read_text()) != records.machine():
        left_out = (*left_out, *records.OF_MACHINE)
    now = json.loads(json.dumps(now))
    found = list(records.differences(records.without(stored, left_out), records.without(now, left_out), name))
    shown = [line[:300] for line in found[:MOST_SHOWN]]
    assert not found, f"{len(found)} differences:\n" + "\n".join(shown)


def check_run(outcomes: Outcomes, name: str) -> None:
    assert_same(f"run_{name}", outcomes.run(name), records.MEASURED if cases.RUNS[name].measured else ())


@pytest.mark.parametrize("name", [run.name for run in cases.QUICK_RUNS])
def test_run_is_what_it_was(quick, name):
    check_run(quick, name)


@pytest.mark.parametrize("name", slow(run.name for run in cases.FULL_RUNS))
def test_further_run_is_what_it_was(full, name):
    check_run(full, name)


@pytest.mark.parametrize("name", cases.QUICK_TEXTS)
def test_text_is_what_it_was(quick, name):
    assert_same(f"text_{name}", quick.text(name))


@pytest.mark.parametrize("name", slow(name for name in cases.TEXTS if name not in cases.QUICK_TEXTS))
def test_further_text_is_what_it_was(full, name):
    assert_same(f"text_{name}", full.text(name))


@pytest.mark.parametrize("name", slow(cases.LM_EVAL))
def test_lm_eval_is_what_it_was(lm_eval, name):
    assert_same(f"lm_eval_{name}", lm_eval.lm_eval(name))


def rows_of(run_dir: Path, table: str) -> list:
    connection = sqlite3.connect(f"file:{run_dir / 'records.sqlite'}?mode=ro", uri=True)
    try:
        return connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2, 3").fetchall()
    finally:
        connection.close()


@pytest.mark.parametrize("run_dir", list(cases.STORED), ids=lambda path: path.name)
def test_stored_run_is_continued(outcomes, continued, run_dir, tmp_path):
    ended, copy = outcomes.ended[f"stored {run_dir.name}"], continued[run_dir]
    assert ended["status"] == 0, ended["stderr"]
    before = shutil.copytree(run_dir, tmp_path / "before")
    stored, now = rows_of(before, "samples"), rows_of(copy, "samples")
    assert len(now) * cases.STORED_LIMIT == len(stored) * cases.CONTINUED_LIMIT
    # Served, not decoded again: times, process and date are those of the first run.
    assert set(stored) <= set(now)
    assert set(rows_of(before, "scores")) <= set(rows_of(copy, "scores"))
    was, is_now = records.read_run(before), records.read_run(copy)
    assert was["fingerprint"] == is_now["fingerprint"]
    assert set(is_now["expected"].values()) == {cases.CONTINUED_LIMIT}
    assert_same(f"continued_{run_dir.name}", is_now)


@pytest.mark.usefixtures("continued")
def test_stored_run_is_read_by_table_and_report(outcomes):
    for command in ("table", "report"):
        ended = outcomes.ended[f"stored {command}"]
        assert ended["status"] == 0, ended["stderr"]
    names = {path.name for path in cases.STORED}
    lines = (outcomes.scratch / "table.csv").read_text().splitlines()
    assert {line.split(",")[0] for line in lines[1:]} == names
    page = (outcomes.scratch / "report.html").read_text()
    assert all(name in page for name in names)
