"""The benchmark of several processes; the processes themselves are tested in tests/scaleout."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from independent import IndependentProcesses, balanced_shares
from scaleout import ScaleOutReport, ScaleOutSettings, measure_scaleout

from refusion_eval.errors import ConfigError, ScaleOutError
from refusion_eval.runs.model_args import parse_model_args
from refusion_eval.runs.system import System


def test_ratios_are_medians_of_rounds_and_are_printed_with_their_range():
    report = ScaleOutReport(
        settings=ScaleOutSettings(num_prompts=6),
        alone_seconds=[4.0, 6.0, 5.0],
        independent_seconds=[2.0, 3.0, 2.5],
        independent_first_seconds=[1.9, 2.4, 2.0],
        independent_processor_shares=[0.99, 0.93, 0.97],
        together_seconds=[2.5, 4.0, 2.6],
        num_tokens=100,
        shares=[9, 9],
        conditions={"cores": 2, "load_before": 0.1, "load_after": 1.9},
    )
    assert report.ratio == pytest.approx(1.6)
    assert report.independent_ratio == pytest.approx(2.0)
    assert report.share_of_independent == pytest.approx(0.8)
    assert "2 independent processes reach 2.00 of 2 here (2.00 to 2.00)" in report.text()
    assert "was done after 80% of the time, and each had a processor for 93% of it or more" in report.text()
    assert "speed-up 1.60 of 2 (1.50 to 1.92), 80% of what independent processes reach (0.75 to 0.96)" in report.text()
    assert "2 cores, load 0.1 before and 1.9 after" in report.text()
    assert json.loads(json.dumps(report.to_json()))["share_of_independent"] == report.share_of_independent


@given(seconds=st.lists(st.floats(0.01, 100), max_size=40), num_shares=st.integers(1, 5))
def test_balanced_shares_divide_all_requests_and_none_could_give_its_shortest_away(seconds, num_shares):
    shares = balanced_shares(seconds, num_shares)
    assert sorted(number for share in shares for number in share) == list(range(len(seconds)))
    sums = [sum(seconds[number] for number in share) for share in shares]
    for share, total in zip(shares, sums, strict=True):
        if share:
            assert total - min(seconds[number] for number in share) <= min(sums) * (1 + 1e-9)


def test_an_independent_process_that_fails_is_an_error():
    system = System(parse_model_args({"pretrained": "embedded", "gen_length": 16}))
    with pytest.raises(ScaleOutError, match="ended with status"), IndependentProcesses(system, [], 1) as processes:
        processes.decode([[0]])


def test_one_process_has_nothing_to_be_compared_with():
    with pytest.raises(ConfigError, match="--processes 1"):
        ScaleOutSettings(num_processes=1)


@pytest.mark.slow
def test_two_processes_are_started_and_both_decode():
    report = measure_scaleout(ScaleOutSettings(num_prompts=6, num_rounds=1, gen_length=16))
    assert sum(report.shares) == 6
    assert len(report.shares) == 2
    assert report.num_tokens > 0
    assert min(report.ratio, report.independent_ratio, report.share_of_independent) > 0
