"""MBU from weights, cache rows and time."""

import pytest

from refusion_eval.errors import DataError
from refusion_eval.metrics.roofline import bytes_read, mbu
from refusion_eval.trace import Trace


def test_each_forward_reads_the_weights_and_the_cache_before_it():
    trace = Trace()
    for cached in (0, 10, 20):
        trace.forward("decode", 1, cached)
    assert bytes_read(trace, weight_bytes=1000, cache_bytes_per_row=8) == 3 * 1000 + 30 * 8


def test_mbu_is_one_when_time_is_spent_reading_only():
    assert mbu([1e9, 2e9], [1.0, 2.0], 1e9).value == 1.0
    assert mbu([1e9, 2e9], [2.0, 4.0], 1e9).value == 0.5


@pytest.mark.parametrize(("seconds", "bandwidth"), [([0.0], 1.0), ([1.0], 0.0)])
def test_mbu_without_time_or_bandwidth_is_refused(seconds, bandwidth):
    with pytest.raises(DataError):
        mbu([1.0], seconds, bandwidth)
