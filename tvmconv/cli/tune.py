"""`tvmconv tune`: search for the fastest configs, and append every measurement to a log."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv import naive_cost, registry, workloads
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.options import (
    EXAMPLE_WORKLOAD,
    add_cost_model_option,
    add_renamed_option,
    add_suite_options,
    add_tracker_option,
    add_verify_option,
    describe_sampled,
    parse_count,
    parse_layers,
    parse_positive,
    parse_seed,
    parse_workers,
    print_auto_device,
    reject_layer_options,
)
from tvmconv.cli.progress import progress_line
from tvmconv.compat import rename_tuner
from tvmconv.deadline import Deadline, get_process_start
from tvmconv.reports.tables import EMPTY_CELL, NETWORK_ROW, Table, format_significant, sum_seconds
from tvmconv.search.tuners import TUNERS
from tvmconv.tvm_import import import_tvm
from tvmconv.workloads import Workload

if TYPE_CHECKING:
    from tvmconv.devices import Device
    from tvmconv.measure.results import ErrorKind
    from tvmconv.search.progress import SearchProgress
    from tvmconv.search.search import TuneResult

DEFAULT_LOG = "tuning.jsonl"
FAILED_STATUS = 1
SECONDS_PER_LINE = 15.0  # minimum time between two lines of progress where stderr is not a terminal


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "tune",
        help="search for the fastest configs of a workload",
        description="Search for the fastest configs of a workload, and append every measurement to a log. The same "
        "command resumes an interrupted search. The exit status is 1 if no config ran for some workload.",
        usage="%(prog)s (WORKLOAD | --suite S) [options]",
    )
    parser.add_argument("workload", metavar="WORKLOAD", nargs="?", help=f"Workload, such as {EXAMPLE_WORKLOAD}.")
    add_suite_options(parser)
    add_search_options(parser)
    parser.add_argument("--json", action="store_true", help="Print the best record of each search as a line of a log.")
    parser.set_defaults(run=run)


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a search."""
    parser.add_argument(
        "--schedule",
        metavar="NAME",
        action="append",
        help="Schedule whose knobs are searched; may be given several times, and applies to the layers that it can "
        "compute (default: all schedules that may be the fastest; tvmconv schedules WORKLOAD lists them).",
    )
    parser.add_argument(
        "--tuner", type=rename_tuner, choices=TUNERS, default="gp", help="Search algorithm (default: %(default)s)."
    )
    parser.add_argument(
        "--trials",
        metavar="N",
        type=parse_count,
        help="Stop after N trials, those in the log included (default: 512 without --seconds).",
    )
    time_limit = parser.add_mutually_exclusive_group()
    time_limit.add_argument(
        "--seconds",
        metavar="T",
        type=parse_positive,
        help="Time limit in seconds for each workload, from the start of the command, final timings included.",
    )
    time_limit.add_argument(
        "--seconds-total",
        metavar="T",
        type=parse_positive,
        help="Time limit in seconds for all workloads, divided by the expected cost of each in the network.",
    )
    parser.add_argument(
        "--patience", metavar="N", type=parse_count, help="Stop after N consecutive trials without improvement."
    )
    parser.add_argument(
        "--log",
        metavar="F",
        type=Path,
        default=Path(DEFAULT_LOG),
        help="Log to resume from and to append to (default: %(default)s).",
    )
    add_renamed_option(
        parser,
        "--transfer-log",
        "--transfer",
        dest="transfer_logs",
        metavar="F",
        type=Path,
        action="append",
        default=[],
        help="Log, or folder of logs, of other workloads that the tuner also learns from; may be given several times.",
    )
    parser.add_argument(
        "--device",
        metavar="D",
        default="auto",
        help="Device to measure on: cuda:N, cuda for all GPUs of this host, opencl:N, rpc:KEY or auto "
        "(default: %(default)s).",
    )
    add_tracker_option(parser)
    add_cost_model_option(parser)
    add_verify_option(parser)
    parser.add_argument("--workers", metavar="N", type=parse_workers, help="Builder processes (default: cores - 1).")
    parser.add_argument("--seed", metavar="N", type=parse_seed, default=0, help="Tuner's seed (default: %(default)s).")


