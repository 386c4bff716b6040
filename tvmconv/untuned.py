"""The best kernel that a workload has without tuning: the fastest of all schedules at their default knobs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TYPE_CHECKING

from tvmconv import library
from tvmconv.analysis.estimate import estimated_seconds
from tvmconv.analysis.predicted_time import predicted_time
from tvmconv.errors import AnalysisError, CompileError, Error
from tvmconv.kernel import Kernel, build_on
from tvmconv.knowledge.model import known_for

if TYPE_CHECKING:
    from tvmconv.devices import Device
    from tvmconv.knowledge.features import Machine
    from tvmconv.library import Schedule
    from tvmconv.workloads import Workload

MOST_STEPS = 30_000  # instructions of a block that are executed to predict a time: some tenths of a second
LARGE_FLOPS = 5e9  # of a workload, beyond which only its most promising schedules are of use
FEW_RESERVES = 3  # schedules that are not made to be tuned, the usually fastest first, where not all are looked at


def untuned_schedules(workload: Workload, device: Device, *, timed: bool = True) -> list[Schedule]:
    """Return the schedules whose default may be the fastest, those that are made to be tuned first.

    They are all that run on the device but for the naive one. The first steps of the ladder are left out for large
    workloads, for which they take long, and where nothing is timed, as the analysis of their long loops takes long.

    Args:
        workload: what to compute.
        device: where it is to run.
        timed: whether the kernels will be timed.

    Raises:
        ScheduleError: no schedule of the workload is made to be tuned on the device.
    """
    first = library.to_tune(workload, device.kind, device.arch)
    others = library.in_reserve(workload, device.kind, device.arch)
    return [*first, *(others if timed and workload.flops <= LARGE_FLOPS else others[:FEW_RESERVES])]


def build_defaults(
    workload: Workload, device: Device, schedules: Sequence[Schedule], seconds: float = math.inf
) -> list[Kernel]:
    """Build schedules at their default knobs, the first of them at least, and return those that compile.

    Args:
        workload: what to compute.
        device: where it is to run.
        schedules: what to build.
        seconds: number of seconds after which no further build begins.
    """
    begun = perf_counter()
    with ThreadPoolExecutor() as pool:  # for NVRTC, which compiles while TVM lowers the next schedule
        built = [
            (kernel, pool.submit(lambda kernel=kernel: kernel.program))  # type: ignore[misc]
            for number, schedule in enumerate(schedules)
            if number == 0 or perf_counter() - begun < seconds
            for kernel in _built(workload, schedule, device)
        ]
    return [kernel for kernel, made in built if made.exception() is None]


def _built(workload: Workload, schedule: Schedule, device: Device) -> Iterator[Kernel]:
    """The kernel of a schedule's default, with its text written; none where it does not lower or fit the device."""
    try:
        kernel = build_on(workload, schedule, device, None)
        assert kernel.source
        yield kernel
    except Error:
        return


def build_untuned(workload: Workload, device: Device) -> Kernel:
    """Build the schedule whose default takes the least time by the analysis of its code.

    Where no time can be computed, it is the first schedule that is made to be tuned.

    Args:
        workload: what to compute.
        device: where it is to run, or the architecture to compile for.

    Raises:
        ScheduleError: no schedule of the workload is made to be tuned on the device.
        Error: that schedule does not lower, or does not fit the device.
    """
    known = known_for(device.arch)
    built = build_defaults(workload, device, untuned_schedules(workload, device, timed=False)) if known else []
    if known and built:
        return min(built, key=lambda kernel: analysed_seconds(kernel, known.machine))
    return build_on(workload, library.to_tune(workload, device.kind, device.arch)[0], device, None)


def analysed_seconds(kernel: Kernel, machine: Machine) -> float:
    """Return the seconds that a kernel takes by the analysis of its code, or by its schedule's estimate.

    They are infinite where neither tells a time: also where a block takes more than `MOST_STEPS` instructions.
    """
    try:
        return predicted_time(kernel, machine, MOST_STEPS).seconds
    except (AnalysisError, CompileError):
        return estimated_seconds(kernel) or math.inf


def fastest_untuned(seconds: Mapping[str, float]) -> str:
    """Return the name of the schedule that is the fastest at its default knobs, by measured times.

    Args:
        seconds: measured seconds of schedules at their default knobs, by name; of one at least.
    """
    return min(seconds, key=lambda name: seconds[name])
