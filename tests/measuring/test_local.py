"""A device process that cannot be kept alive is a lost device; one that a candidate took down is not."""

import contextlib
import threading
import time
from dataclasses import replace
from multiprocessing import Pipe

import pytest
from faulty_schedules import SCHEDULE, WORKLOAD
from processes import wait_for

import tvmconv as tc
from tvmconv.compiler.device_lowering import lower_module
from tvmconv.measure import runner as runners
from tvmconv.measure.results import ErrorKind
from tvmconv.measure.runner import RunnerSetup
from tvmconv.measure.workers import supervisor


@pytest.fixture
def runner(opencl, monkeypatch):
    monkeypatch.setattr(runners, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "MAX_FAILED_STARTS", 2)
    made = runners.LocalRunner(opencl, tc.Problem(WORKLOAD), timeout_seconds=20.0, memory_limit_bytes=1 << 30)
    yield made
    made.close()


def program(device, fault="none"):
    scheduled, _ = SCHEDULE.apply(WORKLOAD, {"fault": fault})
    return lower_module(scheduled.mod, device.make_target()).executable


def run(runner, programs):
    """The errors of programs that are submitted one after another."""
    errors = []
    for made in programs:
        while not runner.num_free_slots:
            runner.poll()
            time.sleep(0.01)
        runner.submit(0, made, 1.0)
        while not (ended := runner.poll()):
            time.sleep(0.01)
        errors += [outcome.error for _, outcome in ended]
    return errors


@pytest.mark.slow
def test_any_number_of_candidates_may_crash_in_a_row(opencl, runner):
    crashes = supervisor.MAX_FAILED_STARTS + 1
    errors = run(runner, [program(opencl), *[program(opencl, "out_of_bounds")] * crashes, program(opencl)])
    assert errors == [ErrorKind.NONE, *[ErrorKind.RUNTIME] * crashes, ErrorKind.NONE]


def test_a_device_on_which_a_right_program_fails_now_is_lost(opencl, runner):
    assert run(runner, [program(opencl)]) == [ErrorKind.NONE]
    runner._control_executable = program(opencl, "wrong")
    with pytest.raises(tc.DeviceError, match="opencl:0 cannot be measured on: a kernel that was correct before fails"):
        run(runner, [program(opencl, "out_of_bounds"), program(opencl)])


@pytest.mark.sample(1)
@pytest.mark.parametrize("never", [False, True])
def test_a_process_that_does_not_start_is_tried_again(opencl, runner, never):
    if never:
        runner._device = replace(opencl, text="opencl:99")
    runner._process.worker_process._process.kill()
    expected = pytest.raises(tc.DeviceError, match="opencl:99 cannot be measured on: no device 'opencl:99'")
    with expected if never else contextlib.nullcontext():
        assert run(runner, [program(opencl)]) == [ErrorKind.NONE]


def test_device_process_that_grows_without_end_is_replaced(opencl, runner, monkeypatch):
    endless, right = program(opencl, "endless"), program(opencl)
    wait_for(lambda: runner.poll() or runner.num_free_slots)
    runner.submit(0, endless, 1.0)
    runner.submit(1, right, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr("tvmconv.measure.workers.process.WorkerProcess.resident_bytes", 1 << 40)
        ((tag, outcome),) = runner.poll()
    assert (tag, outcome.error) == (0, ErrorKind.RUNTIME)
    assert outcome.message == "the device process holds more than 1 GiB"
    ((tag, outcome),) = wait_for(runner.poll)
    assert (tag, outcome.error) == (1, ErrorKind.NONE)


def test_woken_process_brings_up_its_device_and_says_nothing(opencl, monkeypatch):
    monkeypatch.setattr(runners, "_keep_pocl_cache_private", lambda: None)  # here it is this process's
    benches = []
    bench = type(opencl).create_benchmark
    monkeypatch.setattr(type(opencl), "create_benchmark", lambda *args: benches.append(bench(*args)) or benches[-1])
    problem = tc.Problem(WORKLOAD)
    setup = RunnerSetup("opencl:0", problem.inputs, problem.reference, WORKLOAD.tolerance)
    ours, theirs = Pipe()
    with ours, theirs:
        for message in ("opencl:0", setup, (program(opencl), 1.0)):
            ours.send(message)
        thread = threading.Thread(target=serve_until_left, args=(theirs,))
        thread.start()
        assert ours.recv() is None
        assert ours.recv().error is ErrorKind.NONE
        assert not ours.poll(0.5)
        ours.close()
        thread.join(10.0)
    assert len(benches) == 2


def serve_until_left(connection):
    with contextlib.suppress(EOFError, OSError):
        runners.main(connection)