def run(args: argparse.Namespace) -> int:
    """Tune the workloads, and print a table of the results."""
    chosen_workloads, network = _parse_workloads(args)
    try:
        results = search_all(args, {workload: network.get(workload, 1) for workload in chosen_workloads})
    except KeyboardInterrupt:
        print_note(f"interrupted; {args.log} is whole, and the same command goes on with it")
        raise
    if args.json:
        for _, _, tuned in results:
            if tuned.final:
                print(tuned.final.line())
        for line in describe_skipped(results):
            print(f"tvmconv: {line}", file=sys.stderr)
    else:
        print(make_results_table(results, network).format_text())
        lines = describe_skipped(results) + describe_unconfirmed(results) + describe_phases(results)
        for line in lines + describe_sampled(chosen_workloads, args.verify):
            print(line)
    for line in describe_failures(results):
        print(line, file=sys.stderr)
    return 0 if all(tuned.final for _, _, tuned in results) else FAILED_STATUS


def search_all(
    args: argparse.Namespace,
    network: Mapping[Workload, int],
    on_workload: Callable[[int, Workload], None] | None = None,
    **option_values: Any,
) -> list[tuple[Workload, str, TuneResult]]:
    """Tune workloads one after another, with worker processes that start once.

    The time limit of the first workload counts from the start of the command. With `--seconds-total`, the workloads
    that cost the network most are searched first.

    Args:
        args: Values of the options of `add_search_options`.
        network: Number of occurrences in the network of each workload.
        on_workload: Function that is called before each search with its number, from 1, and the workload.
        option_values: Further fields of `TuneOptions`.

    Returns:
        For each workload: the workload, the name of the fastest schedule, and the result; in the order of `network`.
    """
    from tvmconv.measure.workers.pool import keep_workers_alive
    from tvmconv.measure.workers.prestart import prestart_workers
    from tvmconv.search.options import TuneOptions
    from tvmconv.search.task_scheduler import tune_tasks
    from tvmconv.search.tune import find_devices

    started_at, results = get_process_start(), []
    deadline = None if args.seconds_total is None else Deadline.after(args.seconds_total, started_at)
    parsed_options = {
        name: getattr(args, name)
        for name in ("tuner", "trials", "log", "seed", "patience", "transfer_logs", "workers", "verify")
    }
    tune_options = TuneOptions(**parsed_options, seconds=args.seconds, started_at=started_at, **option_values)
    with keep_workers_alive():
        measuring_devices = find_devices(args.device, args.tracker)
        print_auto_device(args.device, *measuring_devices)
        prestart_workers(args.workers, measuring_devices)  # the workers load their libraries during this import
        import_tvm()
        schedule_names = assign_schedules(args.schedule or (), [*network])
        if tune_options.measure_baseline:
            _print_omitted_naive(network, schedule_names, measuring_devices[0])
        searches = tune_tasks(
            network, measuring_devices, tune_options, schedule_names=schedule_names, deadline=deadline
        )
        for number, (workload, search) in enumerate(searches, 1):
            if on_workload:
                on_workload(number, workload)
            with _show_progress(f"{workload.text} on {measuring_devices[0].text}: ") as show:
                result = search(lambda status, show=show: show(format_progress(status)))  # type: ignore[misc]
            results.append((workload, result.final.schedule if result.final else EMPTY_CELL, result))
    order_of_workload = {workload: order for order, workload in enumerate(network)}
    return sorted(results, key=lambda result: order_of_workload[result[0]])


