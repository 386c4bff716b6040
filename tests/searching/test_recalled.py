"""Failures in a log that were the environment's do not count: the search tries their configs again."""

import pytest
from instant import made_up
from searches import WORKLOAD, append, search, some, trials_of

from tvmconv.logs.record import ErrorKind
from tvmconv.search.search import drop_environment_failures

CRASH = "the device process was killed by SIGABRT"


def record(schedule="tiling", error=ErrorKind.NONE, message="", config=None):
    fields = {"error": error, "message": message}
    if error:
        fields["times"] = ()
    return made_up(WORKLOAD, schedule, config or {}, "a device", **fields)


def crash(schedule="tiling", message=CRASH):
    return record(schedule, ErrorKind.RUNTIME, message)


@pytest.mark.parametrize(
    ("records", "kept"),
    [
        ([crash("default"), crash(), crash()], []),
        ([crash("default"), crash(), record(), crash()], [2, 3]),
        ([record(), crash(), crash("default"), record()], [0, 3]),
        ([crash(), crash()], [0, 1]),
        ([record("default"), crash(), record(), crash()], [0, 1, 2, 3]),
        ([crash("default"), record()], [0, 1]),
        ([record("default"), crash(message="[Errno 28] No space left on device: 'x'")], [0]),
        ([crash("default"), record(error=ErrorKind.WRONG_ANSWER), record(error=ErrorKind.BUILD_TIMEOUT)], [1, 2]),
    ],
    ids=[
        "all fail",
        "nothing ran at first",
        "nothing ran meanwhile",
        "the naive schedule was not tried",
        "only configs fail",
        "only the naive schedule fails",
        "the disk was full",
        "wrong answers are the configs' own",
    ],
)
def test_failures_that_the_naive_schedule_shares_are_dropped(records, kept):
    assert drop_environment_failures(records, "default") == [records[number] for number in kept]


def test_a_search_goes_on_after_a_time_in_which_nothing_ran(log, instant, opencl):
    failed = [
        made_up(WORKLOAD, each.schedule, each.config, opencl.name, times=(), error=ErrorKind.RUNTIME, message=CRASH)
        for each in some(4, 0, opencl)
    ]
    naive = made_up(WORKLOAD, "default", {}, opencl.name, times=(), error=ErrorKind.RUNTIME, message=CRASH)
    append(log, [naive, *failed])
    tuned = search(log, trials=4, measure_baseline=True)
    assert (tuned.status.num_trials, tuned.status.num_resumed, tuned.status.error_counts.total()) == (4, 0, 0)
    assert tuned.status.reference.ok
    assert len([record for record in trials_of(log) if record.ok]) == 5
