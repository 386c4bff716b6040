"""`tvmconv counters`: counts from the kernels' code beside a GPU's counters, read by Nsight Compute."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv import devices, workloads
from tvmconv.cli.errors import UsageError
from tvmconv.cli.options import EXAMPLE, add_page, add_place, find_place, told_fallbacks, update_page
from tvmconv.cli.progress import progress_line
from tvmconv.errors import Error, printable

if TYPE_CHECKING:
    from tvmconv.compiler.program import Program
    from tvmconv.devices import Device
    from tvmconv.experiments.beside import Beside
    from tvmconv.experiments.counters import Counters
    from tvmconv.experiments.readings import Readings
    from tvmconv.kernel import Kernel

NAME = "counters"
AGREEMENT = "agreement"  # section of a page


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "counters",
        help="what is counted from the code beside what a GPU counts",
        description="Sectors, requests, wavefronts and occupancy: counted from kernels' code, and measured by Nsight "
        "Compute (ncu), of each kernel and each of its accesses. Each kernel is launched once for either. With --arch, "
        "kernels are built and counted without a GPU, into the file that --programs names, to be measured where there "
        "is one. With --stalls, the counters say why one schedule is faster than another: how busy each unit is, "
        "how many bytes move, and what warps wait for.",
    )
    parser.add_argument("workloads", metavar="WORKLOAD", nargs="*", help=f"such as {EXAMPLE}")
    parser.add_argument("--schedules", metavar="A,B", help="these (default: all that apply)")
    parser.add_argument("--log", metavar="F", type=Path, action="append", help="and the fastest kernel of these logs")
    parser.add_argument("--programs", metavar="F", type=Path, help="kernels that were built before, or go there")
    parser.add_argument(
        "--from",
        dest="files",
        metavar="F",
        type=Path,
        action="append",
        help=f"read {NAME}.json again; several are put together",
    )
    parser.add_argument(
        "--stalls",
        action="store_true",
        help=f"read busy units, traffic and stall reasons; the files are OPERATOR-{NAME}.json and .md",
    )
    parser.add_argument("--launch-only", action="store_true", help=argparse.SUPPRESS)  # the command that ncu runs
    parser.add_argument("--recount", action="store_true", help="of these, build and count the kernels anew")
    parser.add_argument("--all", action="store_true", help="print every count of each kernel and each access")
    parser.add_argument(
        "-o", "--output", dest="out", metavar="DIR", type=Path, help=f"write {NAME}.json and {NAME}.md there"
    )
    add_page(parser)
    add_place(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, or read; print and write."""
    from tvmconv.reports.beside import (
        ACCESS_LEGEND,
        LEGEND,
        NEAR,
        by_access,
        differences,
        largest_differences,
        overview,
        summary,
        table,
    )

    if args.recount and not args.files:
        raise UsageError("--recount counts anew what --from FILE tells was measured")
    if args.stalls or args.launch_only:
        return _run_stalls(args)
    if args.files:
        several = _read(args.files)
        if isinstance(several, tuple):
            return _show_stalls(args, *several)
        rows = [row for each in several for row in each.kernels]
        if args.recount:
            rows = list(_recounted(rows, args.arch or "sm_90"))
        readings = replace(several[0], kernels=rows)
    else:
        device = find_place(args)
        if args.arch or isinstance(device, devices.Arch):
            return _save(args, device)
        readings = _measured(args, device)
    parts = [table(readings.kernels), summary(readings.kernels)]
    accesses = by_access(readings.kernels)
    if args.out:
        page = [f"# {readings.name}", *(part.markdown() for part in reversed(parts)), f"{LEGEND} {readings.provenance}"]
        page += [accesses.markdown(), ACCESS_LEGEND] if accesses.rows else []
        try:
            readings.write(args.out, "\n\n".join(page))
        except OSError as error:
            raise UsageError(f"cannot write to {args.out}: {error.strerror}") from error
    if args.page:
        agree, differ = summary(readings.kernels).markdown(), differences(readings.kernels).markdown()
        differ = f"Those that differ by more, counted over measured:\n\n{differ}"
        update_page(args.page, AGREEMENT, "\n\n".join([agree, differ, f"{LEGEND} {readings.provenance}"]))
    if args.all:
        parts += [accesses] if accesses.rows else []
        print("\n\n".join([*(part.text() for part in parts), printable(readings.provenance)]))
        return 0
    texts = [overview(readings.kernels).text(), summary(readings.kernels).text()]
    different = largest_differences(readings.kernels)
    if different.rows:
        texts.append(f"The accesses that differ most, by more than {NEAR:.0%}:\n{different.text()}")
    if accesses.rows:
        texts.append(f"--all prints each of the {len(accesses.rows):,} accesses.")
    print("\n\n".join([*texts, printable(readings.provenance)]))
    return 0


def _read(files: Sequence[Path]) -> list[Readings[Beside]] | tuple[Readings[Counters]]:
    """Read files of one kind; of --stalls there may be one."""
    from tvmconv.experiments.beside import Beside
    from tvmconv.experiments.counters import Counters
    from tvmconv.experiments.readings import Readings

    try:
        return [Readings.read(file, Beside) for file in files]
    except Error:
        if len(files) > 1:
            raise
        return (Readings.read(files[0], Counters),)


