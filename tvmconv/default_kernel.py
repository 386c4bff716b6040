"""The best kernel that a workload has without tuning: the fastest of all schedules at their default knobs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TYPE_CHECKING

from tvmconv import registry
from tvmconv.analysis.predicted_time import predict_kernel_time
from tvmconv.analysis.schedule_estimate import estimate_schedule_seconds
from tvmconv.cost_model.model import cost_model_for
from tvmconv.errors import AnalysisError, CompileError, Error
from tvmconv.kernel import Kernel, build_for_device

if TYPE_CHECKING:
    from tvmconv.cost_model.features import DeviceSpec
    from tvmconv.devices import Device
    from tvmconv.registry import Schedule
    from tvmconv.workloads import Workload

MAX_EXECUTED_INSTRUCTIONS = (
    30_000  # instructions of a block that are executed to predict a time: some tenths of a second
)
MIN_LARGE_WORKLOAD_FLOPS = 5e9  # of a workload, beyond which only its most promising schedules are of use
MAX_LOW_PRIORITY_SCHEDULES = (
    3  # schedules that are not made to be tuned, the usually fastest first, where not all are looked at
)


def default_candidate_schedules(workload: Workload, device: Device, *, will_be_timed: bool = True) -> list[Schedule]:
    """Return the schedules whose default may be the fastest, those that are made to be tuned first.

    They are all that run on the device but for the naive one. The first steps of the ladder are left out for large
    workloads, for which they take long, and where nothing is timed, as the analysis of their long loops takes long.

    Args:
        workload: what to compute.
        device: where it is to run.
        will_be_timed: whether the kernels will be timed.

    Raises:
        ScheduleError: no schedule of the workload is made to be tuned on the device.
    """
    primary = registry.schedules_to_tune(workload, device.kind, device.arch)
    low_priority = registry.low_priority_schedules(workload, device.kind, device.arch)
    return [
        *primary,
        *(
            low_priority
            if will_be_timed and workload.flops <= MIN_LARGE_WORKLOAD_FLOPS
            else low_priority[:MAX_LOW_PRIORITY_SCHEDULES]
        ),
    ]


def build_default_kernels(
    workload: Workload, device: Device, schedules: Sequence[Schedule], max_seconds: float = math.inf
) -> list[Kernel]:
    """Build schedules at their default knobs, the first of them at least, and return those that compile.

    Args:
        workload: what to compute.
        device: where it is to run.
        schedules: what to build.
        max_seconds: number of seconds after which no further build begins.
    """
    started_at = perf_counter()
    with ThreadPoolExecutor() as pool:  # for NVRTC, which compiles while TVM lowers the next schedule
        builds = [
            (kernel, pool.submit(lambda kernel=kernel: kernel.program))  # type: ignore[misc]
            for number, schedule in enumerate(schedules)
            if number == 0 or perf_counter() - started_at < max_seconds
            for kernel in _build_if_valid(workload, schedule, device)
        ]
    return [kernel for kernel, compilation in builds if compilation.exception() is None]


def _build_if_valid(workload: Workload, schedule: Schedule, device: Device) -> Iterator[Kernel]:
    """The kernel of a schedule's default, with its text written; none where it does not lower or fit the device."""
    try:
        kernel = build_for_device(workload, schedule, device, None)
        assert kernel.source
        yield kernel
    except Error:
        return


def build_fastest_default(workload: Workload, device: Device) -> Kernel:
    """Build the schedule whose default takes the least time by the analysis of its code.

    Where no time can be computed, it is the first schedule that is made to be tuned.

    Args:
        workload: what to compute.
        device: where it is to run, or the architecture to compile for.

    Raises:
        ScheduleError: no schedule of the workload is made to be tuned on the device.
        Error: that schedule does not lower, or does not fit the device.
    """
    cost_model = cost_model_for(device.arch)
    default_kernels = (
        build_default_kernels(workload, device, default_candidate_schedules(workload, device, will_be_timed=False))
        if cost_model
        else []
    )
    if cost_model and default_kernels:
        return min(default_kernels, key=lambda kernel: estimate_kernel_seconds(kernel, cost_model.device_spec))
    return build_for_device(workload, registry.schedules_to_tune(workload, device.kind, device.arch)[0], device, None)


def estimate_kernel_seconds(kernel: Kernel, machine: DeviceSpec) -> float:
    """Return the seconds that a kernel takes by the analysis of its code, or by its schedule's estimate.

    They are infinite where neither tells a time: also where a block takes more than `MAX_EXECUTED_INSTRUCTIONS`
    instructions.
    """
    try:
        return predict_kernel_time(kernel, machine, MAX_EXECUTED_INSTRUCTIONS).seconds
    except (AnalysisError, CompileError):
        return estimate_schedule_seconds(kernel) or math.inf


def fastest_default_name(seconds: Mapping[str, float]) -> str:
    """Return the name of the schedule that is the fastest at its default knobs, by measured times.

    Args:
        seconds: measured seconds of schedules at their default knobs, by name; of one at least.
    """
    return min(seconds, key=lambda name: seconds[name])
