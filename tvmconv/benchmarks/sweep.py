"""Time the optimization steps of the schedules on the layers of a suite, by default those of the d2l-tvm chapter.

    tvmconv bench sweep --device cuda:0 --baseline cudnn -o results
    tvmconv bench sweep --suite resnet50 --only 3x3 --device cuda:0 -o results
    tvmconv bench sweep --from results/*-tuned.json -o results      # tables and charts again

It prints a table, and writes NAME.json (all results and their provenance), NAME.md (the table) and NAME.png (the chart
of GFLOP/s). `scripts/sweep.py` is the same.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tvmconv.benchmarks.common import add_output, find_device
from tvmconv.cli import options, output
from tvmconv.cli.progress import progress_line
from tvmconv.experiments.sweep import CHANNELS_SUITE, Sweep, measure_sweep
from tvmconv.reports.sweep import format_markdown, make_table, rewrite_page, write_sweep
from tvmconv.reports.tables import format_result

OPTIMIZATION_STEPS = ("default", "tiling", "columns", "vthread", "conflict_free")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    options.add_suite_options(parser, CHANNELS_SUITE)
    text = "Files NAME.json to read, not to measure."
    parser.add_argument("--from", dest="files", nargs="+", type=Path, metavar="FILE", help=text)
    add_output(parser, default=None)
    options.add_page(parser)
    options.add_timing_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure a sweep or read sweeps from files, then print and write them."""
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)  # fails before the measurement if it is not permitted
    sweeps = [Sweep.read(file) for file in args.files] if args.files else [_measure(args)]
    for sweep in sweeps:
        output.print_report(args, [make_table(sweep)], [sweep.provenance], json_data=json.loads(sweep.to_json()))
        if args.out:
            is_there = (args.out / f"{sweep.name}.json").resolve() in [file.resolve() for file in args.files or ()]
            (rewrite_page if is_there else write_sweep)(sweep, args.out)
        options.update_page(args.page, sweep.name, format_markdown(sweep))
    return 0 if all(result.has_all_times for sweep in sweeps for result in sweep.results) else 1


def _measure(args: argparse.Namespace) -> Sweep:
    selection = options.parse_layers(args)
    return measure_sweep(
        selection.name,
        selection.workloads,
        find_device(args),
        args.command,
        progress=progress_line,
        on_result=lambda sweep: output.print_intermediate(args, format_result(sweep.results[-1])),
        schedules=OPTIMIZATION_STEPS,
        counts=selection.counts,
        **options.timing_kwargs(args),
    )
