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
from pathlib import Path
from typing import Any

import tvmconv as tc
from tvmconv.baselines.cudnn import torch_with_cudnn
from tvmconv.benchmarks.common import add_archive, add_device, add_output, find_device
from tvmconv.benchmarks.prebuild import entries
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.options import add_suite_options, parse_count, parse_layer_sequence
from tvmconv.cli.progress import progress_line
from tvmconv.compiler.executable import Executable
from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.errors import Error
from tvmconv.experiments.chain import ChainKernel, ChainLayer, measure_chain, split_common_settings
from tvmconv.experiments.kernel_metrics import KernelMetricsFile
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.logs.candidates import DEFAULT_CONFIG, describe_config_source, iterate_candidates
from tvmconv.logs.ranking import RecordIndex
from tvmconv.reports.chain import LEGEND, make_layers_table, make_totals_table
from tvmconv.workloads import Conv


def run(args: argparse.Namespace) -> int:
    """Measure the chain or read a file, then print and write the tables."""
    if args.file:
        measured = KernelMetricsFile.read(args.file, ChainLayer)
    elif args.log or args.archive:
        measured = _measure(args)
    else:
        raise UsageError("expected a --log with tuned kernels, a --kernel-archive, or --from FILE")
    totals, layers = make_totals_table(measured), make_layers_table(measured.kernels)
    print(f"{layers.format_text()}\n\n{totals.format_text()}\n\n{measured.provenance}")
    if args.out:
        tables = f"{totals.format_markdown()}\n\n{layers.format_markdown()}"
        measured.write(args.out, f"{tables}\n\n{LEGEND} {measured.provenance}")
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    add_suite_options(parser, "resnet50")
    parser.add_argument("--log", nargs="+", type=Path, metavar="FILE", help="Logs, or folders of logs.")
    add_archive(parser)
    add_device(parser)
    parser.add_argument(
        "--baseline", choices=("cudnn", "none"), default="cudnn", help="Library to compare with (default: %(default)s)."
    )
    parser.add_argument(
        "--picks",
        type=parse_count,
        default=3,
        metavar="N",
        help="Number of times that cuDNN selects its algorithms (default: %(default)s).",
    )
    parser.add_argument("--from", dest="file", type=Path, metavar="FILE", help="JSON file to read, not to measure.")
    add_output(parser, None)


def _measure(args: argparse.Namespace) -> KernelMetricsFile[ChainLayer]:
    name, chosen = parse_layer_sequence(args)
    layers = [(layer.name, layer.workload) for layer in chosen if isinstance(layer.workload, Conv)]
    if len(layers) < len(chosen):
        raise UsageError(f"{args.suite}: expected a suite of convolutions only")
    device = find_device(args, "a chain is one CUDA graph")
    assert isinstance(device, CudaDevice)
    picks = args.picks if args.baseline == "cudnn" else 0
    if picks:
        torch_with_cudnn()  # raises an error before the measurement if cuDNN is missing
    with progress_line(f"{device.text}: ") as show:
        show("kernels")
        built = _built(args, list(dict.fromkeys(w for _, w in layers)), device)
        links, times = measure_chain(layers, built, device, show, picks=picks)
    common, links = split_common_settings(links)
    elsewhere = [kernel.versions for kernel in built.values() if kernel.versions]
    source = describe_provenance(device, args.command, ", ".join(common), builder_versions=elsewhere)
    return KernelMetricsFile(f"{name}-chain", source, links, {n: [t.median, t.spread] for n, t in times.items()})


def _built(args: argparse.Namespace, workloads: Sequence[Conv], device: CudaDevice) -> dict[Conv, ChainKernel]:
    """Return a kernel for each workload, and print on stderr which workloads have no record."""
    if args.archive:
        found = _archived(args.archive, workloads, args.log, device)
    else:
        found = {w: _fastest(w, args.log, device) for w in workloads}
    for w, built in found.items():
        if not built.config_source.startswith("tuned"):
            print_note(f"no record of {w} applies: {built.schedule}, {built.config_source}")
    return found


def _fastest(w: Conv, logs: Sequence[Path], device: CudaDevice) -> ChainKernel:
    """Return the first candidate that can still be built."""
    for candidate in iterate_candidates(logs, w, device):
        try:
            kernel = tc.build(w, candidate.schedule, device=device, config=candidate.config)
            return ChainKernel(candidate.schedule.name, candidate.config_source, kernel.executable)
        except Error:
            if candidate.config_source == DEFAULT_CONFIG:
                raise
    raise AssertionError("the last candidate is untuned")


def _archived(
    file: Path, workloads: Sequence[Conv], logs: Sequence[Path] | None, device: CudaDevice
) -> dict[Conv, ChainKernel]:
    """Return for each workload the kernel of an archive that is the fastest by the logs, or else the first."""
    there: dict[str, list[tuple[dict[str, Any], Executable]]] = {}
    for entry, _, program in entries(file):
        if entry["arch"] != device.arch:
            raise Error(f"{file} is for {entry['arch']}, and {device.text} is {device.arch or device.kind}")
        there.setdefault(entry["workload"], []).append((entry, program))
    if missing := [w.text for w in workloads if w.text not in there]:
        raise Error(f"{file} has no kernel of {missing[0]}" + f", and {len(missing) - 1} more" * (len(missing) > 1))
    found = {}
    for w in workloads:
        (entry, program), where = there[w.text][0], "the first of the archive"
        where = entry.get("origin", where)
        for nearness, record in RecordIndex(logs, w).iterate_applicable_records(w, device) if logs else ():
            config = {name: list(v) if isinstance(v, tuple) else v for name, v in record.config.items()}
            same = [e for e in there[w.text] if (e[0]["schedule"], e[0]["config"]) == (record.schedule, config)]
            if same:
                (entry, program), where = same[0], describe_config_source(nearness, record, w)
                break
        found[w] = ChainKernel(entry["schedule"], where, program, entry.get("versions"))
    return found
