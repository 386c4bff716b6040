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
from pathlib import Path

from tvmconv import workloads
from tvmconv.baselines import metaschedule
from tvmconv.baselines.metaschedule import MetaScheduleResult
from tvmconv.benchmarks.common import add_device, add_output, find_device, report
from tvmconv.cli import options
from tvmconv.cli.progress import progress_line
from tvmconv.cli.tune import format_progress
from tvmconv.devices import Device
from tvmconv.errors import DeviceError, Error
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.reports.tables import format_micros, format_significant, make_table
from tvmconv.workloads import Workload

OURS, THEIRS = "tvmconv", "MetaSchedule"
SEARCH_COLUMNS = {
    "tuner": lambda row: row[0],
    "trials": lambda row: f"{row[1].trials:,}",
    "succeeded": lambda row: f"{row[1].succeeded:,}",
    "seconds": lambda row: f"{row[1].seconds:,.1f}",
    "trials/s": lambda row: format_significant(row[1].trials / row[1].seconds),
    "best [µs]": lambda row: format_micros(row[1].best),
}
PHASE_COLUMNS = {"stage of a trial": lambda row: row[0], "ms": lambda row: f"{row[1]:.1f}"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    default = options.EXAMPLE_WORKLOAD
    text = "Workload (default: %(default)s)."
    parser.add_argument("workload", metavar="WORKLOAD", nargs="?", default=default, help=text)
    options.add_option(parser, "--trials", "N", "Number of trials of tvmconv", type=options.parse_count, default=2000)
    num_trials = metaschedule.TRIALS_PER_ROUND
    text = "Number of trials of MetaSchedule; the default is one of its rounds"
    options.add_option(parser, "--meta-trials", "N", text, type=options.parse_count, default=num_trials)
    text = "Stop MetaSchedule after S seconds; completed rounds count"
    options.add_option(parser, "--meta-seconds", "S", text, type=options.parse_positive, default=300.0)
    add_device(parser)
    text = "Number of builder processes of tvmconv (default: cores - 1)"
    options.add_option(parser, "--workers", "N", text, type=options.parse_workers)
    options.add_option(parser, "--seed", "N", "Seed", type=options.parse_seed, default=0)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Measure both searches, then print and write the rates."""
    workload = workloads.parse(args.workload)
    device = find_device(args)
    args.out.mkdir(parents=True, exist_ok=True)  # fails before the measurement if it is not permitted

    ours, phases = measure_ours(workload, device, args)
    searches, notes, is_ok = {OURS: ours}, [], ours.succeeded > 0
    try:
        searches[THEIRS] = measure_metaschedule(workload, device, args)
    except Error as error:
        notes.append(f"{error}.")
        is_ok &= isinstance(error, DeviceError)  # MetaSchedule does not support the device, which is not a failure
    else:
        notes += compare(ours, searches[THEIRS])
        is_ok &= searches[THEIRS].succeeded > 0
    notes.append(describe_provenance(device, args.command))
    data = {
        "workload": workload.text,
        "device_name": device.name,
        "searches": {name: dataclasses.asdict(search) for name, search in searches.items()},
        "stage_milliseconds": phases,
        "notes": notes,
    }
    searches_table = make_table(searches.items(), SEARCH_COLUMNS, ["tuner"])
    phases_table = make_table(phases.items(), PHASE_COLUMNS, ["stage of a trial"])
    title = f"{workload.text} on {device.text}, {device.name}"
    report(args, "throughput", [searches_table, phases_table], notes, data, title)
    return 0 if is_ok else 1


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
    num_trials, num_failed = tuned.status.num_trials, tuned.status.error_counts.total()
    best = tuned.final.cost if tuned.final else None
    return MetaScheduleResult(num_trials, num_trials - num_failed, tuned.seconds, best), tuned.phases


def measure_metaschedule(workload: Workload, device: Device, args: argparse.Namespace) -> MetaScheduleResult:
    """Run `metaschedule.run_search`, and show its progress."""
    metaschedule.check_device(device)
    log, limits = args.out / "metaschedule.log", {"seed": args.seed, "seconds": args.meta_seconds}
    with progress_line(f"{THEIRS}: ") as show:
        show(f"{args.meta_trials} trials, at most {args.meta_seconds:g} s")
        return metaschedule.run_search(workload, device, args.meta_trials, log=log, **limits)


def compare(ours: MetaScheduleResult, theirs: MetaScheduleResult) -> list[str]:
    """Return sentences that compare the two rates, and that name differences between the searches."""
    lines = []
    if theirs.succeeded:
        speedup = theirs.seconds / ours.seconds
        trials = format_significant(ours.trials / theirs.trials * speedup)
        succeeded = format_significant(ours.succeeded / theirs.succeeded * speedup)
        lines.append(f"{OURS} has {trials} × the trials per second of {THEIRS}, and {succeeded} × the successful ones.")
    lines.append(f"{OURS} verifies every trial, {THEIRS} none. Each tuner measures its own best time.")
    return lines