def _print_omitted_naive(
    network: Iterable[Workload], schedule_names: Mapping[Workload, Sequence[str]], device: Device
) -> None:
    """Print on stderr for which workloads the naive schedule is not measured, because it would take too long."""
    omitted_schedules = {
        workload: naive_schedule
        for workload in network
        if (naive_schedule := registry.get_baseline_schedule(workload))
        and naive_schedule.name not in schedule_names[workload]
        and not naive_cost.is_affordable(workload, device)
    }
    if omitted_schedules:
        naive_schedule = next(iter(omitted_schedules.values()))
        print_note(naive_cost.describe_omission(naive_schedule, [*omitted_schedules], device))


def assign_schedules(names: Sequence[str], chosen_workloads: Sequence[Workload]) -> dict[Workload, list[str]]:
    """Return for each workload those of the named schedules that can compute it; the list may be empty.

    Raises:
        ScheduleError: A schedule can compute none of the workloads.
    """
    names_by_workload: dict[Workload, list[str]] = {}
    for workload in chosen_workloads:
        applicable_names = {schedule.name for schedule in registry.schedules(workload)}
        names_by_workload[workload] = [name for name in dict.fromkeys(names) if name in applicable_names]
    for name in names:
        if not any(name in workload_names for workload_names in names_by_workload.values()):
            registry.find_schedule(chosen_workloads[0], name)  # raises an error that lists the schedules
    return names_by_workload


def format_progress(progress: SearchProgress) -> str:
    """Return one line on the progress of a search."""
    max_text = f"/{progress.max_trials:,}" if progress.max_trials is not None else ""
    parts = [f"{progress.num_trials:,}{max_text} configs", f"{progress.trials_per_second:.1f}/s"]
    if progress.best:
        reference = progress.reference
        speedup_text = ""
        if reference and progress.speedup:
            speedup_text = f", {format_significant(progress.speedup)} × {reference.schedule}"
        parts.append(
            f"best trial {format_significant(progress.best.cost * 1e6)} µs ({progress.best.schedule}, "
            f"{format_significant(progress.best.gflops)} GFLOP/s{speedup_text})"
        )
    if errors := [f"{count} {format_error_kind(kind)}" for kind, count in progress.error_counts.most_common()]:
        parts.append(f"failed: {', '.join(errors)}")
    if progress.remaining_seconds is not None:
        parts.append(f"{progress.remaining_seconds:.0f} s left")
    return ", ".join(parts)


def format_error_kind(kind: ErrorKind) -> str:
    """Return the name of an `ErrorKind` in lower-case words."""
    return kind.name.lower().replace("_", " ")


def make_results_table(
    results: Sequence[tuple[Workload, str, TuneResult]], network: Mapping[Workload, int] | None = None
) -> Table:
    """Return a table with one row per search, and for a network a last row with the time of all its layers.

    Args:
        results: Workload, name of the schedule and result of each search.
        network: Number of occurrences of each workload in the network, if there is one.
    """
    naive_schedules = [registry.get_baseline_schedule(workload) for workload, _, _ in results]
    naive_names = " or ".join(dict.fromkeys(each.name for each in naive_schedules if each)) or "naive"
    naive_headers = (f"{naive_names} [µs]", f"× {naive_names}", "rel. error", "configs/s")
    headers = ("workload", "schedule", "configs", "failed", "best [µs]", "GFLOP/s", *naive_headers)
    rows: list[tuple[str, ...]] = []
    for workload, schedule_name, result in results:
        status, best, reference = result.status, result.final, result.reference
        num_new_trials = status.num_trials - status.num_resumed
        counts = (f"{status.num_trials:,}", f"{status.error_counts.total():,}")
        cells = (
            format_significant(best.cost * 1e6) if best else EMPTY_CELL,
            format_significant(best.gflops) if best else EMPTY_CELL,
            format_significant(reference.cost * 1e6) if reference and reference.ok else EMPTY_CELL,
            format_significant(result.speedup) if result.speedup else EMPTY_CELL,
            f"{best.relative_error:.1e}" if best and best.relative_error is not None else EMPTY_CELL,
            f"{num_new_trials / result.seconds:.1f}" if num_new_trials and result.seconds else EMPTY_CELL,
        )
        rows.append((workload.text, schedule_name, *counts, *cells))
    if network:
        total = _network_seconds(results, network)
        time_text = EMPTY_CELL if total is None else format_significant(total * 1e6)
        network_cells = {headers[0]: NETWORK_ROW, "best [µs]": time_text}
        rows.append(tuple(network_cells.get(header, EMPTY_CELL) for header in headers))
    return Table(headers, rows, left_aligned=frozenset({"workload", "schedule"}))


