"""What a benchmark report holds (`refusion_eval.bench`)."""

import json

import pytest

from refusion_eval.bench import bench
from refusion_eval.bench.command import run_bench
from refusion_eval.bench.contest import Entrant, compete
from refusion_eval.bench.profile import ATTENTION, HOST, PARTS
from refusion_eval.engine import masks
from refusion_eval.trace import Trace
from refusion_eval.types import Decoded


def entrant(tokens: tuple[int, ...], seconds: float, like: str | None = None) -> Entrant:
    return Entrant(lambda prompt: Decoded((*tokens, len(prompt)), "length", 2, seconds, Trace()), like)


def test_speeds_are_all_tokens_over_all_seconds_and_tokens_are_compared():
    contest = {"a": entrant((1, 2, 3), 0.5), "b": entrant((1, 2, 3), 1.0, "a"), "c": entrant((1, 2, 4), 1.0, "a")}
    standings = compete(contest, [[0], [0, 0]], num_rounds=3)
    assert standings["a"].tokens_per_second == (8.0, 8.0, 8.0)
    assert standings["b"].median == 4.0
    assert (standings["a"].num_tokens, standings["a"].num_forwards) == (8, 4)
    assert [standings[name].same_tokens for name in "abc"] == [None, True, False]


def test_a_report_on_the_embedded_checkpoint_puts_ratios_first(monkeypatch):
    monkeypatch.setattr(bench, "WIDTHS", (1, 8))
    monkeypatch.setattr(bench, "CONTEXTS", (0,))
    report, text = run_bench(
        "embedded",
        num_prompts=2,
        num_rounds=1,
        settings={"gen_length": 32, "slot_size": 8, "block_size": 32},
        threads=None,
        dtype="float32",
        device="cpu",
        with_baseline=True,
        with_profile=True,
        progress=lambda text: None,
    )
    assert {standing.same_tokens for standing in report.standings.values()} == {True, None}
    assert {name for name in bench.RATIOS if "graphs" not in name} <= set(report.ratios)
    assert report.forwards["least"] <= report.forwards["free rows"] <= report.forwards["unfused"]
    assert report.standings["refusion"].num_forwards == report.forwards["unfused"]
    assert report.ratios["forwards: fused / unfused"] <= 1
    assert all(ratio > 0 for ratio in report.ratios.values())
    as_json = json.loads(json.dumps(report.to_json()))
    assert next(iter(as_json)) == "ratios"
    assert as_json["conditions"]["dtype"] == "float32"
    assert all(speed.same == 1 for speeds in report.batch.values() for speed in speeds.values())
    assert "autoregressive: batch 16 / batch 1" in report.ratios
    assert report.profile.num_forwards == report.standings["refusion fused"].num_forwards
    assert set(report.profile.seconds) == {ATTENTION, HOST, *(part for _, _, part in PARTS)}
    assert sum(report.profile.shares.values()) == pytest.approx(1)
    # The stopwatches are gone.
    assert masks.attend_over.__name__ == "attend_over"
    assert not [name for owner, name, _ in PARTS if "timed" in getattr(owner, name).__qualname__]
    assert "synthetic" in text.splitlines()[0]
    assert text.splitlines()[1].startswith("Ratios")
