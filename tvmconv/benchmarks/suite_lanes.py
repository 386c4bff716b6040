"""Tuning and comparison of a suite's layers in several processes, which take turns at the GPU.

Most of the time of a search is compilation, and most of the time of a comparison is the library's choice of an
algorithm. With one process, the processors wait for the GPU during the latter, and the GPU waits during the former.
Here each process, a lane, takes the next layer, searches it, or measures the kernels that were compiled for it, and
compares it. `tvmconv.devices.sharing` gives the GPU to one lane at a time: for one trial of a search, for the kernels
that were compiled, for the library's choice, and for the comparison. Inputs and references are computed meanwhile. So
are copies, the launch that verifies a compiled kernel once more, and those of cuDNN's first choices, which take most of
their time to load and compile kernels. They can delay a few launches that another lane times, but not the median.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path

from tvmconv.benchmarks.build_ahead import AheadBuilder
from tvmconv.benchmarks.prebuild import ArchivedKernel
from tvmconv.cli.errors import print_note, run_guarded
from tvmconv.deadline import get_process_start
from tvmconv.devices import sharing
from tvmconv.devices.sharing import LOCK_VARIABLE
from tvmconv.errors import Error
from tvmconv.experiments.sweep import LayerSelection, Sweep
from tvmconv.reports.sweep import write_numbers
from tvmconv.workloads import Layer, Workload

# What lanes take from their queue: the label of a layer and its kernels, which are None for a search. None ends a lane.
Task = tuple[str, Sequence[ArchivedKernel] | None] | None
MeasureLayer = Callable[[argparse.Namespace, LayerSelection, Sweep | None, Sequence[ArchivedKernel] | None], Sweep]
COLLECTOR_THRESHOLDS = (50_000, 20, 20)  # as those of the command line, for the 90,000 objects of TVM


def measure_in_lanes(
    args: argparse.Namespace,
    selection: LayerSelection,
    previous: Sweep | None,
    start_lane: Callable[[argparse.Namespace], None],
    measure_layer: MeasureLayer,
    builder: AheadBuilder | None = None,
) -> Sweep:
    """Measure the layers that earlier results lack in `args.lanes` processes, and return all results in order.

    Args:
        args: Options of `tvmconv bench tune-suite`. No further layer begins `args.stop_after` seconds after the start
            of the command. The builder processes of all lanes are `args.workers` in number, by default about as many
            as processors.
        selection: Layers. Those that were not begun are missing in the results.
        previous: Earlier results.
        start_lane: Function at the top level of a module, which each lane calls first, while kernels are compiled.
        measure_layer: Function at the top level of a module, which measures the last layer of a selection, and adds it
            to the results of the others.
        builder: Processes that compile the kernels of the layers. Lanes get a layer when its kernels are there.
    """
    known = {result.workload for result in previous.results} if previous else set[Workload]()
    labels = {workload: label for label, workload in reversed(selection.workloads.items()) if workload not in known}
    pending = {label: workload for label, workload in selection.workloads.items() if labels.get(workload) == label}
    context = multiprocessing.get_context("spawn")
    num_lanes = max(1, min(args.lanes, len(pending)))
    num_processors = args.workers or count_free_processors(num_lanes)
    with tempfile.TemporaryDirectory(prefix=f"{selection.name}-lanes-", dir=args.out) as name:
        folder, tasks = Path(name), context.SimpleQueue()
        lock = Path(os.environ.get(LOCK_VARIABLE) or folder / "lock")  # several commands can share one
        lanes = []
        for number in range(num_lanes):
            out = folder / str(number)
            out.mkdir()
            lane_args = argparse.Namespace(**vars(args))
            lane_args.out, lane_args.workers = out, max(num_processors // num_lanes, 1)
            stop_at = get_process_start() + args.stop_after if args.stop_after else None
            arguments = (lane_args, selection, tasks, stop_at, start_lane, measure_layer, lock)
            lanes.append(context.Process(target=_run_lane, args=arguments))
        threading.Thread(target=_give_tasks, args=(pending, num_lanes, tasks, builder), daemon=True).start()
        for lane in lanes:
            lane.start()
        sweeps = [previous] if previous else []
        try:
            while any(lane.is_alive() for lane in lanes):
                for lane in lanes:
                    lane.join(0.5)
                _write_partial(args, selection, [*sweeps, *_read_sweeps(folder)])
        finally:
            for lane in lanes:
                lane.terminate()
        sweeps += _read_sweeps(folder)
    if failed := [str(number) for number, lane in enumerate(lanes, 1) if lane.exitcode]:
        print_note(f"lane {', '.join(failed)} of {num_lanes} ended with an error")
    merged = _merge(selection, sweeps)
    if merged is None:
        raise Error(f"no layer of {selection.name} was measured")
    if missing := len(selection.layers) - len(merged.labels):
        print_note(f"{missing} of {len(selection.layers)} layers were not measured")
    return merged


def _give_tasks(
    workloads: dict[str, Workload], num_lanes: int, tasks: SimpleQueue[Task], builder: AheadBuilder | None
) -> None:
    """Give all layers to lanes, in the order in which their kernels are ready; this waits until a lane takes one."""
    while workloads:
        label = builder.wait_for_any(workloads) if builder else next(iter(workloads))
        workload = workloads.pop(label)
        tasks.put((label, builder.get_kernels(workload) if builder else None))
    for _ in range(num_lanes):
        tasks.put(None)


def count_free_processors(num_lanes: int) -> int:
    """Return the number of processors that compile kernels: those that are left by the lanes, at least one."""
    return max(len(os.sched_getaffinity(0)) - num_lanes, 1)


def _run_lane(
    args: argparse.Namespace,
    selection: LayerSelection,
    tasks: SimpleQueue[Task],
    stop_at: float | None,
    start_lane: Callable[[argparse.Namespace], None],
    measure_layer: MeasureLayer,
    lock: Path,
) -> None:
    """Measure layers until none is left or the time is over; this is the function of a process."""
    from tvmconv.measure.workers.pool import keep_workers_alive

    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    os.environ[LOCK_VARIABLE] = str(lock)
    sweep: Sweep | None = None
    layers: dict[str, Layer] = {}

    def run() -> int:
        nonlocal sweep, layers
        status = 0
        with keep_workers_alive(starts_fork_server=args.configs is None), contextlib.redirect_stdout(sys.stderr):
            start_lane(args)
            while (task := tasks.get()) is not None:
                label, kernels = task
                if stop_at is not None and time.monotonic() >= stop_at:
                    break
                print(f"{label}: {selection.layers[label].workload.text}", file=sys.stderr, flush=True)
                started_at = time.monotonic()
                next_layers = {**layers, label: selection.layers[label]}
                try:
                    sweep = measure_layer(args, replace(selection, layers=next_layers), sweep, kernels)
                except Exception as error:  # a schedule is user code, and the next layers may have a result
                    if not isinstance(error, Error):
                        traceback.print_exc()
                    print_note(f"{label}: {error}")
                    status = 1
                else:
                    layers = next_layers
                turns = ", ".join(f"{seconds:.1f}" for seconds in sharing.take_turn_seconds())
                taken = time.monotonic() - started_at
                print(f"{label}: {taken:.1f} s, turns at the GPU: {turns or 'none'} s", file=sys.stderr, flush=True)
        return status

    sys.exit(run_guarded("tvmconv", run))


def _read_sweeps(folder: Path) -> list[Sweep]:
    return [Sweep.read(file) for file in sorted(folder.glob("*/*-tuned.json"))]


def _write_partial(args: argparse.Namespace, selection: LayerSelection, sweeps: list[Sweep]) -> None:
    """Write the results so far, so that an interrupted command leaves them."""
    if sweep := _merge(selection, sweeps):
        write_numbers(sweep, args.out)


def _merge(selection: LayerSelection, sweeps: list[Sweep]) -> Sweep | None:
    """Return the results of all lanes in the order of the layers; None if there are none."""
    results = {result.workload: result for sweep in sweeps for result in sweep.results}
    kept = [label for label, workload in selection.workloads.items() if workload in results]
    if not kept:
        return None
    counts = selection.counts
    return replace(
        sweeps[-1],
        labels=kept,
        results=[results[selection.layers[label].workload] for label in kept],
        counts=[counts[label] for label in kept] if counts else [],
    )
