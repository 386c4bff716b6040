"""Draw tuning logs and sweeps.

Draw a chart. For the searches of one workload, it shows the best rate over trials and over time; for logs of several
workloads, the best rate of each. For the JSON of a sweep, it shows the rates over sizes, or the speed-up over a library
for each layer of a suite; for several files, their rates side by side.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tvmconv import workloads
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.options import EXAMPLE_WORKLOAD, parse_image_path
from tvmconv.errors import Error, escape_unprintable
from tvmconv.experiments.sweep import Sweep, is_run_output
from tvmconv.files import open_regular
from tvmconv.logs.lines import InvalidLines
from tvmconv.plot import roofline
from tvmconv.reports.charts import compute_sweep_info, create_figure, draw_history, draw_sweep, save_figure
from tvmconv.reports.history import Trace, compute_history_info, merge_into_sweep, read_traces
from tvmconv.reports.sweep import draw_chart
from tvmconv.workloads import Workload


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    text = "Tuning log, JSON of a sweep, or output of tvmconv run --json."
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help=text)
    text = "PNG, SVG or PDF file to write."
    parser.add_argument("-o", dest="out", metavar="IMAGE", type=parse_image_path, required=True, help=text)
    text = "Draw the layers of a sweep below the roofline of their device."
    parser.add_argument("--roofline", action="store_true", help=text)
    parser.add_argument("--workload", metavar="W", help=f"Draw only this workload, such as {EXAMPLE_WORKLOAD}.")


def run(args: argparse.Namespace) -> int:
    """Draw the chart, and print the name of the image."""
    sweeps = [Sweep.read(file) for file in args.files if _is_sweep_file(file)]
    if args.roofline:
        if len(sweeps) != 1 or len(args.files) != 1:
            raise UsageError("--roofline takes one file with the results of a sweep")
        figure = create_figure(9.0)
        roofline(sweeps[0], axes=figure.add_subplot())
        save_figure(figure, args.out)
        print(escape_unprintable(str(args.out)))
        return 0
    traces = [trace for file in args.files if not _is_sweep_file(file) for trace in _read_log_traces(file, args.files)]
    chosen_workload = _select_workload(args, traces)
    if chosen_workload is not None:
        draw_history(compute_history_info(chosen_workload, traces, sweeps), args.out)
    elif len(sweeps) == 1 and not traces:
        draw_chart(sweeps[0], args.out)
    else:
        labels, results = merge_into_sweep(traces, sweeps)
        names = dict.fromkeys(result.device_name for result in results)
        axis = sweeps[0].axis if sweeps else "workload"
        draw_sweep(compute_sweep_info(f"Best on {', '.join(names)}", axis, labels, results), args.out)
    print(escape_unprintable(str(args.out)))
    return 0


def _select_workload(args: argparse.Namespace, traces: Sequence[Trace]) -> Workload | None:
    """Return the workload whose searches are drawn trial by trial: that of `--workload`, or the only one."""
    workloads_of_traces = {trace.workload for trace in traces}
    if args.workload is None:
        return workloads_of_traces.pop() if len(workloads_of_traces) == 1 else None
    workload = workloads.parse(args.workload)
    if workload not in workloads_of_traces:
        raise UsageError(f"no record of {workload} in {', '.join(map(str, args.files))}")
    return workload


def _is_sweep_file(file: Path) -> bool:
    """Return whether a file starts like the JSON of a sweep or the output of `run --json`, and not like a log."""
    with open_regular(file) as opened:
        first_bytes = opened.read(1 << 16)
    return first_bytes.startswith(b'{"name":') or is_run_output(first_bytes)


def _read_log_traces(file: Path, files: Sequence[Path]) -> list[Trace]:
    """Return the searches of a log, named by its stem if that is unique among `files`, else by its path."""
    invalid_lines = InvalidLines()
    is_unique_name = sum(other.name == file.name for other in files) == 1
    traces = read_traces(file.stem if is_unique_name else str(file), file, invalid_lines)
    if not traces:
        raise Error(f"{file} has no record" + (f": {invalid_lines}" if invalid_lines.count else ""))
    if invalid_lines.count:
        print_note(f"{file}: {invalid_lines}")
    return traces
