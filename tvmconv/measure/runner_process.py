"""Runner process, which receives executables and returns verified times; it imports neither TVM nor PyTorch."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv import devices
from tvmconv.devices.device import DeviceLostError, get_first_line
from tvmconv.errors import CompileError, describe_error
from tvmconv.measure.results import ErrorKind, PhaseTimer, RunnerResult
from tvmconv.measure.workers.process import FinalMessage, iterate_messages
from tvmconv.tempdir import ProcessTempDir

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

    from tvmconv.compiler.executable import Executable
    from tvmconv.devices import Device
    from tvmconv.devices.comparison import ReferenceOutput
    from tvmconv.devices.device import Benchmark


@dataclass(frozen=True)
class WarmUpMessage:
    """Optional first message to a runner process, which initializes the device before the `RunnerSetup` arrives."""

    device: str  # name of the device for `tvmconv.devices.lookup`


@dataclass(frozen=True)
class RunnerSetup:
    """Setup of a runner process for all executables."""

    device: str  # name of the device for `tvmconv.devices.lookup`
    inputs: Sequence[NDArray[Any]]
    reference: ReferenceOutput | NDArray[np.float64]
    tolerance: float  # largest relative L2 error of a correct output
    # Executable that was correct before, with which the process first checks the device; None to skip the check.
    control_executable: Executable | None = None


def measure_executable(
    device: Device, benchmark: Benchmark, executable: Executable, best_seconds: float | None, tolerance: float
) -> RunnerResult:
    """Verify an executable, and time it if its output is correct.

    `best_seconds`: best time so far in seconds per launch, or `math.inf`; slow kernels are timed for a shorter time.
        None requests a final timing by `Benchmark.time_final`.
    `tolerance`: largest relative L2 error of a correct output.
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
    except Exception as error:  # drivers may raise any exception
        return make_result(error=ErrorKind.RUNTIME, message=describe_error(error))
    return make_result(times=times, relative_error=comparison.relative_error)


def main(connection: Connection) -> None:
    """Serve measurements: answer each `RunnerSetup` with None or an error text, and each job with a `RunnerResult`.

    A job is a tuple of an executable and the best time so far. A new setup for the same device replaces the arrays.
    """
    benchmark: Benchmark | None = None
    for message in iterate_messages(connection):
        if isinstance(message, WarmUpMessage):
            with contextlib.suppress(Exception):  # the answer to `RunnerSetup` reports errors
                dummy_input = np.zeros(1, np.float32)
                device = devices.find_device(message.device)
                device.create_benchmark([dummy_input], dummy_input.astype(np.float64)).close()
            continue
        if isinstance(message, RunnerSetup):
            setup = message
            try:
                if benchmark:
                    benchmark.close()
                if setup.device.startswith("opencl"):
                    _keep_pocl_cache_private()
                device = devices.find_device(setup.device)
                benchmark = device.create_benchmark(setup.inputs, setup.reference)
                if control := setup.control_executable:
                    reason = measure_executable(device, benchmark, control, 0.0, setup.tolerance).message
                    if reason:
                        connection.send(f"a kernel that was correct before fails: {reason}")
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


@functools.cache
def _keep_pocl_cache_private() -> ProcessTempDir:
    """Give PoCL a folder that goes with this process; it would keep compiled kernels, which are never reused."""
    folder = ProcessTempDir("tvmconv-")
    os.environ["POCL_KERNEL_CACHE"], os.environ["POCL_CACHE_DIR"] = "0", str(folder.path)
    return folder
