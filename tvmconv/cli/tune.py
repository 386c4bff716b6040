"""Search for the fastest configs of a workload.

Search for the fastest configs of a workload, and append every measurement to a log. The same command resumes an
interrupted search. The exit status is 1 if no config ran for some workload.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tvmconv import naive_cost, registry
from tvmconv.cli import options, output
from tvmconv.cli.errors import print_note
from tvmconv.cli.progress import progress_line
from tvmconv.compat import rename_tuner
from tvmconv.deadline import Deadline, get_process_start
from tvmconv.reports.tables import (
    EMPTY_CELL,
    NETWORK_ROW,
    Table,
    format_micros,
    format_optional,
    format_significant,
    sum_seconds,
)
from tvmconv.search.tuners import TUNERS
from tvmconv.tvm_import import import_tvm
from tvmconv.workloads import Workload

if TYPE_CHECKING:
    from tvmconv.devices import Device
    from tvmconv.search.progress import SearchProgress
    from tvmconv.search.result import TuneResult

DEFAULT_LOG = "tuning.jsonl"
FAILED_STATUS = 1
SearchResult: TypeAlias = "tuple[Workload, str, TuneResult]"  # workload, schedule of the fastest kernel, and result
SECONDS_PER_LINE = 15.0  # minimum time between two lines of progress where stderr is not a terminal

USAGE = "%(prog)s (WORKLOAD | --suite S) [options]"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_workload_argument(parser, nargs="?")
    options.add_suite_options(parser)
    add_search_options(parser)
    output.add_table_options(parser, json_help="Print the best record of each search as a line of a log.")


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a search."""
    text = (
        "Schedule whose knobs are searched, in the layers that it can compute (default: all schedules that may be the "
        "fastest; tvmconv schedules WORKLOAD lists them)"
    )
    options.add_option(parser, "--schedule", "NAME", text, repeat=True)
    options.add_option(parser, "--tuner", None, "Search algorithm", type=rename_tuner, choices=TUNERS, default="gp")
    text = "Stop after N trials, those in the log included (default: 512 without --seconds)"
    options.add_option(parser, "--trials", "N", text, type=options.parse_count)
    limits = parser.add_mutually_exclusive_group()
    text = (
        "Time limit in seconds for each workload, final timings and earlier searches in the log included; for a single "
        "workload from the start of the command, for the layers of a suite from the time at which the search can start"
    )
    options.add_option(limits, "--seconds", "T", text, type=options.parse_positive)
    text = "Time limit in seconds for all workloads, divided by the expected cost of each in the network"
    options.add_option(limits, "--seconds-total", "T", text, type=options.parse_positive)
    text = "Stop after N consecutive trials without improvement"
    options.add_option(parser, "--patience", "N", text, type=options.parse_count)
    text = "Log to resume from and to append to"
    options.add_option(parser, "--log", "F", text, type=Path, default=Path(DEFAULT_LOG))
    text = "Log, or folder of logs, of other workloads that the tuner also learns from"
    former = "--transfer"
    options.add_option(parser, "--transfer-log", "F", text, former=former, dest="transfer_logs", type=Path, repeat=True)
    text = "Device to measure on: cuda:N, cuda for all GPUs of this host, opencl:N, rpc:KEY or auto"
    options.add_device_option(parser, text)
    options.add_tracker_option(parser)
    options.add_cost_model_option(parser)
    options.add_verify_option(parser)
    options.add_option(parser, "--workers", "N", "Builder processes (default: cores - 1)", type=options.parse_workers)
    options.add_option(parser, "--seed", "N", "Tuner's seed", type=options.parse_seed, default=0)


def run(args: argparse.Namespace) -> int:
    """Tune the workloads, and print a table of the results."""
    selection = options.parse_selection(args, "tune")
    chosen_workloads = list(dict.fromkeys(selection.workloads.values()))
    network = selection.network if args.suite else {}
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
    elif args.csv:
        print(make_results_table(results, network).format_csv(), end="")
    else:
        print(output.format_table(make_results_table(results, network), is_wide=args.wide))
        lines = describe_skipped(results) + describe_resumed(results) + describe_unconfirmed(results)
        lines += describe_phases(results)
        for line in lines + options.describe_sampled(chosen_workloads, args.verify):
            print(line)
        print("\n".join(suggest_commands(args, results)))
    for line in describe_failures(results):
        print(line, file=sys.stderr)
    return 0 if all(tuned.final for _, _, tuned in results) else FAILED_STATUS


