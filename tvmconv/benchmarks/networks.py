"""Make a table that compares tuned networks with libraries, from the results of `tvmconv bench tune-suite`.

    tvmconv bench networks results/*-tuned.json
    tvmconv bench networks tuning_logs/nvidia-h200/*/*-tuned.json --update-page docs/results.md
    tvmconv bench networks tuning_logs/nvidia-h200/*/*-tuned.json --predicted --update-page docs/predictions.md

With --predicted, the table has the kernels that the cost model predicts without trials. With --slower, it has the
layers whose tuned kernels are slower than the library's. The benchmark also writes the sections of docs/ with these
tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tvmconv.benchmarks.common import show
from tvmconv.cli import options
from tvmconv.experiments.results import PREDICTED, TUNED, UNTUNED, Result
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.library_comparison import sum_network_seconds
from tvmconv.reports.suite import compute_suite_info
from tvmconv.reports.tables import (
    Columns,
    Table,
    format_mean,
    format_micros,
    format_optional,
    format_significant,
    make_table,
)
from tvmconv.target import BEST_RATES
from tvmconv.workloads import dtypes
from tvmconv.workloads.conv_operator import ConvOperator

MIXED_VALUE = "mixed"
MUCH_SLOWER_RATIO, SLOWER_RATIO = 0.8, 0.97  # speed-ups over the library; the latter exceeds the noise of two timings
TARGET_SPEEDUP = 1.5  # over the library; the roofline of some layers is below it
OUR_ROWS = (PREDICTED, UNTUNED, TUNED)
LEGEND = (
    "Number of distinct layers, and of those that are slower than the library; speed-up over the library; total time "
    "of all layers of the network. Each line is one run, whose page lists versions, date and command."
)
PREDICTED_LEGEND = (
    "×: speed-up over cuDNN, geometric means over the distinct layers. *Attainable*: the speed-up of a kernel that "
    "takes a launch and then the longer time of its arithmetic and its bytes, at the best rates of any tensor-core "
    "kernel on this GPU; and the number of layers whose attainable speed-up is below 1.5. Further columns have the "
    "number of layers whose prediction has less than 0.8 of cuDNN's speed, and the total time of all layers of the "
    "network. Each line is one run, whose page lists versions, date, command and model."
)
SLOWER_LEGEND = (
    "The layers of the networks above whose tuned kernels have less than 0.97 of cuDNN's speed, and the attainable "
    "speed-up over cuDNN."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="Files NAME-tuned.json.")
    options.add_page(parser)
    kinds = parser.add_mutually_exclusive_group()
    for kind, text in (("predicted", "the predictions without trials"), ("slower", "the layers that are slower")):
        kinds.add_argument(f"--{kind}", dest="table", action="store_const", const=kind, help=f"Show {text}.")
    parser.set_defaults(table="networks")


def run(args: argparse.Namespace) -> int:
    """Read the results, print the table and write it into a page."""
    make, legend = {
        "networks": (make_networks_table, LEGEND),
        "predicted": (make_predictions_table, PREDICTED_LEGEND),
        "slower": (make_slower_layers_table, SLOWER_LEGEND),
    }[args.table]  # by the section of a page
    show(make([Sweep.read(file) for file in args.files]), args, args.table, legend)
    return 0


def compute_roofline_headroom(result: Result, library: str) -> float | None:
    """Return the speed-up over a library of a direct convolution that takes the minimum time; None if it is unknown.
    The minimum is a roofline with measured rates instead of the data sheet's. It is an optimistic bound: kernels near
    the ridge reach neither rate, and the rates are those of short bursts, while a GPU under load lowers its clock.
    """
    target, timing = BEST_RATES.get(result.device_name), result.find_row(library).timing
    if not target or not timing or not isinstance(result.workload, ConvOperator):
        return None
    if result.workload.dtype not in target.tensor_flops:
        return None
    return timing.median / target.roofline_seconds(result.workload, in_l2=not timing.cold)


class _Network:
    """A sweep with the properties that all its convolutions share, as in workload texts, or else `MIXED_VALUE`."""

    def __init__(self, sweep: Sweep) -> None:
        workloads: list[Any] = [result.workload for result in sweep.results]  # dataclasses, which `Workload` is not
        self.sweep = sweep
        self.dtype = _find_common_value(dtypes.DTYPES[workload.dtype].text for workload in workloads)
        self.layout = _find_common_value(workload.layout for workload in workloads)
        self.batch = _find_common_value(str(workload.N) for workload in workloads)
        base_name, *words = sweep.name.split("-")
        shown_words = {TUNED, self.dtype, self.layout, f"b{self.batch}"}  # in other columns
        self.name = "-".join([base_name, *(word for word in words if word not in shown_words)])
        # Sorts by name, by dtype from float32 to 16 bits, then by batch; mixed values come first.
        self.sort_key = (
            self.name,
            [MIXED_VALUE, *dtypes.DTYPES_BY_TEXT].index(self.dtype),
            self.layout,
            int(self.batch) if self.batch != MIXED_VALUE else 0,
        )


def _find_common_value(values: Iterable[str]) -> str:
    distinct_values = set(values)
    return distinct_values.pop() if len(distinct_values) == 1 else MIXED_VALUE


NETWORK_COLUMNS: Columns = {  # of rows that begin with a network
    "suite": lambda row: row[0].name,
    "dtype": lambda row: row[0].dtype,
    "layout": lambda row: row[0].layout,
    "batch": lambda row: row[0].batch,
}
LEFT_ALIGNED = {"suite", "dtype", "layout", "library", "layer", "schedule"}


def make_networks_table(sweeps: Sequence[Sweep]) -> Table:
    """Return a table with one row per network and library, sorted by name, dtype and batch; filters are left out."""
    rows = [
        (_Network(sweep), total)
        for sweep in sweeps
        if (info := compute_suite_info("", sweep))
        and all(isinstance(each.workload, ConvOperator) for each in sweep.results)
        for total in info.totals
    ]
    columns: Columns = {
        **NETWORK_COLUMNS,
        "library": lambda row: row[1].name,
        "layers": lambda row: str(row[1].num_layers),
        "slower": lambda row: str(row[1].num_slower),
        "× library, geometric mean": lambda row: format_optional(row[1].mean_speedup),
        "network [µs]": lambda row: format_micros(row[1].kernel_seconds),
        "with the library [µs]": lambda row: format_micros(row[1].library_seconds),
        "× library": lambda row: format_optional(row[1].speedup),
    }
    return make_table(sorted(rows, key=lambda row: row[0].sort_key), columns, LEFT_ALIGNED)


def make_predictions_table(sweeps: Sequence[Sweep], library: str = "cudnn") -> Table:
    """Return a table with one row per network with predictions: geometric-mean speed-ups over a library."""
    rows = []
    for sweep in sweeps:
        if sweep.has_row(PREDICTED):
            speedups = {
                name: [speedup for each in sweep.results if (speedup := each.compute_speedup(name, library))]
                for name in OUR_ROWS
            }
            headrooms = [ratio for each in sweep.results if (ratio := compute_roofline_headroom(each, library))]
            rows.append((_Network(sweep), speedups, headrooms))
    columns: Columns = {
        **NETWORK_COLUMNS,
        "layers": lambda row: str(len(row[0].sweep.results)),
        **{f"{name} × {library}": partial(lambda name, row: format_mean(row[1][name]), name) for name in OUR_ROWS},
        f"attainable × {library}": lambda row: format_mean(row[2]),
        f"attainable < {TARGET_SPEEDUP}": lambda row: str(_count_below(TARGET_SPEEDUP, row[2])) if row[2] else None,
        f"{PREDICTED} < {MUCH_SLOWER_RATIO}": lambda row: str(_count_below(MUCH_SLOWER_RATIO, row[1][PREDICTED])),
        **{
            f"{name} [µs]": partial(lambda name, row: format_micros(sum_network_seconds(row[0].sweep, name)), name)
            for name in (*OUR_ROWS, library)
        },
    }
    return make_table(sorted(rows, key=lambda row: row[0].sort_key), columns, LEFT_ALIGNED)


def _count_below(limit: float, ratios: Sequence[float]) -> int:
    return sum(ratio < limit for ratio in ratios)


def make_slower_layers_table(sweeps: Sequence[Sweep], library: str = "cudnn") -> Table:
    """Return a table with one row per layer whose tuned kernel is slower than a library, of networks with predictions.
    A layer counts as slower below `SLOWER_RATIO` of the library's speed.
    """
    rows = [
        (_Network(sweep), result, speedup)
        for sweep in sweeps
        if sweep.has_row(PREDICTED)
        for result in sweep.results
        if (speedup := result.compute_speedup(TUNED, library)) and speedup < SLOWER_RATIO
    ]
    columns: Columns = {
        **{header: NETWORK_COLUMNS[header] for header in ("suite", "dtype", "batch")},
        "layer": lambda row: row[1].workload.text,
        "schedule": lambda row: row[1].find_row(TUNED).schedule,
        f"{TUNED} × {library}": lambda row: format_significant(row[2]),
        f"attainable × {library}": lambda row: format_optional(compute_roofline_headroom(row[1], library)),
    }
    return make_table(sorted(rows, key=lambda row: (row[0].sort_key, row[2])), columns, LEFT_ALIGNED)
