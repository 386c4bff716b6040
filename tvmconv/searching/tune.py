"""Tuning: the schedules of a workload that are worth it are searched, on the devices that were named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence

from tvmconv import devices, library
from tvmconv.devices import Device
from tvmconv.errors import DeviceError
from tvmconv.measuring.ready import begin_processes
from tvmconv.measuring.standing import begin_origin, standing
from tvmconv.searching.opening import Ahead, Field
from tvmconv.searching.request import Request
from tvmconv.searching.search import Tuned, search
from tvmconv.searching.status import Status
from tvmconv.without_torch import can_leave_out_torch, import_tvm
from tvmconv.workloads import Workload
from tvmconv.workloads.registry import as_workload
from tvmconv.workloads.text import quote

Told = Callable[[Status], None]


def tune(
    workload: Workload | str,
    schedule: str | library.Schedule | None = None,
    tuner: str = "xgb",
    *,
    trials: int | None = None,
    seconds: float | None = None,
    log: str | os.PathLike[str] = "tuning.jsonl",
    device: str | Device | Sequence[str | Device] = "auto",
    seed: int = 0,
    patience: int | None = None,
    transfer: Iterable[str | os.PathLike[str]] = (),
    workers: int | None = None,
    compare: bool = True,
    confirm: bool = True,
    progress: Told | None = None,
    verify: str = "auto",
) -> Tuned:
    """Search for the fastest config of a schedule, or of all those that promise something.

    Every measurement is in the log before it is counted. What the log has already of this workload, schedule and device
    counts: the same call after an interruption goes on where that one was.

    Args:
        workload: what to compute, or its text.
        schedule: how; its knobs make the space. By default all that `library.to_tune` names are searched as one, the
            schedule being one more choice, and the other schedules' defaults are measured as well.
        tuner: "xgb", "ga", "random" or "grid".
        trials: how many records there shall be, those in the log included; 512 if `seconds` is not given either.
        seconds: how long it may take, on the clock, with the last timings, earlier sessions included. Where the first
            configs, two for each process that builds, are not measured by then, they are waited for some seconds more,
            as `tvmconv.deadline` says.
        log: the file to append to.
        device: where to measure: a device, several of one architecture, "cuda" for all GPUs of this host, or "auto" for
            these or else the first device of OpenCL.
        seed: of the tuner.
        patience: end after so many records without a better one.
        transfer: logs, or folders of logs, whose records of other workloads the xgb tuner learns from as well.
        workers: processes that build; by default one less than there are processors.
        compare: measure the naive schedule once, if the log does not have it and a launch takes a second at most.
        confirm: measure the fastest configs again at the end, on fresh inputs.
        progress: called with the status about ten times a second.
        verify: "full" to compare all outputs of a kernel with float64, "sample" to compare a random sample of them,
            "auto" for a sample of convolutions above 20 GFLOP; see `tvmconv.verify`.

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
    begun = time.monotonic()
    request = Request(tuner, trials, seconds, log, seed, patience, transfer, workers, compare, confirm, begun, verify)
    named = [] if schedule is None else [schedule]
    found = as_workload(workload)
    without_torch = can_leave_out_torch()  # asked before there are threads of this library
    with standing():
        begin_origin()  # it loads what builders need while this process looks for devices and imports TVM
        places = find_devices(device)
        begin_processes(request.workers, places)
        if without_torch:
            import_tvm()
        return tune_all(found, named, places, request, progress or (lambda status: None))


def tune_all(
    workload: Workload,
    schedules: Sequence[str | library.Schedule],
    places: Sequence[Device],
    request: Request,
    told: Told,
    ahead: Ahead | None = None,
    then: Callable[[], None] | None = None,
) -> Tuned:
    """Search several schedules as one. Raises as `tune` does.

    Args:
        workload: what to compute.
        schedules: by name or as found by the library; if none is named, all that can win.
        places: devices of one architecture, to measure on.
        request: how to search, and how long.
        told: is called with the status about ten times a second.
        ahead: as for `search`.
        then: as for `search`.
    """
    field = Field.of(workload, schedules, places[0])
    with standing():
        begin_processes(request.workers, places)
        return search(workload, field, places, request, told, ahead, then)


def find_devices(device: str | Device | Sequence[str | Device], tracker: str | None = None) -> list[Device]:
    """The devices that a text names, or several texts: as `devices.find`, but for more than one.

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
        return [place for each in device for place in find_devices(each, tracker)]
    if isinstance(device, str) and device.startswith("rpc:"):
        from tvmconv.devices import rpc

        return list(rpc.devices(device.removeprefix("rpc:"), rpc.tracker_address(tracker)))
    found = devices.find(device) if isinstance(device, str) else device
    if isinstance(found, devices.Arch):
        raise DeviceError(f"{found.text} is to compile for only: to measure choose cuda:N, opencl:N, rpc:KEY or auto")
    if found.kind == "cuda" and device in ("auto", "cuda"):
        from tvmconv.devices.cuda import device as cuda

        return [gpu for gpu in cuda.devices() if (gpu.arch, gpu.name) == (found.arch, found.name)]
    return [found]
