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
from tvmconv.benchmarks.common import add_device, add_logs, add_output, find_device
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.progress import progress_line
from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.experiments.run import ProgressCallback, exceeds_cache
from tvmconv.experiments.sweep import LayerSelection
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.ranking import find_best_per_workload, find_best_record, list_log_files
from tvmconv.logs.record import Record
from tvmconv.reports.tables import EMPTY_CELL, NETWORK_ROW, Table, format_micros, format_significant, sum_seconds
from tvmconv.verification import Problem
from tvmconv.workloads import Conv, Layer

EPILOGUES = (("bias", "relu"), ("bias", "add", "relu"))
KERNEL_SECONDS, LIBRARY_SECONDS = 0.05, 0.1  # time of a kernel in each round, and total time of a library
OURS = ""  # tvmconv among the names of libraries
BARE = "bare"  # no epilogue


@dataclass
class EpilogueTimes:
    """The times of a layer without and with epilogues."""

    label: str
    layer: Layer
    record: Record  # of tvmconv's kernel
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)  # by library and epilogue
    remarks: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # such as the library's algorithm
    failures: list[str] = field(default_factory=list)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    add_logs(parser)
    options.add_suite_options(parser, epilogues=False, training=False)
    text = "Epilogue to time (default: bias,relu and bias,add,relu)"
    options.add_option(parser, "--epilogue", "E", text, type=options.parse_epilogue_names, repeat=True)
    options.add_baseline_option(parser)
    add_device(parser)
    text, count = "Number of rounds in which all kernels are timed in turn", options.parse_count
    options.add_option(parser, "--repetitions", "N", text, former="--rounds", type=count, default=7)
    add_output(parser, None)


def run(args: argparse.Namespace) -> int:
    """Time kernels with and without epilogues."""
    device = find_device(args)
    epilogues = list(dict.fromkeys(args.epilogue or EPILOGUES))
    selection = _select(args, device)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    records = {
        label: find_best_record(args.logs, layer.workload, device=device.name)
        for label, layer in selection.layers.items()
    }
    missing = [label for label, record in records.items() if record is None]
    measured = [
        EpilogueTimes(label, selection.layers[label], record) for label, record in records.items() if record is not None
    ]
    if missing:
        print_note(f"no record on {device.name} of {', '.join(missing)}")
    if not measured:
        raise Error(f"no record of {device.name} in {', '.join(map(str, args.logs))} is of these convolutions")
    for number, times in enumerate(measured, 1):
        with progress_line(f"{device.text}: {number} of {len(measured)}, {times.label}, ") as on_progress:
            _measure(times, epilogues, args, device, on_progress)
        finished = measured[:number]
        shared_remarks = {library: _find_shared_remarks(finished, library) for library in args.baseline}
        versions = ", ".join(remark for remarks in shared_remarks.values() for remark in remarks)
        notes = [f"Without a record, and not in the table: {', '.join(missing)}."] if missing else []
        notes += [f"{times.label}: {line}" for times in finished for line in times.failures]
        notes.append(describe_provenance(device, args.command, versions))
        epilogue_names = [BARE, *map(",".join, epilogues)]
        table = _make_table(finished, epilogue_names, shared_remarks, is_network=args.suite is not None)
        if args.out:  # after each layer, because all layers together take long
            name = f"{selection.name}-epilogue.md" if args.suite else "epilogue.md"
            page = "\n\n".join([table.format_markdown(), *notes])
            (args.out / name).write_text(f"{page}\n", encoding="utf-8")
    output.print_report(args, [table], notes)
    return 1 if any(times.failures for times in measured) else 0


def _select(args: argparse.Namespace, device: Device) -> LayerSelection:
    """Return the selected convolutions without epilogue, of a suite or of the logs, whose texts `--only` matches."""
    if args.suite is not None:
        selection = options.parse_layers(argparse.Namespace(**{**vars(args), "epilogue": ()}))
        convolutions = {label: each for label, each in selection.layers.items() if isinstance(each.workload, Conv)}
        return replace(selection, layers=convolutions)
    for name in ("batch", "dtype", "layout"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} is for the layers of a --suite")
    files = {file: InvalidLines() for file in list_log_files(args.logs)}
    layers = {}
    for record in find_best_per_workload(files, device_name=device.name):
        w, text = record.workload, record.workload.text
        is_excluded = (args.only or "") not in text or (args.skip and args.skip in text)
        if isinstance(w, Conv) and not w.epilogue and not is_excluded:
            layers[text] = Layer(text, w, 1)
    if not layers:
        raise Error(f"no record of {device.name} is of a convolution with {args.only or 'conv'!r} in its text")
    return LayerSelection("logs", layers)


