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

from tvmconv.errors import CompileError, ScheduleFailure, describe
from tvmconv.measuring.child import Last, messages
from tvmconv.measuring.outcome import ErrorKind
from tvmconv.measuring.stopwatch import Stopwatch
from tvmconv.without_torch import import_tvm

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from tvmconv.compiler.program import Program
    from tvmconv.devices import Device
    from tvmconv.knobs import Config
    from tvmconv.library import Schedule
    from tvmconv.workloads import Workload


SMALL, SMALL_ARCH = "conv2d:1x1x2x2,1x1x1x1", "sm_90"  # what is built to load the compilers


@dataclass(frozen=True)
class Task:
    """What a builder process builds, whatever the config.

    Attributes:
        workload: what to compute, where a config does not come with another.
        schedules: how, each under its name or another; their functions are found by module and name.
        device: what to build for; need not be present.
        memory_limit: bytes that a build may allocate.
    """

    workload: Workload
    schedules: Mapping[str, Schedule]
    device: Device
    memory_limit: int


@dataclass(frozen=True)
class Built:
    """What came of a config.

    Attributes:
        program: for the device; None for an error.
        error: what went wrong.
        message: of an error, one line.
        phases: milliseconds by phase.
        seconds: wall time.
    """

    program: Program | None = None
    error: ErrorKind = ErrorKind.NONE
    message: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def build(task: Task, schedule: str, config: Config, workload: Workload | None = None) -> Built:
    """Build one config of a schedule; never raises but for want of memory.

    Raises:
        MemoryError: the build allocates more than there is.
    """
    from tvmconv.compiler import build as road

    watch, device = Stopwatch(), task.device
    start = time.monotonic()

    def failed(kind: ErrorKind, error: BaseException) -> Built:
        return Built(None, kind, describe(error), watch.milliseconds, time.monotonic() - start)

    try:
        target = device.target()
        how = task.schedules[schedule]
        made = road.build(workload or task.workload, how, config, target, device.limits, device.text, watch.phase)
        lowered = made.lowered
        with watch.phase("codegen"):
            _ = lowered.source
        with watch.phase("compile"):
            program = lowered.program
    except MemoryError:
        raise
    except CompileError as error:
        return failed(ErrorKind.COMPILE_HOST, error)
    except ScheduleFailure as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        return Built(None, ErrorKind.INSTANTIATION, error.reason, watch.milliseconds, time.monotonic() - start)
    except BaseException as error:  # a schedule is anybody's code, and may even call sys.exit
        return failed(ErrorKind.INSTANTIATION, error)
    return Built(program, phases=watch.milliseconds, seconds=time.monotonic() - start)


def main(connection: Connection) -> None:
    """Serve: a `Task` comes in, and None goes back or why it fails; then a `Built` for each schedule's name and config,
    and perhaps workload.

    Another task may come at any time: the configs after it are its own.
    """
    task, bytes_first, received = None, 0, messages(connection)
    load()
    while True:
        try:
            message = next(received)
        except EOFError:
            raise
        except Exception as error:
            connection.send(describe(error))
            return
        if isinstance(message, Task):
            task, bytes_now = message, _allocated_bytes()
            bytes_first = bytes_first or bytes_now
            if bytes_now - bytes_first > task.memory_limit / 2:
                return  # what builds left behind has grown too much to go on with
            _limit_memory(bytes_now + task.memory_limit)
            connection.send(None)
            continue
        assert task
        try:
            connection.send(build(task, *message))
            continue
        except MemoryError:
            pass  # the build's memory goes with the error; but this process may be short of it ever after
        message = f"the build allocates more than {task.memory_limit / 2**30:.3g} GiB"
        connection.send(Last(Built(None, ErrorKind.COMPILE_HOST, message)))
        return


@functools.cache
def load() -> None:
    """Load what every build needs, before the clock of the first one runs and before anybody asks.

    TVM and NVRTC load much of themselves when they are first used, for which a small build is made.
    """
    with contextlib.suppress(Exception):  # a build that needs it tells what is wrong
        import_tvm()
        from tvmconv import devices, library, workloads
        from tvmconv.compiler import build as road

        workload, device = workloads.parse(SMALL), devices.find(SMALL_ARCH)
        schedule = library.schedules(workload)[0]
        _ = road.build(workload, schedule, {}, device.target(), device.limits, device.text).lowered.program


def _allocated_bytes() -> int:
    """What this process has allocated."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _limit_memory(limit: int) -> None:
    """Let this process allocate so many bytes in all, or as many as it may; another task may set another limit."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
