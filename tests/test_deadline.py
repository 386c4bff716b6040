"""A deadline tells how much time is left, and when what is under way is cut off."""

import math
import time

import pytest
from instant import Clock

from tvmconv.deadline import SLACK_SECONDS, SLACK_SHARE, Deadline, earliest


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def test_the_time_left_is_never_negative(clock):
    deadline = Deadline.after(10.0)
    assert deadline.left == 10.0
    clock.now += 25.0
    assert deadline.left == 0.0
    assert deadline.has_passed


def test_what_is_under_way_is_cut_off_later(clock):
    assert Deadline.after(20.0).cut_off.left == pytest.approx(20.0 * (1 + SLACK_SHARE) + SLACK_SECONDS)


def test_what_reserves_time_has_no_slack(clock):
    reserving = Deadline.after(20.0).reserving(5.0)
    assert reserving.left == reserving.cut_off.left == 15.0


def test_without_a_limit_nothing_passes(clock):
    never = Deadline.after(None)
    assert never == Deadline() == never.cut_off
    assert never.left == math.inf
    assert earliest(never, Deadline.after(3.0)).left == 3.0
