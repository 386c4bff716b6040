"""Compare trials per second of tvmconv's search and of TVM's own search, MetaSchedule, in one run.

    tvmconv bench throughput --device cuda:0 -o results
    tvmconv bench throughput --trials 200 --device opencl:0      # tvmconv alone: TVM's wheel has no OpenCL runtime

Both get the same workload and target. MetaSchedule builds and runs with its default LocalBuilder and LocalRunner, and
needs psutil and cloudpickle. Prints the rates, and where the time of a trial of tvmconv goes. Writes DIR/throughput.md,
throughput.json and metaschedule.log, MetaSchedule's output. Exit status 1 says that a search failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tvmconv import workloads
from tvmconv.baselines import metaschedule
from tvmconv.baselines.metaschedule import Searched
from tvmconv.benchmarks.common import add_device, add_output, find_device, make_table, micros, report
from tvmconv.cli.options import EXAMPLE, count, positive, seed_number, workers
from tvmconv.cli.progress import progress_line
from tvmconv.cli.tune import progress_text
from tvmconv.devices import Device
from tvmconv.errors import DeviceError, Error
from tvmconv.experiments.provenance import provenance
from tvmconv.reports.tables import Table, significant
from tvmconv.workloads import Workload

OURS, THEIRS = "tvmconv", "MetaSchedule"


def run(args: argparse.Namespace) -> int:
    """Measure both searches; print and write the rates."""
    workload = workloads.parse(args.workload)
    device = find_device(args)
    args.out.mkdir(parents=True, exist_ok=True)  # before measuring: it may not be allowed

    searched, phases = measure_ours(workload, device, args)
    searches, notes, ok = {OURS: searched}, [], searched.succeeded > 0
    try:
        searches[THEIRS] = measure_metaschedule(workload, device, args)
    except Error as error:
        notes.append(f"{error}.")
        ok &= isinstance(error, DeviceError)  # not here, as opposed to failed
    else:
        notes += comparison(searches[OURS], searches[THEIRS])
        ok &= searches[THEIRS].succeeded > 0
    notes.append(provenance(device, args.command))

    data = {
        "workload": workload.text,
        "device_name": device.name,
        "searches": {name: dataclasses.asdict(search) for name, search in searches.items()},
        "stage_milliseconds": phases,
        "notes": notes,
    }
    tables = [searches_table(searches), phases_table(phases)]
    report(args.out, "throughput", tables, notes, data, f"{workload.text} on {device.text}, {device.name}")
    return 0 if ok else 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("workload", metavar="WORKLOAD", nargs="?", default=EXAMPLE, help="(default: %(default)s)")
    parser.add_argument(
        "--trials", metavar="N", type=count, default=2000, help="trials of tvmconv (default: %(default)s)"
    )
    parser.add_argument(
        "--meta-trials",
        metavar="N",
        type=count,
        default=metaschedule.TRIALS_A_ROUND,
        help="trials of MetaSchedule (default: %(default)s, one of its rounds)",
    )
    parser.add_argument(
        "--meta-seconds",
        metavar="S",
        type=positive,
        default=300.0,
        help="end MetaSchedule after S seconds; the rounds that it completed count (default: %(default)g)",
    )
    add_device(parser)
    parser.add_argument("--workers", metavar="N", type=workers, help="processes that build for tvmconv")
    parser.add_argument("--seed", metavar="N", type=seed_number, default=0, help="seed of both (default: %(default)s)")
    add_output(parser)


def measure_ours(workload: Workload, device: Device, args: argparse.Namespace) -> tuple[Searched, dict[str, float]]:
    """Tune into a temporary log; return the result, and mean milliseconds per trial by phase."""
    from tvmconv.searching.tune import tune

    with tempfile.TemporaryDirectory() as folder, progress_line(f"{OURS}: ") as show:
        tuned = tune(
            workload,
            trials=args.trials,
            log=Path(folder) / "log.jsonl",
            device=device,
            seed=args.seed,
            workers=args.workers,
            compare=False,
            progress=lambda status: show(progress_text(status)),
        )
    status = tuned.status
    succeeded = status.done - status.errors.total()
    return Searched(status.done, succeeded, tuned.seconds, tuned.final.cost if tuned.final else None), tuned.phases


def measure_metaschedule(workload: Workload, device: Device, args: argparse.Namespace) -> Searched:
    """Run `metaschedule.search` and show its progress."""
    metaschedule.check_runs(device)
    with progress_line(f"{THEIRS}: ") as show:
        show(f"{args.meta_trials} trials, at most {args.meta_seconds:g} s")
        return metaschedule.search(
            workload,
            device,
            args.meta_trials,
            log=args.out / "metaschedule.log",
            seed=args.seed,
            seconds=args.meta_seconds,
        )


def searches_table(searches: Mapping[str, Searched]) -> Table:
    """Return a table with one line per tuner."""
    columns: dict[str, Callable[[tuple[str, Searched]], str]] = {
        "tuner": lambda row: row[0],
        "trials": lambda row: f"{row[1].trials:,}",
        "succeeded": lambda row: f"{row[1].succeeded:,}",
        "seconds": lambda row: f"{row[1].seconds:,.1f}",
        "trials/s": lambda row: significant(row[1].trials / row[1].seconds),
        "best [µs]": lambda row: micros(row[1].best),
    }
    return make_table(searches.items(), columns, ["tuner"])


def phases_table(phases: Mapping[str, float]) -> Table:
    """Return a table of where the time of a trial of tvmconv goes."""
    columns = {"stage of a trial": lambda row: row[0], "ms": lambda row: f"{row[1]:.1f}"}
    return make_table(phases.items(), columns, ["stage of a trial"])


def comparison(ours: Searched, theirs: Searched) -> list[str]:
    """Return in sentences how the two rates compare, and what differs between the searches."""
    lines = []
    if theirs.succeeded:
        trials, succeeded = (
            significant(getattr(ours, what) / ours.seconds / (getattr(theirs, what) / theirs.seconds))
            for what in ("trials", "succeeded")
        )
        lines.append(f"{OURS} makes {trials} × the trials a second of {THEIRS}, and {succeeded} × those that succeed.")
    lines.append(f"{OURS} verifies every trial, {THEIRS} none. Each tuner's best time is its own measurement.")
    return lines
