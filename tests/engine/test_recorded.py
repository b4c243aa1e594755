"""Recorded forwards give the tokens of forwards that are not recorded (`refusion_eval.engine.recorded`).

A recording on a CPU is the computation itself, run again on the same buffers.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from refusion_eval import cli
from refusion_eval.api import load_model
from refusion_eval.decoders import DECODERS, autoregressive
from refusion_eval.decoders.autoregressive import AutoregressiveSettings
from refusion_eval.decoders.refusion import RefusionSettings
from refusion_eval.engine import recorded
from refusion_eval.engine.engine import Engine, Request
from refusion_eval.engine.readout import ReadPlan
from refusion_eval.engine.recorded import WIDTHS, RecordedForwards, Staging
from refusion_eval.engine.request import ActiveRequest
from refusion_eval.engine.width import time_forwards
from refusion_eval.errors import ConfigError
from refusion_eval.models import fused
from refusion_eval.models.cache import KVCache
from refusion_eval.models.choices import MATRICES, SPLIT, Choices, Product, Switches
from refusion_eval.models.transformer import Transformer
from refusion_eval.paths import tasks_path
from refusion_eval.types import Commit, Forward, Read, Readout, Response, Trace, causal
from tests.decoders.baselines import assert_equals_golden, golden_case, golden_model
from tests.decoders.goldens import decode_golden, golden_settings
from tests.decoders.test_d2f import GOLDENS, golden_request
from tests.engine.random_model import EXPERTS, OF_THIS_TRANSFORMER, VOCAB_SIZE, random_transformer
from tests.engine.test_engine import wander, wander_requests

REFUSION = DECODERS["refusion"].decode
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LONG_PROMPT = [index * index % VOCAB_SIZE for index in range(1100)]


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


def tokens_of(results) -> dict[int, tuple[int, ...]]:
    return {index: decoded.tokens for index, decoded in results}


def test_random_decodings_are_the_same(engines) -> None:
    free, replayed = engines
    for request in wander_requests(8):
        expected = free.run(request.decode, request.prompt, request.settings)
        decoded = replayed.run(request.decode, request.prompt, request.settings)
        assert (decoded.tokens, decoded.trace) == (expected.tokens, expected.trace)


def test_experts_are_the_same_and_padding_reads_none(record) -> None:
    model = random_transformer(experts=EXPERTS)
    free, replayed = Engine(model, "sdpa"), Engine(model, "sdpa", record=record)
    for request in wander_requests(4):
        expected = free.run(request.decode, request.prompt, request.settings)
        decoded = replayed.run(request.decode, request.prompt, request.settings)
        assert (decoded.tokens, decoded.trace) == (expected.tokens, expected.trace)
        assert decoded.num_experts_read == expected.num_experts_read
    together = dict(replayed.run_many(iter(wander_requests(4)), 3))
    for index, request in enumerate(wander_requests(4)):
        assert together[index].tokens == free.run(request.decode, request.prompt, request.settings).tokens
        assert together[index].num_experts_read is None


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


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_batches_of_random_decodings_are_the_same(engines, batch_size) -> None:
    """Among them are commits that move rows, requests that end early, and forwards of all patterns."""
    free, replayed = engines
    expected = [free.run(request.decode, request.prompt, request.settings) for request in wander_requests(17)]
    together = dict(replayed.run_many(iter(wander_requests(17)), batch_size))
    for index, decoded in enumerate(expected):
        assert (together[index].tokens, together[index].trace) == (decoded.tokens, decoded.trace)


def test_a_batch_replays_narrow_forwards_and_computes_wide_ones_without_padding(engines, log, monkeypatch) -> None:
    free, replayed = engines
    greedy = AutoregressiveSettings(gen_length=6)
    requests = [Request(autoregressive.decode, LONG_PROMPT[start : start + 400], greedy) for start in range(3)]
    expected = tokens_of(free.run_many(requests, 3))
    widths = []
    hidden = recorded.fused_hidden
    monkeypatch.setattr(recorded, "fused_hidden", lambda *args: widths.append(args[2].shape[1]) or hidden(*args))
    monkeypatch.setattr(replayed.model, "hidden", pytest.fail)  # the path of forwards that are not served
    monkeypatch.setattr(RecordedForwards, "_check", lambda self: None)
    assert tokens_of(replayed.run_many(requests, 3)) == expected
    assert log["recorded"] == sorted(WIDTHS, reverse=True)
    assert [width for width in widths if width > WIDTHS[-1]] == [1200]
    assert log["replayed"] == 5 * [4]


def test_a_buffer_of_a_batch_that_grows_is_recorded_again_and_keeps_its_rows(engines, log) -> None:
    free, replayed = engines
    greedy = AutoregressiveSettings(gen_length=30)
    requests = [Request(autoregressive.decode, prompt, greedy) for prompt in (PROMPT, LONG_PROMPT[:500], PROMPT[:3])]
    assert tokens_of(replayed.run_many(requests, 2)) == tokens_of(free.run_many(requests, 2))
    # All widths before the first request, then each that comes.
    again = log["recorded"][len(WIDTHS) :]
    assert set(again) <= set(log["replayed"][len(WIDTHS) :])
    assert 0 < len(again) < 8


@pytest.mark.parametrize("share", [16, 8])
def test_a_batch_whose_buffer_changes_again_and_again_records_two_rounds_at_most(engines, log, share):
    """Four long requests among short ones, in the memory of this many short texts."""
    free, replayed = engines
    long = {3: 600, 8: 700, 13: 800, 18: 900}
    requests = [*wander_requests(21)]
    for index, num_rows in long.items():
        requests[index] = Request(wander, [row % VOCAB_SIZE for row in range(num_rows)], index)
    replayed.kv_budget = int(share * 512 * 2 * 2 * 2 * 8 * 4 / 0.8)
    assert tokens_of(replayed.run_many(requests, 16)) == tokens_of(free.run_many(requests, 16))
    assert len(WIDTHS) < len(log["recorded"]) <= 2 * len(WIDTHS)


def test_batches_of_one_size_are_recorded_once(engines, log) -> None:
    free, replayed = engines
    greedy = AutoregressiveSettings(gen_length=8)
    requests = [Request(autoregressive.decode, LONG_PROMPT[start : start + 50], greedy) for start in range(5)]
    expected = tokens_of(free.run_many(requests, 2))
    abandoned = replayed.run_many(requests, 2)
    first, _ = next(abandoned)  # its buffer is in use
    for _ in range(3):
        assert tokens_of(replayed.run_many(requests, 2)) == expected
    assert tokens_of(abandoned) == {index: tokens for index, tokens in expected.items() if index != first}
    assert len(log["recorded"]) == 2 * len(WIDTHS)
    assert tokens_of(replayed.run_many(requests, 3)) == expected
    assert len(log["recorded"]) == 3 * len(WIDTHS)


def test_rows_that_no_staging_buffer_holds_move_on_their_own(engines, monkeypatch) -> None:
    free, replayed = engines
    settings = RefusionSettings(gen_length=40, slot_size=8, block_size=16, mask_id=VOCAB_SIZE - 1, tau_token=0.0)
    requests = [Request(REFUSION, PROMPT[:length], settings) for length in (3, 8, 5)]
    expected = tokens_of(free.run_many(requests, 3))
    holds = Staging.holds
    monkeypatch.setattr(Staging, "holds", lambda self, width, words, moves: moves == 0 and holds(self, width, words, 0))
    assert tokens_of(replayed.run_many(requests, 3)) == expected


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


def random_choices(seed: int) -> Choices:
    """A table that pads any matrix at any width, leaves out some widths, and has own products and all switches."""
    random = np.random.default_rng(seed)
    products = {
        matrix: {
            int(rows): Product(padded_to=int(random.integers(rows, 513)))
            for rows in random.choice(WIDTHS, 6, replace=False)
        }
        for matrix in MATRICES
    }
    own = {"kernel": "dot", "block_n": 8, "block_k": 4, "num_warps": 4, "num_stages": 2}
    for matrix in random.choice(MATRICES[:-1], 2, replace=False):
        products[matrix] = {40: Product(**own, splits=2 if matrix in SPLIT else 1)}
    switches = {int(random.choice(WIDTHS)): Switches(joins=True, rotates=bool(seed % 2), early=True)}
    return Choices(
        products=products, switches=switches, skipped=tuple(map(int, random.choice(WIDTHS[:-1], 8, replace=False)))
    )


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_the_same_for_any_table(engines, record, log, monkeypatch, seed) -> None:
    """The rows that a product computes for nothing are not numbers here."""
    free, _ = engines
    table = random_choices(seed)
    monkeypatch.setattr(recorded, "choices_for", lambda *of: table)
    replayed = Engine(free.model, "sdpa", record=record)
    settings = RefusionSettings(gen_length=40, slot_size=8, block_size=16, mask_id=VOCAB_SIZE - 1, tau_token=0.0)
    requests = [Request(REFUSION, PROMPT[:length], settings) for length in (3, 8, 5)]
    requests.append(Request(autoregressive.decode, LONG_PROMPT[:40], AutoregressiveSettings(gen_length=9)))
    expected = [free.run(request.decode, request.prompt, request.settings).tokens for request in requests]
    assert [replayed.run(request.decode, request.prompt, request.settings).tokens for request in requests] == expected
    assert list(tokens_of(sorted(replayed.run_many(requests, 3))).values()) == expected
    assert set(log["recorded"]) == set(WIDTHS) - set(table.skipped)


@pytest.mark.parametrize("experts", [None, EXPERTS])
def test_every_own_kernel_of_a_layer_is_launched_early_if_the_table_says_so(monkeypatch, experts) -> None:
    found = set()

    class Early(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names = [argument.name for argument in func._schema.arguments]
            if "early" in names:
                given = dict(zip(names, args, strict=False)) | (kwargs or {})  # defaults are left out
                found.add((func.overloadpacket.__name__, given.get("early", False)))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(fused, "launches_early", lambda device: True)
    monkeypatch.setattr(recorded, "choices_for", lambda *of: Choices(switches={512: Switches(early=True)}))
    engine = Engine(random_transformer(experts=experts), "sdpa", record=lambda compute: compute)
    with Early():
        engine.run(autoregressive.decode, PROMPT, AutoregressiveSettings(gen_length=2))
    assert found == {(name, True) for name in ("add_rms_norm", "rotate_and_store", "attend_rows", "swiglu")}


def test_a_table_cannot_skip_the_last_width(engines, record) -> None:
    model, cache = engines[0].model, KVCache(engines[0].model.config, 1, 64, torch.float32, torch.device("cpu"))
    forwards = RecordedForwards(model, cache, record, (1, 8, 40), Choices(skipped=(1, 8, 40)))
    forwards.reserve(3)
    forwards.prepare()
    assert forwards.cache.capacity == 512


def test_experts_are_the_same_for_any_table(record, monkeypatch) -> None:
    model = random_transformer(experts=EXPERTS)
    monkeypatch.setattr(recorded, "choices_for", lambda *of: random_choices(3))
    free, replayed = Engine(model, "sdpa"), Engine(model, "sdpa", record=record)
    for request in wander_requests(3):
        expected = free.run(request.decode, request.prompt, request.settings)
        decoded = replayed.run(request.decode, request.prompt, request.settings)
        assert (decoded.tokens, decoded.num_experts_read) == (expected.tokens, expected.num_experts_read)


def test_a_request_that_outgrows_the_buffer_goes_on_without_recordings(engines, log, caplog) -> None:
    free, replayed = engines

    def endless(prompt, settings, trace):
        return (yield from autoregressive.decode(prompt, AutoregressiveSettings(gen_length=settings), trace))

    expected = free.run(endless, PROMPT, 1100).tokens  # a number has no num_positions
    decoded = replayed.run(endless, PROMPT, 1100)
    assert decoded.tokens == expected
    assert len(log["recorded"]) == len(WIDTHS)
    assert len(log["replayed"]) - len(WIDTHS) + decoded.trace.num_unrecorded == decoded.num_forwards
    assert decoded.trace.num_unrecorded > 50
    assert caplog.text.count("outgrew the KV buffer of its recorded forwards") == 1
    assert replayed.run(endless, PROMPT, 5).trace.num_unrecorded == 0


def test_padding_of_the_output_head_is_neither_chosen_nor_counted(engines, record) -> None:
    """Rows after the vocabulary, as on CUDA, here with logits that would win."""
    free, _ = engines
    weights = free.model.weights
    padded = torch.cat((weights.head, 100 * weights.final_norm.expand(9, -1), -100 * weights.final_norm.expand(9, -1)))
    model = Transformer(free.model.config, replace(weights, head=padded))
    for temperature in (0.0, 0.7):
        settings = RefusionSettings(
            gen_length=32, slot_size=8, block_size=16, mask_id=VOCAB_SIZE - 1, temperature=temperature
        )
        expected = free.run(REFUSION, PROMPT, settings)
        for engine in (Engine(model, "sdpa"), Engine(model, "sdpa", record=record)):
            decoded = engine.run(REFUSION, PROMPT, settings)
            assert (decoded.tokens, decoded.num_forwards) == (expected.tokens, expected.num_forwards)


def test_a_recording_that_computes_something_else_is_refused(engines, monkeypatch) -> None:
    _, replayed = engines
    monkeypatch.setattr(recorded, "read_rows", lambda *rest: rest[4].fill_(1e-6))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"recorded forward of 1 rows after 5 differs.*--no-cuda-graphs"):
            replayed.run(autoregressive.decode, PROMPT, AutoregressiveSettings(gen_length=2))


def test_a_recording_that_is_wrong_after_many_rows_alone_is_refused(record, log, monkeypatch) -> None:
    model = random_transformer()
    model.config = replace(model.config, max_positions=4096)
    hidden = recorded.fused_hidden

    def forgetful(model, tables, rows_6W, *rest):
        rows_6W[3].clamp_(max=1024)
        return hidden(model, tables, rows_6W, *rest)

    monkeypatch.setattr(recorded, "fused_hidden", forgetful)
    monkeypatch.setattr(recorded, "LONG_CHECKED", (1,))
    monkeypatch.setattr(recorded, "LONG_CONTEXT", 1500)
    short, long = (Engine(model, "sdpa", record=record) for _ in range(2))
    short.recorded.reserve(600)
    short.recorded.prepare()
    long.recorded.reserve(2000)
    with pytest.raises(ConfigError, match="recorded forward of 1 rows after 1500 differs"):
        long.recorded.prepare()


def test_recordings_of_a_long_buffer_are_checked_once_too(engines, monkeypatch) -> None:
    """But not in the middle of a batch, whose rows a check would write over."""
    checked = []
    monkeypatch.setattr(recorded, "LONG", 1024)
    monkeypatch.setattr(RecordedForwards, "_check", lambda self: checked.append(self.cache.capacity))
    forwards = engines[1].recorded
    for num_rows, lazily in ((600, False), (700, False), (1100, True), (1100, False), (1600, True), (2100, False)):
        forwards.reserve(num_rows)
        forwards.prepare(lazily=lazily)
    assert checked == [1024, 1536]


def test_a_check_of_a_long_buffer_comes_after_any_decoding(engines, log, monkeypatch) -> None:
    free, replayed = engines
    monkeypatch.setattr(recorded, "LONG", 1024)
    settings = RefusionSettings(gen_length=40, slot_size=8, block_size=16, mask_id=VOCAB_SIZE - 1, tau_token=0.0)
    assert replayed.run(REFUSION, PROMPT, settings).tokens == free.run(REFUSION, PROMPT, settings).tokens
    greedy = AutoregressiveSettings(gen_length=5)
    expected = free.run(autoregressive.decode, LONG_PROMPT, greedy).tokens
    assert replayed.run(autoregressive.decode, LONG_PROMPT, greedy).tokens == expected
    assert log["replayed"].count(WIDTHS[-1]) >= 2  # each width is checked twice


def test_where_nothing_can_be_recorded_the_error_says_how_to_go_on() -> None:
    def record(compute):
        raise RuntimeError("Failed to find C compiler")

    model = random_transformer()
    with pytest.raises(ConfigError, match=r"RuntimeError: Failed to find C compiler; run with --no-cuda-graphs"):
        Engine(model, "sdpa", record=record).run(autoregressive.decode, PROMPT, AutoregressiveSettings(gen_length=2))


@pytest.mark.parametrize("closes", [False, True])
def test_memory_that_ends_while_forwards_are_recorded_keeps_its_advice(capsys, closes) -> None:
    def record(compute):
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        finally:
            if closes:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    engine = Engine(random_transformer(), "sdpa", record=record)
    assert cli.status_of("run", lambda: engine.run(autoregressive.decode, PROMPT, AutoregressiveSettings())) == 1
    text = capsys.readouterr().err
    assert "kv_budget_gib" in text
    assert "--no-cuda-graphs" not in text


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
    model.engine = Engine(model.engine.model, "sdpa", record=record)
    cases = [json.loads(line) for line in (shared / "parity" / "golden.jsonl").read_text().splitlines()]
    free = load_model(str(shared / "parity" / "tiny"))
    for case in cases[::8]:
        settings = {"release_compatible": compatible, "row_cost": 0.02, "free_rows": 32}
        assert decode_golden(model, case, **settings).tokens == decode_golden(free, case, **settings).tokens
    assert len(log["recorded"]) == len(WIDTHS)


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("compatible", [True, False])
def test_goldens_of_the_release_come_out_of_a_batch(shared, record, log, compatible, every) -> None:
    model = load_model(str(shared / "parity" / "tiny"))
    cases = [json.loads(line) for line in (shared / "parity" / "golden.jsonl").read_text().splitlines()][::every]
    settings = {"release_compatible": compatible, "row_cost": 0.02, "free_rows": 32}
    requests = [Request(REFUSION, case["prompt_ids"], golden_settings(model, case, **settings)) for case in cases]
    together = tokens_of(Engine(model.engine.model, "sdpa", record=record).run_many(requests, 16))
    for number, case in enumerate(cases):
        assert list(together[number]) == (case if compatible else case["fixed"])["output_ids"]
    assert len(log["replayed"]) > 100


@pytest.mark.parametrize("place", range(len(GOLDENS)))
def test_goldens_of_d2f_come_out_of_a_batch(shared, record, log, place) -> None:
    """Each on its own checkpoint, in a batch with all others."""
    cases = [golden_case(shared, *pair) for pair in GOLDENS]
    requests = [golden_request(decoder, case) for (decoder, _), case in zip(GOLDENS, cases, strict=True)]
    engine = Engine(golden_model(shared, cases[place]).engine.model, "sdpa", record=record)
    assert_equals_golden(dict(engine.run_many(requests, 6))[place], cases[place])
    assert len(log["replayed"]) > len(WIDTHS)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in OF_THIS_TRANSFORMER),
        ("idlm", {"temperature": 1.0}),
        ("refusion", {"completion": "verifier", "tau_token": 0.3}),
        ("refusion", {"completion": "verifier", "temperature": 0.7}),
    ],
)
def test_every_decoder_gives_the_same_tokens_in_a_batch(engines, name, changes) -> None:
    free, replayed = engines
    wanted = {"gen_length": 32, "mask_id": VOCAB_SIZE - 1, "eos_ids": (VOCAB_SIZE - 2,), "steps": 8, "block_length": 8}
    wanted |= {"slot_size": 4, "block_size": 8, "tau_token": 0.0} if name == "refusion" else {}
    wanted |= changes
    entry = DECODERS[name]
    settings = entry.Settings(**{key: wanted[key] for key in wanted if key in entry.Settings.__dataclass_fields__})
    requests = [Request(entry.decode, PROMPT[:length], settings) for length in (3, 8, 1, 5)]
    assert tokens_of(replayed.run_many(requests, 3)) == tokens_of(free.run_many(requests, 3))


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
    assert done.stdout.count("same tokens") == 7


def test_numbers_wait_until_those_before_were_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    class Event:
        """Tells which token the buffer on the host begins with when it is recorded and awaited."""

        def record(self) -> None:
            seen.append(("copied", int(staging._numbers[0])))

        def synchronize(self) -> None:
            seen.append(("awaited", int(staging._numbers[0])))

    plain = recorded.host_buffer
    monkeypatch.setattr(recorded, "host_buffer", lambda *given: (*plain(*given)[:2], Event()))
    monkeypatch.setattr(torch, "empty", torch.zeros)  # the first token that is seen
    staging = Staging(torch.device("cpu"))
    for token in (7, 8):
        forward = Forward(tokens=[token], positions=[0], attention=causal(1), reads=())
        staging.send([forward], [0], ReadPlan(()), (1, 1))
    assert seen == [("awaited", 0), ("copied", 7), ("awaited", 7), ("copied", 8)]


def test_traces_and_checks_are_made_while_the_device_computes(record, log, monkeypatch):
    model, events = random_transformer(), log["replayed"]
    engine = Engine(model, "sdpa", record=record)
    settings = AutoregressiveSettings(gen_length=3)
    engine.run(autoregressive.decode, PROMPT, settings)
    events.clear()
    forward, check = Trace.forward, ActiveRequest.check_answers
    monkeypatch.setattr(Trace, "forward", lambda *args: events.append("trace") or forward(*args))
    monkeypatch.setattr(ActiveRequest, "check_answers", lambda active: events.append("check") or check(active))
    engine.run(autoregressive.decode, PROMPT, settings)
    assert events == [8, "check", "trace", 1, "check", "trace", 1, "check", "trace", "check"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("chosen", [5, VOCAB_SIZE])
def test_answers_that_are_not_finite_fail_their_request_alone(record, monkeypatch, bad, chosen, overlap):
    """Also where the token with them is none of the vocabulary, of which the next forward is impossible."""
    model = random_transformer()
    free, replayed = Engine(model, "sdpa"), Engine(model, "sdpa", record=record, overlap=overlap)
    settings = AutoregressiveSettings(gen_length=3)
    expected = free.run(autoregressive.decode, PROMPT[:3], settings).tokens
    read, calls = recorded.read_rows, []

    def broken(*args):
        read(*args)
        calls.append(1)
        if len(calls) == bad + 1:
            args[-1][:, 0] = torch.tensor([float(chosen), float("nan"), 0.5])

    monkeypatch.setattr(RecordedForwards, "_check", lambda self: None)
    requests = [Request(autoregressive.decode, prompt, settings) for prompt in (PROMPT, PROMPT[:3])]

    def begun():
        monkeypatch.setattr(recorded, "read_rows", broken)  # all widths are recorded now
        yield from requests

    outcomes = dict(replayed.run_many(begun(), 2))
    assert str(outcomes[0]) == f"forward {bad} ({'prefill' if bad == 0 else 'decode'}): logits are not finite"
    assert outcomes[1].tokens == expected


OVERLAPPED = {
    "autoregressive": AutoregressiveSettings(gen_length=12),
    "sampled": AutoregressiveSettings(gen_length=12, temperature=1.0, seed=3),
    "fused": RefusionSettings(gen_length=32, slot_size=8, block_size=16, mask_id=VOCAB_SIZE - 1, tau_token=0.0),
}


@pytest.mark.parametrize("batch_size", [2, 5])
@pytest.mark.parametrize("name", OVERLAPPED)
def test_overlap_changes_no_token_and_no_trace(record, monkeypatch, name, batch_size):
    """The host advances one call while the device computes another; the order in which requests end may differ."""
    model, settings = random_transformer(), OVERLAPPED[name]
    free, overlapped = Engine(model, "sdpa"), Engine(model, "sdpa", record=record, overlap=True)
    calls = launches_of(monkeypatch)
    decode = REFUSION if name == "fused" else autoregressive.decode
    requests = [Request(decode, LONG_PROMPT[start : start + 3 + 9 * start], settings) for start in range(9)]
    expected = [free.run(*request) for request in requests]
    together = dict(overlapped.run_many(iter(requests), batch_size))
    for index, decoded in enumerate(expected):
        assert (together[index].tokens, together[index].trace) == (decoded.tokens, decoded.trace)
    assert calls.most_open == 2
    assert (calls.num_fed > 20) == (name == "autoregressive")


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_overlap_of_random_decodings(record, batch_size):
    model = random_transformer()
    free, overlapped = Engine(model, "sdpa"), Engine(model, "sdpa", record=record, overlap=True)
    expected = [free.run(request.decode, request.prompt, request.settings) for request in wander_requests(17)]
    together = dict(overlapped.run_many(iter(wander_requests(17)), batch_size))
    for index, decoded in enumerate(expected):
        assert (together[index].tokens, together[index].trace) == (decoded.tokens, decoded.trace)


@pytest.mark.parametrize("share", [16, 4])
def test_overlap_where_the_buffer_changes(record, share):
    model = random_transformer()
    free, overlapped = Engine(model, "sdpa"), Engine(model, "sdpa", record=record, overlap=True)
    requests = [
        Request(autoregressive.decode, PROMPT[: 1 + n % 8], AutoregressiveSettings(gen_length=9)) for n in range(9)
    ]
    requests[4] = Request(autoregressive.decode, LONG_PROMPT[:700], AutoregressiveSettings(gen_length=9))
    requests[6] = Request(REFUSION, LONG_PROMPT[:500], OVERLAPPED["fused"])
    overlapped.kv_budget = int(share * 512 * 2 * 2 * 2 * 8 * 4 / 0.8)
    assert tokens_of(overlapped.run_many(requests, 4)) == tokens_of(free.run_many(requests, 4))


def test_overlap_keeps_a_token_that_a_decoder_forces(record, monkeypatch):
    """A forward that was launched ahead with another token is dropped, and no more are guessed for this request."""

    def forcing(prompt, settings, trace):
        tokens, forward = [], Forward(prompt, range(len(prompt)), causal(len(prompt)), (Read([len(prompt) - 1]),))
        while len(tokens) < settings:
            (answer,) = yield forward
            token = 5 if len(tokens) == 3 else int(answer.tokens[0])
            tokens.append(token)
            trace.fix((len(tokens) - 1,), (token,))
            num_rows = len(forward.tokens)
            position = forward.positions[-1] + 1
            forward = Forward([token], [position], causal(1), (Read([0]),), Commit(range(num_rows)))
        return Response(tuple(tokens), "length")

    model = random_transformer()
    free, overlapped = Engine(model, "sdpa"), Engine(model, "sdpa", record=record, overlap=True)
    calls = launches_of(monkeypatch)
    requests = [Request(forcing, PROMPT[:length], 9) for length in (3, 5, 8)]
    expected = tokens_of(free.run_many(requests, 3))
    assert all(tokens[3] == 5 for tokens in expected.values())
    together = dict(overlapped.run_many(requests, 3))
    assert tokens_of(together.items()) == expected
    assert {decoded.num_forwards for decoded in together.values()} == {9}
    assert 6 <= calls.num_fed <= 5 * 3


class Launches:
    num_fed = num_open = most_open = 0


def launches_of(monkeypatch):
    """Counts rows that are fed on the device, and the most calls that are under way at once."""
    calls, launch = Launches(), RecordedForwards.launch

    def counted(self, forwards, plan, lengths, sequences=None, fed=None):
        collect = launch(self, forwards, plan, lengths, sequences, fed)
        if collect is None:
            return None
        calls.num_fed += len(fed or ())
        calls.num_open += 1
        calls.most_open = max(calls.most_open, calls.num_open)

        def collected():
            calls.num_open -= 1
            return collect()

        return collected

    monkeypatch.setattr(RecordedForwards, "launch", counted)
    monkeypatch.setattr(RecordedForwards, "_check", lambda self: None)
    return calls


def test_wide_calls_of_a_batch_are_replayed_with_overlap(record, log, monkeypatch):
    """Of their rows those that are read go through the output head."""
    model = random_transformer()
    free, overlapped = Engine(model, "sdpa"), Engine(model, "sdpa", record=record, overlap=True)
    heads = []
    mm = torch.mm
    monkeypatch.setattr(recorded.torch, "mm", lambda a, b, out: heads.append(len(a)) or mm(a, b, out=out))
    greedy = AutoregressiveSettings(gen_length=6)
    requests = [Request(autoregressive.decode, LONG_PROMPT[start : start + 300], greedy) for start in range(3)]
    assert tokens_of(overlapped.run_many(requests, 3)) == tokens_of(free.run_many(requests, 3))
    used = log["replayed"][len(recorded.OVERLAPPED_WIDTHS) :]
    assert used[0] == 1024 > WIDTHS[-1]
    assert max(heads) == recorded.MOST_READ


@pytest.mark.parametrize("is_skipped", [False, True])
def test_a_call_of_one_request_is_never_padded_to_a_width_of_batches(record, is_skipped):
    """There the logits are those of the rows that are read, in the order of the reads."""
    model = random_transformer()
    table = Choices(skipped=(512,) if is_skipped else ())
    cache = KVCache(model.config, 2, 2048, torch.float32, torch.device("cpu"))
    forwards = RecordedForwards(model, cache, record, recorded.OVERLAPPED_WIDTHS, table)
    sampled = Forward([0] * 500, range(500), causal(500), (Read(rows=(499,), temperature=1.0),))
    shape, is_replayed = forwards._shape([sampled], ReadPlan.of([sampled]))
    assert (shape[0], is_replayed) == ((500, False) if is_skipped else (512, True))


def test_no_graph_of_an_old_buffer_is_left(engines):
    _, replayed = engines
    replayed.run(autoregressive.decode, PROMPT, AutoregressiveSettings(gen_length=2))
    before = replayed.recorded.replay
    replayed._cache.resize(1, 2 * replayed._cache.capacity)
    replayed.recorded.prepare(lazily=True)
    assert replayed.recorded.replay is not before
    replayed.recorded.replay()  # repeats nothing
