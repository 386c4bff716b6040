"""`tvmconv tune`: search for the fastest configs, keep what was measured in a log."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv import library, workloads
from tvmconv.cli.errors import UsageError, note
from tvmconv.cli.options import (
    EXAMPLE,
    add_knowledge,
    add_suite,
    add_tracker,
    add_verify,
    chosen_layers,
    count,
    positive,
    refuse_layers_options,
    seed_number,
    verify_lines,
    workers,
)
from tvmconv.cli.progress import progress_line
from tvmconv.lean import begin_tvm
from tvmconv.reports.tables import ALL, NOTHING, Table, significant, total_seconds
from tvmconv.searching.tuners import TUNERS
from tvmconv.workloads import Workload

if TYPE_CHECKING:
    from tvmconv.measuring.outcome import ErrorKind
    from tvmconv.searching.search import Tuned
    from tvmconv.searching.status import Status

LOG = "tuning.jsonl"
FAILED = 1
LONGEST_START = 30.0  # seconds from a process's begin to its command; an older one was doing something else
LINE_SECONDS = 15.0  # between two lines of progress where there is no terminal


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "tune",
        help="search for the fastest configs of a schedule",
        description="Search for the fastest configs of a schedule, and append every measurement to a log. The same "
        "command goes on where it was interrupted. Exit status 1 says that nothing ran for some workload.",
        usage="%(prog)s (WORKLOAD | --suite S) [options]",
    )
    parser.add_argument("workload", metavar="WORKLOAD", nargs="?", help=f"such as {EXAMPLE}")
    add_suite(parser)
    add_search(parser)
    parser.add_argument("--json", action="store_true", help="print the best record of each search, as in the log")
    parser.set_defaults(run=run)


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how to search."""
    parser.add_argument(
        "--schedule",
        metavar="NAME",
        action="append",
        help="whose knobs to search; may be given several times, each for those layers of a suite that it computes "
        "(default: all that can win, those first that promise most; tvmconv schedules WORKLOAD tells which)",
    )
    parser.add_argument("--tuner", choices=TUNERS, default="xgb", help="how to search (default: %(default)s)")
    parser.add_argument(
        "--trials",
        metavar="N",
        type=count,
        help="measure so many configs, those in the log included (default: 512 without --seconds)",
    )
    time_limit = parser.add_mutually_exclusive_group()
    time_limit.add_argument(
        "--seconds", metavar="T", type=positive, help="stop after so long for each workload, from the command on"
    )
    time_limit.add_argument(
        "--seconds-total",
        metavar="T",
        type=positive,
        help="stop after so long for all, shared out by what each layer costs the network",
    )
    parser.add_argument("--patience", metavar="N", type=count, help="stop after so many configs that are no better")
    parser.add_argument("--log", metavar="F", type=Path, default=Path(LOG), help="append to it (default: %(default)s)")
    parser.add_argument(
        "--transfer",
        metavar="F",
        type=Path,
        action="append",
        default=[],
        help="a log, or a folder of logs, of other workloads to learn from as well; may be given several times",
    )
    parser.add_argument(
        "--device",
        metavar="D",
        default="auto",
        help="cuda:N, cuda for all GPUs of this host, opencl:N, rpc:KEY or auto (default: %(default)s)",
    )
    add_tracker(parser)
    add_knowledge(parser)
    add_verify(parser)
    parser.add_argument("--workers", metavar="N", type=workers, help="processes that build (default: cores - 1)")
    parser.add_argument("--seed", metavar="N", type=seed_number, default=0, help="of the tuner (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Tune, and print a table of what came of it."""
    chosen, network = _workloads(args)
    try:
        results = search_all(args, {workload: network.get(workload, 1) for workload in chosen})
    except KeyboardInterrupt:
        note(f"interrupted; {args.log} is whole, and the same command goes on with it")
        raise
    if args.json:
        for _, _, tuned in results:
            if best := tuned.final or tuned.status.best:
                print(best.line())
    else:
        print(results_table(results, network).text())
        for line in [*phase_lines(results), *verify_lines(chosen, args.verify)]:
            print(line)
    return 0 if all(tuned.final for _, _, tuned in results) else FAILED


def search_all(
    args: argparse.Namespace,
    network: Mapping[Workload, int],
    told: Callable[[int, Workload], None] | None = None,
    **more: Any,
) -> list[tuple[Workload, str, Tuned]]:
    """Tune workloads one after another, by processes that start once.

    The clock of the first one has run since this command was begun.

    Args:
        args: what `add_search` read.
        network: what to compute, and how often the network has each.
        told: is called before each with its number, from 1, and with the workload.
        more: fields of the `Request`.

    Returns:
        Of each the workload, the schedule that won, and what came of the search.
    """
    from tvmconv.measuring.ready import begin_processes
    from tvmconv.measuring.standing import standing
    from tvmconv.searching.network import one_after_another
    from tvmconv.searching.request import Request
    from tvmconv.searching.tune import find_devices

    begun, results = _process_begun(), []
    end = None if args.seconds_total is None else begun + args.seconds_total
    options = {
        name: getattr(args, name)
        for name in ("tuner", "trials", "log", "seed", "patience", "transfer", "workers", "verify")
    }
    request = Request(**options, seconds=None if end else args.seconds, begun=begun, **more)
    with standing():
        begin_tvm()
        places = find_devices(args.device, args.tracker)
        begin_processes(args.workers, places)  # they load what they need while this process does
        named = take_where_they_apply(args.schedule or (), [*network])
        searches = one_after_another(network, places, request, named=named, end=end)
        for number, (workload, search) in enumerate(searches, 1):
            if told:
                told(number, workload)
            with _shown(f"{workload.text} on {places[0].text}: ") as show:
                tuned = search(lambda status, show=show: show(progress_text(status)))  # type: ignore[misc]
            best = tuned.final or tuned.status.best
            results.append((workload, best.schedule if best else NOTHING, tuned))
    return results


def _process_begun() -> float:
    """When this process was begun, as `time.monotonic` would have told it; now, if that was for something else."""
    now = time.monotonic()
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc_pid_stat(5): starttime
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
    except (OSError, AttributeError, ValueError, IndexError):  # not on Linux
        return now
    return now - age if age < LONGEST_START else now


def take_where_they_apply(names: Sequence[str], chosen: Sequence[Workload]) -> dict[Workload, list[str]]:
    """Of schedules that were named for several workloads, those that compute each; none where none of them does.

    Raises:
        ScheduleError: one computes none of the workloads.
    """
    named: dict[Workload, list[str]] = {}
    for workload in chosen:
        there = {schedule.name for schedule in library.schedules(workload)}
        named[workload] = [name for name in dict.fromkeys(names) if name in there]
    for name in names:
        if not any(name in own for own in named.values()):
            library.find(chosen[0], name)  # which says what there is
    return named


def progress_text(status: Status) -> str:
    """How far a search is, in one line."""
    asked = f"/{status.asked:,}" if status.asked is not None else ""
    parts = [f"{status.done:,}{asked} configs", f"{status.rate:.1f}/s"]
    if status.best:
        over = status.reference
        speedup = f", {significant(status.speedup)} × {over.schedule}" if over and status.speedup else ""
        parts.append(
            f"best {significant(status.best.cost * 1e6)} µs ({status.best.schedule}, "
            f"{significant(status.best.gflops)} GFLOP/s{speedup})"
        )
    if status.errors:
        parts.append("failed: " + ", ".join(f"{n} {kind_text(kind)}" for kind, n in status.errors.most_common()))
    if status.seconds_left is not None:
        parts.append(f"{status.seconds_left:.0f} s left")
    return ", ".join(parts)


def kind_text(kind: ErrorKind) -> str:
    """An `ErrorKind` in words."""
    return kind.name.lower().replace("_", " ")


def results_table(
    results: Sequence[tuple[Workload, str, Tuned]], network: Mapping[Workload, int] | None = None
) -> Table:
    """One line a search; of a network the last line has the time of all its layers, each by its fastest kernel.

    Args:
        results: what came of the searches for each workload by each schedule.
        network: how often there is each workload, if that is known.
    """
    naive = dict.fromkeys(schedule.name for workload, _, _ in results if (schedule := library.naive(workload)))
    headers = (
        "workload",
        "schedule",
        "configs",
        "failed",
        "best [µs]",
        "GFLOP/s",
        f"× {' or '.join(naive) or 'naive'}",
        "rel. error",
        "configs/s",
    )
    rows: list[tuple[str, ...]] = []
    for workload, name, tuned in results:
        status, final = tuned.status, tuned.final
        fresh = status.done - status.resumed
        rows.append(
            (
                workload.text,
                name,
                f"{status.done:,}",
                f"{status.errors.total():,}",
                significant(final.cost * 1e6) if final else NOTHING,
                significant(final.gflops) if final else NOTHING,
                significant(status.speedup) if status.speedup else NOTHING,
                f"{final.deviation:.1e}" if final and final.deviation is not None else NOTHING,
                f"{fresh / tuned.seconds:.1f}" if fresh and tuned.seconds else NOTHING,
            )
        )
    if network:
        total = _network_seconds(results, network)
        cells = {headers[0]: ALL, "best [µs]": NOTHING if total is None else significant(total * 1e6)}
        rows.append(tuple(cells.get(header, NOTHING) for header in headers))
    return Table(headers, rows, left=frozenset({"workload", "schedule"}))


def _network_seconds(results: Sequence[tuple[Workload, str, Tuned]], network: Mapping[Workload, int]) -> float | None:
    """Seconds of all layers by the fastest kernel of each; None if nothing ran for one."""
    found: dict[Workload, float] = {}
    for workload, _, tuned in results:
        if tuned.final:
            found[workload] = min(tuned.final.cost, found.get(workload, math.inf))
    return total_seconds([found.get(workload) for workload in network], [*network.values()])


def phase_lines(results: Sequence[tuple[Workload, str, Tuned]]) -> list[str]:
    """Where the time of a trial went, one line for each search that measured something."""
    return [
        f"{workload.text} {name}, ms a trial: " + ", ".join(f"{phase} {ms:.1f}" for phase, ms in tuned.phases.items())
        for workload, name, tuned in results
        if tuned.phases
    ]


def _workloads(args: argparse.Namespace) -> tuple[list[Workload], dict[Workload, int]]:
    """The workloads that were asked for, each once; and of a network how often it has each."""
    if (args.workload is None) == (args.suite is None):
        raise UsageError("expected a workload or --suite; see tvmconv tune --help")
    if args.workload is not None:
        refuse_layers_options(args)
        return [workloads.parse(args.workload)], {}
    selection = chosen_layers(args)
    return list(dict.fromkeys(selection.workloads.values())), selection.network


@contextmanager
def _shown(prefix: str) -> Iterator[Callable[[str], None]]:
    """Show progress on a terminal in place; elsewhere as a line on stderr at the beginning and now and then."""
    if sys.stderr.isatty():
        with progress_line(prefix) as show:
            yield show
        return
    last = -math.inf

    def show_line(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            print(prefix + text, file=sys.stderr, flush=True)

    yield show_line
