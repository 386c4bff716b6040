"""Builder process, which receives configs and returns executables."""

from __future__ import annotations

import contextlib
import functools
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tvmconv.errors import CompileError, ScheduleFailure, describe_error
from tvmconv.measure.results import ErrorKind, PhaseTimer
from tvmconv.measure.workers.process import FinalMessage, iterate_messages
from tvmconv.tvm_import import import_tvm

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from tvmconv.compiler.executable import Executable
    from tvmconv.devices import Device
    from tvmconv.registry import Schedule
    from tvmconv.space import Config
    from tvmconv.workloads import Workload


WARM_UP_WORKLOAD, WARM_UP_ARCH = "conv2d:1x1x2x2,1x1x1x1", "sm_90"  # kernel that loads the compilers


@dataclass(frozen=True)
class BuilderSetup:
    """Setup of a builder process for all configs."""

    workload: Workload  # workload of configs that come without one
    # Schedules by name or other key; other processes find their functions by module and name.
    schedules: Mapping[str, Schedule]
    device: Device  # device to build for, which need not be present
    memory_limit_bytes: int  # memory that one build may allocate, in bytes


@dataclass(frozen=True)
class BuilderResult:
    """Result of a build."""

    executable: Executable | None = None  # executable for the device; None after an error
    error: ErrorKind = ErrorKind.NONE
    message: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)  # milliseconds by phase
    seconds: float = 0.0  # wall time of the build


def build_executable(
    setup: BuilderSetup, schedule_name: str, config: Config, workload: Workload | None = None
) -> BuilderResult:
    """Build one config of a schedule and return the result, including any error.

    `workload`: workload to compute; that of the setup by default.
    """
    from tvmconv.compiler import lowering as lowering

    phase_timer, device = PhaseTimer(), setup.device
    start = time.monotonic()

    def make_failure(kind: ErrorKind, message: str) -> BuilderResult:
        return BuilderResult(None, kind, message, phase_timer.milliseconds, time.monotonic() - start)

    try:
        workload, schedule, target = workload or setup.workload, setup.schedules[schedule_name], device.make_target()
        lowered = lowering.lower_schedule(
            workload, schedule, config, target, device.limits, device.text, phase_timer.phase
        ).lowered
        with phase_timer.phase("codegen"):
            _ = lowered.source
        with phase_timer.phase("compile"):
            executable = lowered.executable
    except MemoryError:
        raise
    except CompileError as error:
        return make_failure(ErrorKind.COMPILE_HOST, describe_error(error))
    except ScheduleFailure as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        return make_failure(ErrorKind.INSTANTIATION, error.reason)
    except BaseException as error:  # a schedule is user code, which may even call sys.exit
        return make_failure(ErrorKind.INSTANTIATION, describe_error(error))
    return BuilderResult(executable, phases=phase_timer.milliseconds, seconds=time.monotonic() - start)


def main(connection: Connection) -> None:
    """Serve builds: answer each `BuilderSetup` with None or an error text, and each job with a `BuilderResult`.

    A job is a tuple of schedule name, config and optional workload. A new setup applies to all later jobs.
    """
    setup, initial_bytes, message_stream = None, 0, iterate_messages(connection)
    preload_compilers()
    while True:
        try:
            message = next(message_stream)
        except EOFError:
            raise
        except Exception as error:
            connection.send(describe_error(error))
            return
        if isinstance(message, BuilderSetup):
            setup, current_bytes = message, _get_allocated_bytes()
            initial_bytes = initial_bytes or current_bytes
            if current_bytes - initial_bytes > setup.memory_limit_bytes / 2:
                return  # earlier builds leaked too much memory
            _limit_memory(current_bytes + setup.memory_limit_bytes)
            connection.send(None)
            continue
        assert setup
        try:
            connection.send(build_executable(setup, *message))
            continue
        except MemoryError:
            pass  # leaving the handler frees the build's memory; the process may still stay short of memory, so it ends
        message = f"the build allocates more than {setup.memory_limit_bytes / 2**30:.3g} GiB"
        connection.send(FinalMessage(BuilderResult(None, ErrorKind.COMPILE_HOST, message)))
        return


@functools.cache
def preload_compilers() -> None:
    """Load TVM and NVRTC with a small build, so that the first timed build does not include their loading.

    Both libraries load many parts on first use.
    """
    with contextlib.suppress(Exception):  # a real build reports the error
        import_tvm()
        from tvmconv import devices, registry, workloads
        from tvmconv.compiler import lowering as lowering

        workload, device = workloads.parse(WARM_UP_WORKLOAD), devices.find_device(WARM_UP_ARCH)
        schedule = registry.schedules(workload)[0]
        target = device.make_target()
        _ = lowering.lower_schedule(workload, schedule, {}, target, device.limits, device.text).lowered.executable


def _get_allocated_bytes() -> int:
    """Return the virtual memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _limit_memory(max_bytes: int) -> None:
    """Set the soft limit of this process's virtual memory, at most to the hard limit; it can be changed again."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    soft_limit = max_bytes if hard_limit == resource.RLIM_INFINITY else min(max_bytes, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (soft_limit, hard_limit))
