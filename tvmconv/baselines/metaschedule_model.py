"""Comparison with MetaSchedule on a whole module of Relax: a search with a time limit, and the compilation from its
database.

The search runs in a separate process (`main`), so that it can be ended together with its child processes. Rounds that
were completed before the limit count; what has no record is compiled by TVM's default pipeline.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv import devices
from tvmconv.baselines.metaschedule import (
    CLOCK_FILE,
    MetaScheduleResult,
    check_device,
    read_search,
    run_bounded,
)
from tvmconv.compiler.cuda_environment import make_cuda_environment
from tvmconv.compiler.tensor_intrinsics import import_tensor_intrinsics
from tvmconv.devices import Device
from tvmconv.errors import Error

if TYPE_CHECKING:
    from tvm.ir import IRModule

TRIALS_PER_ROUND = 16  # fewer than MetaSchedule's default of 64, so that a short search has a round for more tasks
MAX_TRIALS = 100_000  # the time limit ends the search
_TASKS_FILE = "tasks.json"


def tune_module(mod: IRModule, device: Device, folder: Path, *, log: Path, seconds: float) -> MetaScheduleResult:
    """Search for schedules of a module's functions, and write the database to a folder.

    Args:
        mod: Module of Relax with its weights as constants.
        device: GPU to measure on.
        folder: Folder for the database, which `compile_module` reads.
        log: File for what MetaSchedule prints.
        seconds: Time limit of the search with the start of its process.

    Raises:
        DeviceError: MetaSchedule cannot measure on the device.
        Error: The search failed, or measured nothing within the limit.
    """
    check_device(device)
    folder.joinpath(_TASKS_FILE).write_text(extract_tasks(mod, device), encoding="utf-8")
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, device.text, str(folder)]
    status = run_bounded(command, log, make_cuda_environment() | {"TMPDIR": str(folder)}, seconds)
    if status:
        raise Error(f"MetaSchedule ended with status {status}; see {log}")
    result = read_search(folder, time.monotonic())
    if not result.succeeded:
        raise Error(f"MetaSchedule measured no schedule within {seconds:g} s; see {log}")
    return result


def extract_tasks(mod: IRModule, device: Device) -> str:
    """Return the tasks of a module with their names and numbers of occurrences as JSON of TVM, without weights."""
    import tvm
    from tvm import relax
    from tvm.s_tir import meta_schedule

    target = device.make_target()
    with target:
        tasks = meta_schedule.relax_integration.extract_tasks(relax.get_pipeline("zero")(mod), target)
    return str(tvm.ir.save_json([[task.task_name, task.dispatched[0], int(task.weight)] for task in tasks]))


def compile_module(mod: IRModule, device: Device, folder: Path) -> Any:
    """Compile a module with the schedules in the database of `tune_module`, and others by TVM's default pipeline."""
    import tvm
    from tvm import relax

    target = device.make_target()
    with target:
        fused = relax.get_pipeline("zero")(mod)
        scheduled = relax.transform.MetaScheduleApplyDatabase(str(folder))(fused)
    return tvm.compile(scheduled, target)


def main(argv: Sequence[str]) -> None:
    """Run a search in this process; the arguments are the device and the folder with the tasks."""
    device_name, name = argv
    folder, target = Path(name), devices.find_device(device_name).make_target()

    import tvm
    from tvm.s_tir.meta_schedule.relax_integration import ExtractedTask, extracted_tasks_to_tune_contexts
    from tvm.s_tir.meta_schedule.tune import tune_tasks

    import_tensor_intrinsics()  # the search needs them
    saved = tvm.ir.load_json(folder.joinpath(_TASKS_FILE).read_text(encoding="utf-8"))
    tasks = [ExtractedTask(str(name), mod, target, [mod], int(weight)) for name, mod, weight in saved]
    contexts, weights = extracted_tasks_to_tune_contexts(tasks, name, seed=0)
    with folder.joinpath(CLOCK_FILE).open("w", buffering=1) as clock:
        print(time.monotonic(), file=clock)
        tune_tasks(
            tasks=contexts,
            task_weights=weights,
            work_dir=name,
            max_trials_global=MAX_TRIALS,
            num_trials_per_iter=TRIALS_PER_ROUND,
        )
        print(time.monotonic(), file=clock)