def _measure(
    times: EpilogueTimes,
    epilogues: Sequence[tuple[str, ...]],
    args: argparse.Namespace,
    device: Device,
    on_progress: ProgressCallback,
) -> None:
    """Time the layer's kernel and those with epilogues, in turns, then the libraries."""
    workload = times.layer.workload
    problems = {BARE: Problem(workload)}
    for names in epilogues:
        problems[",".join(names)] = Problem(tc.parse(",".join([workload.text, *names])), problems[BARE].seed)
    cold = exceeds_cache(workload, device)
    kernels: dict[tuple[str, bool], tuple[tc.Kernel, Problem]] = {}  # by epilogue and `has_own_config`
    for name, problem in problems.items():
        own_record = None if name == BARE else find_best_record(args.logs, problem.workload, device=device.name)
        for has_own_config, record in ((False, times.record), (True, own_record)):
            if record is None:
                continue
            on_progress(f"building and verifying {name}")
            try:
                kernel = tc.build(problem.workload, record.schedule, config=record.config, device=device)
                if not (verification := kernel.verify(problem)).ok:
                    raise Error(f"wrong by {verification.error:.2g}")
                kernels[name, has_own_config] = kernel, problem
            except Error as error:
                times.failures.append(f"{name} with {'own' if has_own_config else 'same'} config failed: {error}")
    on_progress("timing")
    rounds = [
        [kernel.time(problem, cold=cold, seconds=KERNEL_SECONDS).median for kernel, problem in kernels.values()]
        for _ in range(args.repetitions)
    ]
    for (name, has_own_config), seconds in zip(kernels, zip(*rounds, strict=True), strict=True):
        median = statistics.median(seconds)
        if median < times.seconds.get((OURS, name), float("inf")):
            times.seconds[OURS, name] = median
            times.remarks[OURS, name] = ["config of its own"] if has_own_config else []
    for library in args.baseline:
        for name, problem in problems.items():
            on_progress(f"{library}: {name}")
            _measure_library(times, library, name, problem, {"device": device, "cold": cold})


def _measure_library(
    times: EpilogueTimes, library: str, epilogue: str, problem: Problem, settings: Mapping[str, Any]
) -> None:
    try:
        time_library = libraries.load_baselines()[library]
        baseline = time_library(problem.workload, problem.inputs, seconds=LIBRARY_SECONDS, **settings)
        if baseline.output is not None and not (verification := problem.check(baseline.output)).ok:
            raise Error(f"wrong by {verification.error:.2g}")
    except UnsupportedDeviceError:
        raise
    except Error as error:
        times.failures.append(f"{library}, {epilogue} failed: {error}")
        return
    baseline.close()
    times.seconds[library, epilogue] = baseline.timing.median
    times.remarks[library, epilogue] = baseline.description.split(", ")


def _find_shared_remarks(measured: Sequence[EpilogueTimes], library: str) -> list[str]:
    """Return the remarks of a library that all its times share, such as its version."""
    remarks = [own for times in measured for (name, _), own in times.remarks.items() if name == library]
    return [remark for remark in remarks[0] if all(remark in own for own in remarks)] if remarks else []


def _make_table(
    measured: Sequence[EpilogueTimes],
    epilogue_names: Sequence[str],
    shared_remarks: Mapping[str, Sequence[str]],
    *,
    is_network: bool,
) -> Table:
    """Return a table with one line per convolution: times by library and epilogue, and the cost of the epilogue. The
    last line has the geometric means. For a network, the line before it has the sums of all layers. Remarks of a
    library that are always the same are left out.
    """
    counts = [times.layer.count for times in measured]
    label = "layer" if is_network else "workload"
    last_rows = [NETWORK_ROW, "geometric mean"] if is_network else ["geometric mean"]
    empty = [EMPTY_CELL] * len(last_rows)
    columns: dict[str, list[str]] = {
        label: [*(times.label for times in measured), *last_rows],
        "schedule": [*(times.record.schedule for times in measured), *empty],
    }
    left_aligned = {*columns}

    def list_seconds(library: str, epilogue: str) -> list[float | None]:
        """Return the seconds of each convolution, and for a network their sum."""
        seconds = [times.seconds.get((library, epilogue)) for times in measured]
        return [*seconds, *([sum_seconds(seconds, counts)] if is_network else [])]

    def list_ratios(seconds: Sequence[float | None], others: Sequence[float | None]) -> list[float | None]:
        """Return the ratios of times, and the geometric mean of the convolutions' ratios."""
        ratios = [a / b if a is not None and b is not None else None for a, b in zip(seconds, others, strict=True)]
        known = [ratio for ratio in ratios[: len(measured)] if ratio is not None]
        return [*ratios, statistics.geometric_mean(known) if known else None]

    for library in (OURS, *shared_remarks):
        for name in epilogue_names:
            title, seconds = f"{library} {name}".strip(), list_seconds(library, name)
            columns[f"{title} [µs]"] = [*map(format_micros, seconds), EMPTY_CELL]
            if name != BARE:
                costs = list_ratios(seconds, list_seconds(library, BARE))
                columns[f"{title}: cost"] = [EMPTY_CELL if cost is None else f"{cost - 1:+.1%}" for cost in costs]
            if library != OURS:
                speedups = list_ratios(seconds, list_seconds(OURS, name))
                columns[f"{name}: × {library}"] = [format_significant(x) if x else EMPTY_CELL for x in speedups]
            shared = shared_remarks.get(library, ())
            remarks = [
                ", ".join(remark for remark in times.remarks.get((library, name), []) if remark not in shared)
                for times in measured
            ]
            if any(remarks):
                columns[f"{title}, how"] = [*(remark or EMPTY_CELL for remark in remarks), *empty]
                left_aligned.add(f"{title}, how")
    return Table([*columns], [*zip(*columns.values(), strict=True)], left_aligned=frozenset(left_aligned))
