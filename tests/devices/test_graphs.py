from types import SimpleNamespace

import pytest

from tvmconv.devices.cuda import graphs
from tvmconv.devices.device import BufferSets


@pytest.fixture
def clock(monkeypatch):
    """Replace the events by a kernel that takes given times, and remember how many replays were queued at once."""
    queued = []
    times = []  # of a launch in the replays to come; the last one stays

    def between(stream, replay, count):
        queued.append(count)
        return [replay() * (times.pop(0) if len(times) > 1 else times[0]) for _ in range(count)]

    monkeypatch.setattr(graphs, "time_between_events", between)
    monkeypatch.setattr(graphs, "WARM_UP_SECONDS", 0)
    return SimpleNamespace(take=times.extend, queued=queued)


def measure(multiple=1, seconds=0.5):
    return graphs.time_replays(lambda launches: lambda: launches, 0, launch_multiple=multiple, seconds=seconds)


@pytest.mark.parametrize("kernel_seconds", [1e-7, 3e-6, 1e-4, 1.0])
def test_times_are_per_launch(clock, kernel_seconds):
    clock.take([kernel_seconds])
    assert measure().seconds[0] == pytest.approx(kernel_seconds)


def test_a_replay_goes_through_all_buffer_sets_equally_often(clock):
    clock.take([3e-6])
    assert measure(multiple=48).launches_per_replay == 96


@pytest.mark.parametrize(
    ("kernel_seconds", "replays"), [(0.49, graphs.MIN_SLOW_REPLAYS), (0.1, 5), (0.03, 16), (1e-3, 500), (1e-6, 2500)]
)
def test_replays_fill_the_time_given_within_bounds(clock, kernel_seconds, replays):
    clock.take([kernel_seconds])
    assert len(measure(seconds=0.5).seconds) == pytest.approx(replays, abs=1)


def test_gpu_that_wakes_up_slowly_is_not_taken_for_a_slow_kernel(clock):
    clock.take([*[100e-6] * 3, 10e-6])
    assert measure().launches_per_replay == 20


@pytest.mark.parametrize(("multiple", "kernel_seconds"), [(1, 0.5), (1, 7.0), (3, 0.6)])
def test_a_launch_of_half_a_second_is_replayed_once(clock, multiple, kernel_seconds):
    clock.take([kernel_seconds])
    assert measure(multiple=multiple).seconds == pytest.approx((kernel_seconds,))
    assert clock.queued == [1]


def test_a_long_chain_is_replayed_once(clock):
    clock.take([0.7])
    assert graphs.time_replay(lambda: 1, 0, 0.5) == [0.7]
    assert clock.queued == [1]


@pytest.fixture
def waking(monkeypatch):
    """A GPU that runs three times as slow for some seconds; returns a function that says how long."""
    state = SimpleNamespace(now=0.0, slow_until=0.0)

    def between(stream, replay, count):
        taken = []
        for _ in range(count):
            took = 3.8e-3 if state.now < state.slow_until else 1.3e-3
            state.now += took
            taken.append(took)
        return taken

    monkeypatch.setattr(graphs, "time_between_events", between)
    monkeypatch.setattr(graphs.time, "perf_counter", lambda: state.now)
    return state


@pytest.mark.parametrize("slow_seconds", [0.0, 0.02, 0.045])
def test_a_warm_up_lasts_until_the_clocks_are_steady(waking, slow_seconds):
    waking.slow_until = slow_seconds
    assert graphs.warm_up(lambda: None, 0) == pytest.approx(1.3e-3)
    assert graphs.WARM_UP_SECONDS <= waking.now < graphs.MAX_WARM_UP_SECONDS


def test_a_warm_up_after_idling_outlasts_low_clocks(waking):
    waking.slow_until = 0.18
    warm_up = {"launch_multiple": 1, "seconds": 0.05, "warm_up_seconds": graphs.IDLE_WARM_UP_SECONDS}
    replays = graphs.time_replays(lambda launches: lambda: None, 0, **warm_up)
    assert max(replays.seconds) == pytest.approx(1.3e-3)


def make_timer(num_sets=1):
    return graphs.GraphTimer(lambda launches: lambda: launches, 0, BufferSets(num_sets, 1 << 20, 0))


def test_the_first_replay_of_a_turn_does_not_count(clock):
    clock.take([1e-4])
    timer = make_timer()
    timer.take_turn(1e-3, counts=False)
    clock.take([2e-4])  # behind a first replay, which finds the cache as other kernels left it
    clock.queued.clear()
    timer.take_turn(1e-3)
    assert clock.queued == [6]  # replays of two launches each
    assert timer.finish().seconds == pytest.approx((2e-4,) * 5)
    assert "in turns" in timer.finish().method


def test_a_long_launch_takes_one_turn(clock):
    clock.take([0.7])
    timer = make_timer()
    clock.queued.clear()
    for _ in range(3):
        timer.take_turn(0.01)
    assert clock.queued == []
    assert timer.finish().seconds == pytest.approx((0.7,))
