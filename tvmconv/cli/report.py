"""`tvmconv report`: write an HTML page that shows why one schedule is faster than another, without a GPU."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from tvmconv import registry, workloads
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.explain import find_device_spec
from tvmconv.cli.options import (
    EXAMPLE_WORKLOAD,
    add_device_options,
    add_suite_options,
    find_target_device,
    parse_layers,
    print_device,
    reject_layer_options,
    report_fallbacks,
)
from tvmconv.cli.progress import progress_line
from tvmconv.errors import escape_unprintable
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.packaged import packaged_logs
from tvmconv.logs.ranking import list_log_files
from tvmconv.tvm_import import import_tvm
from tvmconv.workloads import Layer

PACKAGED_LOGS_TEXT = "the logs that come with tvmconv"


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "report",
        help="write an HTML page with times, counts, searches and the gain of each knob",
        description="Write a self-contained HTML file on a workload or a network: times of schedules and libraries, "
        "the roofline, counts from the code of kernels, the course of the search, and the gain of each knob.",
        usage="%(prog)s WORKLOAD [options] -o FILE.html\n       %(prog)s --suite S [options] -o FILE.html",
    )
    parser.add_argument("workload", metavar="WORKLOAD", nargs="?", help=f"Workload, such as {EXAMPLE_WORKLOAD}.")
    add_suite_options(parser)
    parser.add_argument(
        "--log", metavar="F", action="append", help="Log, or folder of logs (default: the logs that come with tvmconv)."
    )
    parser.add_argument(
        "--results",
        metavar="F",
        type=Path,
        action="append",
        default=[],
        help="File with times: the output of tvmconv run --json, or the JSON of a sweep; may be given several times.",
    )
    parser.add_argument(
        "--counters",
        metavar="F",
        type=Path,
        action="append",
        default=[],
        help="File counters.json of tvmconv counters; may be given several times.",
    )
    parser.add_argument(
        "--schedules",
        metavar="A,B",
        help="Schedules to compare and to explain (default: the fastest, and conflict_free or the naive schedule).",
    )
    parser.add_argument("-o", dest="out", type=Path, metavar="FILE", required=True, help="HTML file to write.")
    add_device_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Collect the contents, write the page, and print the name and the size of the file."""
    import_tvm()
    from tvmconv.reports.page.contents import render_page
    from tvmconv.reports.page_data import ReportSources, collect_contents

    name, layers = _parse_subject_layers(args)
    target_device = find_target_device(args)
    if target_device.arch is None:
        raise UsageError(
            f"{target_device.text} is not an NVIDIA architecture, which report needs: choose one with --arch"
        )
    if not args.out.parent.is_dir():
        raise UsageError(f"{args.out}: there is no folder {args.out.parent}")
    schedules = args.schedules.split(",") if args.schedules else None
    if len(layers) == 1:
        for schedule_name in schedules or ():
            registry.find_schedule(layers[0].workload, schedule_name)
    log_names = ", ".join(Path(schedule_name).name for schedule_name in args.log) if args.log else PACKAGED_LOGS_TEXT
    logs = list_log_files(args.log) if args.log else packaged_logs()
    sources = ReportSources(
        logs, log_names, bool(args.log), [Sweep.read(file) for file in args.results], args.counters, schedules
    )
    with report_fallbacks(), progress_line("report: ") as show:
        contents = collect_contents(
            name, layers, target_device, find_device_spec(target_device), sources, _make_command(args), show
        )
    for invalid_lines in contents.invalid_lines:
        print_note(f"{invalid_lines}")
    text = render_page(contents)
    args.out.write_text(text, encoding="utf-8", newline="\n")
    print_device(args, target_device)
    print(f"{escape_unprintable(str(args.out))}  {args.out.stat().st_size / 1e3:,.0f} kB")
    return 0


def _parse_subject_layers(args: argparse.Namespace) -> tuple[str, list[Layer]]:
    """Return the title of the page and its layers."""
    if (args.workload is None) == (args.suite is None):
        raise UsageError("expected a workload or --suite; see tvmconv report --help")
    if args.workload is not None:
        reject_layer_options(args)
        workload = workloads.parse(args.workload)
        return workload.text, [Layer(workload.text, workload, 1)]
    selection = parse_layers(args)
    return selection.name, list(selection.layers.values())


def _make_command(args: argparse.Namespace) -> str:
    """Return the command line without the output file, so that the page does not depend on where it is written."""
    words = ["tvmconv", "report", *([args.workload] if args.workload else [])]
    for option in ("suite", "only", "skip", "batch", "dtype", "layout", "schedules", "arch", "device"):
        if getattr(args, option) is not None:
            words += [f"--{option}", str(getattr(args, option))]
    if args.epilogue:
        words += ["--epilogue", ",".join(args.epilogue)]
    for option in ("log", "results", "counters"):
        for file in getattr(args, option) or ():
            words += [f"--{option}", str(file)]
    return shlex.join(words)
