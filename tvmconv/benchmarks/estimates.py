"""Compare the schedules' latency estimates, which are formulas over their tiles, with the times of records.

    tvmconv bench estimates tuning_logs/sampled/*.jsonl.gz -o tuning_logs/nvidia-h200/estimates.md

For each layer, it takes the configs of a schedule that were measured on one device. It does not build kernels.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tvmconv import registry
from tvmconv.benchmarks.common import add_logs, add_min_configs, add_output
from tvmconv.cli.errors import UsageError
from tvmconv.errors import KnobError, ScheduleError
from tvmconv.logs.ranking import list_log_files
from tvmconv.logs.record import Record
from tvmconv.reports.tables import Table, format_significant
from tvmconv.target import get_block_limits
from tvmconv.training import read_valid_records
from tvmconv.version import VERSION
from tvmconv.workloads import Workload

BEST = 0.1  # fraction of the configs with the best estimates, whose fastest one is compared
LEGEND = (
    "Spearman's rank correlation ρ of estimated and measured times, and the time of the fastest config in the tenth "
    "with the best estimates, divided by that of the fastest config: minimum, median and maximum over the layers."
)

Costs = dict[tuple[tuple[str, object], ...], float]  # seconds by config


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    add_logs(parser)
    add_min_configs(parser, 30)
    add_output(parser, None, "FILE")


def run(args: argparse.Namespace) -> int:
    """Read the logs, print the table and write it."""
    records = (record for log in list_log_files(args.logs) for record in read_valid_records(log))
    table = _table(_layers(records), args.min_configs)
    if not table.rows:
        raise UsageError(f"no layer has {args.min_configs} configs of a schedule with a latency estimate")
    print(table.format_text())
    if args.out:
        source = f"tvmconv {VERSION}, `{args.command}`"
        args.out.write_text(f"{table.format_markdown()}\n\n{LEGEND}\n\n{source}\n", encoding="utf-8")
    return 0


def _layers(records: Iterable[Record]) -> Mapping[tuple[str, str, Workload], Costs]:
    """Return the time of each measured config, by schedule, device and layer."""
    found: dict[tuple[str, str, Workload], Costs] = defaultdict(dict)
    for record in records:
        own = found[record.schedule, record.device, record.workload]
        config = tuple(sorted(record.config.items(), key=lambda item: item[0]))
        own[config] = min(record.cost, own.get(config, record.cost))
    return found


def _table(layers: Mapping[tuple[str, str, Workload], Costs], least: int) -> Table:
    """Return a table with one line per schedule and device."""
    agreements: dict[tuple[str, str], list[tuple[int, float, float]]] = defaultdict(list)
    for (name, device, workload), costs in layers.items():
        if len(costs) >= least and (agreement := _agreement(name, workload, costs, least)):
            agreements[name, device].append(agreement)
    rows = []
    for (name, device), found in sorted(agreements.items()):
        configs, correlations, times = zip(*found, strict=True)
        counts = (f"{len(found)}", f"{sum(configs):,}")
        rows.append((name, device, *counts, *map(_three, (correlations, times))))
    headers = ("schedule", "device", "layers", "configs", "ρ: least, median, most", "best tenth: least, median, most")
    return Table(headers, rows, left_aligned=frozenset({"schedule", "device"}))


def _agreement(name: str, workload: Workload, costs: Costs, least: int) -> tuple[int, float, float] | None:
    """Return the number of configs, the correlation, and the slowdown of the best config in the first tenth."""
    from scipy.stats import spearmanr

    try:
        space = registry.find_schedule(workload, name).space(workload, get_block_limits("sm_90"))
    except ScheduleError:
        return None
    points, took = [], []
    for config, seconds in costs.items():
        try:
            points.append(space.point_from_config(dict(config)))
        except KnobError:  # the config is no longer in the space
            continue
        took.append(seconds)
    usage = space.compute_usage(np.stack(points)) if len(points) >= least else None
    if usage is None or usage.estimate is None:
        return None
    first = np.argsort(usage.estimate, kind="stable")[: max(1, round(BEST * len(took)))]
    return len(took), float(spearmanr(usage.estimate, took).statistic), min(took[i] for i in first) / min(took)


def _three(values: Sequence[float]) -> str:
    return " ".join(format_significant(x) if x > 0 else f"{x:.3f}" for x in np.percentile(values, [0, 50, 100]))
