"""The report of `refusion-eval bench`."""

import json
from types import SimpleNamespace

import pytest
import torch

from refusion_eval.bench import batches, bench
from refusion_eval.bench.batches import BatchSpeed
from refusion_eval.bench.bench import System, _same_text, compare, run_bench
from refusion_eval.bench.profiling import HOST
from refusion_eval.engine.batch import BatchCounts
from refusion_eval.types import Decoded, Trace


def system(tokens: tuple[int, ...], seconds: float, same_tokens_as: str | None = None) -> System:
    return System(lambda prompt: Decoded((*tokens, len(prompt)), "length", 2, seconds, Trace()), same_tokens_as)


def test_speeds_are_all_tokens_over_all_seconds_and_tokens_are_compared():
    systems = {"a": system((1, 2, 3), 0.5), "b": system((1, 2, 3), 1.0, "a"), "c": system((1, 2, 4), 1.0, "a")}
    speeds = compare(systems, [[0], [0, 0]], num_rounds=3)
    assert speeds["a"].tokens_per_second == (8.0, 8.0, 8.0)
    assert speeds["b"].median == 4.0
    assert (speeds["a"].num_tokens, speeds["a"].num_forwards) == (8, 4)
    assert [speeds[name].num_same for name in "abc"] == [None, 2, 0]
    assert [_same_text(speeds[name], "float32") for name in "abc"] == ["", "same", "DIFFERENT"]
    texts = [_same_text(speeds[name], "bfloat16") for name in "abc"]
    assert texts == ["", "bfloat16: 2 of 2 prompts", "bfloat16: 0 of 2 prompts"]
    assert speeds["a"].joules_per_token is None


def test_energy_is_that_of_all_rounds_over_their_tokens_and_is_never_guessed():
    measured = iter([6.0, 2.0, 5.0, 3.0])
    counted = System(lambda prompt: Decoded((1, 2), "length", 2, 1.0, Trace(), joules=next(measured)))
    assert compare({"a": System(counted.run)}, [[0]], num_rounds=3)["a"].joules_per_token == 10 / 6  # one warms up
    partly = iter([1.0, 1.0, None])
    unknown = System(lambda prompt: Decoded((1, 2), "length", 2, 1.0, Trace(), joules=next(partly)))
    assert compare({"a": unknown}, [[0]], num_rounds=2)["a"].joules_per_token is None


def test_a_report_on_the_embedded_checkpoint_puts_ratios_first(monkeypatch):
    monkeypatch.setattr(bench, "WIDTHS", (1, 8))
    monkeypatch.setattr(bench, "CONTEXTS", (0,))
    report, text = run_bench(
        "embedded",
        extent={"num_prompts": 2, "num_rounds": 1, "gen_length": 32},
        settings={"slot_size": 8, "block_size": 32},
        threads=None,
        dtype="float32",
        device="cpu",
        with_profile=True,
        progress=lambda text: None,
    )
    assert {speed.num_same for speed in report.speeds.values()} == {2, None}
    assert {name for name in bench.RATIOS if "graphs" not in name} <= set(report.ratios)
    assert report.forwards["least"] <= report.forwards["free rows"] <= report.forwards["unfused"]
    assert report.speeds["refusion"].num_forwards == report.forwards["unfused"]
    assert report.ratios["forwards: fused / unfused"] <= 1
    assert all(ratio > 0 for ratio in report.ratios.values())
    as_json = json.loads(json.dumps(report.to_json()))
    assert list(as_json)[:3] == ["ratios", "conditions", "standings"]
    assert as_json["conditions"]["dtype"] == "float32"
    assert all(speed.same == 1 for speeds in report.batch.values() for speed in speeds.values())
    assert {"seconds", "num_forwards", "unwatched"} < set(as_json["profile"])
    assert "autoregressive: batch 16 / batch 1" in report.ratios
    assert report.profile.num_forwards == report.speeds["refusion fused"].num_forwards
    assert 0 < sum(report.profile.seconds.values()) <= report.profile.watched
    assert list(report.profile.seconds.values()) == sorted(report.profile.seconds.values(), reverse=True)
    assert "aten::addmm" in report.profile.counts or "aten::mm" in report.profile.counts
    assert HOST in text
    assert "synthetic" in text.splitlines()[0]
    assert text.splitlines()[1].startswith("Ratios")


class _SlowSetUp:
    """An engine that takes 100 s until it takes a request, and then 2 s for each."""

    model = SimpleNamespace(device=torch.device("cpu"))
    batch_counts = BatchCounts(steps=4, requests=6, rows=10, waited_seconds=1.5)

    def __init__(self):
        self.now = 0.0

    def run_many(self, requests, batch_size):
        self.now += 100
        for index, _ in enumerate(requests):
            self.now += 2
            yield index, Decoded((1, 2, 3, 4), "length", 1, 2.0, Trace())


def test_the_speed_of_a_batch_leaves_out_the_set_up_of_its_buffer(monkeypatch):
    engine = _SlowSetUp()
    monkeypatch.setattr(batches.time, "perf_counter", lambda: engine.now)
    speeds = batches.batch_speeds(engine, batches.requests_of("refusion", None, [[0]] * 3), (1, 16))
    assert {size: speed.tokens_per_second for size, speed in speeds.items()} == {1: 2.0, 16: 2.0}
    assert speeds[16] == BatchSpeed(2.0, 1.0, None, 4, 1.5, 2.5, pytest.approx(0.75))
