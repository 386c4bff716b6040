"""Make a table of single layers, one line for each workload, from the results of `tvmconv bench tune-suite`.

    tvmconv bench layer-table results/*-tuned.json
    tvmconv bench layer-table results/grouped-tuned.json --section grouped --update-page docs/backward.md

The table has the times of the tuned kernel and of each library, their shares of the physical limit, the speed-ups, and
in its last line the geometric means. A workload of several files has the times of the first of them. If files are of
several devices, a column names the device of each time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tvmconv.benchmarks.common import show
from tvmconv.cli import options
from tvmconv.cli.errors import UsageError
from tvmconv.experiments.results import TUNED, Result
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.library_comparison import make_comparison_table
from tvmconv.reports.tables import EMPTY_CELL, Table
from tvmconv.workloads import Workload

SECTION = "layers"
DEVICE = "device"  # column of a table of several devices


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="Files NAME-tuned.json.")
    text = f"Section of the page of --update-page that has the table (default: {SECTION})."
    parser.add_argument("--section", default=SECTION, metavar="NAME", help=text)
    options.add_page(parser)


def run(args: argparse.Namespace) -> int:
    """Read the results, print the table and write it into a page."""
    sweeps = [Sweep.read(file) for file in args.files]
    for file, sweep in zip(args.files, sweeps, strict=True):
        if not sweep.has_row(TUNED):
            raise UsageError(
                f"{file} has no tuned kernels: expected a file NAME-tuned.json of tvmconv bench tune-suite"
            )
    provenance = "\n\n".join(dict.fromkeys(sweep.provenance for sweep in sweeps))
    show(make_layer_table(sweeps), args, args.section, f"Median times. {provenance}")
    return 0


def make_layer_table(sweeps: Sequence[Sweep]) -> Table:
    """Return a table with one row for each workload of the sweeps, and the geometric means in the last row."""
    results: dict[Workload, Result] = {}
    for sweep in sweeps:
        for result in sweep.results:
            results.setdefault(result.workload, result)
    labels = [f"`{workload.text}`" for workload in results]
    table = make_comparison_table(Sweep(SECTION, labels, [*results.values()], ""))
    devices = [result.device_name for result in results.values()]
    if len(set(devices)) == 1:
        return table
    cells = [*devices, *[EMPTY_CELL] * (len(table.rows) - len(devices))]
    rows = [(*row, cell) for row, cell in zip(table.rows, cells, strict=True)]
    return Table([*table.headers, DEVICE], rows, {*table.left_aligned, DEVICE})
