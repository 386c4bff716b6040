"""Tuning: the schedules of a workload that are worth it are searched, on the devices that were named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence

from tvmconv import compat, devices, registry
from tvmconv.devices import Device
from tvmconv.errors import DeviceError
from tvmconv.measure.workers.pool import keep_workers_alive, prestart_fork_server
from tvmconv.measure.workers.prestart import prestart_workers
from tvmconv.search.options import TuneOptions
from tvmconv.search.progress import SearchProgress
from tvmconv.search.search import TuneResult, search
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
    """Search for the fastest config of a schedule, or of all those that promise something.

    Every measurement is in the log before it is counted. What the log has already of this workload, schedule and device
    counts: the same call after an interruption goes on where that one was.

    Args:
        workload: what to compute, or its text.
        schedule: how; its knobs make the space. By default all that `tvmconv.registry.schedules_to_tune` names are
            searched as one, the schedule being one more choice, and the other schedules' defaults are measured as well.
        tuner: "gp", "ga", "random" or "grid".
        trials: how many records there shall be, those in the log included; 512 if `seconds` is not given either.
        seconds: how long it may take, on the clock, with the last timings, earlier sessions included. Where the first
            configs, two for each process that builds, are not measured by then, they are waited for some seconds more,
            as `tvmconv.deadline` says.
        log: the file to append to.
        device: where to measure: a device, several of one architecture, "cuda" for all GPUs of this host, or "auto" for
            these or else the first device of OpenCL.
        seed: of the tuner.
        patience: end after so many records without a better one.
        transfer_logs: logs, or folders of logs, whose records of other workloads the gp tuner learns from as well.
        workers: processes that build; by default one less than there are processors.
        measure_baseline: measure the naive schedule once, if the log does not have it and a launch takes a second at
            most.
        remeasure_best: measure the fastest configs again at the end, on fresh inputs.
        progress: called with the status about ten times a second.
        verify: "full" to compare all outputs of a kernel with float64, "sample" to compare a random sample of them,
            "auto" for a sample of convolutions above 20 GFLOP; see `tvmconv.verification`.

    Returns:
        What came of the search.

    Raises:
        WorkloadError: the text of the workload is malformed.
        TunerError: there is no such tuner.
        TuningError: trials, seconds, patience or workers is not positive, there is no such way to verify, or the tuner
            does not learn from other workloads.
        ScheduleError: no such schedule for this workload, or not for devices of this kind.
        DeviceError: a device is not there, or is lost.
        Error: the log cannot be read or written.
        KeyboardInterrupt: the user's; the log is whole.
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
    can_skip_torch = can_leave_out_torch()  # asked before there are threads of this library
    with keep_workers_alive():
        prestart_fork_server()  # it loads what builders need while this process looks for devices and imports TVM
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
    """Search several schedules as one. Raises as `tune` does.

    Args:
        workload: what to compute.
        schedules: by name or as found by the library; if none is named, all that can win.
        measuring_devices: devices of one architecture, to measure on.
        options: how to search, and how long.
        on_progress: is called with the status about ten times a second.
        prefetcher: as for `search`.
        prepare_next: as for `search`.
    """
    selection = ScheduleSelection.resolve(workload, schedules, measuring_devices[0])
    with keep_workers_alive():
        prestart_workers(options.workers, measuring_devices)
        return search(workload, selection, measuring_devices, options, on_progress, prefetcher, prepare_next)


def find_devices(device: str | Device | Sequence[str | Device], tracker: str | None = None) -> list[Device]:
    """The devices that a text names, or several texts: as `devices.find_device`, but for more than one.

    Args:
        device: "cuda" and "auto" name all GPUs of this host that are like the first one, "rpc:KEY" all workers under
            the key.
        tracker: host and port for "rpc:KEY"; by default those of TVM_TRACKER_HOST and TVM_TRACKER_PORT.

    Raises:
        DeviceError: a text names no device, one that is not here, or an architecture; or nothing is named.
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
