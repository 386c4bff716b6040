"""Programs go to whichever device is free, last timings to the first alone; what was fastest is kept as built."""

from collections import deque

import pytest
from faulty_schedules import SCHEDULE, WORKLOAD

import tvmconv as tc
from tvmconv.compiler.device_lowering import lower_module
from tvmconv.measure.builder import BuilderResult, BuilderSetup
from tvmconv.measure.pipeline import MAX_UNEXPLAINED_FAILURES, MeasureCandidate, MeasurePipeline
from tvmconv.measure.results import ErrorKind, PhaseMeans, RunnerResult


class Builders:
    """Stands in for a `BuilderPool`: builds end at once, as messages tell in turn; an empty one is a program."""

    def __init__(self, program, messages=()):
        self.submitted = []  # schedules and configs
        self._program = program
        self._messages = deque(messages)
        self._ended = []

    def submit(self, tag, schedule, config):
        self.submitted.append((schedule, config))
        message = self._messages.popleft() if self._messages else ""
        refused = BuilderResult(None, ErrorKind.COMPILE_HOST, message)
        self._ended.append((tag, refused if message else BuilderResult(self._program)))

    def poll(self):
        ended, self._ended = self._ended, []
        return ended


class Runner:
    """A device that does a program a poll, in seconds a launch that are given in turn; a text is a failure."""

    def __init__(self, device, seconds=(), control_runs=False):
        self.device = device
        self.bests = []  # what it was told of the best time, one a program
        self.lost = False
        self._control_runs = control_runs
        self._seconds = deque(seconds)
        self._waiting = deque()

    @property
    def num_free_slots(self):
        return 2 - len(self._waiting)

    def submit(self, tag, executable, best_seconds):
        self.bests.append(best_seconds)
        self._waiting.append(tag)
        if best_seconds == 0.0 and self._control_runs:  # a control
            self._seconds.insert(len(self._waiting) - 1, 1.0)

    def poll(self):
        if self.lost:
            raise tc.DeviceError("the device is lost")
        if not self._waiting:
            return []
        seconds = self._seconds.popleft() if self._seconds else 1.0
        outcome = RunnerResult(times=(seconds,), relative_error=0.0)
        if isinstance(seconds, str):
            outcome = RunnerResult(error=ErrorKind.RUNTIME, message=seconds)
        return [(self._waiting.popleft(), outcome)]

    def close(self):
        pass


@pytest.fixture(scope="module")
def program(opencl):
    scheduled, _ = SCHEDULE.apply(WORKLOAD, {})
    return lower_module(scheduled.mod, opencl.make_target()).executable


@pytest.fixture
def pipeline(opencl, program):
    """Make a pipeline to some runners; it and what builds."""

    def make(*runners, control=None, builds=()):
        builders = Builders(program, builds)
        task = BuilderSetup(WORKLOAD, {"faulty": SCHEDULE, "other": SCHEDULE}, opencl, 1 << 30)
        return MeasurePipeline(task, builders, runners, {}, PhaseMeans(), control), builders

    return make


def trials(n, **fields):
    return [MeasureCandidate("faulty", {"number": number}, **fields) for number in range(n)]


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


def messages(ended):
    return [each.runner_result.message for each in ended]


def test_last_timings_are_all_on_the_first_device(pipeline, opencl):
    first, second = Runner(opencl), Runner(opencl)
    dealing, _ = pipeline(first, second)
    assert len(run(dealing, trials(8))) == 8
    assert min(len(first.bests), len(second.bests)) >= 2
    met = len(second.bests)
    assert all(ended.is_final for ended in run(dealing, trials(8, is_final=True)))
    assert len(second.bests) == met
    assert first.bests[-8:] == [None] * 8  # as `Benchmark.time_final` does it
    first.lost = True
    assert len(run(dealing, trials(5, is_final=True))) == 5
    assert second.bests[met:] == [None] * 5


def test_a_device_is_told_the_best_time_so_far(pipeline, opencl):
    runner = Runner(opencl, [3.0, 1.0, 2.0])
    dealing, _ = pipeline(runner)
    for trial in trials(3):
        run(dealing, [trial])
    assert runner.bests == [float("inf"), 3.0, 1.0]


def test_each_trial_ends_once_though_a_device_is_lost_in_between(pipeline, opencl):
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


CONTROL = MeasureCandidate("other", {})
CRASH, FULL = "the device process was killed by SIGABRT", "write error: No space left on device"
KILLED = "the device process was killed by SIGKILL"


