"""Random candidates of MetaSchedule's space for all tasks of a module: they are built first, and timed afterwards.

MetaSchedule's own loop builds and measures a few candidates at a time, so that it holds a GPU for minutes in which it
compiles. The candidates here are those of its strategy `replay-trace`, from the same space, with the same
postprocessors; its builder's function builds them, its runner's function times them, and its database has the results.
Only the timing needs the GPU. It takes the candidates in rounds, so that each task has as many as any other.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv import devices
from tvmconv.baselines.metaschedule import CLOCK_FILE, FAILED_SECONDS
from tvmconv.compiler.tensor_intrinsics import import_tensor_intrinsics
from tvmconv.devices import sharing
from tvmconv.errors import describe_error
from tvmconv.workloads.dtypes import get_numpy_dtype

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule import TuneContext

CANDIDATES_PER_ROUND = 2  # of a task
CANDIDATES_PER_PROCESS = 2  # that are built at a time, so that a process has work while another one is busy
MIN_REPEAT_MILLISECONDS = 5  # of a timing; 100 by default, with which timing takes most of a short search
MAX_TRIALS, MAX_ROUNDS = 100_000, 10_000  # the time limit ends the sampling
MAX_ERROR_CHARACTERS = 300
NUM_RANDOM_ELEMENTS = 1 << 16  # an argument repeats so many random numbers, because random numbers take time
FAILED = FAILED_SECONDS * 10  # the seconds of a candidate without a time in MetaSchedule's database
TASKS_FILE, CANDIDATES_FILE, TIMED_FOLDER = "tasks.json", "candidates.jsonl", "search-timed"
WORKLOADS_FILE, RECORDS_FILE = "database_workload.json", "database_tuning_record.json"  # of MetaSchedule's database


def build_candidates(argv: Sequence[str]) -> None:
    """Sample and build candidates.

    The arguments are the device, the folder with the file of tasks, the rank of the process, the number of processes
    that share the tasks, and the number of rounds. The process has a folder of its own, with a database whose records
    have no times yet, and a file with one line for each of them.
    """
    (device_name, name), (rank, number, num_rounds) = argv[:2], map(int, argv[2:])
    folder, target = Path(name), devices.find_device(device_name).make_target()
    own = folder / f"built-{rank}"

    import tvm
    from tvm.s_tir.meta_schedule.builder import BuilderInput
    from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord
    from tvm.s_tir.meta_schedule.relax_integration import ExtractedTask, extracted_tasks_to_tune_contexts

    from tvmconv.compiler.metaschedule_builder import PersistentBuilder

    import_tensor_intrinsics()
    num_processors = max(len(os.sched_getaffinity(0)) // number, 1)
    builder = PersistentBuilder(num_processors)
    saved = list(tvm.ir.load_json(folder.joinpath(TASKS_FILE).read_text(encoding="utf-8")))
    indices = list(range(len(saved)))[rank::number]
    tasks = [ExtractedTask(str(saved[i][0]), saved[i][1], target, [saved[i][1]], int(saved[i][2])) for i in indices]
    contexts, _ = extracted_tasks_to_tune_contexts(
        tasks, str(own), seed=rank, strategy="replay-trace", num_threads=num_processors
    )
    database = JSONDatabase(work_dir=str(own))
    with own.joinpath(CANDIDATES_FILE).open("w", buffering=1) as file, ThreadPoolExecutor(1) as pool:

        def write_built(batch: Sequence[_Round], building: Future[list[Any]]) -> None:
            results = iter(building.result())
            for sampled in batch:
                workload = database.commit_workload(sampled.context.mod)
                for candidate, result in zip(sampled.candidates, results, strict=False):
                    record = TuningRecord(candidate.sch.trace, workload, [FAILED], target, candidate.args_info)
                    database.commit_tuning_record(record)
                    path = result.artifact_path and os.path.relpath(str(result.artifact_path), folder)
                    error = result.error_msg and str(result.error_msg)[-MAX_ERROR_CHARACTERS:]
                    content = {"round": sampled.number, "task": sampled.task, "file": path, "error": error}
                    file.write(json.dumps(content) + "\n")

        previous: tuple[list[_Round], Future[list[Any]]] | None = None
        for batch in _group(_sample(indices, contexts, num_rounds), num_processors * CANDIDATES_PER_PROCESS):
            inputs = [BuilderInput(candidate.sch.mod, target) for each in batch for candidate in each.candidates]
            building = pool.submit(builder.build, inputs)
            if previous:  # its candidates were built while those of this batch were sampled
                write_built(*previous)
            previous = batch, building
        if previous:
            write_built(*previous)


@dataclass(frozen=True)
class _Round:
    """Candidates of a task."""

    number: int  # of the round
    task: int
    context: TuneContext
    candidates: Sequence[Any]


def _group(rounds: Iterable[_Round], min_candidates: int) -> Iterator[list[_Round]]:
    """Yield the rounds of several tasks together, which have enough candidates for all processes that build them."""
    group: list[_Round] = []
    for each in rounds:
        group.append(each)
        if sum(len(grouped.candidates) for grouped in group) >= min_candidates:
            yield group
            group = []
    if group:
        yield group


def _sample(indices: Sequence[int], contexts: Sequence[TuneContext], num_rounds: int) -> Iterator[_Round]:
    """Yield candidates of each task in rounds, until there are as many or no task has more. A task for which
    MetaSchedule's rules raise an error has none.
    """
    remaining = dict(zip(indices, contexts, strict=True))
    is_prepared: set[int] = set()
    for number in range(num_rounds):
        for index, context in list(remaining.items()):
            if index not in is_prepared:
                try:
                    context.pre_tuning(MAX_TRIALS, CANDIDATES_PER_ROUND)
                except Exception as error:  # one of TVM's many types, where a rule does not apply to a task
                    print(f"task {index}: {describe_error(error)[:MAX_ERROR_CHARACTERS]}", file=sys.stderr, flush=True)
                    del remaining[index]
                    continue
                is_prepared.add(index)
            candidates = context.generate_measure_candidates()
            if not candidates:
                del remaining[index]
                continue
            yield _Round(number, index, context, list(candidates))


def time_candidates(argv: Sequence[str]) -> None:
    """Time the candidates of all processes, and write their records to a database of MetaSchedule, in rounds.

    The arguments are the device, the folder, and the index of the first candidate. The folder of the database gets the
    file `clock`, too. A candidate that leaves the device in an error state ends the process, and another one continues.
    """
    (device_name, name), first = argv[:2], int(argv[2])
    folder, target = Path(name), devices.find_device(device_name).make_target()
    own = folder / TIMED_FOLDER

    import tvm

    device = tvm.device(target.kind.name, 0)
    make_cached = functools.cache(functools.partial(make_argument, device))
    workloads, candidates = read_candidates(folder)
    own.joinpath(WORKLOADS_FILE).write_text("".join(f"{line}\n" for line in workloads), encoding="utf-8")
    mode = "a" if first else "w"
    with own.joinpath(CLOCK_FILE).open(mode, buffering=1) as clock, own.joinpath(RECORDS_FILE).open(mode) as records:
        if not first:
            print(time.monotonic(), file=clock)
        for index, each in enumerate(candidates[first:], first):
            trace, times, *others = each["record"]
            error = each["error"]
            if each["file"] is not None:
                try:
                    arguments = [make_cached(dtype, tuple(shape)) for _, dtype, shape in others[1]]
                    with sharing.hold_gpu():
                        times = time_library(folder / each["file"], device, arguments)
                except Exception as failure:  # of a candidate or of the device
                    error = describe_error(failure)
            if error:
                print(str(error)[-MAX_ERROR_CHARACTERS:], file=sys.stderr, flush=True)
            records.write(json.dumps([each["workload"], [trace, times, *others]]) + "\n")
            records.flush()
            if error and not is_usable(device):
                os.execv(sys.executable, [*sys.orig_argv[:-1], str(index + 1)])
        print(time.monotonic(), file=clock)


def is_usable(device: Any) -> bool:
    """Return whether a device of TVM still works. An illegal access of a kernel is an error of all later calls."""
    import tvm

    try:
        tvm.runtime.tensor(np.zeros(1, np.float32), device).numpy()
    except Exception:  # TVM raises many types
        return False
    return True


def make_argument(device: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return a tensor of random numbers on a device of TVM."""
    import tvm

    elements = np.random.default_rng(0).standard_normal(NUM_RANDOM_ELEMENTS, dtype=np.float32)
    return tvm.runtime.tensor(np.resize(elements.astype(get_numpy_dtype(dtype)), shape), device)


