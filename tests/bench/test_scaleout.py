"""The figure of several processes; the processes themselves are tested in tests/scaleout."""

import json

import pytest

from refusion_eval.bench.scaleout import ScaleOutReport, ScaleOutSettings, measure_scaleout
from refusion_eval.errors import ConfigError


def test_the_ratio_is_the_median_of_rounds_and_is_printed_with_its_range():
    report = ScaleOutReport(
        settings=ScaleOutSettings(num_prompts=6),
        alone_seconds=[4.0, 6.0, 5.0],
        together_seconds=[2.0, 4.0, 2.6],
        num_tokens=100,
        shares=[9, 9],
    )
    assert report.ratio == pytest.approx(5.0 / 2.6)
    assert "speed-up 1.92 of 2 (1.50 to 2.00)" in report.text()
    assert json.loads(json.dumps(report.to_json()))["ratio"] == report.ratio


def test_one_process_has_nothing_to_be_compared_with():
    with pytest.raises(ConfigError, match="--processes 1"):
        ScaleOutSettings(num_processes=1)


def test_two_processes_are_started_and_both_decode():
    report = measure_scaleout(ScaleOutSettings(num_prompts=6, num_rounds=1, gen_length=16))
    assert sum(report.shares) == 6
    assert len(report.shares) == 2
    assert report.num_tokens > 0
    assert report.ratio > 0
