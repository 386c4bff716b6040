"""Compare trials per second of tvmconv's search and of TVM's own search, MetaSchedule, in one run.

    tvmconv bench throughput --device cuda:0 -o results
    tvmconv bench throughput --trials 200 --device opencl:0      # tvmconv only: TVM's wheel has no OpenCL runtime

Both searches have the same workload and target. MetaSchedule builds and runs with its default LocalBuilder and
LocalRunner, and needs psutil and cloudpickle. The benchmark prints the rates, and the time of each phase of a trial of
tvmconv. Results are in DIR/throughput.md and throughput.json, and MetaSchedule's output is in metaschedule.log. The
exit status is 1 if a search failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tvmconv import workloads
from tvmconv.baselines import metaschedule
from tvmconv.baselines.metaschedule import MetaScheduleResult
from tvmconv.benchmarks.common import add_device, add_output, find_device, make_table, micros, report
from tvmconv.cli.options import EXAMPLE_WORKLOAD, parse_count, parse_positive, parse_seed, parse_workers
from tvmconv.cli.progress import progress_line
from tvmconv.cli.tune import format_progress
from tvmconv.devices import Device
from tvmconv.errors import DeviceError, Error
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.reports.tables import Table, format_significant
from tvmconv.workloads import Workload

OURS, THEIRS = "tvmconv", "MetaSchedule"


def run(args: argparse.Namespace) -> int:
    """Measure both searches, then print and write the rates."""
    workload = workloads.parse(args.workload)
    device = find_device(args)
    args.out.mkdir(parents=True, exist_ok=True)  # fails before the measurement if it is not permitted

    searched, phases = measure_ours(workload, device, args)
    searches, notes, ok = {OURS: searched}, [], searched.succeeded > 0
    try:
        searches[THEIRS] = measure_metaschedule(workload, device, args)
    except Error as error:
        notes.append(f"{error}.")
        ok &= isinstance(error, DeviceError)  # MetaSchedule does not support the device, which is not a failure
    else:
        notes += comparison(searches[OURS], searches[THEIRS])
        ok &= searches[THEIRS].succeeded > 0
    notes.append(describe_provenance(device, args.command))

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
    parser.add_argument(
        "workload", metavar="WORKLOAD", nargs="?", default=EXAMPLE_WORKLOAD, help="Workload (default: %(default)s)."
    )
    parser.add_argument(
        "--trials",
        metavar="N",
        type=parse_count,
        default=2000,
        help="Number of trials of tvmconv (default: %(default)s).",
    )
    parser.add_argument(
        "--meta-trials",
        metavar="N",
        type=parse_count,
        default=metaschedule.TRIALS_PER_ROUND,
        help="Number of trials of MetaSchedule (default: %(default)s, one of its rounds).",
    )
    parser.add_argument(
        "--meta-seconds",
        metavar="S",
        type=parse_positive,
        default=300.0,
        help="Stop MetaSchedule after S seconds; completed rounds count (default: %(default)g).",
    )
    add_device(parser)
    parser.add_argument(
        "--workers",
        metavar="N",
        type=parse_workers,
        help="Number of builder processes of tvmconv (default: cores - 1).",
    )
    parser.add_argument("--seed", metavar="N", type=parse_seed, default=0, help="Seed (default: %(default)s).")
    add_output(parser)


def measure_ours(
    workload: Workload, device: Device, args: argparse.Namespace
) -> tuple[MetaScheduleResult, dict[str, float]]:
    """Tune with a temporary log, and return the result and the mean milliseconds per trial of each phase."""
    from tvmconv.search.tune import tune

    with tempfile.TemporaryDirectory() as folder, progress_line(f"{OURS}: ") as show:
        tuned = tune(
            workload,
            trials=args.trials,
            log=Path(folder) / "log.jsonl",
            device=device,
            seed=args.seed,
            workers=args.workers,
            measure_baseline=False,
            progress=lambda status: show(format_progress(status)),
        )
    status = tuned.status
    succeeded = status.num_trials - status.error_counts.total()
    return MetaScheduleResult(
        status.num_trials, succeeded, tuned.seconds, tuned.final.cost if tuned.final else None
    ), tuned.phases


def measure_metaschedule(workload: Workload, device: Device, args: argparse.Namespace) -> MetaScheduleResult:
    """Run `metaschedule.run_search`, and show its progress."""
    metaschedule.check_device(device)
    with progress_line(f"{THEIRS}: ") as show:
        show(f"{args.meta_trials} trials, at most {args.meta_seconds:g} s")
        return metaschedule.run_search(
            workload,
            device,
            args.meta_trials,
            log=args.out / "metaschedule.log",
            seed=args.seed,
            seconds=args.meta_seconds,
        )


def searches_table(searches: Mapping[str, MetaScheduleResult]) -> Table:
    """Return a table with one line per tuner."""
    columns: dict[str, Callable[[tuple[str, MetaScheduleResult]], str]] = {
        "tuner": lambda row: row[0],
        "trials": lambda row: f"{row[1].trials:,}",
        "succeeded": lambda row: f"{row[1].succeeded:,}",
        "seconds": lambda row: f"{row[1].seconds:,.1f}",
        "trials/s": lambda row: format_significant(row[1].trials / row[1].seconds),
        "best [µs]": lambda row: micros(row[1].best),
    }
    return make_table(searches.items(), columns, ["tuner"])


def phases_table(phases: Mapping[str, float]) -> Table:
    """Return a table of the time of each phase of a trial of tvmconv."""
    columns = {"stage of a trial": lambda row: row[0], "ms": lambda row: f"{row[1]:.1f}"}
    return make_table(phases.items(), columns, ["stage of a trial"])


def comparison(ours: MetaScheduleResult, theirs: MetaScheduleResult) -> list[str]:
    """Return sentences that compare the two rates, and that name differences between the searches."""
    lines = []
    if theirs.succeeded:
        trials, succeeded = (
            format_significant(getattr(ours, what) / ours.seconds / (getattr(theirs, what) / theirs.seconds))
            for what in ("trials", "succeeded")
        )
        lines.append(f"{OURS} has {trials} × the trials per second of {THEIRS}, and {succeeded} × the successful ones.")
    lines.append(f"{OURS} verifies every trial, {THEIRS} none. Each tuner measures its own best time.")
    return lines