def _run_stalls(args: argparse.Namespace) -> int:
    """Read the counters of --stalls on a GPU, each kernel launched once by a child of ncu."""
    from tvmconv.analysis.nsight import ncu
    from tvmconv.experiments.counters import METRICS, STALLS, counters
    from tvmconv.experiments.provenance import provenance
    from tvmconv.experiments.readings import Readings

    if not args.workloads:
        raise UsageError("--stalls: expected workloads to measure")
    if args.launch_only:
        for _, kernel in _default_kernels(args):
            kernel(*kernel.workload.inputs(seed=0))
        return 0
    device = find_place(args)
    words = ["counters", *_words(args), "--stalls", "--device", device.text]
    profiled = ncu.profile([sys.executable, "-m", "tvmconv", *words, "--launch-only"], {**METRICS, **STALLS})
    with told_fallbacks():
        rows = [counters(*built, read) for built, read in zip(_default_kernels(args), profiled, strict=True)]
    operators = dict.fromkeys(workloads.parse(text).operator for text in args.workloads)
    note = provenance(device, shlex.join(["tvmconv", *words]))
    return _show_stalls(args, Readings(f"{'-'.join(operators)}-{NAME}", note, rows))


def _default_kernels(args: argparse.Namespace) -> Iterator[tuple[str, Kernel]]:
    """Yield the schedules and kernels of --stalls for each workload."""
    from tvmconv.experiments.counters import kernels

    names = args.schedules.split(",") if args.schedules else None
    return kernels([workloads.parse(text) for text in args.workloads], names, find_place(args), args.log)


def _show_stalls(args: argparse.Namespace, measured: Readings[Counters]) -> int:
    """Print the tables of --stalls, a section for each workload, and write them."""
    from tvmconv.reports.counters import LEGEND, SUMMARY_LEGEND, summary, tables

    texts = dict.fromkeys(row.workload for row in measured.kernels)
    sections = {text: [row for row in measured.kernels if row.workload == text] for text in texts}
    for text, rows in sections.items():
        print("\n\n".join([text, *(table.text() for table in tables(rows))]), end="\n\n")
    print(printable(measured.provenance))
    if args.out:
        parts = [["## " + text, *(table.markdown() for table in tables(rows))] for text, rows in sections.items()]
        pages = ["\n\n".join(part) for part in parts]
        measured.write(args.out, "\n\n".join([*pages, f"{LEGEND} {measured.provenance}"]))
    summaries = [f"`{text}`:\n\n{summary(rows).markdown()}" for text, rows in sections.items()]
    update_page(args.page, measured.name, "\n\n".join([*summaries, f"{SUMMARY_LEGEND} {measured.provenance}"]))
    return 0


def _words(args: argparse.Namespace) -> list[str]:
    """Return the words that choose the kernels."""
    return [
        *args.workloads,
        *(["--schedules", args.schedules] if args.schedules else []),
        *(word for log in args.log or () for word in ("--log", str(log))),
    ]


def _recounted(rows: Sequence[Beside], arch: str) -> Iterator[Beside]:
    from tvmconv.experiments.beside import recounted

    with progress_line("counting: ") as show:
        for number, row in enumerate(recounted(rows, arch), start=1):
            show(f"{number} of {len(rows)}: {row.workload} by {row.schedule}")
            yield row


def _save(args: argparse.Namespace, device: Device) -> int:
    from tvmconv.measuring import programs

    if not (args.programs and args.workloads):
        raise UsageError(f"{device.text} is to compile for only: --programs FILE takes kernels to measure on a GPU")
    try:
        programs.save(args.programs, _built(args, device))
    except OSError as error:
        raise UsageError(f"cannot write {args.programs}: {error.strerror}") from error
    print(f"tvmconv counters --programs {args.programs} --device cuda:0  measures them")
    return 0


def _measured(args: argparse.Namespace, device: Device) -> Any:
    from tvmconv.experiments.beside import measured
    from tvmconv.experiments.provenance import provenance
    from tvmconv.experiments.readings import Readings
    from tvmconv.measuring import programs

    if bool(args.workloads) == bool(args.programs):
        raise UsageError("expected workloads, or --programs FILE with kernels that were built before")
    built = list(programs.load(args.programs) if args.programs else _built(args, device))
    words = [*_words(args), *(["--programs", str(args.programs)] if args.programs else [])]
    note = provenance(device, shlex.join(["tvmconv", "counters", *words, "--device", device.text]))
    return Readings(NAME, note, measured(built, device))


def _built(args: argparse.Namespace, device: Device) -> Iterator[tuple[dict[str, Any], Program]]:
    """The kernels that were asked for, one after another, with what is counted of each."""
    from tvmconv.experiments.beside import told_of
    from tvmconv.experiments.run import choose
    from tvmconv.logs.build import build

    wanted = [workloads.parse(text) for text in args.workloads]
    names = args.schedules.split(",") if args.schedules else None
    with progress_line("counters: ") as show:
        for number, workload in enumerate(wanted, start=1):
            for schedule in choose(workload, names, device):
                show(f"{number} of {len(wanted)}: {workload.text} by {schedule.name}")
                try:
                    kernel = build(workload, schedule, device=device)
                except Error as error:
                    if names:
                        raise
                    show(f"{schedule.name}: {error}")
                    continue
                yield told_of(kernel), kernel.program
            if args.log:
                kernel = build(workload, device=device, log=args.log)
                yield told_of(kernel), kernel.program
