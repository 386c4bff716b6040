r"""Time the fastest kernels of logs with and without epilogues, in turn, and the same workloads by libraries.

    tvmconv bench epilogue-cost tuning_logs --only 64x64 --device cuda:0 -o results
    tvmconv bench epilogue-cost results --suite resnet50 --dtype f16 --layout nhwc --batch 32 --baseline cudnn \
        --device cuda:0 -o results

Without a suite, the workloads are all convolutions without epilogue in the logs. A kernel with an epilogue has the
config of the one without, or that of a search with the epilogue if the logs have one and it is faster. All kernels are
verified first. The table shows whether libraries fuse the epilogue. Results are in DIR/epilogue.md, or in
DIR/NAME-epilogue.md for a suite.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tvmconv as tc
from tvmconv import baselines as libraries
from tvmconv.baselines.base import UnsupportedDeviceError
from tvmconv.benchmarks.common import add_device, add_logs, add_output, add_rounds, find_device, micros
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.options import add_baseline_option, add_suite_options, parse_epilogue_names
from tvmconv.cli.progress import progress_line
from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.experiments.run import ProgressCallback, exceeds_cache
from tvmconv.experiments.sweep import LayerSelection, select_layers
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.ranking import find_best_per_workload, find_best_record, list_log_files
from tvmconv.logs.record import Record
from tvmconv.reports.tables import EMPTY_CELL, NETWORK_ROW, Table, format_significant, sum_seconds
from tvmconv.verification import Problem
from tvmconv.workloads import Conv, Layer, Workload, dtypes
from tvmconv.workloads.suites import SuiteVariant

EPILOGUES = (("bias", "relu"), ("bias", "add", "relu"))
KERNEL_SECONDS, LIBRARY_SECONDS = 0.05, 0.1  # time of a kernel in each round, and total time of a library
OURS = ""  # tvmconv among the names of libraries
BARE = "bare"


@dataclass
class EpilogueTimes:
    """The times of a convolution without and with epilogues.

    Attributes:
        label: Label of the layer.
        count: Number of occurrences of the layer in the network.
        schedule: Schedule of tvmconv's kernels.
        seconds: Seconds by library (`OURS` for tvmconv) and epilogue (`BARE` for none); failures are left out.
        how: Remarks by library and epilogue, such as the library's algorithm.
        failures: One line for each failure.
    """

    label: str
    count: int
    schedule: str
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    how: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    """Time kernels with and without epilogues."""
    device = find_device(args)
    epilogues = list(dict.fromkeys(args.epilogue or EPILOGUES))
    selection = _select(args, device)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    measured: list[EpilogueTimes] = []
    found = {
        label: find_best_record(args.logs, layer.workload, device=device.name)
        for label, layer in selection.layers.items()
    }
    records = {label: record for label, record in found.items() if record}
    missing = [label for label in found if label not in records]
    for number, (label, record) in enumerate(records.items(), 1):
        with progress_line(f"{device.text}: {number} of {len(records)}, {label}, ") as on_progress:
            times = EpilogueTimes(label, selection.layers[label].count, record.schedule)
            _measure(times, record, epilogues, args, device, on_progress)
        measured.append(times)
        table, said = _report(measured, missing, [BARE, *map(",".join, epilogues)], args, device)
        if args.out:  # after each layer, because all layers together take long
            name = f"{selection.name}-epilogue.md" if args.suite else "epilogue.md"
            (args.out / name).write_text(f"{table.format_markdown()}\n\n{said}\n", encoding="utf-8")
    if missing:
        print_note(f"no record on {device.name} of {', '.join(missing)}")
    if not measured:
        raise Error(f"no record of {device.name} in {', '.join(map(str, args.logs))} is of these convolutions")
    print(f"{table.format_text()}\n\n{said}")
    return 1 if any(times.failures for times in measured) else 0


def _report(
    measured: Sequence[EpilogueTimes],
    missing: Sequence[str],
    names: Sequence[str],
    args: argparse.Namespace,
    device: Device,
) -> tuple[Table, str]:
    """Return the table and the remarks below it, for measured convolutions and those without a record."""
    common = {library: _common(measured, library) for library in args.baseline}
    source = describe_provenance(device, args.command, ", ".join(part for parts in common.values() for part in parts))
    failures = [f"{times.label}: {line}" for times in measured for line in times.failures]
    absent = [f"Without a record, and not in the table: {', '.join(missing)}."] if missing else []
    said = "\n\n".join([*absent, *failures, source])
    return _table(measured, names, common, summed=args.suite is not None), said


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    add_logs(parser)
    add_suite_options(parser, epilogues=False)
    parser.add_argument(
        "--epilogue",
        metavar="E",
        action="append",
        type=parse_epilogue_names,
        help="Epilogue to time; may be given several times (default: bias,relu and bias,add,relu).",
    )
    add_baseline_option(parser)
    add_device(parser)
    add_rounds(parser, 7)
    add_output(parser, None)


def _select(args: argparse.Namespace, device: Device) -> LayerSelection:
    """Return the selected convolutions without epilogue, of a suite or of the logs, whose texts `--only` matches."""
    if args.suite is not None:
        dtype = dtypes.DTYPES_BY_TEXT[args.dtype].name if args.dtype else None
        found = select_layers(args.suite, SuiteVariant(args.batch, dtype, args.layout, ()), args.only, args.skip)
        return replace(found, layers={k: v for k, v in found.layers.items() if isinstance(v.workload, Conv)})
    for name in ("batch", "dtype", "layout"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} is for the layers of a --suite")
    files = {file: InvalidLines() for file in list_log_files(args.logs)}
    texts = {
        record.workload.text: record.workload
        for record in find_best_per_workload(files, device_name=device.name)
        if isinstance(record.workload, Conv) and not record.workload.epilogue
    }
    chosen = {t: w for t, w in texts.items() if (args.only or "") in t and not (args.skip and args.skip in t)}
    if not chosen:
        raise Error(f"no record of {device.name} is of a convolution with {args.only or 'conv'!r} in its text")
    return LayerSelection("logs", {text: Layer(text, workload, 1) for text, workload in chosen.items()})


def _measure(
    times: EpilogueTimes,
    record: Record,
    epilogues: Sequence[tuple[str, ...]],
    args: argparse.Namespace,
    device: Device,
    on_progress: ProgressCallback,
) -> None:
    """Time a record's kernel and those with epilogues, in turns, then the libraries."""
    bare = Problem(record.workload)
    problems = {BARE: bare}
    for names in epilogues:
        problems[",".join(names)] = Problem(_with(record.workload, names), bare.seed)
    cold = exceeds_cache(record.workload, device)
    kernels: dict[tuple[str, str], tuple[tc.Kernel, Problem]] = {}  # by epilogue and source of the config
    for name, problem in problems.items():
        sources = {"same": record}
        if name != BARE and (own := find_best_record(args.logs, problem.workload, device=device.name)):
            sources["own"] = own
        for config, each in sources.items():
            on_progress(f"building and verifying {name}")
            try:
                kernel = tc.build(problem.workload, each.schedule, config=each.config, device=device)
                found = kernel.verify(problem)
                if not found.ok:
                    raise Error(f"wrong by {found.error:.2g}")
                kernels[name, config] = kernel, problem
            except Error as error:
                times.failures.append(f"{name} with {config} config failed: {error}")
    on_progress("timing")
    turns = [
        [kernel.time(problem, cold=cold, seconds=KERNEL_SECONDS).median for kernel, problem in kernels.values()]
        for _ in range(args.repetitions)
    ]
    for (name, config), seconds in zip(kernels, zip(*turns, strict=True), strict=True):
        median = statistics.median(seconds)
        if median < times.seconds.get((OURS, name), float("inf")):
            times.seconds[OURS, name] = median
            times.how[OURS, name] = [] if config == "same" else ["config of its own"]
    for library in args.baseline:
        _measure_library(times, library, problems, device, cold, on_progress)


