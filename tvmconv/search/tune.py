"""Tuning: search the schedules of a workload for the fastest config, measured on devices."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence

from tvmconv import compat, devices, registry
from tvmconv.devices import Device
from tvmconv.errors import DeviceError
from tvmconv.measure.workers import pool
from tvmconv.measure.workers.pool import prestart_workers
from tvmconv.search.options import TuneOptions
from tvmconv.search.progress import SearchProgress
from tvmconv.search.result import TuneResult
from tvmconv.search.search import search
from tvmconv.search.setup import ScheduleSelection, SearchPrefetcher
from tvmconv.tvm_import import can_leave_out_torch, import_tvm
from tvmconv.workloads import Workload
from tvmconv.workloads.registry import as_workload
from tvmconv.workloads.text import quote

ProgressCallback = Callable[[SearchProgress], None]


@compat.accept_former_keywords(compare="measure_baseline", confirm="remeasure_best", transfer="transfer_logs")
def tune(
    workload: Workload | str,
    schedule: str | registry.Schedule | None = None,
    tuner: str = "gp",
    *,
    trials: int | None = None,
    seconds: float | None = None,
    log: str | os.PathLike[str] = "tuning.jsonl",
    device: str | Device | Sequence[str | Device] = "auto",
    seed: int = 0,
    patience: int | None = None,
    transfer_logs: Iterable[str | os.PathLike[str]] = (),
    workers: int | None = None,
    measure_baseline: bool = True,
    remeasure_best: bool = True,
    progress: ProgressCallback | None = None,
    verify: str = "auto",
) -> TuneResult:
    """Search for the fastest config of a workload, and append every measurement to a log.

    A measurement is written to the log before it counts. The records that the log already has of this workload,
    schedule and device count as well, so the same call resumes an interrupted search.

    Args:
        workload: Workload to tune, or its text.
        schedule: Schedule whose knobs are searched, or its name. By default, all schedules of
            `tvmconv.registry.schedules_to_tune` are searched together, and the default configs of the other schedules
            are measured as well.
        tuner: Search algorithm: "gp", "ga", "random" or "grid".
        trials: Number of records, those in the log included. The default is 512 without `seconds`, else no limit.
        seconds: Time limit in seconds of wall-clock time, with final timings and earlier sessions included. If the
            first configs, two for each builder process, are not measured by then, the search waits some seconds longer
            for them; see `tvmconv.deadline`.
        log: File of records that is read first and then appended to.
        device: Device to measure on, or several devices of one architecture. "cuda" stands for all GPUs of this host,
            "auto" for these GPUs or, without one, for the first OpenCL device.
        seed: Seed of the tuner, not negative.
        patience: Number of consecutive records without improvement after which the search ends.
        transfer_logs: Logs, or folders of logs, of other workloads that the gp tuner also learns from.
        workers: Number of builder processes. The default is the number of processors minus one.
        measure_baseline: Whether the naive schedule is measured once, if the log does not have it and a launch takes
            at most one second.
        remeasure_best: Whether the fastest configs are measured again at the end, on fresh inputs.
        progress: Function that is called with the status about ten times per second.
        verify: Outputs of a kernel that are compared with float64 results: "full" for all, "sample" for a random
            sample, "auto" for a sample of convolutions above 20 GFLOP; see `tvmconv.verification`.

    Returns:
        The best record, the status at the end, and the times of the phases of the search.

    Raises:
        WorkloadError: The text of the workload is malformed.
        TunerError: There is no such tuner.
        TuningError: A number or `verify` is out of its range, or the tuner does not learn from other workloads.
        ScheduleError: There is no such schedule for this workload, or it does not support the device.
        DeviceError: A device does not exist, or was lost.
        Error: The log cannot be read or written.
        KeyboardInterrupt: The user interrupted the search; the log has all measurements up to then.

    Examples:
        >>> import tvmconv as tc
        >>> result = tc.tune("conv2d:1x64x56x56,64x64x3x3,s1,p1", seconds=10, log="my.jsonl")  # doctest: +SKIP
        >>> result.final.schedule, result.speedup  # doctest: +SKIP
    """
    started_at = time.monotonic()
    options = TuneOptions(
        tuner,
        trials,
        seconds,
        log,
        seed,
        patience,
        transfer_logs,
        workers,
        measure_baseline,
        remeasure_best,
        started_at,
        verify,
    )
    schedule_names = [] if schedule is None else [schedule]
    parsed_workload = as_workload(workload)
    can_skip_torch = can_leave_out_torch()  # the answer is valid only before this library starts threads
    with pool.keep_workers_alive(starts_fork_server=True):
        measuring_devices = find_devices(device)
        prestart_workers(options.workers, measuring_devices)
        if can_skip_torch:
            import_tvm()
        return tune_all(parsed_workload, schedule_names, measuring_devices, options, progress or (lambda status: None))


def tune_all(
    workload: Workload,
    schedules: Sequence[str | registry.Schedule],
    measuring_devices: Sequence[Device],
    options: TuneOptions,
    on_progress: ProgressCallback,
    prefetcher: SearchPrefetcher | None = None,
    prepare_next: Callable[[], None] | None = None,
) -> TuneResult:
    """Search several schedules together. It raises the errors of `tune`. Without schedules, all that may be the fastest
    are searched.
    """
    selection = ScheduleSelection.resolve(workload, schedules, measuring_devices[0])
    with pool.keep_workers_alive():
        prestart_workers(options.workers, measuring_devices)
        return search(workload, selection, measuring_devices, options, on_progress, prefetcher, prepare_next)


def find_devices(device: str | Device | Sequence[str | Device], tracker: str | None = None) -> list[Device]:
    """Return the devices that one or several texts name; `devices.find_device` returns only one of them. "cuda" and
    "auto" stand for all GPUs of this host with the name and architecture of the first one, "rpc:KEY" for all workers of
    the key at the tracker (host and port; by default, those of TVM_TRACKER_HOST and TVM_TRACKER_PORT).
    """
    if not isinstance(device, (str, Device)):
        if not isinstance(device, Sequence):
            raise DeviceError(f"expected a device such as 'cuda:0' or 'opencl:0', or several, not {quote(device)}")
        if not device:
            raise DeviceError("no device to measure on: expected one such as cuda:0 or opencl:0")
        return [measuring_device for name in device for measuring_device in find_devices(name, tracker)]
    if isinstance(device, str) and device.startswith("rpc:"):
        from tvmconv.devices import rpc

        return list(rpc.list_rpc_devices(device.removeprefix("rpc:"), rpc.parse_tracker_address(tracker)))
    selected = devices.find_device(device) if isinstance(device, str) else device
    if isinstance(selected, devices.Arch):
        raise DeviceError(
            f"{selected.text} is to compile for only: to measure choose cuda:N, opencl:N, rpc:KEY or auto"
        )
    if selected.kind == "cuda" and device in ("auto", "cuda"):
        from tvmconv.devices.cuda import device as cuda

        return [
            cuda_device
            for cuda_device in cuda.list_cuda_devices()
            if (cuda_device.arch, cuda_device.name) == (selected.arch, selected.name)
        ]
    return [selected]
