"""Write an HTML page with times, counts, searches and the gain of each knob.

Write a self-contained HTML file on a workload or a network: times of schedules and libraries, the roofline, counts from
the code of kernels, the course of the search, and the gain of each knob.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tvmconv import registry
from tvmconv.cli import options
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.progress import progress_line
from tvmconv.command_text import format_command
from tvmconv.errors import escape_unprintable
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.merge import check_output_path
from tvmconv.logs.packaged import packaged_logs
from tvmconv.logs.ranking import list_log_files
from tvmconv.reports.explained import find_device_spec
from tvmconv.reports.page.contents import render_page
from tvmconv.reports.page_data import ReportSources, collect_contents
from tvmconv.tvm_import import import_tvm

PACKAGED_LOGS_TEXT = "the logs that come with tvmconv"

USAGE = "%(prog)s WORKLOAD [options] -o FILE.html\n       %(prog)s --suite S [options] -o FILE.html"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_workload_argument(parser, nargs="?")
    options.add_suite_options(parser)
    options.add_option(parser, "--log", "F", f"Log, or folder of logs (default: {PACKAGED_LOGS_TEXT})", repeat=True)
    text = "File with times: the output of tvmconv run --json, or the JSON of a sweep"
    options.add_option(parser, "--results", "F", text, type=Path, repeat=True)
    options.add_option(parser, "--counters", "F", "File counters.json of tvmconv counters", type=Path, repeat=True)
    text = "Schedules to compare and to explain (default: the fastest, and conflict_free or the naive schedule)"
    options.add_option(parser, "--schedules", "A,B", text, type=options.parse_names)
    parser.add_argument("-o", dest="out", type=Path, metavar="FILE", required=True, help="HTML file to write.")
    options.add_device_options(parser)


def run(args: argparse.Namespace) -> int:
    """Collect the contents, write the page, and print the name and the size of the file."""
    import_tvm()
    selection = options.parse_selection(args, "report")
    layers = list(selection.layers.values())
    device = options.find_target_device(args)
    if device.arch is None:
        raise UsageError(f"{device.text} is not an NVIDIA architecture, which report needs: choose one with --arch")
    if not args.out.parent.is_dir():
        raise UsageError(f"{args.out}: there is no folder {args.out.parent}")
    if len(layers) == 1:
        for schedule_name in args.schedules or ():
            registry.find_schedule(layers[0].workload, schedule_name)
    log_names = ", ".join(Path(log).name for log in args.log) or PACKAGED_LOGS_TEXT
    logs = list_log_files(args.log) if args.log else packaged_logs()
    check_output_path(args.out, [*logs, *args.results, *args.counters])
    results = [Sweep.read(file) for file in args.results]
    sources = ReportSources(logs, log_names, bool(args.log), results, args.counters, args.schedules)
    with options.report_fallbacks(), progress_line("report: ") as show:
        command, device_spec = _make_command(args), find_device_spec(device)
        contents = collect_contents(selection.name, layers, device, device_spec, sources, command, show)
    for invalid_lines in contents.invalid_lines:
        print_note(f"{invalid_lines}")
    args.out.write_text(render_page(contents), encoding="utf-8", newline="\n")
    options.print_device(args, device)
    print(f"{escape_unprintable(str(args.out))}  {args.out.stat().st_size / 1e3:,.0f} kB")
    return 0


def _make_command(args: argparse.Namespace) -> str:
    """Return the command line without the output file, so that the page does not depend on where it is written."""
    words = ["tvmconv", "report", *([args.workload] if args.workload else [])]
    for option in ("suite", "only", "skip", "batch", "dtype", "layout", "schedules", "arch", "device", "epilogue"):
        value = getattr(args, option)
        if value is not None:
            words += [f"--{option}", ",".join(value) if isinstance(value, (list, tuple)) else str(value)]
    words += ["--training"] if args.training else []
    for option in ("log", "results", "counters"):
        words += [word for file in getattr(args, option) for word in (f"--{option}", str(file))]
    return format_command(words)
