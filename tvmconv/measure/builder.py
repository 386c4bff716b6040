"""The builder process: configs in, programs out, one after another."""

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
from tvmconv.measure.phase_timer import PhaseTimer
from tvmconv.measure.results import ErrorKind
from tvmconv.measure.workers.process import FinalMessage, iterate_messages
from tvmconv.tvm_import import import_tvm

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from tvmconv.compiler.executable import Executable
    from tvmconv.devices import Device
    from tvmconv.registry import Schedule
    from tvmconv.space import Config
    from tvmconv.workloads import Workload


WARM_UP_WORKLOAD, WARM_UP_ARCH = "conv2d:1x1x2x2,1x1x1x1", "sm_90"  # what is built to load the compilers


@dataclass(frozen=True)
class BuilderSetup:
    """What a builder process builds, whatever the config.

    Attributes:
        workload: what to compute, where a config does not come with another.
        schedules: how, each under its name or another; their functions are found by module and name.
        device: what to build for; need not be present.
        memory_limit_bytes: bytes that a build may allocate.
    """

    workload: Workload
    schedules: Mapping[str, Schedule]
    device: Device
    memory_limit_bytes: int


@dataclass(frozen=True)
class BuilderResult:
    """What came of a config.

    Attributes:
        executable: for the device; None for an error.
        error: what went wrong.
        message: of an error, one line.
        phases: milliseconds by phase.
        seconds: wall time.
    """

    executable: Executable | None = None
    error: ErrorKind = ErrorKind.NONE
    message: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def build_executable(
    setup: BuilderSetup, schedule_name: str, config: Config, workload: Workload | None = None
) -> BuilderResult:
    """Build one config of a schedule; never raises but for want of memory.

    Raises:
        MemoryError: the build allocates more than there is.
    """
    from tvmconv.compiler import lowering as lowering

    phase_timer, device = PhaseTimer(), setup.device
    start = time.monotonic()

    def make_failure(kind: ErrorKind, error: BaseException) -> BuilderResult:
        return BuilderResult(None, kind, describe_error(error), phase_timer.milliseconds, time.monotonic() - start)

    try:
        target = device.make_target()
        schedule = setup.schedules[schedule_name]
        result = lowering.lower_schedule(
            workload or setup.workload, schedule, config, target, device.limits, device.text, phase_timer.phase
        )
        lowered = result.lowered
        with phase_timer.phase("codegen"):
            _ = lowered.source
        with phase_timer.phase("compile"):
            executable = lowered.executable
    except MemoryError:
        raise
    except CompileError as error:
        return make_failure(ErrorKind.COMPILE_HOST, error)
    except ScheduleFailure as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        return BuilderResult(
            None, ErrorKind.INSTANTIATION, error.reason, phase_timer.milliseconds, time.monotonic() - start
        )
    except BaseException as error:  # a schedule is anybody's code, and may even call sys.exit
        return make_failure(ErrorKind.INSTANTIATION, error)
    return BuilderResult(executable, phases=phase_timer.milliseconds, seconds=time.monotonic() - start)


def main(connection: Connection) -> None:
    """Serve: a `BuilderSetup` comes in, and None goes back or why it fails; then a `BuilderResult` for each schedule's
    name and config, and perhaps workload.

    Another task may come at any time: the configs after it are its own.
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
                return  # what builds left behind has grown too much to go on with
            _limit_memory(current_bytes + setup.memory_limit_bytes)
            connection.send(None)
            continue
        assert setup
        try:
            connection.send(build_executable(setup, *message))
            continue
        except MemoryError:
            pass  # the build's memory goes with the error; but this process may be short of it ever after
        message = f"the build allocates more than {setup.memory_limit_bytes / 2**30:.3g} GiB"
        connection.send(FinalMessage(BuilderResult(None, ErrorKind.COMPILE_HOST, message)))
        return


@functools.cache
def preload_compilers() -> None:
    """Load what every build needs, before the clock of the first one runs and before anybody asks.

    TVM and NVRTC load much of themselves when they are first used, for which a small build is made.
    """
    with contextlib.suppress(Exception):  # a build that needs it tells what is wrong
        import_tvm()
        from tvmconv import devices, registry, workloads
        from tvmconv.compiler import lowering as lowering

        workload, device = workloads.parse(WARM_UP_WORKLOAD), devices.find_device(WARM_UP_ARCH)
        schedule = registry.schedules(workload)[0]
        _ = lowering.lower_schedule(
            workload, schedule, {}, device.make_target(), device.limits, device.text
        ).lowered.executable


def _get_allocated_bytes() -> int:
    """What this process has allocated."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _limit_memory(max_bytes: int) -> None:
    """Let this process allocate so many bytes in all, or as many as it may; another task may set another limit."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS,
        (max_bytes if hard_limit == resource.RLIM_INFINITY else min(max_bytes, hard_limit), hard_limit),
    )
