"""Compare counts from the code of kernels with a GPU's counters.

Compare sectors, requests, wavefronts and occupancy that are counted from the code of kernels with those that Nsight
Compute (ncu) measures, for each kernel and each of its accesses. Each kernel is launched once for each of both. With
--arch, kernels are built and counted without a GPU and written to the file of --kernel-archive, which is measured on a
host with a GPU. With --stalls, the counters show why one schedule is faster than another: how busy each unit is, how
many bytes move, and what warps wait for.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tvmconv import devices, workloads
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError
from tvmconv.cli.progress import progress_line
from tvmconv.command_text import format_command
from tvmconv.compiler.executable import Executable
from tvmconv.devices import Device
from tvmconv.errors import DeviceError, Error, escape_unprintable
from tvmconv.experiments import counter_comparison
from tvmconv.experiments.counter_comparison import CounterComparison, describe_kernel, measure_counters
from tvmconv.experiments.counters import METRICS, STALLS, Counters, iterate_kernels, make_counters
from tvmconv.experiments.kernel_metrics import KernelMetricsFile
from tvmconv.experiments.preparation import select_schedules
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.experiments.results import TUNED
from tvmconv.kernel import Kernel
from tvmconv.logs.build import build
from tvmconv.measure import kernel_archive
from tvmconv.reports import counter_comparison as comparison_tables
from tvmconv.reports import counters as stall_tables

FILE_STEM = "counters"
AGREEMENT = "agreement"  # section of the Markdown page


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    text = f"Workloads, such as {options.EXAMPLE_WORKLOAD}."
    parser.add_argument("workloads", metavar="WORKLOAD", nargs="*", help=text)
    text = "Schedules to measure, or with --stalls `tuned` for the kernel of --log alone (default: all that apply)"
    options.add_option(parser, "--schedules", "A,B", text, type=options.parse_names)
    text = "Log, or folder of logs, whose fastest kernel is measured as well"
    options.add_option(parser, "--log", "F", text, type=Path, repeat=True)
    text = "File of kernels: written with --arch, else read"
    options.add_option(parser, "--kernel-archive", "F", text, former="--programs", type=Path)
    text = f"File {FILE_STEM}.json of an earlier run to read; several files are combined"
    options.add_option(parser, "--from", "F", text, dest="files", type=Path, repeat=True)
    text = f"Measure utilization, traffic and stall reasons; the files are OPERATOR-{FILE_STEM}.json and .md."
    parser.add_argument("--stalls", action="store_true", help=text)
    text = "With --stalls, leave out what is counted from the code, which takes a minute for a large kernel."
    parser.add_argument("--no-code", action="store_true", help=text)
    parser.add_argument("--recount", action="store_true", help="Build and count the kernels of --from again.")
    parser.add_argument("--all", action="store_true", help="Print every count of each kernel and each access.")
    output.add_table_options(parser, json_help="Print JSON, as in the file of -o.")
    text = f"Folder to write {FILE_STEM}.json and {FILE_STEM}.md to."
    parser.add_argument("-o", "--output", dest="out", metavar="DIR", type=Path, help=text)
    options.add_page(parser)
    options.add_device_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the counters or read them from files, then print and write them."""
    if args.recount and not args.files:
        raise UsageError("--recount needs --from FILE, the file of measured kernels to count again")
    if args.stalls:
        return _run_stalls(args)
    if args.files:
        try:
            files = [KernelMetricsFile.read(file, CounterComparison) for file in args.files]
        except Error:
            return _show_stalls(args, _merge([KernelMetricsFile.read(file, Counters) for file in args.files]))
        comparisons = [comparison for file in files for comparison in file.kernels]
        metrics = replace(files[0], kernels=_recount(comparisons, args) if args.recount else comparisons)
    else:
        device = options.find_target_device(args)
        if args.arch or isinstance(device, devices.Arch):
            return _save_kernels(args, device)
        metrics = _measure(args, device)
    _write(args, metrics)
    _print(args, metrics)
    return 0


def _merge(files: Sequence[KernelMetricsFile[Counters]]) -> KernelMetricsFile[Counters]:
    """Return the kernels of several files of --stalls in one, with the name of the first."""
    provenance = "\n\n".join(dict.fromkeys(file.provenance for file in files))
    return KernelMetricsFile(files[0].name, provenance, [kernel for file in files for kernel in file.kernels])


