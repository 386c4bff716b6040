"""Compare the schedules' latency estimates, which are formulas over their tiles, with the times of records.

    tvmconv bench estimates tuning_logs/sampled/*.jsonl.xz -o tuning_logs/nvidia-h200/experiments/estimates.md

For each layer, it takes the configs of a schedule that were measured on one device. It does not build kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from tvmconv import registry
from tvmconv.benchmarks.common import add_logs, add_output, compare_ranks
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError
from tvmconv.errors import KnobError, ScheduleError
from tvmconv.logs.merge import check_output_path
from tvmconv.logs.ranking import list_log_files
from tvmconv.reports.tables import Table, format_significant
from tvmconv.target import get_block_limits
from tvmconv.training import read_valid_records
from tvmconv.version import VERSION
from tvmconv.workloads import Workload

LEGEND = (
    "Spearman's rank correlation ρ of estimated and measured times, and the time of the fastest config in the tenth "
    "with the best estimates, divided by that of the fastest config: minimum, median and maximum over the layers."
)

SecondsByConfig = dict[tuple[tuple[str, object], ...], float]
Agreement = tuple[int, float, float]  # number of configs, correlation, slowdown of the best config in the first tenth


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    add_logs(parser)
    text = "Leave out layers with fewer measured configs"
    options.add_option(parser, "--min-configs", "N", text, former="--least", type=options.parse_count, default=30)
    add_output(parser, None, "FILE")


def run(args: argparse.Namespace) -> int:
    """Read the logs, print the table and write it."""
    layers: dict[tuple[str, str, Workload], SecondsByConfig] = defaultdict(dict)
    logs = list_log_files(args.logs)
    if args.out:
        check_output_path(args.out, logs)
    for log in logs:
        for record in read_valid_records(log):
            seconds = layers[record.schedule, record.device, record.workload]
            config = tuple(sorted(record.config.items(), key=lambda item: item[0]))
            seconds[config] = min(record.cost, seconds.get(config, record.cost))
    table = _make_table(layers, args.min_configs)
    if not table.rows:
        raise UsageError(f"no layer has {args.min_configs} configs of a schedule with a latency estimate")
    output.print_report(args, [table])
    if args.out:
        source = f"tvmconv {VERSION}, `{args.command}`"
        args.out.write_text(f"{table.format_markdown()}\n\n{LEGEND}\n\n{source}\n", encoding="utf-8")
    return 0


def _make_table(layers: Mapping[tuple[str, str, Workload], SecondsByConfig], min_configs: int) -> Table:
    """Return a table with one line per schedule and device."""
    agreements: dict[tuple[str, str], list[Agreement]] = defaultdict(list)
    for (schedule, device, workload), seconds in layers.items():
        if len(seconds) >= min_configs and (agreement := _compare_layer(schedule, workload, seconds, min_configs)):
            agreements[schedule, device].append(agreement)
    rows = []
    for (schedule, device), of_layers in sorted(agreements.items()):
        num_configs, correlations, slowdowns = zip(*of_layers, strict=True)
        counts = (f"{len(of_layers)}", f"{sum(num_configs):,}")
        rows.append((schedule, device, *counts, _format_range(correlations), _format_range(slowdowns)))
    headers = ("schedule", "device", "layers", "configs", "ρ: least, median, most", "best tenth: least, median, most")
    return Table(headers, rows, left_aligned=frozenset({"schedule", "device"}))


def _compare_layer(schedule: str, workload: Workload, seconds: SecondsByConfig, min_configs: int) -> Agreement | None:
    """Compare the estimates of a layer's configs with their times; None if too few are still in the space."""
    try:
        space = registry.find_schedule(workload, schedule).space(workload, get_block_limits("sm_90"))
    except ScheduleError:
        return None
    points, times = [], []
    for config, time in seconds.items():
        with contextlib.suppress(KnobError):  # the config is no longer in the space
            points.append(space.point_from_config(dict(config)))
            times.append(time)
    usage = space.compute_usage(np.stack(points)) if len(points) >= min_configs else None
    if usage is None or usage.estimate is None:
        return None
    correlation, slowdown = compare_ranks(usage.estimate, np.array(times))
    return len(times), math.nan if correlation is None else correlation, slowdown


def _format_range(values: Sequence[float]) -> str:
    return " ".join(format_significant(x) if x > 0 else f"{x:.3f}" for x in np.percentile(values, [0, 50, 100]))
