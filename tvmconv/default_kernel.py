"""Selection of the fastest kernel without tuning, among all schedules with their default knob values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TYPE_CHECKING

from tvmconv import registry
from tvmconv.analysis.predicted_time import estimate_schedule_seconds, predict_kernel_time
from tvmconv.cost_model.model import cost_model_for
from tvmconv.errors import AnalysisError, CompileError, Error
from tvmconv.kernel import Kernel, build_for_device

if TYPE_CHECKING:
    from tvmconv.devices import Device
    from tvmconv.registry import Schedule
    from tvmconv.target import Target
    from tvmconv.workloads import Workload

MAX_EXECUTED_INSTRUCTIONS = 30_000  # emulated instructions per block; a prediction then takes some tenths of a second
MIN_LARGE_WORKLOAD_FLOPS = 5e9  # a workload with more FLOP is tried with its most promising schedules only
MAX_LOW_PRIORITY_SCHEDULES = 3  # schedules outside the default search that are tried for a large workload


def default_candidate_schedules(workload: Workload, device: Device, *, will_be_timed: bool = True) -> list[Schedule]:
    """Return the schedules whose default config may be the fastest, beginning with those that a search tries. The naive
    schedule is never among them. Most low-priority schedules are left out for large workloads, for which they run long.
    They are also left out when nothing is timed, because the analysis of their long loops is slow.
    """
    primary = registry.schedules_to_tune(workload, device.kind, device.arch)
    low_priority = registry.low_priority_schedules(workload, device.kind, device.arch)
    tries_all = will_be_timed and workload.flops <= MIN_LARGE_WORKLOAD_FLOPS
    return [*primary, *(low_priority if tries_all else low_priority[:MAX_LOW_PRIORITY_SCHEDULES])]


def build_default_kernels(
    workload: Workload, device: Device, schedules: Sequence[Schedule], max_seconds: float = math.inf
) -> list[Kernel]:
    """Build schedules with their default knob values and return the kernels that compile. The first schedule is always
    built; after `max_seconds` no further build begins.
    """
    started_at, builds = perf_counter(), []
    with ThreadPoolExecutor() as pool:  # NVRTC compiles while TVM lowers the next schedule
        for number, schedule in enumerate(schedules):
            if number == 0 or perf_counter() - started_at < max_seconds:
                with contextlib.suppress(Error):
                    kernel = build_for_device(workload, schedule, device, None)
                    assert kernel.source  # generated here, in this thread
                    builds.append((kernel, pool.submit(getattr, kernel, "executable")))
    return [kernel for kernel, compilation in builds if compilation.exception() is None]


def build_fastest_default(workload: Workload, device: Device) -> Kernel:
    """Build the default kernel with the shortest predicted time. If no time can be predicted, the result is the default
    kernel of the first schedule that a search tries.
    """
    if cost_model := cost_model_for(device.arch):
        machine, candidates = cost_model.device_spec, default_candidate_schedules(workload, device, will_be_timed=False)
        if kernels := build_default_kernels(workload, device, candidates):
            return min(kernels, key=lambda kernel: estimate_kernel_seconds(kernel, machine))
    return build_for_device(workload, registry.schedules_to_tune(workload, device.kind, device.arch)[0], device, None)


def estimate_kernel_seconds(kernel: Kernel, machine: Target) -> float:
    """Return the seconds that a kernel takes, predicted from its code or else by its schedule's estimate. The result is
    infinite if neither gives a time. Code is analysed up to `MAX_EXECUTED_INSTRUCTIONS` per block.
    """
    try:
        return predict_kernel_time(kernel, machine, MAX_EXECUTED_INSTRUCTIONS).seconds
    except (AnalysisError, CompileError):
        return estimate_schedule_seconds(kernel) or math.inf


def fastest_default_name(seconds: Mapping[str, float]) -> str:
    """Return the name of the schedule whose default kernel was measured as the fastest."""
    return min(seconds, key=lambda name: seconds[name])
