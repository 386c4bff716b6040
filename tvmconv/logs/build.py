"""`tvmconv.build`: build a kernel of a named schedule and config, of the best record of a log, or of a prediction."""

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
    """Build a kernel for a workload.

    Args:
        workload: Workload to compute, or its text.
        schedule: Schedule or its name. By default, it is that of the log's best record, else the one that the cost
            model predicts to be the fastest or the best default. If the cost model does not cover the device, it is
            `depthwise` for depthwise convolutions, `direct` for other convolutions, and `register` for filters.
        device: Device to run on, such as `cuda:0` or `opencl:0`. The default is the best available one (`auto`).
        arch: CUDA architecture to compile for instead of a device, such as `sm_90`.
        config: Values by knob name; the other knobs take their defaults.
        log: Index of records, or path of a log or of a folder of logs, or several of them, instead of a config. The
            kernel is that of the fastest valid record for the workload (and the schedule) on this device. If there is
            none, a `FallbackWarning` names the alternative: the record of a similar device of the same kind, the
            prediction of the cost model, or the default config of the schedule.
        check: Whether a predicted kernel is timed on the device together with the schedules' default configs, of which
            the fastest is then used. This takes some seconds, mostly for building. Otherwise, and for an architecture,
            a prediction is checked by the analysis of its code.

    Returns:
        The kernel.

    Raises:
        WorkloadError: The text of the workload is malformed.
        ScheduleError: There is no such schedule for this workload, or it does not support the device.
        KnobError: There is no such knob or value, or both `config` and `log` are given.
        DeviceError: There is no such device, its memory is too small, or the kernel exceeds its limits.
        CompileError: The schedule cannot be lowered.
        Error: A log cannot be read.

    Examples:
        >>> import tvmconv as tc
        >>> tc.build("conv2d:1x8x8x8,8x8x3x3,s1,p1", "tiling", arch="sm_90").schedule.name
        'tiling'
    """
    workload = as_workload(workload)
    if log is None and (schedule is not None or config is not None):
        return kernel.build(workload, schedule, device=device, arch=arch, config=config)
    if config is not None:
        raise KnobError("expected a config or a log, not both")
    target_device = kernel.resolve_device(device, arch)
    if log is None:
        kernel.check_device_memory(workload, target_device)
        return build_predicted(workload, target_device, time_candidates=check)
    chosen_schedule = None if schedule is None else registry.as_schedule(workload, schedule)
    kernel.check_device_memory(workload, target_device)
    failures: list[Error] = []
    target = target_device.name if target_device.multiprocessors else target_device.text  # an architecture has none
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
        except Error as error:  # the schedule has changed since the record, or this device has other limits
            failures.append(error)
            continue
        built_kernel.record = record
        if device_match is not DeviceMatch.DEVICE:
            _warn(
                f"no record of {workload} for {target}: built is the fastest on {record.device}",
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
        f"no record of {workload} for {target}: built is {built_kernel.schedule.name} with {config_kind} knobs",
        failures,
    )
    return built_kernel


def _warn(message: str, failures: Sequence[Error]) -> None:
    first_failure = f"; {len(failures)} skipped, the first: {failures[0]}" if failures else ""
    warnings.warn(message + first_failure, FallbackWarning, stacklevel=3)