def _write(args: argparse.Namespace, metrics: KernelMetricsFile[CounterComparison]) -> None:
    """Write the tables to the folder and the page that were named."""
    rows, legend = metrics.kernels, f"{comparison_tables.LEGEND} {metrics.provenance}"
    summary = comparison_tables.make_summary_table(rows).format_markdown()
    if args.out:
        accesses = comparison_tables.make_access_table(rows)
        page = [f"# {metrics.name}", summary, comparison_tables.make_table(rows).format_markdown(), legend]
        page += [accesses.format_markdown(), comparison_tables.ACCESS_LEGEND] if accesses.rows else []
        try:
            metrics.write(args.out, "\n\n".join(page))
        except OSError as error:
            raise UsageError(f"cannot write to {args.out}: {error.strerror}") from error
    if args.page:
        differences = comparison_tables.make_differences_table(rows).format_markdown()
        differences = f"Those that differ by more, counted over measured:\n\n{differences}"
        options.update_page(args.page, AGREEMENT, "\n\n".join([summary, differences, legend]))


def _print(args: argparse.Namespace, metrics: KernelMetricsFile[CounterComparison]) -> None:
    """Print every table with `--all`, else a summary; as CSV, a row per kernel, and with `--all` one per access."""
    formatter = output.make_table_formatter(args)
    rows, accesses = metrics.kernels, comparison_tables.make_access_table(metrics.kernels)
    if args.json or args.csv:
        tables = [comparison_tables.make_table(rows), *([accesses] if args.all else [])]
        output.print_report(args, tables, json_data=asdict(metrics))
        return
    summary = formatter(comparison_tables.make_summary_table(rows))
    if args.all:
        sections = [formatter(comparison_tables.make_table(rows)), summary]
        sections += [formatter(accesses)] if accesses.rows else []
    else:
        sections = [formatter(comparison_tables.make_overview_table(rows)), summary]
        differences = comparison_tables.make_largest_differences_table(rows)
        if differences.rows:
            limit = f"{comparison_tables.COUNT_TOLERANCE:.0%}"
            sections.append(f"Accesses that differ most, by more than {limit}:\n{formatter(differences)}")
        if accesses.rows:
            sections.append(f"--all prints each of the {len(accesses.rows):,} accesses.")
    print("\n\n".join([*sections, escape_unprintable(metrics.provenance)]))


def _run_stalls(args: argparse.Namespace) -> int:
    """Measure the counters of --stalls on a GPU; a child process of ncu launches each kernel once."""
    if not args.workloads:
        raise UsageError("--stalls needs at least one workload to measure")
    if args.schedules == [TUNED] and not args.log:
        raise UsageError("--schedules tuned needs --log FILE, whose fastest kernel is measured")
    parsed_workloads, device = [workloads.parse(text) for text in args.workloads], options.find_target_device(args)
    with options.report_fallbacks():
        kernels = list(iterate_kernels(parsed_workloads, args.schedules, device, args.log))
    programs = [({"workload": kernel.workload.text}, kernel.executable) for _, kernel in kernels]
    profiled = counter_comparison.profile_launches(programs, device, {**METRICS, **STALLS})
    rows = [
        make_counters(name, kernel, _select_longest(kernel, profiled), counts_code=not args.no_code)
        for name, kernel in kernels
    ]
    if next(profiled, None) is not None:
        raise DeviceError("ncu measured more launches than the kernels have")
    words = ["counters", *_selection_words(args), "--stalls", *["--no-code"] * args.no_code, "--device", device.text]
    operators = dict.fromkeys(workload.operator for workload in parsed_workloads)
    note = describe_provenance(device, format_command(["tvmconv", *words]))
    return _show_stalls(args, KernelMetricsFile(f"{'-'.join(operators)}-{FILE_STEM}", note, rows))


