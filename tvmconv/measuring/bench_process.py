"""The device process: programs in, verified times out, one after another. Loads neither TVM nor PyTorch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv import devices
from tvmconv.devices.base import LostError, first_line
from tvmconv.errors import CompileError, describe
from tvmconv.measuring.child import Last, messages
from tvmconv.measuring.outcome import ErrorKind, Outcome
from tvmconv.measuring.stopwatch import Stopwatch

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

    from tvmconv.compiler.program import Program
    from tvmconv.devices import Device
    from tvmconv.devices.base import Bench
    from tvmconv.devices.comparison import Reference


@dataclass(frozen=True)
class Wake:
    """What a device process may be told first: to bring up its device, for a `Setup` that will come.

    Attributes:
        device: its name for `tvmconv.devices.find`.
    """

    device: str


@dataclass(frozen=True)
class Setup:
    """What a device process measures on, whatever the program.

    Attributes:
        device: its name for `tvmconv.devices.find`.
        inputs: of the workload.
        reference: what its output is compared with.
        tolerance: the largest relative L2 error of a right kernel.
        right: a program that was right before, to see first whether the device still is; None if there was none.
    """

    device: str
    inputs: Sequence[NDArray[Any]]
    reference: Reference | NDArray[np.float64]
    tolerance: float
    right: Program | None = None


def measure(device: Device, bench: Bench, program: Program, best: float | None, tolerance: float) -> Outcome:
    """Verify a program, and time it if it is right.

    Args:
        device: where the program runs.
        bench: the workload's arrays there.
        program: built for the device.
        best: the best time so far, in seconds a launch, or `math.inf`; the kernel is timed as long as it deserves. None
            for a last timing, as `Bench.time_long` does it.
        tolerance: the largest relative L2 error of a right kernel.

    Raises:
        LostError: the program took the device from this process.
    """
    watch = Stopwatch()
    start = time.monotonic()

    def outcome(**what: Any) -> Outcome:
        return Outcome(**what, phases=watch.milliseconds, seconds=time.monotonic() - start)

    try:
        with watch.phase("load"):
            kernel = device.load(program)
        with watch.phase("verify"):
            found = bench.compare(kernel)
        if not found.is_right(tolerance):
            bench.restore()
            return outcome(error=ErrorKind.WRONG_ANSWER, message=found.fault(tolerance), deviation=found.error)
        with watch.phase("time"):
            times = bench.time_long(kernel) if best is None else bench.time(kernel, best)
    except LostError:
        raise
    except CompileError as error:
        return outcome(error=ErrorKind.COMPILE_DEVICE, message=first_line(error))
    except Exception as error:  # a driver in trouble raises what it likes
        return outcome(error=ErrorKind.RUNTIME, message=describe(error))
    return outcome(times=times, deviation=found.error)


def main(connection: Connection) -> None:
    """Serve: a `Setup` comes in, and None goes back or why it fails; then an `Outcome` for each program and best.

    Another setup may come at any time, for the same device: the arrays of the one before it are freed.
    """
    bench: Bench | None = None
    for message in messages(connection):
        if isinstance(message, Wake):
            with contextlib.suppress(Exception):  # whatever is wrong, `Setup` tells
                nothing = np.zeros(1, np.float32)
                devices.find(message.device).bench([nothing], nothing.astype(np.float64)).close()
            continue
        if isinstance(message, Setup):
            setup = message
            try:
                if bench:
                    bench.close()
                device = devices.find(setup.device)
                bench = device.bench(setup.inputs, setup.reference)
                if setup.right and (reason := measure(device, bench, setup.right, 0.0, setup.tolerance).message):
                    connection.send(f"a program that was right before fails: {reason}")
                    return
            except Exception as error:
                connection.send(describe(error))
                return
            connection.send(None)
            continue
        assert bench
        program, best = message
        try:
            connection.send(measure(device, bench, program, best, setup.tolerance))
        except LostError as error:
            connection.send(Last(Outcome(error=ErrorKind.RUNTIME, message=first_line(error))))
            return
