"""Times are taken in turn, and what deviates in one round is taken again."""

import math
from collections import defaultdict

import pytest

from tvmconv.measure.timing_rounds import measure_in_rounds


class FakeTimer:
    """Milliseconds by key and round; the last one is repeated. Remembers what was measured in each round."""

    def __init__(self, **seconds):
        self.seconds, self.count, self.rounds = seconds, defaultdict(int), []

    def __call__(self, keys):
        self.rounds.append("".join(keys))
        return [self.next(key) for key in keys]

    def next(self, key):
        own = self.seconds[key]
        self.count[key] += 1
        return own[min(self.count[key], len(own)) - 1]


def measured(timer, **how):
    keys = list(timer.seconds)
    return dict(zip(keys, measure_in_rounds(keys, timer, lambda ms: ms / 1e3, **how), strict=True))


def test_all_are_measured_in_turn_for_three_rounds():
    timer = FakeTimer(a=[10, 10.2, 9.9], b=[5], c=[7])
    found = measured(timer)
    assert timer.rounds == ["abc"] * 3
    assert [found[key].median_measurement for key in "abc"] == [10, 5, 7]
    assert all(rounds.is_stable for rounds in found.values())


@pytest.mark.parametrize("outlier", range(3))
def test_a_round_that_deviates_is_repeated_and_decides_nothing(outlier):
    seconds = [29.0, 28.0, 30.0]
    seconds[outlier] = 58.0
    timer = FakeTimer(a=[*seconds, 28.5], b=[20.0])
    found = measured(timer)
    assert timer.rounds == ["ab", "ab", "ab", "a"]
    assert found["a"].is_stable
    assert 28.0 <= found["a"].median_measurement <= 30.0
    assert 58.0 not in found["a"].agreeing_measurements
    assert found["a"].measurements == (*seconds, 28.5)


def test_what_never_agrees_is_measured_a_limited_number_of_times():
    timer = FakeTimer(a=[10, 20, 40, 80, 160, 320, 640], b=[1])
    found = measured(timer)
    assert timer.rounds == ["ab"] * 3 + ["a"] * 3
    assert not found["a"].is_stable
    assert found["a"].median_measurement == 40
    assert found["b"].is_stable


def test_a_deviation_of_ten_percent_is_no_outlier():
    assert len(measured(FakeTimer(a=[10.0, 10.9, 9.1]))["a"].seconds) == 3
    assert len(measured(FakeTimer(a=[10.0, 11.2, 10.0]))["a"].seconds) == 4


def test_what_fails_is_not_measured_again():
    timer = FakeTimer(a=[10, math.inf], b=[1])
    found = measured(timer)
    assert timer.rounds == ["ab", "ab", "b"]
    assert not found["a"].is_stable
    assert found["a"].agreeing_measurements == (10, math.inf)


@pytest.mark.parametrize(("milliseconds", "count"), [(499.0, 3), (500.0, 1), (7000.0, 1)])
def test_a_launch_of_half_a_second_is_timed_in_one_round(milliseconds, count):
    timer = FakeTimer(a=[milliseconds], b=[1.0])
    found = measured(timer)
    assert timer.count == {"a": count, "b": 3}
    assert found["a"].is_stable
    assert found["a"].median_measurement == milliseconds
