"""What whole benchmarks cost (`refusion_eval.results.cost`)."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion_eval.benchmarks import BENCHMARKS
from refusion_eval.errors import StoreError
from refusion_eval.results.cost import HOUR, cost_csv, cost_table, projected, published_table, share_out
from refusion_eval.results.measurement import TASKS
from tests.results.conftest import sample


def test_static_shards_wait_for_the_slowest_and_pulling_workers_do_not():
    # Every second request is long, so one of two static shards gets all of them.
    share = share_out([9 * HOUR, HOUR] * 4, 2)
    assert (share.pulled, share.sharded) == (20, 36)


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=50), st.integers(1, 8))
def test_pulling_loses_one_request_at_most(seconds, workers):
    share = share_out(seconds, workers)
    even = sum(seconds) / workers / HOUR
    assert even - 1e-9 <= share.pulled <= even + max(seconds) / HOUR + 1e-9
    assert share.sharded >= even - 1e-9


def test_a_pilot_is_projected_to_the_whole_benchmark(write_run):
    samples = [sample(item, seconds=seconds) for item, seconds in enumerate((1.0, 1.0, 4.0))]
    run = write_run("pilot", [*samples, sample(3, seconds=50.0, batch_size=8)])
    (cost,) = projected([run], (1, 8))
    assert (cost.n, cost.items, cost.seconds.value) == (3, BENCHMARKS["gsm8k"].source.num_rows, 2.0)
    alone, eight = cost.shares
    assert alone.pulled == pytest.approx(alone.sharded)
    assert alone.pulled == pytest.approx(2.0 * cost.items / HOUR, rel=0.1)
    assert alone.pulled / 8 <= eight.pulled <= alone.pulled / 8 + 4.0 / HOUR
    table = cost_table([cost]).markdown()
    assert "synthetic look-alikes" in table
    rows = list(csv.DictReader(io.StringIO(cost_csv([cost]))))
    assert [row["workers"] for row in rows] == ["1", "8"]
    assert float(rows[1]["hours_pulled"]) == pytest.approx(eight.pulled, rel=1e-4)


def test_several_tasks_have_a_sum(write_run):
    run = write_run("pilot", [sample(1), sample(2, task="mini_mbpp")])
    costs = projected([run], (1,))
    total = cost_table(costs).rows[-1]
    assert total[1] == "all"
    assert total[3] == f"{BENCHMARKS['gsm8k'].source.num_rows + BENCHMARKS['mbpp'].source.num_rows:,}"


def test_runs_of_one_system_are_added_up_apart(write_run):
    both = [sample(1), sample(2, task="mini_mbpp")]
    costs = projected([write_run("plain", both), write_run("other", both)], (1,))
    totals = [row for row in cost_table(costs).rows if row[1] == "all"]
    assert [row[0] for row in totals] == ["ReFusion [plain]", "ReFusion [other]"]
    assert totals[0][2:] == totals[1][2:]


def test_a_run_without_samples_decoded_alone_is_refused(write_run):
    run = write_run("batch", [sample(1, batch_size=4)])
    with pytest.raises(StoreError, match="decoded alone"):
        projected([run], (1,))


def test_published_systems_by_their_printed_seconds():
    table = published_table((1, 8))
    by_system = {row[0]: row for row in table.rows}
    assert len(by_system) == len(table.rows) == 11
    # Table 9 of the second version, times the items of each benchmark.
    seconds = {
        "LLaDA-8B-Instruct": (13.81, 32.86, 9.02, 10.13, 4.71, 26.85, 27.65),
        "ReFusion": (2.35, 0.07, 1.74, 2.17, 0.14, 0.63, 0.48),
        # Tokens of LLaDA over the throughput of Table 1.
        "LLaDA w/ D2F": (251 / 44.54, 1 / 3.70, 247 / 82.59, 242 / 59.48, 9 / 23.84, 334 / 96.90, 82 / 53.85),
    }
    for system, of_tasks in seconds.items():
        hours = sum(one * BENCHMARKS[task].source.num_rows for one, task in zip(of_tasks, TASKS, strict=True)) / HOUR
        assert float(by_system[system][3]) == pytest.approx(hours, rel=0.01)
        assert float(by_system[system][4]) == pytest.approx(hours / 8, rel=0.01)
    assert by_system["ReFusion"][1] == "printed"
    assert by_system["LLaDA w/ D2F"][1] == "tokens of LLaDA-8B-Instruct / TPS"
