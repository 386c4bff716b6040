"""Make tables and a chart of the fastest schedules by channels, image and batch.

    tvmconv bench winners tuning_logs/nvidia-h200/winograd/*-tuned.json --log tuning_logs/nvidia-h200
    tvmconv bench winners results/*-tuned.json --log results --kind winograd -o results/winners

It reads the results of `tvmconv bench tune-suite`, and logs with the times of the other schedules. It writes NAME.md,
with a line per layer, and NAME.png. With --update-page, it writes a line per network and batch into a page.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tvmconv.benchmarks.common import add_output, show
from tvmconv.cli import options
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.ranking import list_log_files
from tvmconv.reports.winners import compare_layers, draw_winners, make_layers_table, make_networks_table
from tvmconv.training import read_valid_records

LEGEND = (
    "×: speed-up over the library, the geometric mean over the layers. TFLOP/s count the operations of direct "
    "convolution. Errors are relative L2 errors against float64."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="Files NAME-tuned.json.")
    options.add_option(parser, "--kind", "SCHEDULE", "Schedule that is compared with all others", repeat=True)
    options.add_option(parser, "--log", "LOG", "Log, or folder of logs", type=Path, repeat=True)
    add_output(parser, None, "NAME.md and NAME.png")
    options.add_page(parser)
    options.add_option(parser, "--section", "NAME", "Section of page", default="winners")


def run(args: argparse.Namespace) -> int:
    """Read results and logs, then print and write the tables."""
    sweeps = [Sweep.read(file) for file in args.files]
    records = (record for log in list_log_files(args.log) for record in read_valid_records(log))
    layers = compare_layers(sweeps, records, args.kind)
    show(make_networks_table(layers), args, args.section, LEGEND)
    if args.out:
        draw_winners(layers, args.kind, args.out.with_name(f"{args.out.name}.png"))
        sources = "\n".join(f"* {sweep.name}: {sweep.provenance}" for sweep in sweeps)
        made = f"Written by `{args.command}` from these:"
        page = "\n\n".join([make_layers_table(layers, args.kind).format_markdown(), LEGEND, made, sources])
        args.out.with_name(f"{args.out.name}.md").write_text(f"{page}\n", encoding="utf-8")
    return 0
