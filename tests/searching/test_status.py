import pytest

from tvmconv.logs.record import ErrorKind, Record
from tvmconv.search.progress import RATE_SECONDS, SearchProgress
from tvmconv.workloads import parse

WORKLOAD = parse("conv2d:1x4x8x8,4x4x1x1")


def record(seconds=None, *, schedule="tiling", error=ErrorKind.RUNTIME, elapsed=None):
    """A record that took some seconds a launch, or failed."""
    outcome = {"error": error} if seconds is None else {"times": (seconds,)}
    return Record(WORKLOAD, schedule, {}, "a device", "opencl", **outcome, elapsed=elapsed)


def counted(records, **options):
    """The status after the records came in, one a second."""
    status = SearchProgress(**{"max_trials": 100, "max_seconds": None, **options})
    for elapsed, each in enumerate(records, 1):
        status.elapsed_seconds = float(elapsed)
        status.count_record(each)
    return status


def test_fastest_record_is_the_best_and_those_since_are_counted():
    status = counted([record(3.0), record(1.0), record(), record(2.0)])
    assert status.best.cost == 1.0
    assert (status.num_trials, status.trials_since_best) == (4, 2)


def test_records_of_earlier_sessions_bring_time_but_no_rate():
    status = SearchProgress(100, None)
    for elapsed in (3.0, 9.0, None):
        status.count_record(record(1.0, elapsed=elapsed), is_resumed=True)
    assert (status.num_trials, status.num_resumed, status.elapsed_seconds, status.trials_per_second) == (3, 3, 9.0, 0.0)


def test_the_rate_is_that_of_late():
    status = counted([record(1.0)] * 50)
    assert status.trials_per_second == pytest.approx(1.0)
    status.elapsed_seconds += RATE_SECONDS  # without a record
    assert status.trials_per_second == pytest.approx(0.5)


def test_the_time_left_is_that_of_the_limit_reached_first():
    records = [record(1.0)] * 10
    assert counted(records, max_trials=50).remaining_seconds == pytest.approx(40.0)
    assert counted(records, max_trials=50, max_seconds=15.0).remaining_seconds == pytest.approx(5.0)
    assert counted(records, max_trials=None, max_seconds=5.0).remaining_seconds == 0.0
    assert SearchProgress(100, None).remaining_seconds is None


def test_the_speedup_is_over_the_reference():
    status = counted([record(2.0)])
    assert status.speedup is None
    status.reference = record(schedule="default")
    assert status.speedup is None
    status.reference = record(6.0, schedule="default")
    assert status.speedup == 3.0
