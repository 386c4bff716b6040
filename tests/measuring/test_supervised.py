"""Every job of a supervised process ends once: with its answer, or with the end that it brought upon the process."""

import pytest
from processes import wait_for

from tvmconv.measuring.supervised import DEPTH, MAX_FAILED_STARTS, Cause, End, Job, Limits, Supervised

TEXTS = {
    Cause.CRASH: "it {how}",
    Cause.START: "not ready in {limit:g} s",
    Cause.TIME: "longer than {limit:g} s",
    Cause.MEMORY: "more than {limit:.3g} GiB",
}


@pytest.fixture
def supervise():
    """Start a process, and give it jobs once it is ready."""
    started = []

    def start(*jobs, hello=None, **limits):
        limits = Limits(**{"start_seconds": 60.0, "job_seconds": 60.0, **limits})
        process = Supervised("obedient", lambda: hello, limits, TEXTS)
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
    wait_for(lambda: process.poll() or process.ready)


def ended(process):
    """What the next jobs that end have become, by tag."""
    return {job.tag: answer for job, answer in wait_for(process.poll)}


def test_process_has_no_room_before_it_is_ready(supervise):
    process = supervise()
    assert process.room == 0
    ready(process)
    assert process.room == DEPTH
    process.submit(Job(0, ("hang",)))
    assert process.room == DEPTH - 1


def test_job_under_way_is_to_blame_and_the_next_one_is_done(supervise):
    process = supervise(("end",), ("say", "b"))
    end = ended(process)[0]
    assert (end.cause, end.reason, end.was_ready) == (Cause.CRASH, "it ended with exit status 7", True)
    assert process.end == end
    assert process.waitables() == []
    process.renew()
    assert ended(process) == {1: ["b"]}


def test_a_job_that_takes_too_long_is_ended(supervise):
    end = ended(supervise(("hang",), job_seconds=0.2))[0]
    assert (end.cause, end.reason) == (Cause.TIME, "longer than 0.2 s")
    assert end.seconds >= 0.2


def test_a_process_that_holds_too_much_is_ended(supervise):
    process = supervise(memory_bytes=1.0)
    wait_for(lambda: process.poll() or process.end)
    assert process.end.cause is Cause.MEMORY


def test_last_answer_counts_and_the_next_job_is_not_to_blame(supervise):
    process = supervise(("last", "a"), ("say", "b"))
    assert ended(process) == {0: ["a"]}
    assert process.end.cause is Cause.LAST
    assert [job.tag for job in process.take_back()] == [1]


def test_a_process_that_refuses_says_why(supervise):
    process = supervise(hello="no such device")
    wait_for(lambda: process.poll() or process.end)
    assert (process.end.cause, process.end.reason, process.end.was_ready) == (Cause.REFUSED, "no such device", False)


def test_a_process_that_is_not_ready_in_time_is_ended(supervise):
    process = supervise(start_seconds=0.0)
    wait_for(lambda: process.poll() or process.end)
    assert process.end == End(Cause.START, "not ready in 0 s", process.end.seconds, was_ready=False)


def test_after_so_many_failed_starts_in_a_row_there_is_no_hope(supervise):
    process = supervise(hello="no")
    for _ in range(MAX_FAILED_STARTS):
        assert not process.hopeless
        wait_for(lambda: process.poll() or process.end)
        process.renew()
    assert process.hopeless
