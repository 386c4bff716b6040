"""`tvmconv counters`: compare counts from the code of kernels with a GPU's counters, read by Nsight Compute."""

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
from tvmconv.cli.options import (
    EXAMPLE_WORKLOAD,
    add_device_options,
    add_page,
    add_renamed_option,
    find_target_device,
    report_fallbacks,
    update_page,
)
from tvmconv.cli.progress import progress_line
from tvmconv.errors import Error, escape_unprintable

if TYPE_CHECKING:
    from tvmconv.compiler.executable import Executable
    from tvmconv.devices import Device
    from tvmconv.experiments.counter_comparison import CounterComparison
    from tvmconv.experiments.counters import Counters
    from tvmconv.experiments.kernel_metrics import KernelMetricsFile
    from tvmconv.kernel import Kernel

FILE_STEM = "counters"
AGREEMENT = "agreement"  # section of the Markdown page


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "counters",
        help="compare counts from the code of kernels with a GPU's counters",
        description="Compare sectors, requests, wavefronts and occupancy that are counted from the code of kernels "
        "with those that Nsight Compute (ncu) measures, for each kernel and each of its accesses. Each kernel is "
        "launched once for each of both. With --arch, kernels are built and counted without a GPU and written to the "
        "file of --kernel-archive, which is measured on a host with a GPU. With --stalls, the counters show why one "
        "schedule is faster than another: how busy each unit is, how many bytes move, and what warps wait for.",
    )
    parser.add_argument("workloads", metavar="WORKLOAD", nargs="*", help=f"Workloads, such as {EXAMPLE_WORKLOAD}.")
    parser.add_argument("--schedules", metavar="A,B", help="Schedules to measure (default: all that apply).")
    parser.add_argument(
        "--log",
        metavar="F",
        type=Path,
        action="append",
        help="Log, or folder of logs, whose fastest kernel is measured as well; may be given several times.",
    )
    add_renamed_option(
        parser,
        "--kernel-archive",
        "--programs",
        metavar="F",
        type=Path,
        help="File of kernels: written with --arch, else read.",
    )
    parser.add_argument(
        "--from",
        dest="files",
        metavar="F",
        type=Path,
        action="append",
        help=f"File {FILE_STEM}.json of an earlier run to read; several files are combined.",
    )
    parser.add_argument(
        "--stalls",
        action="store_true",
        help="Measure utilization of units, traffic and stall reasons; the files are "
        f"OPERATOR-{FILE_STEM}.json and .md.",
    )
    parser.add_argument("--launch-only", action="store_true", help=argparse.SUPPRESS)  # the command that ncu runs
    parser.add_argument("--recount", action="store_true", help="Build and count the kernels of --from again.")
    parser.add_argument("--all", action="store_true", help="Print every count of each kernel and each access.")
    parser.add_argument(
        "-o",
        "--output",
        dest="out",
        metavar="DIR",
        type=Path,
        help=f"Folder to write {FILE_STEM}.json and {FILE_STEM}.md to.",
    )
    add_page(parser)
    add_device_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure the counters or read them from files, then print and write them."""
    from tvmconv.reports.counter_comparison import (
        ACCESS_LEGEND,
        COUNT_TOLERANCE,
        LEGEND,
        make_access_table,
        make_differences_table,
        make_largest_differences_table,
        make_overview_table,
        make_summary_table,
        make_table,
    )

    if args.recount and not args.files:
        raise UsageError("--recount needs --from FILE, the file of measured kernels to count again")
    if args.stalls or args.launch_only:
        return _run_stalls(args)
    if args.files:
        metrics_files = _read(args.files)
        if isinstance(metrics_files, tuple):
            return _show_stalls(args, *metrics_files)
        comparisons = [comparison for metrics_file in metrics_files for comparison in metrics_file.kernels]
        if args.recount:
            comparisons = list(_recount(comparisons, args.arch or "sm_90"))
        loaded_metrics = replace(metrics_files[0], kernels=comparisons)
    else:
        device = find_target_device(args)
        if args.arch or isinstance(device, devices.Arch):
            return _save_programs(args, device)
        loaded_metrics = _measure(args, device)
    tables = [make_table(loaded_metrics.kernels), make_summary_table(loaded_metrics.kernels)]
    accesses = make_access_table(loaded_metrics.kernels)
    if args.out:
        page = [
            f"# {loaded_metrics.name}",
            *(part.format_markdown() for part in reversed(tables)),
            f"{LEGEND} {loaded_metrics.provenance}",
        ]
        page += [accesses.format_markdown(), ACCESS_LEGEND] if accesses.rows else []
        try:
            loaded_metrics.write(args.out, "\n\n".join(page))
        except OSError as error:
            raise UsageError(f"cannot write to {args.out}: {error.strerror}") from error
    if args.page:
        agree = make_summary_table(loaded_metrics.kernels).format_markdown()
        differ = make_differences_table(loaded_metrics.kernels).format_markdown()
        differ = f"Those that differ by more, counted over measured:\n\n{differ}"
        update_page(args.page, AGREEMENT, "\n\n".join([agree, differ, f"{LEGEND} {loaded_metrics.provenance}"]))
    if args.all:
        tables += [accesses] if accesses.rows else []
        print("\n\n".join([*(part.format_text() for part in tables), escape_unprintable(loaded_metrics.provenance)]))
        return 0
    sections = [
        make_overview_table(loaded_metrics.kernels).format_text(),
        make_summary_table(loaded_metrics.kernels).format_text(),
    ]
    differences = make_largest_differences_table(loaded_metrics.kernels)
    if differences.rows:
        sections.append(f"Accesses that differ most, by more than {COUNT_TOLERANCE:.0%}:\n{differences.format_text()}")
    if accesses.rows:
        sections.append(f"--all prints each of the {len(accesses.rows):,} accesses.")
    print("\n\n".join([*sections, escape_unprintable(loaded_metrics.provenance)]))
    return 0


def _read(files: Sequence[Path]) -> list[KernelMetricsFile[CounterComparison]] | tuple[KernelMetricsFile[Counters]]:
    """Read several files of `CounterComparison`, or one file of `Counters` that --stalls wrote."""
    from tvmconv.experiments.counter_comparison import CounterComparison
    from tvmconv.experiments.counters import Counters
    from tvmconv.experiments.kernel_metrics import KernelMetricsFile

    try:
        return [KernelMetricsFile.read(file, CounterComparison) for file in files]
    except Error:
        if len(files) > 1:
            raise
        return (KernelMetricsFile.read(files[0], Counters),)


def _run_stalls(args: argparse.Namespace) -> int:
    """Measure the counters of --stalls on a GPU; a child process of ncu launches each kernel once."""
    from tvmconv.analysis.nsight import ncu
    from tvmconv.experiments.counters import METRICS, STALLS, make_counters
    from tvmconv.experiments.kernel_metrics import KernelMetricsFile
    from tvmconv.experiments.provenance import describe_provenance

    if not args.workloads:
        raise UsageError("--stalls needs at least one workload to measure")
    if args.launch_only:
        for _, kernel in _default_kernels(args):
            kernel(*kernel.workload.inputs(seed=0))
        return 0
    device = find_target_device(args)
    words = ["counters", *_words(args), "--stalls", "--device", device.text]
    profiled = ncu.profile_command([sys.executable, "-m", "tvmconv", *words, "--launch-only"], {**METRICS, **STALLS})
    with report_fallbacks():
        rows = [make_counters(*built, read) for built, read in zip(_default_kernels(args), profiled, strict=True)]
    operators = dict.fromkeys(workloads.parse(text).operator for text in args.workloads)
    note = describe_provenance(device, shlex.join(["tvmconv", *words]))
    return _show_stalls(args, KernelMetricsFile(f"{'-'.join(operators)}-{FILE_STEM}", note, rows))


def _default_kernels(args: argparse.Namespace) -> Iterator[tuple[str, Kernel]]:
    """Yield the schedules and kernels of --stalls for each workload."""
    from tvmconv.experiments.counters import iterate_kernels

    names = args.schedules.split(",") if args.schedules else None
    return iterate_kernels(
        [workloads.parse(text) for text in args.workloads], names, find_target_device(args), args.log
    )


def _show_stalls(args: argparse.Namespace, measured: KernelMetricsFile[Counters]) -> int:
    """Print and write the tables of --stalls, with a section for each workload."""
    from tvmconv.reports.counters import LEGEND, SUMMARY_LEGEND, make_summary_table, make_tables

    texts = dict.fromkeys(row.workload for row in measured.kernels)
    sections = {text: [row for row in measured.kernels if row.workload == text] for text in texts}
    for text, rows in sections.items():
        print("\n\n".join([text, *(table.format_text() for table in make_tables(rows))]), end="\n\n")
    print(escape_unprintable(measured.provenance))
    if args.out:
        parts = [
            ["## " + text, *(table.format_markdown() for table in make_tables(rows))] for text, rows in sections.items()
        ]
        pages = ["\n\n".join(part) for part in parts]
        measured.write(args.out, "\n\n".join([*pages, f"{LEGEND} {measured.provenance}"]))
    summaries = [f"`{text}`:\n\n{make_summary_table(rows).format_markdown()}" for text, rows in sections.items()]
    update_page(args.page, measured.name, "\n\n".join([*summaries, f"{SUMMARY_LEGEND} {measured.provenance}"]))
    return 0


def _words(args: argparse.Namespace) -> list[str]:
    """Return the arguments of the command line that select the kernels."""
    return [
        *args.workloads,
        *(["--schedules", args.schedules] if args.schedules else []),
        *(word for log in args.log or () for word in ("--log", str(log))),
    ]


def _recount(comparisons: Sequence[CounterComparison], arch: str) -> Iterator[CounterComparison]:
    from tvmconv.experiments.counter_comparison import recount

    with progress_line("counting: ") as show:
        for number, comparison in enumerate(recount(comparisons, arch), start=1):
            show(f"{number} of {len(comparisons)}: {comparison.workload} by {comparison.schedule}")
            yield comparison


def _save_programs(args: argparse.Namespace, device: Device) -> int:
    from tvmconv.measure import kernel_archive

    if not (args.kernel_archive and args.workloads):
        raise UsageError(
            f"{device.text} can only be compiled for: expected workloads and --kernel-archive FILE to write to"
        )
    try:
        kernel_archive.save_kernels(args.kernel_archive, _build_kernels(args, device))
    except OSError as error:
        raise UsageError(f"cannot write {args.kernel_archive}: {error.strerror}") from error
    print(f"measure the kernels on a GPU with: tvmconv counters --kernel-archive {args.kernel_archive} --device cuda:0")
    return 0


def _measure(args: argparse.Namespace, device: Device) -> Any:
    from tvmconv.experiments.counter_comparison import measure_counters
    from tvmconv.experiments.kernel_metrics import KernelMetricsFile
    from tvmconv.experiments.provenance import describe_provenance
    from tvmconv.measure import kernel_archive

    if bool(args.workloads) == bool(args.kernel_archive):
        raise UsageError("expected workloads, or --kernel-archive FILE with compiled kernels")
    described_programs = list(
        kernel_archive.load_kernels(args.kernel_archive) if args.kernel_archive else _build_kernels(args, device)
    )
    words = [*_words(args), *(["--kernel-archive", str(args.kernel_archive)] if args.kernel_archive else [])]
    provenance_text = describe_provenance(device, shlex.join(["tvmconv", "counters", *words, "--device", device.text]))
    return KernelMetricsFile(FILE_STEM, provenance_text, measure_counters(described_programs, device))


def _build_kernels(args: argparse.Namespace, device: Device) -> Iterator[tuple[dict[str, Any], Executable]]:
    """Yield the description, with its counts, and the executable of each selected kernel."""
    from tvmconv.experiments.counter_comparison import describe_kernel
    from tvmconv.experiments.preparation import select_schedules
    from tvmconv.logs.build import build

    parsed_workloads = [workloads.parse(text) for text in args.workloads]
    names = args.schedules.split(",") if args.schedules else None
    with progress_line("counters: ") as show:
        for number, workload in enumerate(parsed_workloads, start=1):
            for schedule in select_schedules(workload, names, device):
                show(f"{number} of {len(parsed_workloads)}: {workload.text} by {schedule.name}")
                try:
                    kernel = build(workload, schedule, device=device)
                except Error as error:
                    if names:
                        raise
                    show(f"{schedule.name}: {error}")
                    continue
                yield describe_kernel(kernel), kernel.executable
            if args.log:
                kernel = build(workload, device=device, log=args.log)
                yield describe_kernel(kernel), kernel.executable
