"""`tvmconv tune`: search for the fastest configs, keep what was measured in a log."""

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

from tvmconv import library, naive, workloads
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
    tell_choice,
    verify_lines,
    workers,
)
from tvmconv.cli.progress import progress_line
from tvmconv.deadline import Deadline, process_begun
from tvmconv.reports.tables import ALL, NOTHING, Table, significant, total_seconds
from tvmconv.searching.tuners import TUNERS
from tvmconv.without_torch import import_tvm
from tvmconv.workloads import Workload

if TYPE_CHECKING:
    from tvmconv.devices import Device
    from tvmconv.measuring.outcome import ErrorKind
    from tvmconv.searching.search import Tuned
    from tvmconv.searching.status import Status

LOG = "tuning.jsonl"
FAILED = 1
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
        "--seconds",
        metavar="T",
        type=positive,
        help="take so long for each workload, from the command on, with the last timings",
    )
    time_limit.add_argument(
        "--seconds-total",
        metavar="T",
        type=positive,
        help="take so long for all workloads, from the command on, shared out by what each costs the network",
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
            if tuned.final:
                print(tuned.final.line())
        for line in omitted_lines(results):
            print(f"tvmconv: {line}", file=sys.stderr)
    else:
        print(results_table(results, network).text())
        for line in (
            *omitted_lines(results),
            *unconfirmed_lines(results),
            *phase_lines(results),
            *verify_lines(chosen, args.verify),
        ):
            print(line)
    for line in failure_lines(results):
        print(line, file=sys.stderr)
    return 0 if all(tuned.final for _, _, tuned in results) else FAILED


def search_all(
    args: argparse.Namespace,
    network: Mapping[Workload, int],
    told: Callable[[int, Workload], None] | None = None,
    **more: Any,
) -> list[tuple[Workload, str, Tuned]]:
    """Tune workloads one after another, by processes that start once.

    The clock of the first one has run since this command was begun. With `--seconds-total` those that cost the network
    most are searched first.

    Args:
        args: what `add_search` read.
        network: what to compute, and how often the network has each.
        told: is called before each with its number, from 1, and with the workload.
        more: fields of the `Request`.

    Returns:
        Of each the workload, the schedule that won, and what came of the search; in the order of the network.
    """
    from tvmconv.measuring.ready import begin_processes
    from tvmconv.measuring.standing import standing
    from tvmconv.searching.network import one_after_another
    from tvmconv.searching.request import Request
    from tvmconv.searching.tune import find_devices

    begun, results = process_begun(), []
    deadline = None if args.seconds_total is None else Deadline.after(args.seconds_total, begun)
    options = {
        name: getattr(args, name)
        for name in ("tuner", "trials", "log", "seed", "patience", "transfer", "workers", "verify")
    }
    request = Request(**options, seconds=args.seconds, begun=begun, **more)
    with standing():
        places = find_devices(args.device, args.tracker)
        tell_choice(args.device, *places)
        begin_processes(args.workers, places)  # they load what they need while this process does
        import_tvm()
        named = take_where_they_apply(args.schedule or (), [*network])
        if request.compare:
            _tell_omitted_naive(network, named, places[0])
        searches = one_after_another(network, places, request, named=named, deadline=deadline)
        for number, (workload, search) in enumerate(searches, 1):
            if told:
                told(number, workload)
            with _shown(f"{workload.text} on {places[0].text}: ") as show:
                tuned = search(lambda status, show=show: show(progress_text(status)))  # type: ignore[misc]
            results.append((workload, tuned.final.schedule if tuned.final else NOTHING, tuned))
    places_of = {workload: place for place, workload in enumerate(network)}
    return sorted(results, key=lambda result: places_of[result[0]])


def _tell_omitted_naive(network: Iterable[Workload], named: Mapping[Workload, Sequence[str]], device: Device) -> None:
    """Say in one line on stderr that the naive schedule is not measured where that would take too long."""
    omitted = {
        workload: reference
        for workload in network
        if (reference := library.naive(workload))
        and reference.name not in named[workload]
        and not naive.is_affordable(workload, device)
    }
    if omitted:
        reference = next(iter(omitted.values()))
        note(naive.describe_omission(reference, [*omitted], device))


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
            f"best trial {significant(status.best.cost * 1e6)} µs ({status.best.schedule}, "
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
    references = dict.fromkeys(schedule.name for workload, _, _ in results if (schedule := library.naive(workload)))
    over = " or ".join(references) or "naive"
    headers = (
        "workload",
        "schedule",
        "configs",
        "failed",
        "best [µs]",
        "GFLOP/s",
        f"{over} [µs]",
        f"× {over}",
        "rel. error",
        "configs/s",
    )
    rows: list[tuple[str, ...]] = []
    for workload, name, tuned in results:
        status, final, reference = tuned.status, tuned.final, tuned.reference
        fresh = status.done - status.resumed
        rows.append(
            (
                workload.text,
                name,
                f"{status.done:,}",
                f"{status.errors.total():,}",
                significant(final.cost * 1e6) if final else NOTHING,
                significant(final.gflops) if final else NOTHING,
                significant(reference.cost * 1e6) if reference and reference.ok else NOTHING,
                significant(tuned.speedup) if tuned.speedup else NOTHING,
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


def unconfirmed_lines(results: Sequence[tuple[Workload, str, Tuned]]) -> list[str]:
    """Return one line for each search whose result is a trial, as it has no valid final timing."""
    return [
        f"{workload.text} {name}: there is no valid final timing; the time is the median of the config's trials"
        for workload, name, tuned in results
        if tuned.final and not tuned.final.final
    ]


def omitted_lines(results: Sequence[tuple[Workload, str, Tuned]]) -> list[str]:
    """What there was no time left for, in one line; none where there was time for all."""
    counts = Counter(what.value for _, _, tuned in results for what in tuned.omitted)
    if not counts:
        return []
    several = len(results) > 1
    named = [
        f"the {what}" + (f" of {number} of {len(results)} workloads" if several else "")
        for what, number in sorted(counts.items())
    ]
    return [f"No time was left for {', '.join(named)}."]


def phase_lines(results: Sequence[tuple[Workload, str, Tuned]]) -> list[str]:
    """Where the time of a trial went, one line for each search that measured something."""
    return [
        f"{workload.text} {name}, ms a trial: " + ", ".join(f"{phase} {ms:.1f}" for phase, ms in tuned.phases.items())
        for workload, name, tuned in results
        if tuned.phases
    ]


def failure_lines(results: Sequence[tuple[Workload, str, Tuned]]) -> list[str]:
    """Return a line for each search in which nothing ran, with the message that most of its configs failed with."""
    lines = []
    for workload, _, tuned in results:
        status = tuned.status
        if not tuned.final and status.messages:
            ((message, count),) = status.messages.most_common(1)
            failed = f"{count:,} of {status.done:,} configs failed"
            lines.append(f"tvmconv: nothing ran for {workload.text}: {failed}: {message or 'no reason is recorded'}")
    return lines


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