def _select_longest(kernel: Kernel, profiled: Iterator[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of the device function of a kernel that takes longest, from those of all its launches."""
    launches = list(itertools.islice(profiled, len(kernel.kernels)))
    if len(launches) < len(kernel.kernels):
        raise DeviceError(f"ncu measured {len(launches)} launches of a kernel that has {len(kernel.kernels)}")
    timed_launches = launches[-len(kernel.timed_kernels) :]
    return max(timed_launches, key=lambda metrics: metrics.get("nanoseconds", 0.0))


def _show_stalls(args: argparse.Namespace, measured: KernelMetricsFile[Counters]) -> int:
    """Print and write the tables of --stalls, with a section for each workload."""
    texts = dict.fromkeys(row.workload for row in measured.kernels)
    sections = {text: [row for row in measured.kernels if row.workload == text] for text in texts}
    tables = {text: stall_tables.make_tables(rows) for text, rows in sections.items()}
    if args.json or args.csv:
        all_tables = [table for text in texts for table in tables[text]]
        output.print_report(args, all_tables, json_data=asdict(measured))
    else:
        for text in texts:
            print("\n\n".join([text, *map(output.make_table_formatter(args), tables[text])]), end="\n\n")
        print(escape_unprintable(measured.provenance))
    if args.out:
        parts = [part for text in texts for part in (f"## {text}", *(t.format_markdown() for t in tables[text]))]
        measured.write(args.out, "\n\n".join([*parts, f"{stall_tables.LEGEND} {measured.provenance}"]))
    if len(texts) == len(measured.kernels) > 1:
        summaries = [stall_tables.make_workloads_table(measured.kernels).format_markdown()]
        legend = f"{stall_tables.WORKLOADS_LEGEND} {measured.provenance}"
    else:
        summaries = [
            f"`{text}`:\n\n{stall_tables.make_summary_table(rows).format_markdown()}" for text, rows in sections.items()
        ]
        legend = f"{stall_tables.SUMMARY_LEGEND} {measured.provenance}"
    options.update_page(args.page, measured.name, "\n\n".join([*summaries, legend]))
    return 0


def _selection_words(args: argparse.Namespace) -> list[str]:
    """Return the arguments of the command line that select the kernels."""
    schedules = ["--schedules", ",".join(args.schedules)] if args.schedules else []
    return [*args.workloads, *schedules, *(word for log in args.log for word in ("--log", str(log)))]


def _recount(comparisons: Sequence[CounterComparison], args: argparse.Namespace) -> list[CounterComparison]:
    recounted = []
    with progress_line("counting: ") as show:
        for comparison in counter_comparison.recount(comparisons, args.arch or "sm_90"):
            recounted.append(comparison)
            show(f"{len(recounted)} of {len(comparisons)}: {comparison.workload} by {comparison.schedule}")
    return recounted


def _save_kernels(args: argparse.Namespace, device: Device) -> int:
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


def _measure(args: argparse.Namespace, device: Device) -> KernelMetricsFile[CounterComparison]:
    if bool(args.workloads) == bool(args.kernel_archive):
        raise UsageError("expected workloads, or --kernel-archive FILE with compiled kernels")
    words = _selection_words(args)
    if args.kernel_archive:
        kernels = list(kernel_archive.load_kernels(args.kernel_archive))
        words += ["--kernel-archive", str(args.kernel_archive)]
    else:
        kernels = list(_build_kernels(args, device))
    provenance = describe_provenance(device, format_command(["tvmconv", "counters", *words, "--device", device.text]))
    return KernelMetricsFile(FILE_STEM, provenance, measure_counters(kernels, device))


def _build_kernels(args: argparse.Namespace, device: Device) -> Iterator[tuple[dict[str, Any], Executable]]:
    """Yield the description, with its counts, and the executable of each selected kernel."""
    parsed_workloads = [workloads.parse(text) for text in args.workloads]
    with progress_line("counters: ") as show:
        for number, workload in enumerate(parsed_workloads, start=1):
            for schedule in select_schedules(workload, args.schedules, device):
                show(f"{number} of {len(parsed_workloads)}: {workload.text} by {schedule.name}")
                try:
                    kernel = build(workload, schedule, device=device)
                except Error as error:
                    if args.schedules:
                        raise
                    show(f"{schedule.name}: {error}")
                    continue
                yield describe_kernel(kernel), kernel.executable
            if args.log:
                kernel = build(workload, device=device, log=args.log)
                yield describe_kernel(kernel), kernel.executable