def search_all(
    args: argparse.Namespace,
    network: Mapping[Workload, int],
    on_workload: Callable[[int, Workload], None] | None = None,
    **option_values: Any,
) -> list[SearchResult]:
    """Tune workloads one after another, with worker processes that start once, and return the results in the order of
    `network`, which has the number of occurrences of each workload. The time limit of a single workload counts from the
    start of the command, and that of the first layer of a suite from the time at which the processes are ready. With
    `--seconds-total`, the workloads that cost the network most are searched first.
    `on_workload` is called before each search with its number, from 1. `option_values` are fields of `TuneOptions`.
    """
    from tvmconv.measure.workers.pool import keep_workers_alive, prestart_workers
    from tvmconv.search.options import TuneOptions
    from tvmconv.search.task_scheduler import tune_tasks
    from tvmconv.search.tune import find_devices

    started_at, results = get_process_start(), []
    deadline = None if args.seconds_total is None else Deadline.after(args.seconds_total, started_at)
    parsed_options = {
        name: getattr(args, name)
        for name in ("tuner", "trials", "log", "seed", "patience", "transfer_logs", "workers", "verify")
    }
    tune_options = TuneOptions(
        **parsed_options,
        seconds=args.seconds,
        started_at=started_at,
        counts_from_ready_workers=args.suite is not None and deadline is None,
        **option_values,
    )
    with keep_workers_alive():
        measuring_devices = find_devices(args.device, args.tracker)
        options.print_auto_device(args.device, *measuring_devices)
        prestart_workers(args.workers, measuring_devices)  # the workers load their libraries during this import
        import_tvm()
        schedule_names = assign_schedules(args.schedule or (), [*network])
        if tune_options.measure_baseline:
            _print_omitted_naive(schedule_names, measuring_devices[0])
        searches = tune_tasks(
            network, measuring_devices, tune_options, schedule_names=schedule_names, deadline=deadline
        )
        for number, (workload, search) in enumerate(searches, 1):
            if on_workload:
                on_workload(number, workload)
            prefix = f"{workload.text} on {measuring_devices[0].text}: "
            with progress_line(prefix, SECONDS_PER_LINE) as show:
                result = search(lambda status, show=show: show(format_progress(status)))  # type: ignore[misc]
            results.append((workload, result.final.schedule if result.final else EMPTY_CELL, result))
    order_of_workload = {workload: order for order, workload in enumerate(network)}
    return sorted(results, key=lambda result: order_of_workload[result[0]])


def _print_omitted_naive(schedule_names: Mapping[Workload, Sequence[str]], device: Device) -> None:
    """Print on stderr for which workloads the naive schedule is not measured, because it would take too long."""
    schedules = {workload: registry.get_baseline_schedule(workload) for workload in schedule_names}
    omitted = {
        workload: schedule
        for workload, schedule in schedules.items()
        if schedule and schedule.name not in schedule_names[workload] and not naive_cost.is_affordable(workload, device)
    }
    if omitted:
        print_note(naive_cost.describe_omission(next(iter(omitted.values())), [*omitted], device))


