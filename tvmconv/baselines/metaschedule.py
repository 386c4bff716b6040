"""Comparison with MetaSchedule, TVM's own search: its trials per second and the speed of its best kernel.

MetaSchedule runs with its default rules, cost model, LocalBuilder, LocalRunner and database. It runs in a separate
process (`main`), so that it can be ended together with its child processes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
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
from tvmconv.compiler.cuda_environment import make_cuda_environment
from tvmconv.compiler.tensor_intrinsics import import_tensor_intrinsics
from tvmconv.devices import Device
from tvmconv.errors import DeviceError, Error
from tvmconv.workloads import Workload

TRIALS_PER_ROUND = 64  # MetaSchedule's default
_REQUIRED_MODULES = ("psutil", "cloudpickle", "xgboost")
FAILED_SECONDS = 1e9  # the database records failures as 1e10 seconds
CLOCK_FILE = "clock"


@dataclass(frozen=True)
class MetaScheduleResult:
    """Result of a search."""

    trials: int  # number of tried configs
    succeeded: int  # number of configs with a time
    seconds: float  # wall time from the first config to the last time
    best: float | None  # seconds per launch of the fastest config


def check_device(device: Device) -> None:
    """Raise DeviceError with the reason if MetaSchedule cannot measure on a device."""
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
    """Run a search with MetaSchedule in rounds of `TRIALS_PER_ROUND`; only its log is kept.

    The search is ended after `seconds`, and rounds that were completed before count.
    """
    check_device(device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = [workload.text, device.text, str(num_trials), str(seed), name]
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main(sys.argv[1:])"
        environment = make_cuda_environment() | {"TMPDIR": name}
        status = run_bounded([sys.executable, "-c", code, *arguments], log, environment, seconds)
        stopped_at = time.monotonic()
        if status:
            raise Error(f"MetaSchedule ended with status {status}, {_read_last_line(log)!r}; see {log}")
        with log.open("ab") as output:  # these logs contain the errors of trials
            for task_log in sorted(folder.glob("logs/*.task_[0-9]*.log")):
                with task_log.open("rb") as source:
                    shutil.copyfileobj(source, output)
        return read_search(folder, stopped_at)


def main(argv: Sequence[str]) -> None:
    """Run a search in this process.

    The arguments are workload, device, number of trials, seed, and the folder for the database and the file `clock`,
    which gets the start and the end of the search by the monotonic clock.
    """
    text, device_name, num_trials, seed, name = argv
    workload, target, folder = workloads.parse(text), devices.find_device(device_name).make_target(), Path(name)

    from tvm.s_tir import meta_schedule

    import_tensor_intrinsics()  # the search needs them

    with (folder / CLOCK_FILE).open("w", buffering=1) as clock:
        print(time.monotonic(), file=clock)
        meta_schedule.tune_tir(
            workload.prim_func(), target, name, int(num_trials), num_trials_per_iter=TRIALS_PER_ROUND, seed=int(seed)
        )
        print(time.monotonic(), file=clock)


def run_bounded(command: Sequence[str], log: Path, environment: Mapping[str, str], seconds: float) -> int | None:
    """Run a command, end all processes that it started, and return its exit status; None after the time limit."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # a process group, which can be ended as a whole
        )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_search(folder: Path, stopped_at: float) -> MetaScheduleResult:
    """Read the result of a search, which ended by `stopped_at`, from MetaSchedule's database and the file `clock`."""
    clock = folder / CLOCK_FILE
    if not clock.exists():
        raise Error("MetaSchedule reached its time limit before it began")
    started_at, ended_at = (*map(float, clock.read_text().split()), stopped_at)[:2]
    costs = [statistics.fmean(times) for _, times in read_records(folder)]  # MetaSchedule ranks by the mean
    succeeded = [cost for cost in costs if cost < FAILED_SECONDS]
    return MetaScheduleResult(len(costs), len(succeeded), ended_at - started_at, min(succeeded, default=None))


def read_records(folder: Path) -> list[tuple[int, list[float]]]:
    """Return the number of the task and the seconds of each candidate in MetaSchedule's database."""
    database, records = folder / "database_tuning_record.json", []
    for line in database.read_text().splitlines() if database.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):  # the last line may be incomplete
            task, (_, times, *_) = json.loads(line)
            records.append((int(task), times))
    return records


def _read_last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
