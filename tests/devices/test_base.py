import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmconv.devices.device import MAX_BUFFER_SETS, BufferSets, Timing


def test_spread_is_half_the_interquartile_range_over_the_median():
    assert Timing((1.0, 2.0, 4.0, 6.0, 9.0), "", cold=False).spread == pytest.approx((6 - 2) / 2 / 4)


@given(st.integers(1, 10**9), st.integers(0, 10**9))
def test_cold_sets_exceed_twice_the_cache_or_reach_the_limit(set_bytes, cache_bytes):
    sets = BufferSets.choose_count(set_bytes, cache_bytes, cold=True)
    assert sets.num_sets == MAX_BUFFER_SETS or sets.num_sets * set_bytes > 2 * cache_bytes


def test_method_tells_that_too_few_sets_were_allowed():
    assert BufferSets.choose_count(1000, 10**6, cold=True).describe("L2") == (
        "cold L2: 512 sets of buffers in turn, 0.512 MB of the 2 MB that would empty it"
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(69.23e-6, "69.23 µs"), (1.5e-3, "1.5 ms"), (2.0, "2 s"), (1e-9, "0.001 µs")]
)
def test_timing_is_one_line_however_many_samples_it_has(seconds, text):
    timing = Timing((seconds * 0.9, *[seconds] * 300, seconds * 1.1), "by hand", cold=False)
    assert str(timing) == f"{text} ± 0.0% (by hand)"
    assert repr(timing) == f"<Timing {timing}>"