def assign_schedules(names: Sequence[str], chosen_workloads: Sequence[Workload]) -> dict[Workload, list[str]]:
    """Return for each workload those of the named schedules that can compute it; the list may be empty. ScheduleError
    is raised for a schedule that can compute none.
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
    if best := progress.best:
        texts = [best.schedule, f"{format_significant(best.gflops)} GFLOP/s"]
        if progress.reference and progress.speedup:
            texts.append(f"{format_significant(progress.speedup)} × {progress.reference.schedule}")
        parts.append(f"best trial {format_micros(best.cost)} µs ({', '.join(texts)})")
    if errors := [f"{count} {kind.text}" for kind, count in progress.error_counts.most_common()]:
        parts.append(f"failed: {', '.join(errors)}")
    if progress.remaining_seconds is not None:
        parts.append(f"{progress.remaining_seconds:.0f} s left")
    return ", ".join(parts)


def make_results_table(results: Sequence[SearchResult], network: Mapping[Workload, int]) -> Table:
    """Return a table with one row per search, and for a network a last row with the time of all its layers."""
    naive_schedules = [registry.get_baseline_schedule(workload) for workload, _, _ in results]
    naive = " or ".join(dict.fromkeys(schedule.name for schedule in naive_schedules if schedule)) or "naive"
    headers = ["workload", "schedule", "configs", "failed", "best [µs]", "GFLOP/s", f"{naive} [µs]", f"× {naive}"]
    headers += ["rel. error", "configs/s"]
    rows: list[tuple[str, ...]] = []
    best_seconds: dict[Workload, float] = {}
    for workload, schedule_name, result in results:
        status, best, reference = result.status, result.final, result.reference
        if best:
            best_seconds[workload] = min(best.cost, best_seconds.get(workload, math.inf))
        num_new_trials = status.num_trials - status.num_resumed
        cells = (
            f"{status.num_trials:,}",
            f"{status.error_counts.total():,}",
            format_micros(best.cost if best else None),
            format_optional(best.gflops if best else None),
            format_micros(reference.cost if reference and reference.ok else None),
            format_optional(result.speedup or None),
            f"{best.relative_error:.1e}" if best and best.relative_error is not None else EMPTY_CELL,
            f"{num_new_trials / result.seconds:.1f}" if num_new_trials and result.seconds else EMPTY_CELL,
        )
        rows.append((workload.text, schedule_name, *cells))
    if network:
        total = sum_seconds([best_seconds.get(workload) for workload in network], [*network.values()])
        network_cells = {"workload": NETWORK_ROW, "best [µs]": format_micros(total)}
        rows.append(tuple(network_cells.get(header, EMPTY_CELL) for header in headers))
    optional = ("configs/s", "rel. error", headers[6], "GFLOP/s", "failed", "configs")
    return Table(headers, rows, frozenset({"workload", "schedule"}), optional)


def suggest_commands(args: argparse.Namespace, results: Sequence[SearchResult]) -> list[str]:
    """Return the commands that use the log, each with what it does; none if no config ran."""
    succeeded = [(workload, name, result.final) for workload, name, result in results if result.final]
    if not succeeded:
        return []
    workload, schedule_name, record = succeeded[0]
    log, is_cuda = shlex.quote(str(args.log)), record.target.startswith("cuda")
    device = "" if args.device == "auto" or args.device.startswith("rpc:") else f" --device {args.device}"
    names = ("suite", "only", "skip", "batch", "dtype", "layout", "epilogue")
    values = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    texts = {name: ",".join(value) if isinstance(value, tuple) else str(value) for name, value in values.items()}
    words = [*(f"--{name} {shlex.quote(text)}" for name, text in texts.items()), *["--training"] * bool(args.training)]
    subject = " ".join(words) if args.suite else workload.text
    commands = {f"run {subject} --log {log}{device}{' --baseline cudnn' * is_cuda}": "compare with the baseline"}
    if is_cuda:
        commands[f"explain {workload.text} {schedule_name}:tuned --log {log}"] = "see what bounds the kernel"
        commands[f"report {subject} --log {log} -o report.html"] = "see code, counts and search on a page"
    commands[f"plot {log} -o search.png"] = "draw the search"
    if not args.suite:
        # Without a device, `build` compiles for CUDA, also where the log is of an OpenCL device.
        built_device = device or ("" if is_cuda else " --device opencl:0")
        commands[f"build {workload.text} --log {log}{built_device} -o kernel"] = "export the kernel"
    return ["", "Next:", *(f"  tvmconv {command}  # {purpose}" for command, purpose in commands.items())]


def describe_unconfirmed(results: Sequence[SearchResult]) -> list[str]:
    """Return one line for each search whose result is a trial, because it has no valid final timing."""
    return [
        f"{workload.text} {name}: there is no valid final timing; the time is the median of the config's trials"
        for workload, name, tuned in results
        if tuned.final and not tuned.final.final
    ]


def describe_resumed(results: Sequence[SearchResult]) -> list[str]:
    """Return at most one line, which says that the log has whole searches, so that they measured nothing."""
    statuses = [result.status for _, _, result in results if not result.omitted]
    number = sum(status.num_trials == status.num_resumed > 0 for status in statuses)
    scope = "the search" if len(results) == 1 else f"the searches of {number} of {len(results)} workloads"
    note = f"The log has {scope} already; its trials and seconds count, so that a larger --trials or --seconds goes on."
    return [note] if number else []


def describe_skipped(results: Sequence[SearchResult]) -> list[str]:
    """Return at most one line, which lists the phases that were skipped for lack of time."""
    counts = sorted(Counter(phase.value for _, _, result in results for phase in result.omitted).items())
    scope = f" of {len(results)} workloads"
    texts = [f"the {phase}" + f" of {number}{scope}" * (len(results) > 1) for phase, number in counts]
    return [f"No time was left for {', '.join(texts)}."] if texts else []


def describe_phases(results: Sequence[SearchResult]) -> list[str]:
    """Return the mean milliseconds of each phase of a trial, one line for each search that measured a config."""
    return [
        f"{workload.text} {name}, ms a trial: "
        + ", ".join(f"{phase} {milliseconds:.1f}" for phase, milliseconds in tuned.phases.items())
        for workload, name, tuned in results
        if tuned.phases
    ]


def describe_failures(results: Sequence[SearchResult]) -> list[str]:
    """Return a line for each search in which no config ran, with the most frequent error message."""
    return [
        f"tvmconv: nothing ran for {workload.text}: {count:,} of {result.status.num_trials:,} configs failed: "
        f"{message or 'no reason is recorded'}"
        for workload, _, result in results
        if not result.final
        for message, count in result.status.message_counts.most_common(1)
    ]
