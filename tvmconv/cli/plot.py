"""`tvmconv plot`: tuning logs and sweeps as charts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvmconv import workloads
from tvmconv.cli.errors import UsageError, note
from tvmconv.cli.options import EXAMPLE, image
from tvmconv.errors import Error, printable
from tvmconv.experiments.sweep import Sweep, is_run_output
from tvmconv.files import open_regular
from tvmconv.logs.lines import BadLines
from tvmconv.reports.charts import draw_history, draw_sweep, sweep_info
from tvmconv.reports.history import Trace, history_info, merge_into_sweep, read_traces
from tvmconv.reports.sweep import draw
from tvmconv.workloads import Workload


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "plot",
        help="draw tuning logs and sweeps",
        description="Draw the best rate so far over trials and over time of the searches for one workload; for logs of "
        "several workloads the best rate of each; for the JSON of a sweep its rates over sizes, or how many times as "
        "fast as a library each layer of a suite is; for several files their rates side by side.",
    )
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        type=Path,
        help="a tuning log, a sweep's JSON, or what tvmconv run --json prints",
    )
    parser.add_argument("-o", dest="out", metavar="IMAGE", type=image, required=True, help="a PNG, SVG or PDF file")
    parser.add_argument("--workload", metavar="W", help=f"only this workload's searches, such as {EXAMPLE}")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw; print the image's name."""
    sweeps = [Sweep.read(file) for file in args.files if _is_sweep(file)]
    found = [trace for file in args.files if not _is_sweep(file) for trace in _read_log(file, args.files)]
    chosen = _choose(args, found)
    if chosen is not None:
        draw_history(history_info(chosen, found, sweeps), args.out)
    elif len(sweeps) == 1 and not found:
        draw(sweeps[0], args.out)
    else:
        labels, results = merge_into_sweep(found, sweeps)
        names = dict.fromkeys(result.device_name for result in results)
        axis = sweeps[0].axis if sweeps else "workload"
        draw_sweep(sweep_info(f"Best on {', '.join(names)}", axis, labels, results), args.out)
    print(printable(str(args.out)))
    return 0


def _choose(args: argparse.Namespace, found: Sequence[Trace]) -> Workload | None:
    """The workload whose searches are drawn trial by trial: the one asked for, or the only one."""
    there = {trace.workload for trace in found}
    if args.workload is None:
        return there.pop() if len(there) == 1 else None
    workload = workloads.parse(args.workload)
    if workload not in there:
        raise UsageError(f"no record of {workload} in {', '.join(map(str, args.files))}")
    return workload


def _is_sweep(file: Path) -> bool:
    """Whether a file begins like a sweep's JSON or what `run --json` prints; a log's lines begin otherwise."""
    with open_regular(file) as opened:
        begin = opened.read(1 << 16)
    return begin.startswith(b'{"name":') or is_run_output(begin)


def _read_log(file: Path, files: Sequence[Path]) -> list[Trace]:
    """The searches of a log, named by as much of its path as tells it from the others."""
    bad = BadLines()
    short = sum(other.name == file.name for other in files) == 1
    found = read_traces(file.stem if short else str(file), file, bad)
    if not found:
        raise Error(f"{file}: no record in it" + (f": {bad}" if bad.count else ""))
    if bad.count:
        note(f"{file}: {bad}")
    return found
