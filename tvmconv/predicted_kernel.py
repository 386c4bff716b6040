"""Building of the kernel that the cost model predicts to be the fastest, with checks of the prediction.

The cost model is trained on measured configs, and decision trees do not extrapolate beyond their training data. A
predicted config is therefore checked with its compiled kernel:

* The local-memory traffic must not take longer than the predicted time of the whole kernel (`local_memory`).
* On a device, the kernel and the default kernels of all schedules are timed for some milliseconds each, and the fastest
  is returned.
* Without timing, the predicted kernel is compared with the best default kernel by analytic prediction, if the nearest
  training workload is further away than `MAX_WORKLOAD_DISTANCE`.

Without a prediction, the result is the default kernel of the first schedule that a search tries.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TYPE_CHECKING, cast

from tvmconv import devices, registry
from tvmconv.analysis.local_memory import estimate_seconds_from_cubin, estimate_seconds_from_text
from tvmconv.analysis.predicted_time import (
    estimate_config_seconds,
    estimate_schedule_seconds,
    predict_kernel_time,
)
from tvmconv.cost_model.model import cost_model_for
from tvmconv.cost_model.recommend import recommend_configs
from tvmconv.cost_model.similarity import workload_distance
from tvmconv.errors import AnalysisError, CompileError, Error
from tvmconv.kernel import Kernel, build_for_device

if TYPE_CHECKING:
    from tvmconv.cost_model.model import CostModel
    from tvmconv.cost_model.predict import Prediction
    from tvmconv.devices import Device
    from tvmconv.registry import Schedule
    from tvmconv.target import Target
    from tvmconv.workloads import Conv, Workload

MAX_EXECUTED_INSTRUCTIONS = 30_000  # emulated instructions per block; a prediction then takes some tenths of a second
MIN_LARGE_WORKLOAD_FLOPS = 5e9  # a workload with more FLOP is tried with its most promising schedules only
MAX_LOW_PRIORITY_SCHEDULES = 3  # schedules outside the default search that are tried for a large workload
MAX_WORKLOAD_DISTANCE = 6.0  # largest trusted distance to a training workload, as the sum of |log2| of size ratios
SECONDS_PER_CHECK = 0.005  # timing per kernel after the warm-up of the clocks
MAX_ESTIMATE_RATIO = 2.0  # longest estimate of a default kernel to build, over the shortest time of those before it
MAX_DEFAULT_BUILD_SECONDS = 5.0  # time after which no further default kernel is built for the comparison


def build_predicted(workload: Workload, device: Device, *, time_candidates: bool = True) -> Kernel:
    """Build the kernel that the cost model predicts to be the fastest, or the best default kernel if that is faster.
    The `prediction` of a default kernel is None.
    """
    cost_model = cost_model_for(device.arch)
    predictions = recommend_configs(workload, device)
    if cost_model is None or not predictions:
        schedule = registry.schedules_to_tune(workload, device.kind, device.arch)[0]
        return build_for_device(workload, schedule, device, None)
    predicted = _build_plausible_prediction(workload, device, predictions, cost_model.device_spec)
    if time_candidates and not isinstance(device, devices.Arch):
        candidates = _append_defaults(predicted, workload, device, MAX_DEFAULT_BUILD_SECONDS)
        if fastest := _time_and_select_fastest(workload, candidates):
            return fastest
    if predicted is None:
        return build_fastest_default(workload, device)
    if _distance_to_nearest_example(workload, predicted, cost_model) > MAX_WORKLOAD_DISTANCE:
        machine, default = cost_model.device_spec, build_fastest_default(workload, device, predicted)
        return min(predicted, default, key=lambda kernel: estimate_kernel_seconds(kernel, machine))
    return predicted


def build_contenders(workload: Workload, device: Device) -> list[Kernel]:
    """Build the kernels that `build_predicted` times on a device: a plausible prediction, then default kernels."""
    cost_model, predicted = cost_model_for(device.arch), None
    if cost_model:
        predictions = recommend_configs(workload, device)
        predicted = _build_plausible_prediction(workload, device, predictions, cost_model.device_spec)
    return _append_defaults(predicted, workload, device)


def _append_defaults(
    predicted: Kernel | None, workload: Workload, device: Device, max_seconds: float = math.inf
) -> list[Kernel]:
    defaults = build_default_kernels(workload, device, default_candidate_schedules(workload, device), max_seconds)
    return [*([predicted] if predicted else []), *defaults]


def _build_plausible_prediction(
    workload: Workload, device: Device, predictions: Sequence[Prediction], machine: Target
) -> Kernel | None:
    """Build the first prediction that compiles and is plausible; return None if there is none."""
    for prediction in predictions:
        with contextlib.suppress(Error):  # the compiler may reject a config of the training data
            schedule = registry.find_schedule(workload, prediction.schedule)
            kernel = build_for_device(workload, schedule, device, prediction.config)
            kernel.prediction = prediction
            if is_plausible(kernel, prediction, machine):
                return kernel
    return None


def is_plausible(kernel: Kernel, prediction: Prediction, machine: Target) -> bool:
    """Return whether the local-memory traffic of a kernel takes no longer than its predicted time."""
    if estimate_seconds_from_text(kernel, machine) > prediction.seconds:
        return False  # decided without NVRTC, which takes seconds for such sources
    return estimate_seconds_from_cubin(kernel, machine) <= prediction.seconds


def _distance_to_nearest_example(workload: Workload, predicted: Kernel, cost_model: CostModel) -> float:
    """Return the distance to the nearest training workload of the predicted kernel's schedule; 0 if it has none, as
    its own estimate predicted it.
    """
    if predicted.schedule.name not in cost_model.schedule_models:
        return 0.0
    examples = cost_model.schedule_models[predicted.schedule.name].examples
    others = (cost_model.parse_workload(example.workload) for example in examples)
    distances = (workload_distance(cast("Conv", workload), other, any_spatial_ndim=True) for other in others)
    return min(distances, default=math.inf)


def _time_and_select_fastest(workload: Workload, kernels: list[Kernel]) -> Kernel | None:
    """Time kernels on their device and return the fastest one that runs, or None if none runs."""
    inputs = workload.inputs(seed=0)
    times: list[tuple[float, Kernel]] = []
    for kernel in kernels:
        with contextlib.suppress(Error):
            times.append((kernel.loaded_kernel.time(inputs, seconds=SECONDS_PER_CHECK).median, kernel))
    return min(times, key=lambda each: each[0])[1] if times else None


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


def build_fastest_default(workload: Workload, device: Device, built: Kernel | None = None) -> Kernel:
    """Build the default kernel with the shortest predicted time. If no time can be predicted, the result is the default
    kernel of the first schedule that a search tries.

    The schedules are tried in the order of their own estimates, and those without an estimate last. A schedule whose
    estimate exceeds the shortest time so far by `MAX_ESTIMATE_RATIO` is not built.

    `built`: kernel that is used instead of building the default config of its schedule again, if it has that config.
    """
    fastest: Kernel | None = None
    shortest_seconds = math.inf
    if cost_model := cost_model_for(device.arch):
        schedules = default_candidate_schedules(workload, device, will_be_timed=False)
        estimates = {schedule.name: _estimate_default(workload, schedule, device) for schedule in schedules}
        for schedule in sorted(schedules, key=lambda schedule: estimates[schedule.name] or math.inf):
            if (estimates[schedule.name] or 0) > MAX_ESTIMATE_RATIO * shortest_seconds:
                continue
            is_built = built is not None and _has_default_config(built, schedule)
            for kernel in [built] if built and is_built else build_default_kernels(workload, device, [schedule]):
                seconds = estimate_kernel_seconds(kernel, cost_model.device_spec)
                if fastest is None or seconds < shortest_seconds:
                    fastest, shortest_seconds = kernel, seconds
    if fastest:
        return fastest
    return build_for_device(workload, registry.schedules_to_tune(workload, device.kind, device.arch)[0], device, None)


def _has_default_config(kernel: Kernel, schedule: Schedule) -> bool:
    """Return whether a kernel is of a schedule and has the default value of each knob."""
    if kernel.schedule.name != schedule.name:
        return False
    return kernel.config == schedule.space(kernel.workload, kernel.device.limits).default


def _estimate_default(workload: Workload, schedule: Schedule, device: Device) -> float | None:
    """Return the estimated seconds of a schedule's default config; None if the schedule cannot estimate it."""
    try:
        return estimate_config_seconds(workload, schedule, None, device.limits)
    except Error:
        return None


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
