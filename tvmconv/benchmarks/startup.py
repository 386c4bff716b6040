"""Time how soon a search measures its first config and reaches its full rate, for several layers of one command.

    tvmconv bench startup --device cuda:0 -o results
    tvmconv bench startup --device cuda:0 --workers 15 --name one-gpu
    tvmconv bench startup --device cuda --name two-gpus

The benchmark runs `tvmconv tune --suite` on three layers, and reads the times of the records from its log. The time of
the first layer counts from the start of the command, that of the others from the last record of the previous layer. The
full rate is reached in the first second with four fifths of the layer's median records per second. Then the imports
that precede the first trial are timed, each in a process of its own. Results are in DIR/NAME.md and NAME.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tvmconv import devices, workloads
from tvmconv.benchmarks.common import add_output, report
from tvmconv.cli import options
from tvmconv.errors import Error
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.record import Record
from tvmconv.reports.tables import EMPTY_CELL, format_significant, make_table

LAYERS = ("conv2d:1x128x40x40,128x128x3x3,s1,p1", "conv2d:1x64x56x56,64x64x3x3,s1,p1", "conv2d:1x384x40x40,256x384x1x1")
FULL_RATE = 0.8  # fraction of the median rate
IMPORTS = {  # code that is timed, each in a fresh process
    "Python": "",
    "the command line's modules": "import tvmconv.cli.tune",
    "TVM": "import tvm",
    "TVM and all schedules": "from tvmconv import registry; registry.schedules()",
    "the devices": "from tvmconv import devices; devices.find_device({device!r})",
    "xgboost": "import xgboost",
}


@dataclass(frozen=True)
class LayerArrivals:
    """The times at which the records of a layer were measured, in seconds from the start of its search."""

    workload: str
    first: float
    full: float | None  # until the full rate; None if it was not reached
    rate: float  # median records per second
    trials: int  # number of verified trials
    last: float  # until the last record, final timings included


COLUMNS = {
    "layer": lambda layer: layer.workload,
    "first record [s]": lambda layer: f"{layer.first:.1f}",
    "full rate [s]": lambda layer: EMPTY_CELL if layer.full is None else f"{layer.full:.0f}",
    "records/s": lambda layer: format_significant(layer.rate),
    "verified": lambda layer: f"{layer.trials:,}",
    "last [s]": lambda layer: f"{layer.last:.1f}",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    text = "Workloads to tune (default: three layers)."
    parser.add_argument("workloads", metavar="WORKLOAD", nargs="*", default=LAYERS, help=text)
    options.add_device_option(parser, "Device to measure on, as for tvmconv tune")
    options.add_option(parser, "--seconds", "S", "Seconds per layer", type=options.parse_positive, default=10.0)
    text = "Number of builder processes (default: cores - 1)"
    options.add_option(parser, "--workers", "N", text, type=options.parse_workers)
    parser.add_argument("--no-parts", action="store_true", help="Leave out the times of the imports.")
    options.add_option(parser, "--name", "NAME", "Name of the result files", default="startup")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Run the search, then print and write the times."""
    texts = [workloads.parse(text).text for text in args.workloads]
    device = devices.find_device("cuda:0" if args.device == "cuda" else args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    layers = tune(texts, args.device, args.seconds, args.workers)
    imports = {} if args.no_parts else IMPORTS
    seconds = {name: time_code(code.format(device=device.text)) for name, code in imports.items()}
    tables = [make_table(layers, COLUMNS, ["layer"])]
    if seconds:
        columns = {"to start": lambda row: row[0], "s": lambda row: f"{row[1]:.2f}"}
        tables.append(make_table(seconds.items(), columns, ["to start"]))
    source = describe_provenance(device, args.command)
    rows = [asdict(layer) for layer in layers]
    data = {"device_name": device.name, "layers": rows, "seconds": seconds, "note": source}
    report(args, args.name, tables, [source], data, f"A search from its command on, {args.device}, {device.name}")
    return 0


def tune(texts: Sequence[str], device: str, seconds: float, workers: int | None) -> list[LayerArrivals]:
    """Tune the workloads by one command, and return the times of each workload's records."""
    with tempfile.TemporaryDirectory() as folder:
        suite, log = Path(folder) / "suite.json", Path(folder) / "log.jsonl"
        suite.write_text(json.dumps([{"name": text, "text": text} for text in texts]))
        command = [sys.executable, "-m", "tvmconv", "tune", "--suite", str(suite), "--seconds", f"{seconds:g}"]
        command += ["--device", device, "--log", str(log)] + (["--workers", str(workers)] if workers else [])
        started_at = time.time()
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            raise Error(f"{shlex.join(command)} ended with {process.returncode}: {process.stderr.strip()}")
        records = list(read_records(log, InvalidLines()))
    layers = []
    for text in texts:
        layer_records = [record for record in records if record.workload.text == text]
        layers.append(compute_arrivals(text, layer_records, started_at))
        started_at = max(record.timestamp for record in layer_records)
    return layers


def compute_arrivals(text: str, records: Sequence[Record], started_at: float) -> LayerArrivals:
    """Return the times of a layer's records relative to `started_at`, in seconds since 1970."""
    arrivals = sorted(record.timestamp - started_at for record in records if not record.final)
    rates = [sum(second <= arrival < second + 1 for arrival in arrivals) for second in range(int(arrivals[-1]))]
    median_rate = statistics.median([rate for rate in rates if rate] or [0])
    full = next((float(second) for second, rate in enumerate(rates) if rate >= FULL_RATE * median_rate > 0), None)
    num_verified = sum(record.ok for record in records if not record.final)
    last = max(record.timestamp for record in records) - started_at
    return LayerArrivals(text, arrivals[0], full, median_rate, num_verified, last)


def time_code(code: str) -> float:
    """Return the seconds of a Python process that runs some code, the better of two runs."""
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