def _measure_library(
    times: EpilogueTimes,
    library: str,
    problems: Mapping[str, Problem],
    device: Device,
    cold: bool,
    on_progress: ProgressCallback,
) -> None:
    """Time a library on the same inputs."""
    for name, problem in problems.items():
        on_progress(f"{library}: {name}")
        try:
            ran: Any = libraries.load_baselines()[library](
                problem.workload, problem.inputs, device=device, cold=cold, seconds=LIBRARY_SECONDS
            )
            if ran.output is not None and not (found := problem.check(ran.output)).ok:
                raise Error(f"wrong by {found.error:.2g}")
        except UnsupportedDeviceError:
            raise
        except Error as error:
            times.failures.append(f"{library}, {name} failed: {error}")
            continue
        ran.close()
        times.seconds[library, name] = ran.timing.median
        times.how[library, name] = ran.description.split(", ")


def _common(measured: Sequence[EpilogueTimes], library: str) -> list[str]:
    """Return the remarks of a library that all its times share, such as its version."""
    remarks = [parts for times in measured for (name, _), parts in times.how.items() if name == library]
    return [part for part in remarks[0] if all(part in parts for parts in remarks)] if remarks else []


def _with(w: Workload, names: tuple[str, ...]) -> Workload:
    return tc.parse(",".join([w.text, *names]))


