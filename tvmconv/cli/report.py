"""`tvmconv report`: why one schedule beats another, as a page to look at; no GPU is needed."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from tvmconv import library, workloads
from tvmconv.cli.errors import UsageError, note
from tvmconv.cli.explain import machine_of
from tvmconv.cli.options import (
    EXAMPLE,
    add_place,
    add_suite,
    chosen_layers,
    find_place,
    refuse_layers_options,
    tell_place,
    told_fallbacks,
)
from tvmconv.cli.progress import progress_line
from tvmconv.errors import printable
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.best import log_files
from tvmconv.logs.shipped import shipped_logs
from tvmconv.without_torch import import_tvm
from tvmconv.workloads import Layer

SHIPPED = "the logs that come with tvmconv"


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "report",
        help="a page to look at: times, the code's counts, the search, what each knob bought",
        description="Write one self-contained HTML file on a workload or a network: times of schedules and libraries, "
        "the roofline, what the kernels' code costs, how the search went, and what each knob bought.",
        usage="%(prog)s WORKLOAD [options] -o FILE.html\n       %(prog)s --suite S [options] -o FILE.html",
    )
    parser.add_argument("workload", metavar="WORKLOAD", nargs="?", help=f"such as {EXAMPLE}")
    add_suite(parser)
    parser.add_argument(
        "--log", metavar="F", action="append", help="a log, or a folder of logs (default: those that come with tvmconv)"
    )
    parser.add_argument(
        "--results",
        metavar="F",
        type=Path,
        action="append",
        default=[],
        help="times: what tvmconv run --json prints, or the JSON of a sweep",
    )
    parser.add_argument(
        "--counters", metavar="F", type=Path, action="append", default=[], help="what a profiler counted: its JSON"
    )
    parser.add_argument(
        "--schedules",
        metavar="A,B",
        help="those to look into, and whose times to show (default: the fastest, and conflict_free or the naive)",
    )
    parser.add_argument("-o", dest="out", type=Path, metavar="FILE", required=True, help="the HTML file to write")
    add_place(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Gather, write; print the file's name and size."""
    import_tvm()
    from tvmconv.reports.gather import Sources, gather
    from tvmconv.reports.page.contents import page

    name, layers = _chosen(args)
    place = find_place(args)
    if place.arch is None:
        raise UsageError(f"what is counted is of NVIDIA's architectures: {place.text} is none, try --arch")
    if not args.out.parent.is_dir():
        raise UsageError(f"{args.out}: there is no folder {args.out.parent}")
    schedules = args.schedules.split(",") if args.schedules else None
    if len(layers) == 1:
        for each in schedules or ():
            library.find(layers[0].workload, each)
    called = ", ".join(Path(each).name for each in args.log) if args.log else SHIPPED
    logs = log_files(args.log) if args.log else shipped_logs()
    sources = Sources(
        logs, called, bool(args.log), [Sweep.read(file) for file in args.results], args.counters, schedules
    )
    with told_fallbacks(), progress_line("report: ") as show:
        contents = gather(name, layers, place, machine_of(place), sources, _command(args), show)
    for bad in contents.bad:
        note(f"{bad}")
    text = page(contents)
    args.out.write_text(text, encoding="utf-8", newline="\n")
    tell_place(args, place)
    print(f"{printable(str(args.out))}  {args.out.stat().st_size / 1e3:,.0f} kB")
    return 0


def _chosen(args: argparse.Namespace) -> tuple[str, list[Layer]]:
    """What the page is about: a name, and its layers."""
    if (args.workload is None) == (args.suite is None):
        raise UsageError("expected a workload or --suite; see tvmconv report --help")
    if args.workload is not None:
        refuse_layers_options(args)
        workload = workloads.parse(args.workload)
        return workload.text, [Layer(workload.text, workload, 1)]
    selection = chosen_layers(args)
    return selection.name, list(selection.layers.values())


def _command(args: argparse.Namespace) -> str:
    """What was typed, but for where the page goes: the same page wherever it is written."""
    words = ["tvmconv", "report", *([args.workload] if args.workload else [])]
    for option in ("suite", "only", "skip", "batch", "dtype", "layout", "schedules", "arch", "device"):
        if getattr(args, option) is not None:
            words += [f"--{option}", str(getattr(args, option))]
    if args.epilogue:
        words += ["--epilogue", ",".join(args.epilogue)]
    for option in ("log", "results", "counters"):
        for each in getattr(args, option) or ():
            words += [f"--{option}", str(each)]
    return shlex.join(words)
