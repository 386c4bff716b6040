"""Every job of a supervised process ends once: with its answer, or with the end that it brought upon the process."""

import pytest
from processes import wait_for

from tvmconv.measure.workers.supervisor import (
    MAX_FAILED_STARTS,
    MAX_QUEUED_JOBS,
    ExitCause,
    Job,
    SupervisedWorker,
    WorkerLimits,
)

TEXTS = {
    ExitCause.CRASH: "it {how}",
    ExitCause.START_TIMEOUT: "not ready in {limit:g} s",
    ExitCause.JOB_TIMEOUT: "longer than {limit:g} s",
    ExitCause.MEMORY_LIMIT: "more than {limit:.3g} GiB",
}


@pytest.fixture
def supervise():
    """Start a process, and give it jobs once it is ready."""
    started = []

    def start(*jobs, hello=None, **limits):
        limits = WorkerLimits(**{"start_seconds": 60.0, "job_seconds": 60.0, **limits})
        process = SupervisedWorker("obedient", lambda: hello, limits, TEXTS)
        started.append(process)
        if jobs:
            ready(process)
        for tag, message in enumerate(jobs):
            process.submit(Job(tag, message))
        return process

    yield start
    for process in started:
        process.close()


def ready(process):
    wait_for(lambda: process.poll() or process.is_ready)


def ended(process):
    """What the next jobs that end have become, by tag."""
    return {job.tag: answer for job, answer in wait_for(process.poll)}


def test_process_has_no_room_before_it_is_ready(supervise):
    process = supervise()
    assert process.num_free_slots == 0
    ready(process)
    assert process.num_free_slots == MAX_QUEUED_JOBS
    process.submit(Job(0, ("hang",)))
    assert process.num_free_slots == MAX_QUEUED_JOBS - 1


def test_job_under_way_is_to_blame_and_the_next_one_is_done(supervise):
    process = supervise(("end",), ("say", "b"))
    end = ended(process)[0]
    assert (end.cause, end.reason, end.was_ready) == (ExitCause.CRASH, "it ended with exit status 7", True)
    assert process.exit_info == end
    assert process.wait_handles() == []
    process.restart()
    assert ended(process) == {1: ["b"]}


def test_a_job_that_takes_too_long_is_ended(supervise):
    end = ended(supervise(("hang",), job_seconds=0.2))[0]
    assert (end.cause, end.reason) == (ExitCause.JOB_TIMEOUT, "longer than 0.2 s")
    assert end.seconds >= 0.2


def test_last_answer_counts_and_the_next_job_is_not_to_blame(supervise):
    process = supervise(("last", "a"), ("say", "b"))
    assert ended(process) == {0: ["a"]}
    assert process.exit_info.cause is ExitCause.FINAL_MESSAGE
    assert [job.tag for job in process.reclaim_jobs()] == [1]


@pytest.mark.parametrize(
    ("options", "cause", "reason"),
    [
        ({"hello": "no such device"}, ExitCause.REFUSED, "no such device"),
        ({"start_seconds": 0.0}, ExitCause.START_TIMEOUT, "not ready in 0 s"),
        ({"memory_bytes": 1.0}, ExitCause.MEMORY_LIMIT, "more than 9.31e-10 GiB"),
    ],
)
def test_a_process_that_does_not_start_says_why(supervise, options, cause, reason):
    process = supervise(**options)
    wait_for(lambda: process.poll() or process.exit_info)
    assert (process.exit_info.cause, process.exit_info.reason, process.exit_info.was_ready) == (cause, reason, False)


def test_after_so_many_failed_starts_in_a_row_there_is_no_hope(supervise):
    process = supervise(hello="no")
    for _ in range(MAX_FAILED_STARTS):
        assert not process.is_hopeless
        wait_for(lambda: process.poll() or process.exit_info)
        process.restart()
    assert process.is_hopeless
