"""kill -9 at seeded instants over decoding, scoring and writing: the same command ends with the records of a calm run.

A run directory goes through several kills, each in a process that continues what the one before left, until its run
ends; then it is held against the undisturbed run, and against what the store had called written before every kill.
"""

import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from tests.faults.places import PLACES
from tests.faults.runs import (
    NUM_SAMPLES,
    assert_same,
    bytes_lost,
    command,
    num_recorded,
    records,
    verdicts_made_twice,
)

TIME = "random time"
NUM_TOGETHER = 2  # directories at a time


class Points:
    """Where kills came, and what they cost."""

    def __init__(self):
        self.tried, self.survived, self.directories = Counter(), 0, 0
        self.records_lost = self.bytes_lost = 0

    def __str__(self):
        by_place = ", ".join(f"{place} {number}" for place, number in sorted(self.tried.items()))
        return (
            f"kill -9: {self.tried.total()} points tried ({by_place}) in {self.directories} run directories, "
            f"{self.survived} survived, {self.records_lost} records and {self.bytes_lost} bytes lost"
        )


def draw_fault(rng, passed, seconds, place, is_early):
    """A count that a run of this length may reach at a place, or a moment; without a place, one is drawn as well.

    A directory that has had some kills has less left to do, so counts near the beginning come often, and the places
    that only decoding passes come first.
    """
    place = place or rng.choice(["forward", "forward", "record", "commit", TIME] if is_early else [*PLACES, TIME])
    if place == TIME:
        return {"place": TIME, "seconds": rng.uniform(0.02, seconds)}
    count = 1 + int(min(passed[place], 8 if is_early else 400) * rng.random() ** 2)
    return {"place": place, "count": count, "seconds": rng.uniform(0, 0.003)}


def kill_once(server, arguments, fault, acknowledged):
    """Runs until the fault; whether it came before the end."""
    run = server.start(arguments, fault=fault, acknowledged=str(acknowledged))
    if fault["place"] == TIME:
        deadline = time.monotonic() + fault["seconds"]
        while time.monotonic() < deadline and run.poll() is None:
            time.sleep(0.002)
        run.kill(signal.SIGKILL)
    status = run.wait()
    assert status in (0, -signal.SIGKILL), run.output()
    return status != 0


@pytest.fixture(scope="module")
def calm(server, tmp_path_factory):
    """An undisturbed run for each batch size: its directory, passages of every place, and seconds."""
    folder, found = tmp_path_factory.mktemp("calm"), {}
    for batch_size in (1, 3):
        run_dir, counts = folder / str(batch_size), folder / f"{batch_size}.json"
        started = time.monotonic()
        status, output = server.run(command(run_dir, batch_size=batch_size), counts=str(counts))
        assert status == 0, output
        found[batch_size] = run_dir, Counter(server.read(counts)), time.monotonic() - started
    return found


def torment(server, calm, folder, seed, num_kills):
    """One directory, killed so often and then finished; returns places, and what was lost.

    The first kill of a directory comes at each place in turn; where the run has ended, no more can come.
    """
    rng = Random(seed)
    first = [*PLACES, TIME][seed % (len(PLACES) + 1)]
    batch_size = rng.choice(list(calm))
    calm_dir, passed, seconds = calm[batch_size]
    run_dir, acknowledged = folder / f"run{seed}", folder / f"run{seed}.notes"
    arguments = command(run_dir, batch_size=batch_size)
    places, before = [], 0
    for _ in range(3 * num_kills):
        fault = draw_fault(rng, passed, seconds, None if places else first, len(places) < num_kills // 2)
        if kill_once(server, arguments, fault, acknowledged):
            places.append(fault["place"])
            if rng.random() < 0.5:  # not always: who looks opens the database, and puts its log in order
                assert before <= (before := num_recorded(run_dir))
                assert bytes_lost(run_dir, acknowledged) == (0, 0), f"seed {seed}, after {places}"
        if len(places) == num_kills:
            break
    status, output = server.run(arguments, acknowledged=str(acknowledged))
    assert status == 0, output
    lost = bytes_lost(run_dir, acknowledged)
    assert_same(run_dir, calm_dir)
    assert verdicts_made_twice(acknowledged) == []
    return places, lost


def torment_many(server, calm, folder, seeds, num_kills):
    """All directories; the sum of what they went through."""
    points = Points()
    with ThreadPoolExecutor(NUM_TOGETHER) as pool:
        for places, lost in pool.map(lambda seed: torment(server, calm, folder, seed, num_kills), seeds):
            points.tried.update(places)
            points.survived += len(places)
            points.directories += 1
            points.records_lost += lost[0]
            points.bytes_lost += lost[1]
    return points


@pytest.mark.parametrize(
    ("seeds", "num_kills"),
    [pytest.param(range(7), 8, id="few"), pytest.param(range(100, 120), 12, id="many", marks=pytest.mark.slow)],
)
def test_killed_at_any_instant_a_run_continues_to_the_records_of_a_calm_one(
    server, calm, tmp_path, report, seeds, num_kills
):
    points = torment_many(server, calm, tmp_path, seeds, num_kills)
    report(points)
    assert (points.records_lost, points.bytes_lost) == (0, 0)
    assert points.tried.total() >= 0.8 * len(seeds) * num_kills
    assert set(points.tried) == {*PLACES, TIME}


def test_a_killed_run_leaves_the_verdict_on_every_text_but_the_last(server, calm, tmp_path):
    passed = calm[1][1]["forward"]
    status, _ = server.run(command(tmp_path / "run"), fault={"place": "forward", "count": passed - 1})
    assert status == -signal.SIGKILL
    samples, scores = records(tmp_path / "run")
    assert len(samples) == NUM_SAMPLES - 1
    assert {score.key for score in scores} == {sample.key for sample in samples}
    before = sorted(scores, key=str)
    assert server.run(command(tmp_path / "run"))[0] == 0
    assert_same(tmp_path / "run", calm[1][0])
    assert [score for score in sorted(records(tmp_path / "run")[1], key=str) if score in before] == before


def test_a_batch_and_single_requests_leave_the_same_tokens(calm):
    tokens = [[sample.tokens for sample in records(run_dir)[0]] for run_dir, _, _ in calm.values()]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == NUM_SAMPLES
    assert all(tokens[0])


@pytest.mark.parametrize("place", ["forward", "statement", "file", "record", "verdict"])
def test_every_place_is_on_the_way_of_a_run(calm, place):
    assert all(passed[place] >= 4 for _, passed, _ in calm.values())


def test_a_killed_write_of_a_table_leaves_the_old_one(server, calm, tmp_path):
    arguments = command(tmp_path / "run")
    assert server.run(arguments)[0] == 0
    before = {name: (tmp_path / "run" / name).read_bytes() for name in ("results.csv", "table.md", "run.json")}
    passed = calm[1][1]["file"]
    num_killed = 0
    for count in [4, 5, 7, *range(passed - 13, passed)]:  # first run.json, at the end the two tables
        num_killed += server.run(arguments, fault={"place": "file", "count": count})[0] != 0
        for name, content in before.items():
            there = (tmp_path / "run" / name).read_bytes()
            assert there == content or (name == "run.json" and there.startswith(b"{") and there.endswith(b"}\n"))
    assert num_killed >= 8
    assert server.run(arguments)[0] == 0
    assert not list((tmp_path / "run").glob(".*")), "what was half written is still there"
