"""TVM's own search, MetaSchedule, to compare with: how many trials a second it makes, and how fast its best kernel is.

All parts are MetaSchedule's as they come: its rules, cost model, LocalBuilder, LocalRunner and database. It runs in a
process of its own (`main`), so that it can be ended together with the processes that it starts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tvmconv import devices, workloads
from tvmconv.devices import Device
from tvmconv.errors import DeviceError, Error
from tvmconv.workloads import Workload

TRIALS_PER_ROUND = 64  # MetaSchedule's default
_REQUIRED_MODULES = ("psutil", "cloudpickle", "xgboost")
_FAILED_SECONDS = 1e9  # the database has 1e10 for what failed
_CLOCK_FILE = "clock"


@dataclass(frozen=True)
class MetaScheduleResult:
    """What a search did.

    Attributes:
        trials: configs that it tried.
        succeeded: of these, those that have a time.
        seconds: on the clock, from its first config to its last time.
        best: seconds a launch of the fastest; None if none succeeded.
    """

    trials: int
    succeeded: int
    seconds: float
    best: float | None


def check_device(device: Device) -> None:
    """Raise DeviceError if MetaSchedule cannot measure there, with the reason."""
    if device.kind != "cuda":
        raise DeviceError(f"MetaSchedule does not measure on {device.text}: TVM's wheel has no OpenCL runtime")
    if device.text != "cuda:0":
        raise DeviceError(f"MetaSchedule's LocalRunner measures on cuda:0, not on {device.text}")
    missing = [name for name in _REQUIRED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise DeviceError(f"MetaSchedule needs more modules: pip install {' '.join(missing)}")


def run_search(
    workload: Workload, device: Device, num_trials: int, *, log: Path, seed: int = 0, seconds: float
) -> MetaScheduleResult:
    """Have MetaSchedule search; nothing but the log is left of it.

    Args:
        workload: what to compute; MetaSchedule gets its unscheduled function and the device's target.
        device: where.
        num_trials: how many, in rounds of `TRIALS_PER_ROUND`.
        log: the file that MetaSchedule's output goes to.
        seed: of the search.
        seconds: after which it is ended; what it measured in rounds that it completed by then counts.

    Raises:
        DeviceError: it cannot measure there.
        Error: it failed, or it did not begin in time.
        OSError: the log cannot be written.
    """
    check_device(device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = [workload.text, device.text, str(num_trials), str(seed), name]
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main(sys.argv[1:])"
        environment = _make_cuda_environment() | {"TMPDIR": name}
        status = run_bounded([sys.executable, "-c", code, *arguments], log, environment, seconds)
        stopped_at = time.monotonic()
        if status:
            raise Error(f"MetaSchedule ended with status {status}, {_read_last_line(log)!r}; see {log}")
        with log.open("ab") as output:  # the errors of trials are in these
            for task_log in sorted(folder.glob("logs/*.task_[0-9]*.log")):
                with task_log.open("rb") as source:
                    shutil.copyfileobj(source, output)
        return read_search(folder, stopped_at)


def main(argv: Sequence[str]) -> None:
    """Search, in this process.

    Args:
        argv: workload, device, number of trials, seed, and the folder for the database and for the file `clock`, which
            gets the begin and the end of the search on the monotonic clock.
    """
    text, device_name, num_trials, seed, name = argv
    workload, target, folder = workloads.parse(text), devices.find_device(device_name).make_target(), Path(name)

    import tvm.s_tir.tensor_intrin  # noqa: F401  of which the search asks; it takes seconds, none of the search's
    from tvm.s_tir import meta_schedule

    with (folder / _CLOCK_FILE).open("w", buffering=1) as clock:
        print(time.monotonic(), file=clock)
        meta_schedule.tune_tir(
            workload.prim_func(), target, name, int(num_trials), num_trials_per_iter=TRIALS_PER_ROUND, seed=int(seed)
        )
        print(time.monotonic(), file=clock)


def run_bounded(command: Sequence[str], log: Path, environment: Mapping[str, str], seconds: float) -> int | None:
    """Run a command; end all processes that it started when it ends, and with it when its time is over.

    Args:
        command: program and arguments.
        log: the file that its output goes to.
        environment: variables beside those of this process.
        seconds: how long it may take.

    Returns:
        The exit status; None if its time was over.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # a process group, which is ended as a whole
        )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _make_cuda_environment() -> dict[str, str]:
    """Variables by which TVM's own CUDA compiler and runtime find the headers and libcudart of NVIDIA's wheels."""
    from cuda.pathfinder import find_nvidia_header_directory, load_nvidia_dynamic_lib

    runtime = load_nvidia_dynamic_lib("cudart").abs_path
    paths = [os.path.dirname(runtime or ""), os.environ.get("LD_LIBRARY_PATH")]
    environment = {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}
    headers, cccl = (find_nvidia_header_directory(library) for library in ("cudart", "cccl"))
    if headers and cccl and "CUDA_PATH" not in os.environ:
        environment |= {"CUDA_PATH": os.path.dirname(headers), "TVM_CUDA_NVRTC_EXTRA_OPTS": shlex.join([f"-I{cccl}"])}
    return environment


def read_search(folder: Path, stopped_at: float) -> MetaScheduleResult:
    """What MetaSchedule's database and `clock` tell.

    Args:
        folder: where they are.
        stopped_at: on the monotonic clock, of a search that did not come to its own.

    Raises:
        Error: it did not begin.
    """
    clock = folder / _CLOCK_FILE
    if not clock.exists():
        raise Error("MetaSchedule's time was over before it began")
    started_at, ended_at = (*map(float, clock.read_text().split()), stopped_at)[:2]
    database = folder / "database_tuning_record.json"
    costs = []
    for line in database.read_text().splitlines() if database.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):  # a last line that was being written at the end
            _, (_, times, *_) = json.loads(line)
            costs.append(statistics.fmean(times))  # MetaSchedule ranks by the mean
    succeeded = [cost for cost in costs if cost < _FAILED_SECONDS]
    return MetaScheduleResult(len(costs), len(succeeded), ended_at - started_at, min(succeeded, default=None))


def _read_last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
