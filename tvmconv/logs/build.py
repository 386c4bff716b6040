"""`tvmconv.build`: a kernel of the schedule and the config that are named, or that a log says are the fastest."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from tvmconv import kernel, registry
from tvmconv.devices import Device
from tvmconv.errors import Error, FallbackWarning, KnobError
from tvmconv.kernel import Kernel
from tvmconv.logs.ranking import DeviceMatch, LogPaths, RecordIndex
from tvmconv.predicted_kernel import build_predicted
from tvmconv.space import Value
from tvmconv.workloads import Workload
from tvmconv.workloads.registry import as_workload


def build(
    workload: Workload | str,
    schedule: str | registry.Schedule | None = None,
    *,
    device: str | Device | None = None,
    arch: str | None = None,
    config: Mapping[str, Value] | None = None,
    log: LogPaths | RecordIndex | None = None,
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
    target_device = kernel.resolve_device(device, arch)
    if log is None:
        kernel.check_device_memory(workload, target_device)
        return build_predicted(workload, target_device, time_candidates=check)
    chosen_schedule = None if schedule is None else registry.as_schedule(workload, schedule)
    kernel.check_device_memory(workload, target_device)
    failures: list[Error] = []
    record_index = log if isinstance(log, RecordIndex) else RecordIndex(log, workload)
    for device_match, record in record_index.iterate_by_device_match(
        workload, target_device, chosen_schedule.name if chosen_schedule else None
    ):
        try:
            built_kernel = kernel.build_for_device(
                workload,
                chosen_schedule or registry.find_schedule(workload, record.schedule),
                target_device,
                record.config,
            )
        except Error as error:  # the schedule has changed since, or this device has other limits
            failures.append(error)
            continue
        built_kernel.record = record
        if device_match is not DeviceMatch.DEVICE:
            _warn(
                f"no record of {workload} on {target_device.name} applies: built is the fastest on {record.device}",
                failures,
            )
        elif failures:
            _warn(f"a faster record of {workload} does not apply", failures)
        return built_kernel
    built_kernel = (
        kernel.build_for_device(workload, chosen_schedule, target_device, None)
        if chosen_schedule
        else build_predicted(workload, target_device, time_candidates=check)
    )
    config_kind = "predicted" if built_kernel.prediction else "default"
    _warn(
        f"no record of {workload} for {target_device.name} applies: built is "
        f"{built_kernel.schedule.name} with {config_kind} knobs",
        failures,
    )
    return built_kernel


def _warn(message: str, failures: Sequence[Error]) -> None:
    first_failure = f"; {len(failures)} skipped, the first: {failures[0]}" if failures else ""
    warnings.warn(message + first_failure, FallbackWarning, stacklevel=3)