def _table(
    measured: Sequence[EpilogueTimes], names: Sequence[str], common: Mapping[str, Sequence[str]], *, summed: bool
) -> Table:
    """Return a table with one line per convolution: times by library and epilogue, and the cost of the epilogue.

    The last line has the geometric means. For a network, the line before it has the sums of all layers.

    Args:
        measured: Times of the convolutions.
        names: Names of the epilogues, `BARE` first.
        common: Remarks of each library that are always the same, and therefore left out.
        summed: Whether the convolutions are a network.
    """
    columns: dict[str, list[str]] = {
        "layer" if summed else "workload": [times.label for times in measured],
        "schedule": [times.schedule for times in measured],
    }
    left = [*columns]
    ends = [NETWORK_ROW] * summed + ["geometric mean"]
    blank = [EMPTY_CELL] * len(ends)
    columns[left[0]] += ends
    columns["schedule"] += blank
    for library_name in (OURS, *common):
        bare = [times.seconds.get((library_name, BARE)) for times in measured]
        for name in names:
            title = f"{library_name} {name}".strip()
            seconds = [times.seconds.get((library_name, name)) for times in measured]
            total = _total(measured, seconds)
            columns[f"{title} [µs]"] = [*map(micros, seconds), *[micros(total)] * summed, EMPTY_CELL]
            if name != BARE:
                costs = [*map(_ratio, seconds, bare)]
                sums = [_ratio(total, _total(measured, bare))] * summed
                columns[f"{title}: cost"] = [*map(_percent, [*costs, *sums, _mean(costs)])]
            if library_name != OURS:
                ours = [times.seconds.get((OURS, name)) for times in measured]
                speedups = [*map(_ratio, seconds, ours)]
                sums = [_ratio(total, _total(measured, ours))] * summed
                columns[f"{name}: × {library_name}"] = [
                    format_significant(each) if each else EMPTY_CELL for each in (*speedups, *sums, _mean(speedups))
                ]
            remarks = [times.how.get((library_name, name), []) for times in measured]
            how = [", ".join(part for part in parts if part not in common.get(library_name, ())) for parts in remarks]
            if any(how):
                columns[f"{title}, how"] = [*(each or EMPTY_CELL for each in how), *blank]
                left.append(f"{title}, how")
    return Table([*columns], [*zip(*columns.values(), strict=True)], left_aligned=frozenset(left))


def _total(measured: Sequence[EpilogueTimes], seconds: Sequence[float | None]) -> float | None:
    """Return the seconds of all layers of the network; None if a layer has no time."""
    return sum_seconds(seconds, [times.count for times in measured])


def _ratio(time: float | None, other: float | None) -> float | None:
    return None if time is None or other is None else time / other


def _mean(ratios: Sequence[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return statistics.geometric_mean(known) if known else None


def _percent(ratio: float | None) -> str:
    return EMPTY_CELL if ratio is None else f"{ratio - 1:+.1%}"
