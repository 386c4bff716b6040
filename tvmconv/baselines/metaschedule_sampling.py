"""Random candidates of MetaSchedule's space for all tasks of a module: they are built first, and timed afterwards.

MetaSchedule's own loop builds and measures a few candidates at a time, so that it holds a GPU for minutes in which it
compiles. The candidates here are those of its strategy `replay-trace`, from the same space, with the same
postprocessors; its builder's functions build them, its LocalRunner times them, and its database has the results. Only
the timing needs the GPU. It takes the candidates in rounds, so that each task has as many as any other.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv import devices
from tvmconv.baselines.metaschedule import CLOCK_FILE, FAILED_SECONDS
from tvmconv.compiler.tensor_intrinsics import import_tensor_intrinsics

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule import TuneContext

CANDIDATES_PER_ROUND = 4  # of a task
MIN_REPEAT_MILLISECONDS = 10  # of a timing; 100 by default, with which timing takes most of a short search
MAX_TRIALS, MAX_ROUNDS = 100_000, 10_000  # the time limit ends the sampling
MAX_ERROR_CHARACTERS = 300
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

    from tvmconv.compiler.metaschedule_builder import PersistentBuilder, start_fork_server

    start_fork_server()
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

        def write_built(built: _Round) -> None:
            workload = database.commit_workload(built.context.mod)
            for candidate, result in zip(built.candidates, built.building.result(), strict=True):
                record = TuningRecord(candidate.sch.trace, workload, [FAILED], target, candidate.args_info)
                database.commit_tuning_record(record)
                path = result.artifact_path and os.path.relpath(str(result.artifact_path), folder)
                error = result.error_msg and str(result.error_msg)[-MAX_ERROR_CHARACTERS:]
                content = {"round": built.number, "task": built.task, "file": path, "error": error}
                file.write(json.dumps(content) + "\n")

        previous = None
        for sampled in _sample(indices, contexts, num_rounds):
            inputs = [BuilderInput(candidate.sch.mod, target) for candidate in sampled.candidates]
            built = replace(sampled, building=pool.submit(builder.build, inputs))
            if previous:  # its candidates were built while those of this task were sampled
                write_built(previous)
            previous = built
        if previous:
            write_built(previous)


@dataclass(frozen=True)
class _Round:
    """Candidates of a task, and how they are built."""

    number: int  # of the round
    task: int
    context: TuneContext
    candidates: Sequence[Any]
    building: Future[list[Any]] = field(default_factory=Future)


def _sample(indices: Sequence[int], contexts: Sequence[TuneContext], num_rounds: int) -> Iterator[_Round]:
    """Yield candidates of each task in rounds, until there are as many or no task has more."""
    remaining = dict(zip(indices, contexts, strict=True))
    is_prepared: set[int] = set()
    for number in range(num_rounds):
        for index, context in list(remaining.items()):
            if index not in is_prepared:
                context.pre_tuning(MAX_TRIALS, CANDIDATES_PER_ROUND)
                is_prepared.add(index)
            candidates = context.generate_measure_candidates()
            if not candidates:
                del remaining[index]
                continue
            yield _Round(number, index, context, list(candidates))


def time_candidates(argv: Sequence[str]) -> None:
    """Time the candidates of all processes, and write their records to a database of MetaSchedule, in rounds.

    The arguments are the device and the folder. The folder of the database gets the file `clock`, too.
    """
    device_name, name = argv
    folder, target = Path(name), devices.find_device(device_name).make_target()
    own = folder / TIMED_FOLDER

    from tvm.s_tir.meta_schedule.arg_info import ArgInfo
    from tvm.s_tir.meta_schedule.runner import EvaluatorConfig, LocalRunner, RunnerInput

    runner = LocalRunner(timeout_sec=10.0, evaluator_config=EvaluatorConfig(min_repeat_ms=MIN_REPEAT_MILLISECONDS))
    workloads, candidates = read_candidates(folder)
    own.joinpath(WORKLOADS_FILE).write_text("".join(f"{line}\n" for line in workloads), encoding="utf-8")
    with own.joinpath(CLOCK_FILE).open("w", buffering=1) as clock, own.joinpath(RECORDS_FILE).open("w") as records:
        print(time.monotonic(), file=clock)
        for each in candidates:
            trace, times, *others = each["record"]
            error = each["error"]
            if each["file"] is not None:
                args_info = [ArgInfo.from_json(info) for info in others[1]]
                (future,) = runner.run([RunnerInput(str(folder / each["file"]), target.kind.name, args_info)])
                result = future.result()
                error = result.error_msg
                times = times if error else [float(seconds) for seconds in result.run_secs]
            if error:
                print(str(error)[-MAX_ERROR_CHARACTERS:], file=sys.stderr, flush=True)
            records.write(json.dumps([each["workload"], [trace, times, *others]]) + "\n")
            records.flush()
        print(time.monotonic(), file=clock)


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
