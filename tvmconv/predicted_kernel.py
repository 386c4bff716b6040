"""Building what the model predicts to be the fastest, checked: a prediction without a trial may be far off.

The model was taught measured configs, and trees continue no trend beyond what they were taught. So a predicted config
is compared with what its compiled kernel shows:

* Its local memory must not take longer than the whole kernel is expected to take (`local_memory`).
* On a device, the kernel and the defaults of all schedules are timed for some milliseconds each, and the fastest is
  taken.
* Where nothing is timed, and the nearest workload that the schedule was taught is far away (`MAX_WORKLOAD_DISTANCE`),
  the time that the analysis predicts decides between the kernel and the default of least such time.

Where the model predicts nothing, the default of the schedule that is tried first is built, as without a model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from tvmconv import devices, registry
from tvmconv.analysis.local_memory import estimate_seconds_from_cubin, estimate_seconds_from_text
from tvmconv.cost_model.model import cost_model_for
from tvmconv.cost_model.recommend import recommend_configs
from tvmconv.cost_model.similarity import workload_distance
from tvmconv.default_kernel import (
    build_default_kernels,
    build_fastest_default,
    default_candidate_schedules,
    estimate_kernel_seconds,
)
from tvmconv.errors import Error
from tvmconv.kernel import Kernel, build_for_device

if TYPE_CHECKING:
    from tvmconv.cost_model.features import DeviceSpec
    from tvmconv.cost_model.model import CostModel
    from tvmconv.cost_model.predict import Prediction
    from tvmconv.devices import Device
    from tvmconv.workloads import Conv, Workload

MAX_WORKLOAD_DISTANCE = (
    6.0  # powers of two by which the sizes of two workloads differ, beyond which one tells little of the other
)
SECONDS_PER_CHECK = 0.005  # for which a kernel is timed, after the clocks were brought up
MAX_DEFAULT_BUILD_SECONDS = 5.0  # after which no further default is built to compare with


def build_predicted(workload: Workload, device: Device, *, time_candidates: bool = True) -> Kernel:
    """Build what the model predicts to be the fastest, or the best default where that is faster.

    Args:
        workload: what to compute.
        device: where it is to run, or the architecture to compile for.
        time_candidates: whether the kernel is timed on the device beside the defaults of all schedules.

    Returns:
        The kernel. Its `prediction` is None where it is a default.

    Raises:
        ScheduleError: no schedule of the workload is made to be tuned on the device.
        Error: nothing was predicted, and the default does not lower or does not fit the device.
    """
    cost_model = cost_model_for(device.arch)
    predictions = recommend_configs(workload, device)
    if cost_model is None or not predictions:
        return build_for_device(
            workload, registry.schedules_to_tune(workload, device.kind, device.arch)[0], device, None
        )
    predicted = _build_plausible_prediction(workload, device, predictions, cost_model.device_spec)
    if time_candidates and not isinstance(device, devices.Arch):
        fastest = _time_and_select_fastest(
            workload, _append_defaults(predicted, workload, device, MAX_DEFAULT_BUILD_SECONDS)
        )
        if fastest:
            return fastest
    if predicted is None:
        return build_fastest_default(workload, device)
    if _distance_to_nearest_example(workload, predicted, cost_model) > MAX_WORKLOAD_DISTANCE:
        fastest_default = build_fastest_default(workload, device)
        return min(
            predicted, fastest_default, key=lambda kernel: estimate_kernel_seconds(kernel, cost_model.device_spec)
        )
    return predicted


def build_contenders(workload: Workload, device: Device) -> list[Kernel]:
    """Build the kernels that `build_predicted` times on a device: a plausible prediction first, then defaults.

    Args:
        workload: what to compute.
        device: where it is to run, or the architecture to compile for.

    Raises:
        ScheduleError: no schedule of the workload is made to be tuned on the device.
    """
    cost_model = cost_model_for(device.arch)
    predicted = (
        _build_plausible_prediction(workload, device, recommend_configs(workload, device), cost_model.device_spec)
        if cost_model
        else None
    )
    return _append_defaults(predicted, workload, device)


def _append_defaults(
    predicted: Kernel | None, workload: Workload, device: Device, max_seconds: float = math.inf
) -> list[Kernel]:
    defaults = build_default_kernels(workload, device, default_candidate_schedules(workload, device), max_seconds)
    return [*([predicted] if predicted else []), *defaults]


def _build_plausible_prediction(
    workload: Workload, device: Device, predictions: Sequence[Prediction], machine: DeviceSpec
) -> Kernel | None:
    """Build the first prediction that compiles and is plausible; None where there is no such prediction."""
    for prediction in predictions:
        with contextlib.suppress(Error):  # the compiler may not take every config that the model was taught
            kernel = build_for_device(
                workload, registry.find_schedule(workload, prediction.schedule), device, prediction.config
            )
            kernel.prediction = prediction
            if is_plausible(kernel, prediction, machine):
                return kernel
    return None


def is_plausible(kernel: Kernel, prediction: Prediction, machine: DeviceSpec) -> bool:
    """Return whether the local memory of a predicted kernel takes no longer than the whole kernel was expected to.

    Args:
        kernel: of the predicted config, for an NVIDIA architecture.
        prediction: with the expected seconds.
        machine: the GPU that these are of.

    Raises:
        CompileError: the kernel does not compile.
    """
    if estimate_seconds_from_text(kernel, machine) > prediction.seconds:
        return False  # without a compiler, which takes seconds for such texts
    return estimate_seconds_from_cubin(kernel, machine) <= prediction.seconds


def _distance_to_nearest_example(workload: Workload, predicted: Kernel, cost_model: CostModel) -> float:
    """How far the nearest workload is that the schedule of a predicted kernel was taught."""
    examples = cost_model.schedule_models[predicted.schedule.name].examples
    example_workloads = (cost_model.parse_workload(example.workload) for example in examples)
    return min(
        (
            workload_distance(cast("Conv", workload), example_workload, any_spatial_ndim=True)
            for example_workload in example_workloads
        ),
        default=math.inf,
    )


def _time_and_select_fastest(workload: Workload, kernels: list[Kernel]) -> Kernel | None:
    """Time kernels on their device, and return the fastest of those that run; None where none runs."""
    inputs = workload.inputs(seed=0)
    times: list[tuple[float, Kernel]] = []
    for kernel in kernels:
        with contextlib.suppress(Error):
            times.append((kernel.loaded_kernel.time(inputs, seconds=SECONDS_PER_CHECK).median, kernel))
    return min(times, key=lambda each: each[0])[1] if times else None
