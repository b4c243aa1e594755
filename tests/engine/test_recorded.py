"""Recorded forwards give the tokens of forwards that are not recorded (`refusion_eval.engine.recorded`).

A recording on a CPU is the computation itself, run again on the same buffers.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from refusion_eval.api import load_model
from refusion_eval.decoders import DECODERS, autoregressive
from refusion_eval.decoders.autoregressive import AutoregressiveSettings
from refusion_eval.decoders.refusion_slots import RefusionSettings
from refusion_eval.engine import recorded
from refusion_eval.engine.engine import Engine
from refusion_eval.engine.recorded import WIDTHS, RecordedForwards
from refusion_eval.engine.width import time_forwards
from refusion_eval.errors import ConfigError
from refusion_eval.paths import tasks_path
from refusion_eval.types import Readout, Trace
from tests.decoders.goldens import decode_golden
from tests.engine.random_model import VOCAB_SIZE, random_transformer
from tests.engine.test_engine import wander_requests

REFUSION = DECODERS["refusion"].decode
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LONG_PROMPT = [index * index % VOCAB_SIZE for index in range(700)]


@pytest.fixture
def log(monkeypatch):
    """Widths in the order in which they are recorded, and in which they are replayed."""
    monkeypatch.setattr(recorded, "CHECKED_CONTEXT", 5)
    return {"recorded": [], "replayed": []}


@pytest.fixture
def record(log):
    def record(compute):
        width = compute.args[0]
        log["recorded"].append(width)
        compute()

        def replay():
            log["replayed"].append(width)
            compute()

        return replay

    return record


@pytest.fixture
def engines(record) -> tuple[Engine, Engine]:
    model = random_transformer()
    return Engine(model, "sdpa"), Engine(model, "sdpa", record=record)


def test_random_decodings_are_the_same(engines) -> None:
    free, replayed = engines
    for request in wander_requests(8):
        expected = free.run(request.decode, request.prompt, request.settings)
        decoded = replayed.run(request.decode, request.prompt, request.settings)
        assert (decoded.tokens, decoded.trace) == (expected.tokens, expected.trace)


@pytest.mark.parametrize("prompt", [PROMPT, LONG_PROMPT])
@pytest.mark.parametrize("fuse", [True, False])
def test_decoders_give_the_same_tokens_before_and_after_the_buffer_grew(engines, prompt, fuse) -> None:
    free, replayed = engines
    settings = RefusionSettings(
        gen_length=40, slot_size=8, block_size=16, mask_id=VOCAB_SIZE - 1, tau_token=0.0, fuse=fuse
    )
    assert replayed.run(REFUSION, prompt, settings).tokens == free.run(REFUSION, prompt, settings).tokens
    greedy = AutoregressiveSettings(gen_length=30)
    mine = replayed.run(autoregressive.decode, LONG_PROMPT, greedy)
    assert mine.tokens == free.run(autoregressive.decode, LONG_PROMPT, greedy).tokens
    again = replayed.run(REFUSION, prompt, settings)
    assert again.tokens == free.run(REFUSION, prompt, settings).tokens


def test_all_widths_are_recorded_before_the_first_decoding_the_largest_first(engines, log) -> None:
    _, replayed = engines
    for _ in range(2):
        replayed.run(autoregressive.decode, PROMPT, AutoregressiveSettings(gen_length=30))
    assert log["recorded"] == sorted(WIDTHS, reverse=True)
    assert log["replayed"][: len(WIDTHS)] == list(WIDTHS)  # each is checked once
    assert log["replayed"][len(WIDTHS) :] == 2 * ([8] + 29 * [1])


def test_a_buffer_that_grows_is_recorded_again_between_requests(engines, log) -> None:
    _, replayed = engines
    greedy = AutoregressiveSettings(gen_length=2)
    replayed.run(autoregressive.decode, PROMPT, greedy)
    replayed.run(autoregressive.decode, LONG_PROMPT, greedy)
    assert len(log["recorded"]) == 2 * len(WIDTHS)
    replayed.run(autoregressive.decode, PROMPT, greedy)
    assert len(log["recorded"]) == 2 * len(WIDTHS)


def test_a_request_that_outgrows_the_buffer_goes_on_without_recordings(engines, log) -> None:
    free, replayed = engines

    def endless(prompt, settings, trace):
        return (yield from autoregressive.decode(prompt, AutoregressiveSettings(gen_length=settings), trace))

    expected = free.run(endless, PROMPT, 900).tokens  # a number has no num_positions
    assert replayed.run(endless, PROMPT, 900).tokens == expected
    assert len(log["recorded"]) == len(WIDTHS)


def test_a_recording_that_computes_something_else_is_refused(engines, monkeypatch) -> None:
    _, replayed = engines
    monkeypatch.setattr(recorded, "read_rows", lambda *rest: rest[-1].fill_(1e-6))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"recorded forward of 1 rows differs.*--no-cuda-graphs"):
            replayed.run(autoregressive.decode, PROMPT, AutoregressiveSettings(gen_length=2))


def test_where_nothing_can_be_recorded_the_error_says_how_to_go_on() -> None:
    def record(compute):
        raise RuntimeError("Failed to find C compiler")

    model = random_transformer()
    with pytest.raises(ConfigError, match=r"RuntimeError: Failed to find C compiler; run with --no-cuda-graphs"):
        Engine(model, "sdpa", record=record).run(autoregressive.decode, PROMPT, AutoregressiveSettings(gen_length=2))


def test_widths_are_timed_on_the_recorded_path(engines, log) -> None:
    _, replayed = engines
    times = time_forwards(
        replayed.model, "sdpa", widths=(1, 9, 600), context=5, num_rounds=3, recorded=replayed.recorded
    )
    assert {width: len(seconds) for width, seconds in times.items()} == {1: 3, 9: 3, 600: 3}
    assert log["replayed"][len(WIDTHS) :] == [1, 16] * 4


@pytest.mark.parametrize("compatible", [True, False])
def test_goldens_of_the_release_come_out_the_same(shared, record, log, compatible) -> None:
    model = load_model(str(shared / "parity" / "tiny"))
    model.engine.recorded = RecordedForwards(model.engine.model, model.engine._cache, record)
    cases = [json.loads(line) for line in (shared / "parity" / "golden.jsonl").read_text().splitlines()]
    free = load_model(str(shared / "parity" / "tiny"))
    for case in cases[::8]:
        settings = {"release_compatible": compatible, "row_cost": 0.02, "free_rows": 32}
        assert decode_golden(model, case, **settings).tokens == decode_golden(free, case, **settings).tokens
    assert len(log["recorded"]) == len(WIDTHS)


def readouts(forward, random):
    for read in forward.reads:
        num_rows = len(read.rows)
        probs = random.uniform(0.3, 1, (2, num_rows))
        yield Readout(random.integers(0, 1000, num_rows), probs[0], None if read.given is None else probs[1])


TABLE_6 = yaml.safe_load((tasks_path() / "settings" / "refusion.yaml").read_text())["benchmarks"]


@pytest.mark.parametrize("benchmark", TABLE_6)
@pytest.mark.parametrize("cost", [(0, 0.02), (64, 0.01), (128, 0.005), (256, 0.005)])
def test_every_forward_of_table_6_but_the_prefill_fits_a_recording(benchmark, cost) -> None:
    random = np.random.default_rng(0)
    wide = {}
    for fuse in (True, False):
        free_rows, row_cost = cost
        settings = RefusionSettings(
            **TABLE_6[benchmark], mask_id=1000, eos_ids=(1001,), fuse=fuse, free_rows=free_rows, row_cost=row_cost
        )
        decoding = REFUSION(list(range(100)), settings, Trace())
        forward = next(decoding)
        try:
            while True:
                forward = decoding.send(tuple(readouts(forward, random)))
                num_reads = sum(len(read.rows) for read in forward.reads)
                wide[forward.kind] = max(wide.get(forward.kind, 0), len(forward.tokens), num_reads)
        except StopIteration:
            pass
    assert max(wide.values()) <= WIDTHS[-1], wide


@pytest.mark.slow
def test_the_kernels_themselves_decode_the_same_tokens() -> None:
    """In a process of its own, in which they also stand in for the plain functions on the CPU."""
    pytest.importorskip("triton", reason="Triton is not installed")
    command = [sys.executable, "-m", "tests.engine.decode_with_kernels"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("same tokens") == 2
