"""Building what the model predicts to be the fastest, checked: a prediction without a trial may be far off.

The model was taught measured configs, and trees continue no trend beyond what they were taught. So a predicted config
is compared with what its compiled kernel shows:

* Its local memory must not take longer than the whole kernel is expected to take (`local_memory`).
* On a device, the kernel and the defaults of all schedules are timed for some milliseconds each, and the fastest is
  taken.
* Where nothing is timed, and the nearest workload that the schedule was taught is far away (`FAR`), the time that the
  analysis predicts decides between the kernel and the default of least such time.

Where the model predicts nothing, the default of the schedule that is tried first is built, as without a model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from tvmconv import devices, library
from tvmconv.analysis.local_memory import seconds_by_code, seconds_by_text
from tvmconv.errors import Error
from tvmconv.kernel import Kernel, build_on
from tvmconv.knowledge.choose import promising
from tvmconv.knowledge.likeness import distance
from tvmconv.knowledge.model import known_for
from tvmconv.untuned import analysed_seconds, build_defaults, build_untuned, untuned_schedules

if TYPE_CHECKING:
    from tvmconv.devices import Device
    from tvmconv.knowledge.features import Machine
    from tvmconv.knowledge.model import Knowledge
    from tvmconv.knowledge.predict import Prediction
    from tvmconv.workloads import Conv, Workload

FAR = 6.0  # powers of two by which the sizes of two workloads differ, beyond which one tells little of the other
CHECK_SECONDS = 0.005  # for which a kernel is timed, after the clocks were brought up
BUILD_SECONDS = 5.0  # after which no further default is built to compare with


def build_predicted(workload: Workload, device: Device, *, check: bool = True) -> Kernel:
    """Build what the model predicts to be the fastest, or the best default where that is faster.

    Args:
        workload: what to compute.
        device: where it is to run, or the architecture to compile for.
        check: whether the kernel is timed on the device beside the defaults of all schedules.

    Returns:
        The kernel. Its `prediction` is None where it is a default.

    Raises:
        ScheduleError: no schedule of the workload is made to be tuned on the device.
        Error: nothing was predicted, and the default does not lower or does not fit the device.
    """
    known = known_for(device.arch)
    predictions = promising(workload, device)
    if known is None or not predictions:
        return build_on(workload, library.to_tune(workload, device.kind, device.arch)[0], device, None)
    predicted = _plausible(workload, device, predictions, known.machine)
    if check and not isinstance(device, devices.Arch):
        fastest = _fastest(workload, _with_defaults(predicted, workload, device, BUILD_SECONDS))
        if fastest:
            return fastest
    if predicted is None:
        return build_untuned(workload, device)
    if _distance(workload, predicted, known) > FAR:
        untuned = build_untuned(workload, device)
        return min(predicted, untuned, key=lambda kernel: analysed_seconds(kernel, known.machine))
    return predicted


def contenders(workload: Workload, device: Device) -> list[Kernel]:
    """Build the kernels that `build_predicted` times on a device: a plausible prediction first, then defaults.

    Args:
        workload: what to compute.
        device: where it is to run, or the architecture to compile for.

    Raises:
        ScheduleError: no schedule of the workload is made to be tuned on the device.
    """
    known = known_for(device.arch)
    predicted = _plausible(workload, device, promising(workload, device), known.machine) if known else None
    return _with_defaults(predicted, workload, device)


def _with_defaults(
    predicted: Kernel | None, workload: Workload, device: Device, seconds: float = math.inf
) -> list[Kernel]:
    defaults = build_defaults(workload, device, untuned_schedules(workload, device), seconds)
    return [*([predicted] if predicted else []), *defaults]


def _plausible(
    workload: Workload, device: Device, predictions: Sequence[Prediction], machine: Machine
) -> Kernel | None:
    """Build the first prediction that compiles and is plausible; None where there is no such prediction."""
    for prediction in predictions:
        with contextlib.suppress(Error):  # the compiler may not take every config that the model was taught
            built = build_on(workload, library.find(workload, prediction.schedule), device, prediction.config)
            built.prediction = prediction
            if is_plausible(built, prediction, machine):
                return built
    return None


def is_plausible(kernel: Kernel, prediction: Prediction, machine: Machine) -> bool:
    """Return whether the local memory of a predicted kernel takes no longer than the whole kernel was expected to.

    Args:
        kernel: of the predicted config, for an NVIDIA architecture.
        prediction: with the expected seconds.
        machine: the GPU that these are of.

    Raises:
        CompileError: the kernel does not compile.
    """
    if seconds_by_text(kernel, machine) > prediction.seconds:
        return False  # without a compiler, which takes seconds for such texts
    return seconds_by_code(kernel, machine) <= prediction.seconds


def _distance(workload: Workload, predicted: Kernel, known: Knowledge) -> float:
    """How far the nearest workload is that the schedule of a predicted kernel was taught."""
    examples = known.experts[predicted.schedule.name].examples
    others = (known.workload(each.workload) for each in examples)
    return min((distance(cast("Conv", workload), other, any_rank=True) for other in others), default=math.inf)


def _fastest(workload: Workload, built: list[Kernel]) -> Kernel | None:
    """Time kernels on their device, and return the fastest of those that run; None where none runs."""
    inputs = workload.inputs(seed=0)
    times: list[tuple[float, Kernel]] = []
    for kernel in built:
        with contextlib.suppress(Error):
            times.append((kernel.loaded.time(inputs, seconds=CHECK_SECONDS).median, kernel))
    return min(times, key=lambda each: each[0])[1] if times else None
