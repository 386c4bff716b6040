"""A deadline tells how much time is left, and when what is under way is cut off."""

import math
import time

import pytest
from instant import Clock

from tvmconv.deadline import SLACK_FRACTION, SLACK_SECONDS, Deadline, find_earliest


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_the_time_left_is_never_negative(clock):
    deadline = Deadline.after(10.0)
    assert deadline.remaining_seconds == 10.0
    clock.now += 25.0
    assert deadline.remaining_seconds == 0.0
    assert deadline.has_passed


def test_what_is_under_way_is_cut_off_later(clock):
    assert Deadline.after(20.0).cut_off.remaining_seconds == pytest.approx(20.0 * (1 + SLACK_FRACTION) + SLACK_SECONDS)


def test_what_reserves_time_has_no_slack(clock):
    reserving = Deadline.after(20.0).reserve_seconds(5.0)
    assert reserving.remaining_seconds == reserving.cut_off.remaining_seconds == 15.0


def test_without_a_limit_nothing_passes(clock):
    never = Deadline.after(None)
    assert never == Deadline() == never.cut_off
    assert never.remaining_seconds == math.inf
    assert find_earliest(never, Deadline.after(3.0)).remaining_seconds == 3.0
