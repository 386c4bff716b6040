"""Time a network's convolutions in one CUDA graph, and compare it with the sum of their times and with cuDNN's graph.

    tvmconv bench chain --suite resnet50 --dtype f16 --layout nhwc --epilogue bias,relu --log tuning_logs -o results
    tvmconv bench chain --suite resnet50 --dtype f16 --layout nhwc --epilogue bias,relu --kernel-archive kernels.zip
    tvmconv bench chain --from results/resnet50-f16-nhwc-bias-relu-chain.json      # the tables again

The graph has every layer in the order of the network, with repetitions, each with weights of its own. A layer reads the
output of the previous layer if the shapes agree, else an input of its own. Its kernel is the fastest of the logs for
the layer, or for the layer without its epilogue, else a default, which the table marks. With a kernel archive of
`tvmconv bench prebuild`, TVM is not needed, and the kernel is the fastest by --log, or else the first. Each kernel is
verified and timed alone. Then all kernels are timed in one graph, one after another, and again with programmatic
dependent launch if kernels support it. cuDNN is measured through PyTorch in the same layout. The benchmark writes
NAME-chain.json and NAME-chain.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import tvmconv as tc
from tvmconv.baselines.cudnn import torch_with_cudnn
from tvmconv.benchmarks.common import add_device, add_output, find_device
from tvmconv.benchmarks.prebuild import ArchivedKernel, check_arch, get_config, read_entries
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.progress import progress_line
from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.errors import Error
from tvmconv.experiments.chain import (
    CUDNN_GRAPH,
    GRAPH,
    OVERLAPPING,
    ChainKernel,
    ChainLayer,
    measure_chain,
    split_common_settings,
)
from tvmconv.experiments.kernel_metrics import KernelMetricsFile
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.logs.candidates import DEFAULT_CONFIG, describe_config_source, iterate_candidates
from tvmconv.logs.ranking import RecordIndex
from tvmconv.reports.tables import EMPTY_CELL, Columns, Table, format_micros, format_optional, make_table
from tvmconv.workloads import Conv

SEPARATE_SUM, CUDNN_SEPARATE_SUM = "sum", "cudnn sum"
TITLES = {
    SEPARATE_SUM: "each alone, summed",
    GRAPH: "one graph",
    OVERLAPPING: "one graph, overlapping",
    CUDNN_SEPARATE_SUM: "cuDNN, each alone, summed",
    CUDNN_GRAPH: "cuDNN, one graph",
}
LIBRARY_COUNTERPARTS = {SEPARATE_SUM: CUDNN_SEPARATE_SUM, GRAPH: CUDNN_GRAPH, OVERLAPPING: CUDNN_GRAPH}
SEPARATE_COUNTERPARTS = {GRAPH: SEPARATE_SUM, OVERLAPPING: SEPARATE_SUM, CUDNN_GRAPH: CUDNN_SEPARATE_SUM}
LEGEND = (
    "Alone: launches of one kernel in a graph, hot cache. One graph: every layer once, each with its own weights. "
    "Overlapping: kernels with programmatic dependent launch begin before the previous kernel has ended. Input: the "
    "output of the previous layer, or a separate array."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    options.add_suite_options(parser, "resnet50", training=False)
    parser.add_argument("--log", nargs="+", default=[], type=Path, metavar="FILE", help="Logs, or folders of logs.")
    text = "File of kernels that `tvmconv bench prebuild build` wrote; then TVM is not needed"
    options.add_option(parser, "--kernel-archive", "FILE", text, former="--archive", dest="archive", type=Path)
    add_device(parser)
    options.add_option(
        parser, "--baseline", None, "Library to compare with", choices=("cudnn", "none"), default="cudnn"
    )
    text = "Number of times that cuDNN selects its algorithms"
    options.add_option(parser, "--picks", "N", text, type=options.parse_count, default=3)
    parser.add_argument("--from", dest="file", type=Path, metavar="FILE", help="JSON file to read, not to measure.")
    add_output(parser, None)


def run(args: argparse.Namespace) -> int:
    """Measure the chain or read a file, then print and write the tables."""
    if args.file:
        measured = KernelMetricsFile.read(args.file, ChainLayer)
    elif args.log or args.archive:
        measured = _measure(args)
    else:
        raise UsageError("expected a --log with tuned kernels, a --kernel-archive, or --from FILE")
    totals, layers = make_totals_table(measured), make_layers_table(measured.kernels)
    output.print_report(args, [layers, totals], [measured.provenance], json_data=asdict(measured))
    if args.out:
        tables = f"{totals.format_markdown()}\n\n{layers.format_markdown()}"
        measured.write(args.out, f"{tables}\n\n{LEGEND} {measured.provenance}")
    return 0


def _measure(args: argparse.Namespace) -> KernelMetricsFile[ChainLayer]:
    name, sequence = options.parse_layer_sequence(args)
    layers = [(layer.name, layer.workload) for layer in sequence if isinstance(layer.workload, Conv)]
    if len(layers) < len(sequence):
        raise UsageError(f"{args.suite}: expected a suite of convolutions only")
    device = find_device(args, "a chain is one CUDA graph")
    assert isinstance(device, CudaDevice)
    num_picks = args.picks if args.baseline == "cudnn" else 0
    if num_picks:
        torch_with_cudnn()  # raises an error before the measurement if cuDNN is missing
    with progress_line(f"{device.text}: ") as show:
        show("kernels")
        workloads = list(dict.fromkeys(workload for _, workload in layers))
        if args.archive:
            kernels = _load_kernels(args.archive, workloads, args.log, device)
        else:
            kernels = {workload: _build_fastest(workload, args.log, device) for workload in workloads}
        for workload, kernel in kernels.items():
            if not kernel.config_source.startswith("tuned"):
                print_note(f"no record of {workload} applies: {kernel.schedule}, {kernel.config_source}")
        rows, timings = measure_chain(layers, kernels, device, show, picks=num_picks)
    shared_settings, rows = split_common_settings(rows)
    versions = [kernel.versions for kernel in kernels.values() if kernel.versions]
    source = describe_provenance(device, args.command, ", ".join(shared_settings), builder_versions=versions)
    totals = {name: [timing.median, timing.spread] for name, timing in timings.items()}
    return KernelMetricsFile(f"{name}-chain", source, rows, totals)


def _build_fastest(workload: Conv, logs: Sequence[Path], device: CudaDevice) -> ChainKernel:
    """Return the first candidate that can still be built."""
    for candidate in iterate_candidates(logs, workload, device):
        try:
            kernel = tc.build(workload, candidate.schedule, device=device, config=candidate.config)
            return ChainKernel(candidate.schedule.name, candidate.config_source, kernel.executable)
        except Error:
            if candidate.config_source == DEFAULT_CONFIG:
                raise
    raise AssertionError("the last candidate is untuned")


def _load_kernels(
    file: Path, workloads: Sequence[Conv], logs: Sequence[Path], device: CudaDevice
) -> dict[Conv, ChainKernel]:
    """Return for each workload the kernel of an archive that is the fastest by the logs, or else the first."""
    archived: dict[str, list[ArchivedKernel]] = {}
    for entry, _, executable in read_entries(file):
        check_arch(entry, device, file)
        archived.setdefault(entry["workload"], []).append((entry, executable))
    if missing := [workload.text for workload in workloads if workload.text not in archived]:
        raise Error(f"{file} has no kernel of {missing[0]}" + f", and {len(missing) - 1} more" * (len(missing) > 1))
    kernels = {}
    for workload in workloads:
        entry, executable = archived[workload.text][0]
        config_source = entry.get("origin", "the first of the archive")
        by_config = {
            (each[0]["schedule"], tuple(sorted(get_config(each[0]).items()))): each
            for each in reversed(archived[workload.text])
        }
        for match, record in RecordIndex(logs, workload).iterate_applicable_records(workload, device) if logs else ():
            key = record.schedule, tuple(sorted(record.config.items()))
            if key in by_config:
                entry, executable = by_config[key]
                config_source = describe_config_source(match, record, workload)
                break
        kernels[workload] = ChainKernel(entry["schedule"], config_source, executable, entry.get("versions"))
    return kernels


def make_totals_table(metrics: KernelMetricsFile[ChainLayer]) -> Table:
    """Return a table of the time of all layers, each alone and in one graph, by tvmconv and by cuDNN."""
    layers = metrics.kernels
    seconds = {SEPARATE_SUM: sum(layer.seconds for layer in layers)}
    if all(layer.cudnn is not None for layer in layers):
        seconds[CUDNN_SEPARATE_SUM] = sum(layer.cudnn or 0 for layer in layers)
    seconds |= {name: median for name, (median, _) in metrics.totals.items()}
    rows = []
    for name in filter(seconds.__contains__, TITLES):
        separate_seconds = seconds.get(SEPARATE_COUNTERPARTS.get(name, ""))
        library_seconds = seconds.get(LIBRARY_COUNTERPARTS.get(name, ""))
        overlap_note = f" ({sum(layer.overlaps for layer in layers)} of {len(layers)})" if name == OVERLAPPING else ""
        spread = f" ± {metrics.totals[name][1]:.1%}" if name in metrics.totals else ""
        difference = separate_seconds and (seconds[name] - separate_seconds) * 1e6 / len(layers)
        rows.append(
            (
                TITLES[name] + overlap_note,
                format_micros(seconds[name]) + spread,
                EMPTY_CELL if difference is None else f"{difference:+.2f}",
                format_optional(library_seconds and library_seconds / seconds[name]),
            )
        )
    headers = (f"{len(layers)} layers", "time [µs]", "over the sum, per layer [µs]", "× cuDNN")
    return Table(headers, rows, headers[:1])


def make_layers_table(layers: Sequence[ChainLayer]) -> Table:
    """Return a table with one row per layer, in their order."""
    columns: Columns = {
        "layer": lambda layer: layer.layer,
        "schedule": lambda layer: layer.schedule,
        "config": lambda layer: layer.origin,
        "input": lambda layer: "the layer before's" if layer.linked else "its own",
        "overlaps": lambda layer: "yes" if layer.overlaps else None,
        "alone [µs]": lambda layer: format_micros(layer.seconds),
        "cuDNN [µs]": lambda layer: format_micros(layer.cudnn),
        "cuDNN, how": lambda layer: layer.how or None,
    }
    return make_table(layers, columns, {"layer", "schedule", "config", "input", "overlaps", "cuDNN, how"})
