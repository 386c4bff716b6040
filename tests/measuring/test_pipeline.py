"""Programs go to whichever device is free, last timings to the first alone; what was fastest is kept as built."""

from collections import deque

import pytest
from faulty_schedules import SCHEDULE, WORKLOAD

import tvmconv as tc
from tvmconv.compiler.lower import lower
from tvmconv.measuring.builder import Built, Task
from tvmconv.measuring.outcome import FINALISTS, ErrorKind, Outcome
from tvmconv.measuring.pipeline import Pipeline, Trial
from tvmconv.measuring.stopwatch import Means


class Builders:
    """Stands in for a `Pool`; what is submitted is built at once.

    Attributes:
        submitted: schedules and configs.
    """

    def __init__(self, program):
        self.submitted = []
        self._program = program
        self._ended = []

    def submit(self, tag, schedule, config):
        self.submitted.append((schedule, config))
        refused = Built(None, ErrorKind.INSTANTIATION, "no such tile")
        self._ended.append((tag, refused if config.get("refused") else Built(self._program)))

    def poll(self):
        ended, self._ended = self._ended, []
        return ended

    def waitables(self):
        return []


class Runner:
    """A device that does a program a poll, in so many seconds a launch.

    Attributes:
        bests: what it was told of the best time, one a program.
        lost: whether the device is.
    """

    def __init__(self, device, seconds=()):
        self.device = device
        self.bests = []
        self.lost = False
        self._seconds = deque(seconds)
        self._waiting = deque()

    @property
    def free(self):
        return 2 - len(self._waiting)

    def submit(self, tag, program, best):
        self.bests.append(best)
        self._waiting.append(tag)

    def poll(self):
        if self.lost:
            raise tc.DeviceError("the device is lost")
        if not self._waiting:
            return []
        seconds = self._seconds.popleft() if self._seconds else 1.0
        outcome = Outcome(times=(seconds,), deviation=0.0) if seconds else Outcome(error=ErrorKind.RUNTIME)
        return [(self._waiting.popleft(), outcome)]

    def waitables(self):
        return []

    def close(self):
        pass


@pytest.fixture(scope="module")
def program(opencl):
    scheduled, _ = SCHEDULE.apply(WORKLOAD, {})
    return lower(scheduled.mod, opencl.target()).program


@pytest.fixture
def pipeline(opencl, program):
    """Make a pipeline to some runners; it and what builds."""

    def make(*runners):
        builders = Builders(program)
        task = Task(WORKLOAD, {"faulty": SCHEDULE, "other": SCHEDULE}, opencl, 1 << 30)
        return Pipeline(task, builders, runners, {}, Means()), builders

    return make


def trials(n, **fields):
    return [Trial("faulty", {"number": number}, **fields) for number in range(n)]


def run(pipeline, submitted):
    """What comes of trials, in the order in which they end."""
    for trial in submitted:
        pipeline.submit(trial)
    ended = []
    for _ in range(100):
        ended += pipeline.poll()
        if len(ended) == len(submitted):
            break
    return ended


def test_trials_are_shared_by_the_devices_and_last_timings_are_all_the_first_ones(pipeline, opencl):
    first, second = Runner(opencl), Runner(opencl)
    dealing, _ = pipeline(first, second)
    assert len(run(dealing, trials(8))) == 8
    assert min(len(first.bests), len(second.bests)) >= 2
    met = len(second.bests)
    assert all(ended.final for ended in run(dealing, trials(8, final=True)))
    assert len(second.bests) == met
    assert first.bests[-8:] == [None] * 8  # as `Bench.time_long` does it


def test_trials_pass_last_timings_that_wait_for_the_first_device(pipeline, opencl):
    first, second = Runner(opencl), Runner(opencl)
    dealing, _ = pipeline(first, second)
    ended = run(dealing, [*trials(6, final=True), Trial("faulty", {"number": 9})])
    assert len(ended) == 7
    assert len(second.bests) == 1


def test_where_the_first_device_is_lost_the_next_one_takes_the_last_timings(pipeline, opencl):
    first, second = Runner(opencl), Runner(opencl)
    dealing, _ = pipeline(first, second)
    first.lost = True
    assert len(run(dealing, trials(5, final=True))) == 5
    assert second.bests == [None] * 5


def test_last_timings_are_not_among_the_fastest_and_failures_are_not_either(pipeline, opencl):
    runner = Runner(opencl, [3.0, 1.0, None, 2.0, 0.5])
    dealing, _ = pipeline(runner)
    run(dealing, [*trials(4), *trials(1, final=True)])
    assert [trial.config["number"] for trial in dealing.fastest] == [1, 3, 0]
    assert not any(trial.final for trial in dealing.fastest)
    assert runner.bests[-1] is None


def test_only_so_many_are_kept_as_there_are_finalists(pipeline, opencl, program):
    seconds = [float(n) for n in (9, 3, 8, 1, 7, 2, 6, 4)]
    dealing, _ = pipeline(Runner(opencl, seconds))
    run(dealing, trials(len(seconds)))
    assert [seconds[trial.config["number"]] for trial in dealing.fastest] == sorted(seconds)[:FINALISTS]
    assert all(trial.program is program for trial in dealing.fastest)


def test_a_device_is_told_the_best_time_so_far(pipeline, opencl):
    runner = Runner(opencl, [3.0, 1.0, 2.0])
    dealing, _ = pipeline(runner)
    for trial in trials(3):
        run(dealing, [trial])
    assert runner.bests == [float("inf"), 3.0, 1.0]


def test_what_was_built_before_is_not_built_again(pipeline, opencl, program):
    dealing, builders = pipeline(Runner(opencl))
    ended = run(dealing, [*trials(2, program=program), Trial("other", {"number": 7})])
    assert builders.submitted == [("other", {"number": 7})]
    assert sorted((each.schedule, each.config["number"]) for each in ended) == [
        ("faulty", 0), ("faulty", 1), ("other", 7)
    ]  # fmt: skip


def test_what_is_not_built_is_a_measurement_of_its_schedule_and_config(pipeline, opencl):
    dealing, _ = pipeline(Runner(opencl))
    (ended,) = run(dealing, [Trial("other", {"refused": True})])
    assert (ended.schedule, ended.config, ended.outcome.error) == (
        "other", {"refused": True}, ErrorKind.INSTANTIATION
    )  # fmt: skip


def test_each_trial_ends_once_also_where_a_device_is_lost_in_between(pipeline, opencl):
    first, second = Runner(opencl), Runner(opencl)
    dealing, _ = pipeline(first, second)
    for trial in trials(9):
        dealing.submit(trial)
    ended = [*dealing.poll(), *dealing.poll()]
    first.lost = True
    for _ in range(30):
        ended += dealing.poll()
    assert sorted(each.config["number"] for each in ended) == list(range(9))
    second.lost = True
    dealing.poll()
    with pytest.raises(tc.DeviceError, match="the device is lost"):
        dealing.poll()
