r"""Compare the predicted times and the lower bounds of the units, from the code of kernels, with measured records.

    tvmconv bench bounds tuning_logs/*/*.jsonl.[gx]z --schedule direct -o results \
        --workload conv2d:1x128x40x40,128x128x3x3,s1,p1 --validation-workload conv2d:1x256x20x20,256x256x3x3,s1,p1
    tvmconv bench bounds --from results/bounds-direct.json -o results

For each workload, N random measured configs are built for the architecture of the log's device. The table compares the
largest lower bound of the units (tvmconv.analysis.speed_of_light) and the predicted time
(tvmconv.analysis.predicted_time) with the measured times. The only fitted constant, `OVERLAP_EXPONENT`, is fitted to
the workloads of --workload, not to those of --validation-workload, and the fit is printed. Results are in
bounds-SCHEDULE.json, .md and .png. The JSON has all counts, so that --from does not build kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tvmconv as tc
from tvmconv.analysis.kernel_work import KernelWork, count_kernel_work
from tvmconv.analysis.occupancy import compute_kernel_occupancy
from tvmconv.analysis.predicted_time import OVERLAP_EXPONENT, predict_time
from tvmconv.analysis.speed_of_light import compute_unit_times
from tvmconv.benchmarks.common import add_output, compare_ranks
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError
from tvmconv.cli.progress import progress_line
from tvmconv.errors import Error
from tvmconv.jsonfile import read_json, translate_json_errors
from tvmconv.logs.lines import translate_os_errors
from tvmconv.logs.record import Record
from tvmconv.reports.tables import EMPTY_CELL, Table, format_optional, format_significant
from tvmconv.target import Target
from tvmconv.training import find_record_device_spec, read_valid_records
from tvmconv.version import VERSION

LEGEND = (
    "ρ: Spearman's rank correlation with the measured times, of the largest lower bound and of the predicted time. "
    "Best: time of the fastest config divided by that of the fastest one in the tenth with the best estimates. The "
    "last column has the quartiles of measured over predicted time."
)

Point = dict[str, Any]  # times and counts of one kernel, in the form of the JSON file


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("logs", nargs="*", type=Path, metavar="LOG", help="Tuning logs, also .gz and .xz.")
    options.add_option(parser, "--workload", "W", "Workload that the overlap exponent is fitted to", repeat=True)
    text = "Workload excluded from the fit"
    options.add_option(parser, "--validation-workload", "W", text, former="--held-out", repeat=True)
    options.add_option(parser, "--schedule", "S", "Schedule", default="direct")
    count: dict[str, Any] = {"type": options.parse_count}
    options.add_option(parser, "--configs", "N", "Number of configs of each workload", default=150, **count)
    text = "Number of configs of each validation workload"
    options.add_option(parser, "--validation-configs", "N", text, former="--held-configs", default=50, **count)
    text = "File bounds-SCHEDULE.json to read, not logs."
    parser.add_argument("--from", "--again", dest="file", type=Path, metavar="FILE", help=text)
    options.add_page(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Build and count the kernels or read a file, then print and write the table."""
    data = _read(args.file) if args.file else _count_kernels(args)
    data["provenance"] = data.get("provenance") or f"tvmconv {VERSION}; `{args.command}`"
    device_spec = Target(**data["machine"])
    points: dict[str, list[Point]] = data["points"]
    for point in _flatten(points.values()):
        point["predicted"] = _predict_seconds(point, device_spec, OVERLAP_EXPONENT)
    validation = data["held_out"]
    fitted = [own_points for text, own_points in points.items() if text not in validation]
    table = _make_table(points, validation)
    note = f"{device_spec.name}; {data['provenance']}"
    if fitted:
        best_fit = format_significant(_fit_overlap(_flatten(fitted), device_spec))
        note += f"; the best fit of the overlap exponent is {best_fit}, its value in use is {OVERLAP_EXPONENT}"
    if validation:
        quartiles = _format_quartiles(_flatten(points[text] for text in validation))
        note += f"; the quartiles of measured over predicted held-out times are {quartiles}"
    output.print_report(args, [table], [note], json_data=data)
    args.out.mkdir(parents=True, exist_ok=True)
    name, section = data["name"], f"{table.format_markdown()}\n\n{LEGEND}"
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    (args.out / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
    (args.out / f"{name}.md").write_text(f"# {name}\n\n{section}\n\n{note}\n", encoding="utf-8")
    _draw(points, args.out / f"{name}.png")
    options.update_page(args.page, name, section)
    return 0


def _flatten(groups: Iterable[list[Point]]) -> list[Point]:
    return [point for group in groups for point in group]


def _read(file: Path) -> dict[str, Any]:
    """Read the file of an earlier run."""
    with translate_os_errors(file, "read"), translate_json_errors(f"cannot read {file}", UsageError):
        data = read_json(file).value
    if not isinstance(data, dict) or not {"machine", "points", "held_out", "name"} <= set(data):
        raise UsageError(f"{file} was not written by tvmconv bench bounds")
    return data


def _count_kernels(args: argparse.Namespace) -> dict[str, Any]:
    """Build the kernels of the workloads' records, and return their counts."""
    num_configs = {tc.parse(text).text: args.configs for text in args.workload}
    validation = {tc.parse(text).text: args.validation_configs for text in args.validation_workload}
    num_configs |= validation
    records: dict[str, dict[str, Record]] = {text: {} for text in num_configs}
    for log in args.logs:
        for record in read_valid_records(log):
            if record.workload.text in records and record.schedule == args.schedule:
                records[record.workload.text][record.identity[-1]] = record
    for text in [text for text in records if not records[text]] or ([] if records else ["no workload"]):
        raise UsageError(f"the logs have no records of {args.schedule} for {text}")
    device_spec = find_record_device_spec(next(iter(next(iter(records.values())).values())))
    points: dict[str, list[Point]] = {text: [] for text in records}
    with progress_line("bounds: ") as show:
        for text, own_points in points.items():
            shuffled = list(records[text].values())
            random.Random(0).shuffle(shuffled)
            for record in shuffled:
                if len(own_points) == num_configs[text]:
                    break
                show(f"{text}: {len(own_points)} of {num_configs[text]}")
                with contextlib.suppress(Error):  # a kernel that cannot be built or counted
                    own_points.append(_count_kernel(record, device_spec))
    name, machine = f"bounds-{args.schedule}", device_spec.to_json()
    return {"name": name, "machine": machine, "held_out": sorted(validation), "points": points}


def _count_kernel(record: Record, device_spec: Target) -> Point:
    """Return a record's time and the counts of its kernel."""
    kernel = tc.build(record.workload, record.schedule, arch=device_spec.arch, config=record.config)
    seconds = {unit.unit: round(unit.seconds, 9) for unit in compute_unit_times(kernel, device_spec)}
    return {
        "measured": record.cost,
        "least": max(seconds.values()),
        "units": seconds,
        "occupancy": compute_kernel_occupancy(kernel).warp_fraction,
        "steps": [step.to_json() for step in count_kernel_work(kernel)],
    }


def _predict_seconds(point: Point, device_spec: Target, overlap: float) -> float:
    steps = [KernelWork(**step) for step in point["steps"]]
    return round(predict_time(steps, device_spec, overlap).seconds, 9)


def _fit_overlap(points: Sequence[Point], device_spec: Target) -> float:
    """Return the exponent with the smallest mean square of the logarithm of measured over predicted time."""

    def compute_error(overlap: float) -> float:
        ratios = [point["measured"] / _predict_seconds(point, device_spec, overlap) for point in points]
        return float(np.mean(np.log(ratios) ** 2))

    return min(np.arange(1.0, 4.05, 0.1), key=compute_error)


def _make_table(points: dict[str, list[Point]], validation: Sequence[str]) -> Table:
    rows = []
    for text, own_points in points.items():
        if not own_points:  # no config builds any longer
            continue
        cells = []
        for estimate in ("least", "predicted"):
            estimates, seconds = (np.array([point[key] for point in own_points]) for key in (estimate, "measured"))
            correlation, slowdown = compare_ranks(estimates, seconds)
            cells += [format_optional(correlation), format_significant(1 / slowdown)]
        label = f"{text}{' (held out)' * (text in validation)}"
        rows.append((label, str(len(own_points)), *cells, _format_quartiles(own_points)))
    headers = ("workload", "configs", "least ρ", "least best", "predicted ρ", "predicted best", "measured / predicted")
    return Table(headers, rows, left_aligned=frozenset({"workload"}))


def _format_quartiles(points: Sequence[Point]) -> str:
    """Return the quartiles of measured over predicted."""
    ratios = [point["measured"] / point["predicted"] for point in points]
    return " ".join(map(format_significant, np.percentile(ratios, [25, 50, 75]))) if ratios else EMPTY_CELL


def _draw(points: dict[str, list[Point]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, plots = pyplot.subplots(1, 2, figsize=(10.8, 5.2), layout="constrained", sharey=True)
    for axes, name, title in zip(plots, ("least", "predicted"), ("the longest least time", "predicted"), strict=True):
        for text, own_points in points.items():
            seconds, estimates = (np.array([point[key] for point in own_points]) for key in ("measured", name))
            axes.scatter(estimates * 1e6, seconds * 1e6, s=7, alpha=0.6, label=text if axes is plots[0] else None)
        axes.axline((1, 1), (10, 10), color="grey", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel=f"{title}, by the code [µs]")
    plots[0].set_ylabel("measured [µs]")
    figure.legend(loc="outside lower center", ncols=3, fontsize=7)
    figure.savefig(file, dpi=100, metadata={"Software": None})
    pyplot.close(figure)
