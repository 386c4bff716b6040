"""Tuning and comparison of a suite's layers in several processes, which take turns at the GPU.

Most of the time of a search is compilation, and most of the time of a comparison is the library's choice of an
algorithm. With one process, the processors wait for the GPU during the latter, and the GPU waits during the former.
Here each process, a lane, takes the next layer, searches it and compares it. `tvmconv.devices.sharing` gives the GPU to
one lane at a time: for one trial of a search, or for the whole comparison of a layer.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path

from tvmconv.cli.errors import print_note, run_guarded
from tvmconv.deadline import get_process_start
from tvmconv.devices.sharing import LOCK_VARIABLE
from tvmconv.errors import Error
from tvmconv.experiments.sweep import LayerSelection, Sweep
from tvmconv.reports.sweep import write_numbers
from tvmconv.workloads import Layer

MeasureLayer = Callable[[argparse.Namespace, LayerSelection, Sweep | None], Sweep]
COLLECTOR_THRESHOLDS = (50_000, 20, 20)  # as those of the command line, for the 90,000 objects of TVM


def measure_in_lanes(
    args: argparse.Namespace, selection: LayerSelection, previous: Sweep | None, measure_layer: MeasureLayer
) -> Sweep:
    """Measure the layers that earlier results lack in `args.lanes` processes, and return all results in order.

    Args:
        args: Options of `tvmconv bench tune-suite`. No further layer begins `args.stop_after` seconds after the start
            of the command. The builder processes of all lanes are `args.workers` in number, by default about as many
            as processors.
        selection: Layers. Those that were not begun are missing in the results.
        previous: Earlier results.
        measure_layer: Function at the top level of a module, which measures the last layer of a selection, and adds it
            to the results of the others.
    """
    known = set(previous.labels) if previous else set[str]()
    pending = [label for label in selection.layers if label not in known]
    context = multiprocessing.get_context("spawn")
    num_lanes = max(1, min(args.lanes, len(pending)))
    num_processors = args.workers or max(len(os.sched_getaffinity(0)) - num_lanes, 1)
    with tempfile.TemporaryDirectory(prefix=f"{selection.name}-lanes-", dir=args.out) as name:
        folder, labels = Path(name), context.SimpleQueue()
        lock = Path(os.environ.get(LOCK_VARIABLE) or folder / "lock")  # several commands can share one
        for label in [*pending, *[None] * num_lanes]:
            labels.put(label)
        lanes = []
        for number in range(num_lanes):
            out = folder / str(number)
            out.mkdir()
            lane_args = argparse.Namespace(**vars(args))
            lane_args.out, lane_args.workers = out, max(num_processors // num_lanes, 1)
            stop_at = get_process_start() + args.stop_after if args.stop_after else None
            arguments = (lane_args, selection, labels, stop_at, measure_layer, lock)
            lanes.append(context.Process(target=_run_lane, args=arguments))
            lanes[-1].start()
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


def _run_lane(
    args: argparse.Namespace,
    selection: LayerSelection,
    labels: SimpleQueue[str | None],
    stop_at: float | None,
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
        with keep_workers_alive(starts_fork_server=True), contextlib.redirect_stdout(sys.stderr):
            while (label := labels.get()) is not None:
                if stop_at is not None and time.monotonic() >= stop_at:
                    break
                print(f"{label}: {selection.layers[label].workload.text}", file=sys.stderr, flush=True)
                next_layers = {**layers, label: selection.layers[label]}
                try:
                    sweep = measure_layer(args, replace(selection, layers=next_layers), sweep)
                except Exception as error:  # a schedule is user code, and the next layers may have a result
                    if not isinstance(error, Error):
                        traceback.print_exc()
                    print_note(f"{label}: {error}")
                    status = 1
                else:
                    layers = next_layers
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
    results = {label: result for sweep in sweeps for label, result in sweep.labeled_results}
    kept = [label for label in selection.layers if label in results]
    if not kept:
        return None
    counts = selection.counts
    return replace(
        sweeps[-1],
        labels=kept,
        results=[results[label] for label in kept],
        counts=[counts[label] for label in kept] if counts else [],
    )
