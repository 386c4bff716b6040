"""Draw the share of the physical limit that each layer of networks reaches, from the results of `bench tune-suite`.

    tvmconv bench limits-chart results/*-tuned.json --networks tuning_logs/batch-networks.json -o limits.png

The chart has a panel for each network of the suite, whose layers are named NETWORK.NUMBER or NETWORK.NUMBER.GRADIENT,
with its measured layers from the lowest share to the highest. Shares are those of the newest run of a layer. Of layers
with --sustained they are at the clock of that run, and of others at the maximum clock.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tvmconv.benchmarks.layer_table import keep_newest
from tvmconv.cli.errors import UsageError
from tvmconv.experiments.results import TUNED
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.network_limits import compute_network_shares, draw_network_limits
from tvmconv.workloads.suites import read_suite

TITLE = "Share of the physical limit, of each layer from the lowest to the highest (and geometric mean)"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="Files NAME-tuned.json.")
    text = "Suite whose networks have panels."
    parser.add_argument("--networks", type=Path, required=True, metavar="FILE", help=text)
    text = "Chart to write: .png, .svg or .pdf."
    parser.add_argument("-o", "--output", dest="out", type=Path, required=True, metavar="FILE", help=text)


def run(args: argparse.Namespace) -> int:
    """Read the results, and draw the chart."""
    sweeps = {file: Sweep.read(file) for file in args.files}
    results = {result.workload: result for sweep in keep_newest(sweeps) for result in sweep.results}
    networks = compute_network_shares(results, read_suite(args.networks))
    if not networks:
        raise UsageError(f"the files have no layer of {args.networks}")
    draw_network_limits(networks, TITLE, args.out)
    num_layers = sum(len(network.shares[TUNED]) for network in networks)
    print(f"{num_layers} layers of {len(networks)} networks in {args.out}")
    return 0
