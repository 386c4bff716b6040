"""Comparison with MetaSchedule on a whole module of Relax: a search with a time limit, and the compilation from its
database.

The search runs in a separate process (`main`), so that it can be ended together with its child processes. Rounds that
were completed before the limit count; what has no record is compiled by TVM's default pipeline.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv import devices
from tvmconv.baselines import metaschedule_sampling
from tvmconv.baselines.metaschedule import (
    CLOCK_FILE,
    FAILED_SECONDS,
    MetaScheduleResult,
    check_device,
    read_records,
    read_search,
    run_bounded,
)
from tvmconv.baselines.metaschedule_sampling import MAX_ROUNDS, TASKS_FILE
from tvmconv.compiler.cuda_environment import make_cuda_environment
from tvmconv.compiler.tensor_intrinsics import import_tensor_intrinsics
from tvmconv.devices import Device, sharing
from tvmconv.errors import Error

if TYPE_CHECKING:
    from tvm.ir import IRModule

TRIALS_PER_ROUND = 4  # fewer than MetaSchedule's default of 64, so that a short search has a round for more tasks
STRATEGIES = ("evolutionary", "replay-trace")  # MetaSchedule's default, and random schedules of the same space
MIN_REPEAT_MILLISECONDS = 20  # of a timing; 100 by default, with which timing takes most of a short search
MAX_TRIALS = 100_000  # the time limit ends the search
CORES_PER_SEARCH = 4  # searches that share the tasks: one would leave most cores idle between its rounds
BUILD_FRACTION = 0.7  # of the time for random candidates; the rest is for timing them
_LOCK_FILE = "lock"


@dataclass(frozen=True)
class ModuleSearchResult(MetaScheduleResult):
    """Result of a search on a module.

    Attributes:
        strategy: One of `STRATEGIES`.
        tasks: Number of tasks of the module.
        trials_by_task: Numbers of candidates that were tried and of those with a time, for each task that has any.
    """

    strategy: str
    tasks: int
    trials_by_task: tuple[tuple[int, int], ...]


def tune_module(
    mod: IRModule,
    device: Device,
    folder: Path,
    *,
    log: Path,
    seconds: float,
) -> ModuleSearchResult:
    """Search for schedules of a module's functions, and write databases to a folder. Several searches share the tasks.

    Args:
        mod: Module of Relax with its weights as constants.
        device: GPU to measure on.
        folder: Folder for the databases, which `compile_module` reads.
        log: File for what MetaSchedule prints; each search adds its rank to the name.
        seconds: Time limit of the search with the start of its process.

    Raises:
        DeviceError: MetaSchedule cannot measure on the device.
        Error: The search failed, or measured nothing within the limit.
    """
    check_device(device)
    num_tasks = write_tasks(mod, device, folder)
    number = max(len(os.sched_getaffinity(0)) // CORES_PER_SEARCH, 1)
    with ThreadPoolExecutor(number) as pool:
        searches = [pool.submit(_run_search, device, folder, log, seconds, r, number) for r in range(number)]
        results = [search.result() for search in searches]
    return summarize_results(results, folder, log, STRATEGIES[0], num_tasks, seconds)


def sample_module(
    mod: IRModule,
    device: Device,
    folder: Path,
    *,
    log: Path,
    seconds: float,
) -> ModuleSearchResult:
    """Build random candidates of all tasks of a module, time them afterwards, and write a database as `tune_module`.

    Candidates that `build_candidates` has left in the folder are not built again. Only the timing uses the GPU, in
    turns with other processes (`tvmconv.devices.sharing`). The arguments and errors are those of `tune_module`, whose
    evolution takes minutes of processor time for the candidates of a task, because it applies thousands of traces of
    scheduling primitives to find them. In the first round of a task it ranks them by a cost model that knows nothing
    yet, and chooses no better.
    """
    check_device(device)
    num_tasks, build_seconds = count_tasks(folder), 0.0
    if not num_tasks:
        started_at = time.monotonic()
        num_tasks = build_candidates(mod, device, folder, log=log, seconds=seconds * BUILD_FRACTION)
        build_seconds = time.monotonic() - started_at
    result = _time_candidates(device, folder, log, max(seconds - build_seconds, seconds * (1 - BUILD_FRACTION)))
    result = replace(result, seconds=result.seconds + build_seconds)
    return summarize_results([result], folder, log, STRATEGIES[1], num_tasks, seconds)


def build_candidates(
    mod: IRModule, device: Device, folder: Path, *, log: Path, seconds: float, num_rounds: int = MAX_ROUNDS
) -> int:
    """Build random candidates of all tasks of a module in rounds, and return the number of tasks. It needs no GPU.

    Args:
        mod: Module of Relax with its weights as constants.
        device: GPU or architecture to build for.
        folder: Folder for the candidates, which `sample_module` times.
        log: File for what MetaSchedule prints; each process adds its rank to the name.
        seconds: Time limit.
        num_rounds: Greatest number of rounds, each of which has `CANDIDATES_PER_ROUND` candidates of each task.
    """
    num_tasks = write_tasks(mod, device, folder)
    number = max(len(os.sched_getaffinity(0)) // CORES_PER_SEARCH, 1)
    arguments = device, folder, log, seconds, number, num_rounds
    with ThreadPoolExecutor(number) as pool:
        for build in [pool.submit(_run_build, rank, *arguments) for rank in range(number)]:
            build.result()
    return num_tasks


def count_tasks(folder: Path) -> int:
    """Return the number of the tasks whose candidates were built in a folder, 0 if there are none."""
    import tvm

    path = folder / TASKS_FILE
    return len(tvm.ir.load_json(path.read_text(encoding="utf-8"))) if path.exists() else 0


def write_tasks(mod: IRModule, device: Device, folder: Path) -> int:
    """Write the tasks of a module to a file in a folder, and return their number."""
    import tvm

    tasks = extract_tasks(mod, device)
    folder.joinpath(TASKS_FILE).write_text(str(tvm.ir.save_json(tasks)), encoding="utf-8")
    return len(tasks)


def summarize_results(
    results: Sequence[MetaScheduleResult], folder: Path, log: Path, strategy: str, num_tasks: int, seconds: float
) -> ModuleSearchResult:
    """Return the result of all searches on a module; raise Error if none has measured a schedule."""
    times = [result.best for result in results if result.best is not None]
    if not times:
        raise Error(f"MetaSchedule measured no schedule within {seconds:g} s; see {log}")
    return ModuleSearchResult(
        trials=sum(result.trials for result in results),
        succeeded=sum(result.succeeded for result in results),
        seconds=max(result.seconds for result in results),
        best=min(times),
        strategy=strategy,
        tasks=num_tasks,
        trials_by_task=tuple(itertools.chain(*map(count_trials, list_databases(folder)))),
    )


def _run_build(
    rank: int, device: Device, folder: Path, log: Path, seconds: float, number: int, num_rounds: int
) -> None:
    """Run one of the processes that build candidates."""
    own = folder / f"built-{rank}"
    own.mkdir()
    numbers = map(str, (rank, number, num_rounds))
    command = _make_command(metaschedule_sampling.build_candidates, device.text, str(folder), *numbers)
    own_log = log.with_name(f"{log.stem}-{rank}{log.suffix}")
    status = run_bounded(command, own_log, make_cuda_environment() | {"TMPDIR": str(own)}, seconds)
    if status:
        raise Error(f"MetaSchedule ended with status {status}; see {own_log}")


def _time_candidates(device: Device, folder: Path, log: Path, seconds: float) -> MetaScheduleResult:
    """Run the process that times candidates, and return its result."""
    own = folder / metaschedule_sampling.TIMED_FOLDER
    own.mkdir(exist_ok=True)
    command = _make_command(metaschedule_sampling.time_candidates, device.text, str(folder), "0")
    status = run_bounded(command, log, make_cuda_environment() | {"TMPDIR": str(own)}, seconds)
    if status:
        raise Error(f"MetaSchedule ended with status {status}; see {log}")
    stopped_at = time.monotonic()
    _drop_incomplete_lines(own)
    return read_search(own, stopped_at)


def _make_command(function: Callable[[Sequence[str]], None], *arguments: str) -> list[str]:
    """Return the command of a Python process that calls a function with arguments."""
    module, name = function.__module__, function.__name__
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from tvmconv.tvm_import import import_tvm; import_tvm(); "
        f"from {module} import {name}; {name}(sys.argv[1:])"
    )
    return [sys.executable, "-c", code, *arguments]


def _run_search(device: Device, folder: Path, log: Path, seconds: float, rank: int, number: int) -> MetaScheduleResult:
    """Run one of the searches that share the tasks, and return its result."""
    own = folder / f"search-{rank}"
    own.mkdir()
    command = _make_command(main, device.text, str(folder), str(rank), str(number))
    own_log = log.with_name(f"{log.stem}-{rank}{log.suffix}")
    status = run_bounded(command, own_log, make_cuda_environment() | {"TMPDIR": str(own)}, seconds)
    if status:
        raise Error(f"MetaSchedule ended with status {status}; see {own_log}")
    stopped_at = time.monotonic()
    _drop_incomplete_lines(own)
    return read_search(own, stopped_at)


def list_databases(folder: Path) -> list[Path]:
    """Return the folders of the databases that the searches on a module have written."""
    return sorted(path.parent for path in folder.glob("search-*/database_workload.json"))


def count_trials(folder: Path) -> tuple[tuple[int, int], ...]:
    """Return the numbers of candidates of each task in a database that were tried, and of those with a time."""
    tried, timed = Counter[int](), Counter[int]()
    for task, times in read_records(folder):
        tried[task] += 1
        timed[task] += statistics.fmean(times) < FAILED_SECONDS
    return tuple((tried[task], timed[task]) for task in sorted(tried))


def _drop_incomplete_lines(folder: Path) -> None:
    """Remove what the end of a search left of the last lines of its database, which MetaSchedule cannot read."""
    for path in folder.glob("database_*.json"):
        lines = path.read_bytes()
        path.write_bytes(lines[: lines.rfind(b"\n") + 1])


def extract_tasks(mod: IRModule, device: Device) -> list[list[Any]]:
    """Return the name, the module without weights and the number of occurrences of each task of a module."""
    from tvm import relax
    from tvm.s_tir import meta_schedule

    target = device.make_target()
    with target:
        tasks = meta_schedule.relax_integration.extract_tasks(relax.get_pipeline("zero")(mod), target)
    return [[task.task_name, task.dispatched[0], int(task.weight)] for task in tasks]


def compile_module(mod: IRModule, device: Device, folder: Path) -> tuple[Any, int]:
    """Compile a module with the schedules in the databases of `tune_module`, and others by TVM's default pipeline; also
    return how many functions have schedules of a database.
    """
    import tvm
    from tvm import relax
    from tvm.s_tir.meta_schedule.database import JSONDatabase, UnionDatabase

    target = device.make_target()
    databases = [JSONDatabase(work_dir=str(path)) for path in list_databases(folder)]
    with target:
        fused = relax.get_pipeline("zero")(mod)  # it would ask for the size of the databases, and a union has none
    with target, UnionDatabase(*databases):
        scheduled = relax.transform.MetaScheduleApplyDatabase()(fused)
    num_scheduled = sum(
        bool(function.attrs and function.attrs.get("tirx.is_scheduled")) for function in scheduled.functions.values()
    )
    return tvm.compile(scheduled, target), num_scheduled


def main(argv: Sequence[str]) -> None:
    """Run a search in this process. The arguments are the device, the folder with the tasks, the rank of the search and
    the number of searches.
    """
    device_name, name, rank, number = argv
    folder, target = Path(name), devices.find_device(device_name).make_target()
    own = folder / f"search-{rank}"

    import tvm
    from tvm.s_tir.meta_schedule.relax_integration import ExtractedTask, extracted_tasks_to_tune_contexts
    from tvm.s_tir.meta_schedule.runner import EvaluatorConfig, LocalRunner
    from tvm.s_tir.meta_schedule.tune import tune_tasks

    from tvmconv.compiler.metaschedule_builder import PersistentBuilder

    import_tensor_intrinsics()  # the search needs them, too
    num_processors = max(len(os.sched_getaffinity(0)) // int(number), 1)
    saved = tvm.ir.load_json(folder.joinpath(TASKS_FILE).read_text(encoding="utf-8"))
    shared = list(saved)[int(rank) :: int(number)]
    tasks = [ExtractedTask(str(name), mod, target, [mod], int(weight)) for name, mod, weight in shared]
    contexts, weights = extracted_tasks_to_tune_contexts(
        tasks, str(own), seed=0, strategy=STRATEGIES[0], num_threads=num_processors
    )
    runner = LocalRunner(
        evaluator_config=EvaluatorConfig(min_repeat_ms=MIN_REPEAT_MILLISECONDS),
        f_run_evaluator=functools.partial(time_alone, str(folder / _LOCK_FILE)),
    )
    with own.joinpath(CLOCK_FILE).open("w", buffering=1) as clock:
        print(time.monotonic(), file=clock)
        tune_tasks(
            tasks=contexts,
            task_weights=weights,
            work_dir=str(own),
            max_trials_global=MAX_TRIALS,
            num_trials_per_iter=TRIALS_PER_ROUND,
            builder=PersistentBuilder(num_processors),
            runner=runner,
        )
        print(time.monotonic(), file=clock)


def time_alone(lock: str, *args: Any) -> list[float]:
    """Return what MetaSchedule's function for timing returns, while no other search times."""
    from tvm.s_tir.meta_schedule.runner.local_runner import default_run_evaluator

    os.environ.setdefault(sharing.LOCK_VARIABLE, lock)
    with sharing.hold_gpu():
        return list(default_run_evaluator(*args))
