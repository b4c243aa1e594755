"""Where forwards go, from recorded steps: by block, by part of the response, and by draft."""

import json

import pytest
from typer.testing import CliRunner

from refusion_eval.cli import app
from refusion_eval.errors import StoreError
from refusion_eval.results.steps import read_steps, steps_cells, steps_table
from refusion_eval.types import Trace
from tests.results.conftest import sample

SETTINGS = {"block_size": 4, "slot_size": 2}


def by_blocks(*blocks):
    """A trace whose blocks of four positions are filled by so many tokens a forward."""
    trace = Trace()
    for number, sizes in enumerate(blocks):
        position = 4 * number
        for size in sizes:
            trace.forward("predict", 4, 0)
            trace.fix(range(position, position + size), [7] * size)
            position += size
    trace.stop("length", 4 * len(blocks))
    return trace


def decoded(number, trace, **more):
    cost = {
        "num_forwards": trace.num_forwards,
        "num_tokens": len(trace.fixed_at()),
        "tokens": [7] * len(trace.fixed_at()),
    }
    return sample(number, trace=trace.to_json(), **cost | {"settings": SETTINGS} | more)


def test_forwards_count_for_the_blocks_whose_positions_they_fix(write_run):
    traces = [by_blocks([4], [1, 1, 1, 1], [2, 2]), by_blocks([4], [4], [3, 1])]
    (found,) = read_steps([write_run("run", [decoded(number, trace) for number, trace in enumerate(traces)])])
    assert (found.n, found.block, found.forwards) == (2, 4, (7 + 4) / 2)
    # Blocks of 1, 4, 2, 1, 1 and 2 forwards, of which the dearest one is a fifth.
    assert found.forwards_of_block == pytest.approx(11 / 6)
    assert found.dearest_fifth == pytest.approx(100 * 4 / 11)
    assert found.without_gain == pytest.approx(100 / 6)
    assert found.in_few == pytest.approx(500 / 6)
    assert found.tpf_by_part == pytest.approx((8 / 2, 8 / 5, 8 / 4))
    assert (found.accepted, found.accepted_by_place) == (None, ())


def test_a_forward_that_fixes_nothing_counts_for_the_block_of_the_next(write_run):
    trace = Trace()
    for positions in ((), range(4), (), (), range(4, 8), ()):
        trace.forward("verify", 4, 0)
        trace.fix(positions, [7] * len(positions))
    trace.stop("eos", 8)
    (found,) = read_steps([write_run("run", [decoded(0, trace)])])
    assert (found.forwards, found.forwards_of_block) == (6, 3)
    assert found.dearest_fifth == pytest.approx(100 * 4 / 6)


def test_drafts_are_counted_by_their_place_in_the_slot(write_run):
    trace = Trace()
    trace.forward("plan", 4, 0)
    trace.draft([0, 1, 2, 3], [5, 5, 5, 5])
    trace.forward("verify", 4, 0)
    trace.fix([0, 1, 2], [5, 5, 6])  # the third is another token than was drafted
    trace.draft([3], [9])  # and the fourth is drafted again
    trace.forward("verify", 1, 0)
    trace.fix([3], [9])
    trace.stop("length", 4)
    (found,) = read_steps([write_run("run", [decoded(0, trace)])])
    assert found.accepted == pytest.approx(100 * 3 / 5)
    assert found.accepted_by_place == pytest.approx((50, 200 / 3))
    (without,) = read_steps([write_run("other", [decoded(0, trace, settings={})])])
    assert without.block == 32
    assert without.accepted_by_place == (100, 100, 0, 0)


def test_positions_are_ranked_by_the_first_score_that_they_or_their_slots_had(write_run):
    trace = Trace()
    trace.forward("plan", 6, 0)
    trace.select("slot", [0, 2, 4], [0.9, 0.2, 0.5], [0])
    trace.fix([0, 1], [7, 7])
    trace.forward("plan", 4, 0)
    trace.select("slot", [2, 4], [0.99, 0.6], [4])  # the first score counts
    trace.fix([4, 5], [7, 7])
    for position in (2, 3):
        trace.forward("verify", 2, 0)
        trace.fix([position], [7])
    trace.stop("length", 6)
    (found,) = read_steps([write_run("run", [decoded(0, trace)])])
    assert found.tpf_by_score == pytest.approx((1, 2, 2))
    (without,) = read_steps([write_run("other", [decoded(0, by_blocks([4]))])])
    assert without.tpf_by_score == ()
    at_random = decoded(0, trace, settings=SETTINGS | {"remasking": "random"})
    assert read_steps([write_run("random", [at_random])])[0].tpf_by_score == ()


def test_table_and_files_have_a_line_for_each_task_with_steps(write_run):
    samples = [decoded(0, by_blocks([4], [2, 2])), decoded(1, by_blocks([4]), task="mini_math")]
    run = write_run("run", [*samples, sample(2, task="mini_mbpp", trace=None)])
    found = read_steps([run])
    columns, rows = steps_cells(found)
    assert [dict(zip(columns, row, strict=True))["task"] for row in rows] == ["mini_gsm8k", "mini_math"]
    assert "| mini_gsm8k | 1 | 3.0 | predict 3.0 | 4 | 1.5 |" in steps_table(found).markdown()
    done = CliRunner().invoke(app, ["speed", str(run), "--steps", "--json"])
    assert [row["tpf_by_part"] for row in json.loads(done.stdout)] == ["4|2.4|2", "4|4|4"]


def test_short_answers_have_no_parts_and_sealed_ones_no_drafts(write_run):
    trace = Trace()
    trace.forward("plan", 1, 0)
    trace.draft([0], [0])
    trace.fix([0], [0])
    trace.stop("eos", 1)
    settings = {"block_length": 0, "slot_size": 0}
    (found,) = read_steps([write_run("run", [decoded(0, trace, settings=settings, tokens=None)])])
    assert (found.block, found.tpf_by_part, found.accepted) == (32, (), None)
    assert steps_table([found]).markdown()


def test_runs_without_steps_are_one_line(write_run):
    with pytest.raises(StoreError, match="no answer has recorded steps"):
        read_steps([write_run("run", [sample(0, trace=None)])])