def time_library(path: Path, device: Any, arguments: Sequence[Any]) -> list[float]:
    """Return the seconds of a candidate as MetaSchedule's runner measures them."""
    import tvm
    from tvm.s_tir.meta_schedule.runner import EvaluatorConfig
    from tvm.s_tir.meta_schedule.runner.utils import run_evaluator_common

    config = EvaluatorConfig(number=1, repeat=1, min_repeat_ms=MIN_REPEAT_MILLISECONDS)
    times = run_evaluator_common(tvm.runtime.load_module(str(path)), device, config, [arguments])
    return [float(each) for each in times]


def read_candidates(folder: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the lines of all workloads and the candidates that were built, those of earlier rounds first.

    A candidate has its record, and the index of its workload. The last lines of files may be incomplete.
    """
    workloads: list[str] = []
    found: list[dict[str, Any]] = []
    for own in sorted(folder.glob("built-*")):
        lines = zip(_read_lines(own / CANDIDATES_FILE), _read_lines(own / RECORDS_FILE), strict=False)
        for line, (index, record) in ((json.loads(line), json.loads(text)) for line, text in lines):
            found.append({**line, "workload": len(workloads) + index, "record": record})
        workloads += _read_lines(own / WORKLOADS_FILE)
    return workloads, sorted(found, key=lambda each: (each["round"], each["task"]))


def _read_lines(path: Path) -> list[str]:
    """Return the complete lines of a file, none if it is missing."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
