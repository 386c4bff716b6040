import pytest

from tvmconv.devices.cuda import graphs


@pytest.fixture
def clock(monkeypatch):
    """Replace the events by a kernel that takes a given time; returns a function that sets it."""
    times = []  # of a launch in the replays to come; the last one stays

    def between(stream, replay, count):
        return [replay() * (times.pop(0) if len(times) > 1 else times[0]) for _ in range(count)]

    monkeypatch.setattr(graphs, "between", between)
    monkeypatch.setattr(graphs, "WARM_UP_SECONDS", 0)
    return lambda *seconds: times.extend(seconds)


def measure(multiple=1, seconds=0.5):
    return graphs.time_replays(lambda launches: lambda: launches, 0, multiple=multiple, seconds=seconds)


@pytest.mark.parametrize("kernel_seconds", [1e-7, 3e-6, 1e-4, 1.0])
def test_times_are_per_launch(clock, kernel_seconds):
    clock(kernel_seconds)
    assert measure().seconds[0] == pytest.approx(kernel_seconds)


def test_a_replay_lasts_long_enough_for_the_events_resolution(clock):
    clock(3e-6)
    assert measure().launches * 3e-6 >= graphs.REPLAY_SECONDS


def test_a_long_kernel_is_replayed_alone(clock):
    clock(0.01)
    assert measure().launches == 1


def test_a_replay_goes_through_all_buffer_sets_equally_often(clock):
    clock(3e-6)
    assert measure(multiple=48).launches == 96


@pytest.mark.parametrize(
    ("kernel_seconds", "replays"),
    [(1.0, graphs.FEWEST_REPLAYS), (0.1, 5), (0.03, 16), (1e-3, 500), (1e-6, 1000)],
)
def test_replays_fill_the_time_given_within_bounds(clock, kernel_seconds, replays):
    clock(kernel_seconds)
    assert len(measure(seconds=0.5).seconds) == pytest.approx(replays, abs=1)


def test_a_gpu_that_wakes_up_slowly_is_not_taken_for_a_slow_kernel(clock):
    clock(*[100e-6] * 3, 10e-6)
    assert measure().launches == 20
