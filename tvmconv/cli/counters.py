"""`tvmconv counters`: what is counted from kernels' code, beside what Nsight Compute counts on a GPU."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv import devices, workloads
from tvmconv.cli.errors import UsageError
from tvmconv.cli.options import EXAMPLE, add_place, find_place
from tvmconv.cli.progress import progress_line
from tvmconv.errors import Error, printable

if TYPE_CHECKING:
    from tvmconv.compiler.program import Program
    from tvmconv.devices import Device
    from tvmconv.experiments.beside import Beside

NAME = "counters"


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "counters",
        help="what is counted from the code beside what a GPU counts",
        description="Sectors, requests, wavefronts and occupancy: counted from kernels' code, and measured by Nsight "
        "Compute (ncu), of each kernel and each of its accesses. Each kernel is launched once for either. With --arch, "
        "kernels are built and counted without a GPU, into the file that --programs names, to be measured where there "
        "is one.",
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
    parser.add_argument("--recount", action="store_true", help="of these, build and count the kernels anew")
    parser.add_argument("--all", action="store_true", help="print every count of each kernel and each access")
    parser.add_argument("-o", dest="out", metavar="DIR", type=Path, help=f"write {NAME}.json and {NAME}.md there")
    add_place(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print and write."""
    from tvmconv.experiments.beside import Beside
    from tvmconv.experiments.readings import Readings
    from tvmconv.reports.beside import (
        ACCESS_LEGEND,
        LEGEND,
        NEAR,
        by_access,
        largest_differences,
        overview,
        summary,
        table,
    )

    if args.recount and not args.files:
        raise UsageError("--recount counts anew what --from FILE tells was measured")
    if args.files:
        several = [Readings.read(file, Beside) for file in args.files]
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
    words = [*args.workloads, *(["--programs", str(args.programs)] if args.programs else [])]
    words += ["--schedules", args.schedules] if args.schedules else []
    words += [word for log in args.log or () for word in ("--log", str(log))]
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
