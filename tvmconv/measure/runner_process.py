"""The device process: programs in, verified times out, one after another. Loads neither TVM nor PyTorch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv import devices
from tvmconv.devices.device import DeviceLostError, get_first_line
from tvmconv.errors import CompileError, describe_error
from tvmconv.measure.phase_timer import PhaseTimer
from tvmconv.measure.results import ErrorKind, RunnerResult
from tvmconv.measure.workers.process import FinalMessage, iterate_messages

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

    from tvmconv.compiler.executable import Executable
    from tvmconv.devices import Device
    from tvmconv.devices.comparison import ReferenceOutput
    from tvmconv.devices.device import Benchmark


@dataclass(frozen=True)
class WarmUpMessage:
    """What a device process may be told first: to bring up its device, for a `RunnerSetup` that will come.

    Attributes:
        device: its name for `tvmconv.devices.lookup`.
    """

    device: str


@dataclass(frozen=True)
class RunnerSetup:
    """What a device process measures on, whatever the program.

    Attributes:
        device: its name for `tvmconv.devices.lookup`.
        inputs: of the workload.
        reference: what its output is compared with.
        tolerance: the largest relative L2 error of a right kernel.
        control_executable: a program that was right before, to see first whether the device still is; None if there was
            none.
    """

    device: str
    inputs: Sequence[NDArray[Any]]
    reference: ReferenceOutput | NDArray[np.float64]
    tolerance: float
    control_executable: Executable | None = None


def measure_executable(
    device: Device, benchmark: Benchmark, executable: Executable, best_seconds: float | None, tolerance: float
) -> RunnerResult:
    """Verify a program, and time it if it is right.

    Args:
        device: where the program runs.
        benchmark: the workload's arrays there.
        executable: built for the device.
        best_seconds: the best time so far, in seconds a launch, or `math.inf`; the kernel is timed as long as it
            deserves. None for a last timing, as `Benchmark.time_final` does it.
        tolerance: the largest relative L2 error of a right kernel.

    Raises:
        DeviceLostError: the program took the device from this process.
    """
    phase_timer = PhaseTimer()
    start = time.monotonic()

    def make_result(**fields: Any) -> RunnerResult:
        return RunnerResult(**fields, phases=phase_timer.milliseconds, seconds=time.monotonic() - start)

    try:
        with phase_timer.phase("load"):
            kernel = device.load(executable)
        with phase_timer.phase("verify"):
            comparison = benchmark.compare(kernel)
        if not comparison.is_within_tolerance(tolerance):
            benchmark.restore_inputs()
            return make_result(
                error=ErrorKind.WRONG_ANSWER,
                message=comparison.describe_mismatch(tolerance),
                relative_error=comparison.relative_error,
            )
        with phase_timer.phase("time"):
            times = benchmark.time_final(kernel) if best_seconds is None else benchmark.time(kernel, best_seconds)
    except DeviceLostError:
        raise
    except CompileError as error:
        return make_result(error=ErrorKind.COMPILE_DEVICE, message=get_first_line(error))
    except Exception as error:  # a driver in trouble raises what it likes
        return make_result(error=ErrorKind.RUNTIME, message=describe_error(error))
    return make_result(times=times, relative_error=comparison.relative_error)


def main(connection: Connection) -> None:
    """Serve: a `RunnerSetup` comes in, and None goes back or why it fails; then an `RunnerResult` for each program and
    best.

    Another setup may come at any time, for the same device: the arrays of the one before it are freed.
    """
    benchmark: Benchmark | None = None
    for message in iterate_messages(connection):
        if isinstance(message, WarmUpMessage):
            with contextlib.suppress(Exception):  # whatever is wrong, `RunnerSetup` tells
                dummy_input = np.zeros(1, np.float32)
                devices.find_device(message.device).create_benchmark(
                    [dummy_input], dummy_input.astype(np.float64)
                ).close()
            continue
        if isinstance(message, RunnerSetup):
            setup = message
            try:
                if benchmark:
                    benchmark.close()
                device = devices.find_device(setup.device)
                benchmark = device.create_benchmark(setup.inputs, setup.reference)
                if setup.control_executable and (
                    reason := measure_executable(
                        device, benchmark, setup.control_executable, 0.0, setup.tolerance
                    ).message
                ):
                    connection.send(f"a program that was right before fails: {reason}")
                    return
            except Exception as error:
                connection.send(describe_error(error))
                return
            connection.send(None)
            continue
        assert benchmark
        executable, best_seconds = message
        try:
            connection.send(measure_executable(device, benchmark, executable, best_seconds, setup.tolerance))
        except DeviceLostError as error:
            connection.send(FinalMessage(RunnerResult(error=ErrorKind.RUNTIME, message=get_first_line(error))))
            return
