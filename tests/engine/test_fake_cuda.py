"""What a forward costs on CUDA, counted on a machine without a GPU: kernels a layer, copies, and waits.

All decoders run at the shape of an 8B model, alone and in batches, on tensors without storage.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from refusion_eval.decoders import DECODERS
from refusion_eval.engine import recorded
from refusion_eval.engine.engine import Engine, Request
from refusion_eval.engine.readout import ReadPlan
from refusion_eval.engine.recorded import WIDTHS, RecordedForwards
from refusion_eval.models import device as devices
from refusion_eval.models.cache import KVCache
from refusion_eval.types import Decoded, Forward, Read, causal
from tests.engine.fake_cuda import all_switches, fake_cuda, fake_transformer, make_guard, shape_8b
from tests.engine.random_model import EXPERTS, OF_THIS_TRANSFORMER

PROMPT = list(range(40))
SPECIAL = {"mask_id": 151000, "eos_ids": (151001,)}
SETTINGS = {
    "refusion": {
        "slot_size": 8,
        "block_size": 16,
        "tau_slot": 0.6,
        "tau_token": 0.4,
        "row_cost": 0.01,
        "free_rows": 64,
    },
    "llada": {"block_length": 16, "steps": 8},
    "dream": {"steps": 8},
    **{name: {"gen_length": 32} for name in ("d2f_dream", "d2f_llada", "fast_dllm_dream", "fast_dllm_llada")},
}


@pytest.fixture(scope="module", autouse=True)
def _guard(tmp_path_factory):
    make_guard(tmp_path_factory.mktemp("guard"))


def settings_of(name, **more):
    settings_type = DECODERS[name].Settings
    wanted = {"gen_length": 16, **SPECIAL, **SETTINGS.get(name, {}), **more}
    return settings_type(**{key: value for key, value in wanted.items() if key in settings_type.__dataclass_fields__})


@torch.inference_mode()
def one_forward(engine, launches, width):
    """Counts one recorded forward of a width."""
    forward = Forward([1] * width, range(90, 90 + width), causal(width), (Read(range(width), suppress=(7,)),))
    plan = ReadPlan([(forward.reads[0], 0)])
    for counter in (launches.kernels, launches.copies, launches.waits, launches.pageable):
        counter.clear()
    assert engine.recorded.read([forward], plan, [90]) is not None
    return launches.num_kernels


@pytest.mark.parametrize(
    ("width", "bound", "table"), [(1, 10, None), (40, 10, None), (1, 7, all_switches), (40, 7, all_switches)]
)
def test_kernels_of_a_layer_and_copies_of_a_forward(monkeypatch, width, bound, table):
    """A card adds the reductions of products that cuBLAS splits: two more a layer."""
    if table is not None:
        monkeypatch.setattr(recorded, "choices_for", lambda device, config, dtype: table(config))
    kernels = {}
    for num_layers in (1, 3):
        with fake_cuda(monkeypatch) as launches:
            engine = Engine(fake_transformer(shape_8b(num_layers)), "sdpa", record=lambda compute: compute)
            engine.recorded.reserve(500)
            engine.recorded.prepare()
            launches.awaited.clear()
            kernels[num_layers] = one_forward(engine, launches, width)
            assert launches.copies == {"to the device": 1, "to the host": 1}
            assert not launches.pageable
            assert launches.awaited[-1] == 3 * width  # the answers, by an event
            assert not launches.waits
    a_layer = (kernels[3] - kernels[1]) / 2
    assert a_layer == bound
    assert kernels[1] - a_layer <= 5, launches.kernels  # embedding, first norm, output head, and two of the readout


def test_experts_are_chosen_without_a_copy_and_without_waiting(monkeypatch):
    with fake_cuda(monkeypatch) as launches:
        config = replace(shape_8b(2), experts=replace(EXPERTS, layers=frozenset({0, 1})))
        engine = Engine(fake_transformer(config), "sdpa", record=lambda compute: compute)
        engine.recorded.reserve(500)
        engine.recorded.prepare()
        one_forward(engine, launches, 8)
        assert launches.kernels["mix_experts"] == 2
        assert launches.copies == {"to the device": 1, "to the host": 1}
        assert not launches.waits


@pytest.mark.parametrize("name", OF_THIS_TRANSFORMER)
def test_every_decoder_alone(monkeypatch, name):
    with fake_cuda(monkeypatch) as launches:
        engine = Engine(fake_transformer(shape_8b(1)), "sdpa", record=lambda compute: compute)
        settings = settings_of(name)
        engine.recorded.reserve(100)
        engine.recorded.prepare()
        launches.copies.clear()
        decoded = engine.run(DECODERS[name].decode, PROMPT, settings)
        assert launches.copies["to the host"] == decoded.num_forwards
        # Suppressed ids that the readout kernel does not know go to the device once a decoding.
        assert launches.copies["to the device"] - decoded.num_forwards in (0, 1)
        assert not launches.waits


@pytest.mark.parametrize(("sizes", "bound"), [([1] * 32, 11), ([40] * 8, 11), ([40] * 32, 11)])
def test_kernels_of_a_layer_and_copies_of_a_forward_of_a_batch(monkeypatch, sizes, bound):
    """32 rows and 320 are replayed, 1280 are launched one by one."""
    kernels = {}
    for num_layers in (1, 3):
        with fake_cuda(monkeypatch) as launches:
            model = fake_transformer(shape_8b(num_layers))
            cache = KVCache(model.config, 32, 512, model.dtype, model.device)
            forwards = RecordedForwards(model, cache, lambda compute: compute)
            forwards.prepare()
            one = [Forward([1] * size, range(90, 90 + size), causal(size), (Read(range(size)),)) for size in sizes]
            plan = ReadPlan([(one[0].reads[0], first) for first in np.cumsum([0, *sizes[:-1]])])
            for counter in (launches.kernels, launches.copies, launches.waits, launches.pageable):
                counter.clear()
            for sequence in range(3):
                cache.moves.append((sequence, 92, 91))  # rows that stay after the forward before
            with torch.inference_mode():
                assert forwards.read(one, plan, [90] * len(sizes)) is not None
            assert launches.copies == {"to the device": 1, "to the host": 1}
            assert not launches.waits
            kernels[num_layers] = launches.num_kernels
    assert (kernels[3] - kernels[1]) / 2 <= bound
    assert kernels[1] - bound <= (9 if sum(sizes) <= WIDTHS[-1] else 60), launches.kernels  # four move rows


@pytest.mark.parametrize("name", OF_THIS_TRANSFORMER)
def test_every_decoder_in_a_batch(monkeypatch, name):
    with fake_cuda(monkeypatch) as launches:
        engine = Engine(fake_transformer(shape_8b(1)), "sdpa", kv_budget=2**36, record=lambda compute: compute)
        requests = [Request(DECODERS[name].decode, PROMPT[:length], settings_of(name)) for length in (20, 30, 40)]
        results = dict(engine.run_many(requests, 2))
        assert all(isinstance(result, Decoded) for result in results.values()), results
        assert not launches.waits
        more = launches.copies["to the device"] - launches.copies["to the host"] - len(WIDTHS)
        # Suppressed ids that the readout kernel does not know, and rows that move when a request ends.
        assert more <= 1 + len(requests)


@pytest.mark.parametrize("name", ["autoregressive", "refusion", "llada"])
def test_copies_of_a_batch_with_overlap(monkeypatch, name):
    """Each call takes one copy to the device, which brings also what is fed from the last call, and one back."""
    with fake_cuda(monkeypatch) as launches:
        model = fake_transformer(shape_8b(1))
        engine = Engine(model, "sdpa", kv_budget=2**36, record=lambda compute: compute, overlap=True)
        requests = [Request(DECODERS[name].decode, PROMPT[:length], settings_of(name)) for length in (20, 30, 40, 25)]

        def begun():
            for counter in (launches.copies, launches.pageable):
                counter.clear()
            yield from requests

        results = dict(engine.run_many(begun(), 4))
        assert all(isinstance(result, Decoded) for result in results.values()), results
        assert not launches.waits
        assert launches.copies["to the host"] == engine.batch_counts.steps
        assert launches.copies["to the device"] - engine.batch_counts.steps in (0, 1)  # suppressed ids, once
        assert sum(launches.pageable.values()) <= 1


@pytest.mark.parametrize("name", OF_THIS_TRANSFORMER)
def test_every_decoder_in_a_batch_without_recordings(monkeypatch, name):
    with fake_cuda(monkeypatch) as launches:
        engine = Engine(fake_transformer(shape_8b(1)), "sdpa", kv_budget=2**34)
        requests = [Request(DECODERS[name].decode, PROMPT[:length], settings_of(name)) for length in (20, 40)]
        results = dict(engine.run_many(requests, 2))
        assert all(isinstance(result, Decoded) for result in results.values()), results
        assert not launches.waits
        # Tokens and positions, mask or rows of the cache, reads; more where rows move in the cache.
        assert launches.copies["to the device"] <= 5 * launches.copies["to the host"]


def test_a_place_is_zeroed_as_far_as_it_was_used(monkeypatch):
    with fake_cuda(monkeypatch) as launches:
        model = fake_transformer(shape_8b(1))
        engine = Engine(model, "sdpa", kv_budget=2**36, record=lambda compute: compute)
        requests = [Request(DECODERS["autoregressive"].decode, PROMPT, settings_of("autoregressive"))] * 9

        def begun():
            launches.zeroed = 0
            yield from requests

        assert len(dict(engine.run_many(begun(), 3))) == 9
        # 40 rows of the prompt and 16 of the response, when a place is taken again and when its rows move.
        used = (40 + 16) * devices.cache_bytes_per_row(model.config, model.dtype)
        assert 0 < launches.zeroed <= 2 * used * len(requests)


def test_a_gpu_takes_the_times_of_copies_itself(monkeypatch):
    class Event:
        """The k-th of the marks is made after k (k + 1) / 2 milliseconds, so each copy takes longer than the last."""

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            recorded.append(self)

        def elapsed_time(self, other):
            return float(recorded.index(other))

    recorded = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(devices.time, "perf_counter", lambda: 0.0)  # a clock of the host that would be divided by
    with fake_cuda(monkeypatch):
        # The first copy does not count, and the second takes two milliseconds.
        assert devices.copy_bandwidth(torch.device("cuda")) == pytest.approx(2 * devices.COPY_BYTES["cuda"] / 2e-3)
