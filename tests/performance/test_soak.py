"""Many requests in one process leak no memory and change no result (`performance/soak.py`)."""

from dataclasses import replace

import pytest
import soak as soaking
import torch
from soak import Moment, SoakReport, SoakSettings, soak

from refusion_eval.api import LoadedModel
from refusion_eval.engine.engine import Engine
from refusion_eval.errors import ConfigError
from refusion_eval.paths import embedded_path

SHORT = SoakSettings(num_requests=60, round_size=20, max_batch=4, max_prompt=24, max_gen=16)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel.open(str(embedded_path("refusion")), dtype="float32", device="cpu")


def test_nothing_grows_and_nothing_drifts(model):
    told = []
    report = soak(model, SHORT, told.append)
    assert [moment.requests for moment in report.moments] == [0, 20, 40, 60]
    assert tuple(told) == tuple(report.moments[1:])
    assert set(report.decoded) == set(model.decoders)
    assert sum(report.decoded.values()) == 60
    assert (report.failed, report.drifted) == (0, 0)
    assert report.tokens > 240
    # The cache of single requests grows to the longest; beside it, masks of up to 57 rows are kept, 16 at most.
    rest = [moment.tensor_bytes - moment.cache_bytes for moment in report.moments]
    assert max(rest) - rest[0] <= 16 * 4 * 57**2


def test_a_leak_shows(model, monkeypatch):
    kept = []
    compute = Engine._compute
    monkeypatch.setattr(Engine, "_compute", lambda *args: (kept.append(torch.zeros(1000)), compute(*args))[1])
    monkeypatch.setattr(soaking, "MOST_GROWTH", 4000 * 20)
    report = soak(model, replace(SHORT, num_requests=100), lambda _: None)
    assert report.leaks
    assert "a leak" in report.in_words()


def test_a_result_that_drifts_shows(model, monkeypatch):
    compute, calls = Engine._compute, []

    def wrong_after_a_while(*args):
        calls.append(1)
        readouts = compute(*args)
        if len(calls) > 150:
            for readout in readouts:
                readout.tokens[:] = 7
        return readouts

    monkeypatch.setattr(Engine, "_compute", wrong_after_a_while)
    assert soak(model, SHORT, lambda _: None).drifted > 0


def test_growth_is_the_slope_of_the_later_half():
    # The first half rises to where caches are warm, which is no leak.
    later = [(1000, 50), (2000, 60), (3000, 70), (4000, 80)]
    moments = [Moment(n, 0.0, size, 0, 0, 0, 0) for n, size in [(0, 0), (500, 45), (700, 49), *later]]
    report = SoakReport(conditions={}, moments=moments, decoded={}, failed=0, tokens=0)
    assert report.growth("host_bytes") == pytest.approx(10)
    assert not report.leaks


def test_few_rounds_have_no_slope():
    moments = [Moment(n, 0.0, n, 0, 0, 0, 0) for n in (0, 10)]
    report = SoakReport(conditions={}, moments=moments, decoded={}, failed=0, tokens=0)
    assert "too few rounds" in report.in_words()
    assert report.to_json()["growth_per_1000_requests"]["host_bytes"] is None


def test_a_number_of_requests_below_one_is_refused():
    with pytest.raises(ConfigError, match="num_requests=0"):
        SoakSettings(num_requests=0)
