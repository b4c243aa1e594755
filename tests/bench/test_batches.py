"""Batches are measured as they are, with overlap, and with rows priced by load (`refusion_eval.bench.batches`)."""

from types import SimpleNamespace

import pytest

from refusion_eval import api
from refusion_eval.bench import batches
from refusion_eval.bench.batches import requests_of, speeds_by_way
from refusion_eval.bench.bench import mini_prompts
from refusion_eval.engine.engine import Engine
from refusion_eval.engine.recorded import RecordedForwards, recorder


@pytest.mark.parametrize("decoder", ["autoregressive", "refusion"])
def test_every_way_of_a_batch_is_measured_with_the_same_tokens(monkeypatch, decoder):
    monkeypatch.setattr(RecordedForwards, "_check", lambda self: None)
    model = api.load_model("embedded", device="cpu", dtype="float32", attention="sdpa")
    engine = Engine(model.transformer, "sdpa", record=recorder(model.device))
    loaded = SimpleNamespace(engine=engine, attention="sdpa", cuda_graphs=True, device=model.device)
    more = {"slot_size": 8, "block_size": 16, "fuse": True, "row_cost": 0.002} if decoder == "refusion" else {}
    settings = api.decoder_settings(model, decoder, gen_length=16, **more)
    speeds = speeds_by_way(loaded, requests_of(decoder, settings, mini_prompts(model, 6)), 3)
    ways = ["batch 1", "batch 3", "batch 3, overlap"]
    if decoder == "refusion":
        ways += [f"{way}, rows priced by load" for way in ways[1:]]
    assert list(speeds) == ways
    assert all(speed.same == 1 for speed in speeds.values())
    assert speeds["batch 1"].requests_a_step == 1
    assert all(1 < speeds[way].requests_a_step <= 3 for way in ways[1:])
    assert all(speed.rows_a_step >= speed.requests_a_step for speed in speeds.values())
    assert all(0 <= speed.host_share <= 1 for speed in speeds.values())
    assert speeds["batch 3"].steps < speeds["batch 1"].steps
    assert engine.load_curve is None


def test_rows_priced_by_load_are_compared_with_single_requests(monkeypatch):
    model = api.load_model("embedded", device="cpu", dtype="float32", attention="sdpa")
    settings = api.decoder_settings(model, "refusion", gen_length=8, slot_size=8, block_size=8, fuse=True)
    loaded = SimpleNamespace(engine=model.engine, attention="sdpa", cuda_graphs=False, device=model.device)

    def timed(engine, requests, size):
        return [(1 if engine.load_curve is None else 2,)] * len(requests), 1.0, None

    monkeypatch.setattr("refusion_eval.bench.batches._timed", timed)
    monkeypatch.setattr("refusion_eval.bench.batches.time_forwards", lambda *args, **more: {1: [1.0], 2: [2.0]})
    speeds = speeds_by_way(loaded, requests_of("refusion", settings, mini_prompts(model, 2)), 2)
    assert {name: speed.same for name, speed in speeds.items()} == {
        "batch 1": 1,
        "batch 2": 1,
        "batch 2, rows priced by load": 0,
    }


def test_every_way_of_a_batch_follows_one_table(monkeypatch):
    model = api.LoadedModel.open("embedded", device="cpu", dtype="float32", attention="sdpa")
    engine, given = (SimpleNamespace(model=None, recorded=SimpleNamespace(choices=of)) for of in ("decided", "shipped"))
    loaded = SimpleNamespace(engine=engine, attention="sdpa", cuda_graphs=True, device=model.device)
    monkeypatch.setattr(batches, "Engine", lambda *_, **options: given)
    monkeypatch.setattr(
        batches, "_measure", lambda ways, *_: {way: one.recorded.choices for way, (one, _) in ways.items()}
    )
    assert set(speeds_by_way(loaded, [], 3).values()) == {"decided"}