def _network_seconds(
    results: Sequence[tuple[Workload, str, TuneResult]], network: Mapping[Workload, int]
) -> float | None:
    """Return the total seconds of all layers, each by its fastest kernel; None if a layer has no valid kernel."""
    best_seconds: dict[Workload, float] = {}
    for workload, _, result in results:
        if result.final:
            best_seconds[workload] = min(result.final.cost, best_seconds.get(workload, math.inf))
    return sum_seconds([best_seconds.get(workload) for workload in network], [*network.values()])


def describe_unconfirmed(results: Sequence[tuple[Workload, str, TuneResult]]) -> list[str]:
    """Return one line for each search whose result is a trial, because it has no valid final timing."""
    return [
        f"{workload.text} {name}: there is no valid final timing; the time is the median of the config's trials"
        for workload, name, tuned in results
        if tuned.final and not tuned.final.final
    ]


def describe_skipped(results: Sequence[tuple[Workload, str, TuneResult]]) -> list[str]:
    """Return at most one line, which lists the phases that were skipped for lack of time."""
    counts = Counter(phase.value for _, _, result in results for phase in result.omitted)
    if not counts:
        return []
    has_several = len(results) > 1
    skipped_texts = [
        f"the {phase}" + (f" of {number} of {len(results)} workloads" if has_several else "")
        for phase, number in sorted(counts.items())
    ]
    return [f"No time was left for {', '.join(skipped_texts)}."]


def describe_phases(results: Sequence[tuple[Workload, str, TuneResult]]) -> list[str]:
    """Return the mean milliseconds of each phase of a trial, one line for each search that measured a config."""
    return [
        f"{workload.text} {name}, ms a trial: " + ", ".join(f"{phase} {ms:.1f}" for phase, ms in tuned.phases.items())
        for workload, name, tuned in results
        if tuned.phases
    ]


def describe_failures(results: Sequence[tuple[Workload, str, TuneResult]]) -> list[str]:
    """Return a line for each search in which no config ran, with the most frequent error message."""
    lines = []
    for workload, _, result in results:
        progress = result.status
        if not result.final and progress.message_counts:
            ((message, count),) = progress.message_counts.most_common(1)
            failed_text = f"{count:,} of {progress.num_trials:,} configs failed"
            lines.append(
                f"tvmconv: nothing ran for {workload.text}: {failed_text}: {message or 'no reason is recorded'}"
            )
    return lines


def _parse_workloads(args: argparse.Namespace) -> tuple[list[Workload], dict[Workload, int]]:
    """Return the selected workloads, each once, and the number of occurrences of each if they are a network."""
    if (args.workload is None) == (args.suite is None):
        raise UsageError("expected a workload or --suite; see tvmconv tune --help")
    if args.workload is not None:
        reject_layer_options(args)
        return [workloads.parse(args.workload)], {}
    selection = parse_layers(args)
    return list(dict.fromkeys(selection.workloads.values())), selection.network


@contextmanager
def _show_progress(prefix: str) -> Iterator[Callable[[str], None]]:
    """Show progress in place on a terminal, elsewhere as a line on stderr every `SECONDS_PER_LINE`."""
    if sys.stderr.isatty():
        with progress_line(prefix) as show:
            yield show
        return
    last_time = -math.inf

    def show_line(text: str) -> None:
        nonlocal last_time
        if time.monotonic() - last_time >= SECONDS_PER_LINE:
            last_time = time.monotonic()
            print(prefix + text, file=sys.stderr, flush=True)

    yield show_line