@pytest.mark.parametrize("crashes", [1, 20])
def test_where_the_control_fails_too_nothing_is_measured(pipeline, opencl, crashes):
    dealing, _ = pipeline(Runner(opencl, [CRASH] * 100), control=CONTROL)
    with pytest.raises(tc.HostError, match=f"opencl:0 cannot be measured on.* fails too: {CRASH}"):
        assert run(dealing, trials(crashes)) == []


def test_where_the_control_runs_a_crash_is_the_configs_own(pipeline, opencl):
    runner = Runner(opencl, [CRASH])
    dealing, builders = pipeline(runner, control=CONTROL)
    (ended,) = run(dealing, trials(1))
    assert (ended.runner_result.error, ended.runner_result.message) == (ErrorKind.RUNTIME, CRASH)
    assert builders.submitted[1:] == [("other", {})]
    assert len(runner.bests) == 2


def test_program_that_runs_afterwards_makes_the_control_needless(pipeline, opencl):
    runner = Runner(opencl, [CRASH, 1.0, CRASH, 1.0])
    dealing, builders = pipeline(runner, control=CONTROL)
    ended = run(dealing, trials(4))
    assert [each.runner_result.error for each in ended] == [ErrorKind.RUNTIME, ErrorKind.NONE] * 2
    assert len(builders.submitted) == len(runner.bests) == 4


def test_controls_are_few_where_most_programs_crash(pipeline, opencl):
    runner = Runner(opencl, [CRASH] * 100, control_runs=True)
    dealing, _ = pipeline(runner, control=CONTROL)
    ended = run(dealing, trials(4 * MAX_UNEXPLAINED_FAILURES))
    assert messages(ended) == [CRASH] * 4 * MAX_UNEXPLAINED_FAILURES
    assert 4 <= runner.bests.count(0.0) <= 5


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ([FULL], ""),
        ([KILLED], ""),
        (["cuda:0: CUDA_ERROR_ECC_UNCORRECTABLE (214)"], ""),
        ([KILLED, 1.0, KILLED], KILLED),  # a config that is killed twice is at fault
    ],
)
def test_a_fault_that_passes_costs_no_trial(pipeline, opencl, faults, expected):
    dealing, _ = pipeline(Runner(opencl, [1.0, *faults, 1.0]), control=CONTROL)
    assert messages(run(dealing, trials(2))) == ["", expected]


def test_config_on_which_the_disk_is_full_twice_is_not_recorded(pipeline, opencl):
    dealing, _ = pipeline(Runner(opencl, [1.0, FULL, 1.0, FULL, 1.0]), control=CONTROL)
    with pytest.raises(tc.HostError, match=r"opencl:0 cannot be measured on: .*No space left"):
        run(dealing, trials(2))


def test_programs_that_fail_on_a_lost_device_run_on_another(pipeline, opencl):
    lost, other = Runner(opencl, [CRASH] * 100), Runner(opencl)
    dealing, _ = pipeline(lost, other, control=CONTROL)
    ended = run(dealing, trials(12))
    assert sorted(each.config["number"] for each in ended) == list(range(12))
    assert all(each.runner_result.error is ErrorKind.NONE for each in ended)


def test_nothing_is_measured_where_the_naive_schedule_fails(pipeline, opencl):
    dealing, _ = pipeline(Runner(opencl), control=CONTROL, builds=["no NVRTC"] * 50)
    with pytest.raises(tc.HostError, match="no kernel can be built, not even of schedule other: no NVRTC"):
        run(dealing, trials(4))


def test_failed_build_is_the_configs_own_if_the_naive_one_builds(pipeline, opencl):
    dealing, builders = pipeline(Runner(opencl), control=CONTROL, builds=["too many registers"] * 3)
    ended = run(dealing, trials(3))
    assert messages(ended) == ["too many registers"] * 3
    assert builders.submitted[3:] == [("other", {})]


def test_a_build_that_was_killed_is_tried_once_more(pipeline, opencl):
    killed = "the builder process was killed by SIGKILL"
    dealing, _ = pipeline(Runner(opencl), control=CONTROL, builds=[killed, "", killed])
    assert messages(run(dealing, trials(1))) == [killed]
    dealing, _ = pipeline(Runner(opencl), control=CONTROL, builds=[killed])
    assert messages(run(dealing, trials(1))) == [""]


def test_last_timings_that_all_crash_are_not_recorded(pipeline, opencl, program):
    dealing, _ = pipeline(Runner(opencl, [CRASH] * 9))
    with pytest.raises(tc.HostError):
        run(dealing, trials(3, is_final=True, executable=program))
