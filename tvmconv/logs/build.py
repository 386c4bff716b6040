"""`tvmconv.build`: a kernel of the schedule and the config that are named, or that a log says are the fastest."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from tvmconv import kernel, library
from tvmconv.devices import Device
from tvmconv.errors import Error, FallbackWarning, KnobError
from tvmconv.kernel import Kernel
from tvmconv.knobs import Value
from tvmconv.logs.best import Nearness, Paths, Rankings
from tvmconv.predicted import build_predicted
from tvmconv.workloads import Workload
from tvmconv.workloads.registry import as_workload


def build(
    workload: Workload | str,
    schedule: str | library.Schedule | None = None,
    *,
    device: str | Device | None = None,
    arch: str | None = None,
    config: Mapping[str, Value] | None = None,
    log: Paths | Rankings | None = None,
    check: bool = True,
) -> Kernel:
    """Build the kernel of a schedule for a workload.

    Args:
        workload: what to compute, or its text.
        schedule: how, by name or as found by `schedules`; by default what the log says, else what the model predicts
            or the best schedule without tuning, and where no model knows the device `depthwise` for what is depthwise,
            `direct` for other convolutions and `register` for filters.
        device: where to run it, such as `cuda:0` or `opencl:0`; by default the best there is (`auto`).
        arch: instead of a device, a CUDA architecture to compile for only, such as `sm_90`.
        config: values by knob name; the other knobs take their defaults.
        log: instead of a config, a log, a folder of logs or several of them, or what was read of them, whose fastest
            valid record for the workload (and the schedule) on this device is built. Where there is none, a
            `FallbackWarning` tells what is built instead: the record of the nearest device of its kind, what the model
            predicts, or the schedule with its default config.
        check: whether a predicted kernel is timed on the device for some milliseconds beside the schedules' default
            configs, of which the fastest is built then. It takes some seconds, mostly to build them. Without, and for
            an architecture alone, a prediction is checked by the analysis of its code.

    Raises:
        WorkloadError: the text of the workload is malformed.
        ScheduleError: no such schedule for this workload, or not for devices of this kind.
        KnobError: no such knob, or not a value that it takes.
        DeviceError: no such device, the workload does not fit in its memory, or the kernel exceeds its limits.
        CompileError: the schedule does not lower.
        Error: a log cannot be read.
    """
    workload = as_workload(workload)
    if log is None and (schedule is not None or config is not None):
        return kernel.build(workload, schedule, device=device, arch=arch, config=config)
    if config is not None:
        raise KnobError("give a config or a log, not both")
    place = kernel.find_place(device, arch)
    if log is None:
        kernel.check_memory(workload, place)
        return build_predicted(workload, place, check=check)
    chosen = None if schedule is None else library.as_schedule(workload, schedule)
    kernel.check_memory(workload, place)
    failures: list[Error] = []
    rankings = log if isinstance(log, Rankings) else Rankings(log, workload)
    for nearness, record in rankings.nearest_first(workload, place, chosen.name if chosen else None):
        try:
            built = kernel.build_on(workload, chosen or library.find(workload, record.schedule), place, record.config)
        except Error as error:  # the schedule has changed since, or this device has other limits
            failures.append(error)
            continue
        built.record = record
        if nearness is not Nearness.DEVICE:
            _warn(f"no record of {workload} on {place.name} applies: built is the fastest on {record.device}", failures)
        elif failures:
            _warn(f"a faster record of {workload} does not apply", failures)
        return built
    built = kernel.build_on(workload, chosen, place, None) if chosen else build_predicted(workload, place, check=check)
    how = "predicted" if built.prediction else "default"
    _warn(
        f"no record of {workload} for {place.name} applies: built is {built.schedule.name} with {how} knobs", failures
    )
    return built


def _warn(message: str, failures: Sequence[Error]) -> None:
    first = f"; {len(failures)} skipped, the first: {failures[0]}" if failures else ""
    warnings.warn(message + first, FallbackWarning, stacklevel=3)
