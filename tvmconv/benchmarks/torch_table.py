"""Make a table of whole networks inside PyTorch, one line each, from the results of `tvmconv bench torch-models`.

tvmconv bench torch-table tuning_logs/*/torch/torch-*.json* --update-page docs/torch.md

With --by-layout, a line compares a network in PyTorch's default format with the same network in channels_last. With
--quantized, it compares a network in its own precision with the same network in 8 bits.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tvmconv.benchmarks.common import read_results, require_files_of, show
from tvmconv.cli import options
from tvmconv.reports.tables import (
    EMPTY_CELL,
    Table,
    format_mean,
    format_micros,
    format_optional,
    format_significant,
    format_speedup,
)

PYTORCH, TVMCONV, COMPILED_LABEL, FROM_LOG_LABEL = "PyTorch", "tvmconv", "compiled", "from the log"
HEADERS = (
    *("network", "dtype", "batch", "PyTorch [µs]", "compiled [µs]", "tvmconv [µs]", "compiled [µs] "),
    *("× PyTorch", "made in [s]", "again in [s]", "error, PyTorch", "error, tvmconv"),
)
SECTION = "torch-models"
LEGEND = (
    "Microseconds per call in a CUDA graph: of PyTorch in the faster memory format, and under `torch.compile`; of the "
    "optimized model, and of it under `torch.compile`. *× PyTorch*: the better time of PyTorch divided by the better "
    "time of tvmconv. *Made in*, *again in*: seconds of `optimize`, and of the same call with the log of the first. "
    "*Error*: relative L2 difference of the network's output from that in float64. Each line is one run, whose "
    "page lists its layers, versions, date and command."
)
CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels_last"  # values of --layout of torch-models
LAYOUT_COLUMNS = tuple(f"{name}, {layout}" for name in (PYTORCH, TVMCONV) for layout in (CONTIGUOUS, CHANNELS_LAST))
LAYOUT_HEADERS = (
    *("network", "dtype", "batch", *(f"{name} [µs]" for name in LAYOUT_COLUMNS)),
    *("contiguous × PyTorch", "contiguous × channels_last"),
)
QUANTIZED_LABELS = ("i8", "e4m3")  # of timings of quantized networks, after that of tvmconv
QUANTIZED_HEADERS = ("network", "dtype", "batch", "time [µs]", "× PyTorch", "× tvmconv", "layers in 8 bits", "error")
QUANTIZED_SECTION = "torch-quantized"
QUANTIZED_LEGEND = (
    "Microseconds per call in a CUDA graph. *× PyTorch*: the best time of PyTorch, divided by that of the line. "
    "*× tvmconv*: the time of the network optimized in its own precision, divided by that of the line. "
    "*Error*: relative L2 difference of the network's output from that in float64; weights and inputs are random."
)
LAYOUT_SECTION = "torch-layouts"
LAYOUT_LEGEND = (
    "Microseconds per call in a CUDA graph, without `torch.compile`, of network and input in either memory format. "
    "*Contiguous × PyTorch*: PyTorch's time in the faster format divided by that of the contiguous optimized network. "
    "*Contiguous × channels_last*: the optimized network's time in channels_last divided by that of the contiguous one."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="FILE", help="Files torch-NAME.json of networks, also .gz."
    )
    text = "Compare contiguous networks with the same networks in channels_last."
    parser.add_argument("--by-layout", action="store_true", help=text)
    text = "Compare networks with the same networks in 8 bits."
    parser.add_argument("--quantized", action="store_true", help=text)
    options.add_page(parser)


def run(args: argparse.Namespace) -> int:
    """Read the results, print the table and write it into a page."""
    read = read_results(args.results)
    results = [each for each in read if isinstance(each, dict) and "network" in each]  # torch-overhead.json has none
    make_table: Callable[[Sequence[Mapping[str, Any]]], Table] = make_torch_models_table
    section, legend = SECTION, LEGEND
    if args.by_layout:
        make_table, section, legend = make_layout_table, LAYOUT_SECTION, LAYOUT_LEGEND
    elif args.quantized:
        make_table, section, legend = make_quantized_table, QUANTIZED_SECTION, QUANTIZED_LEGEND
    with require_files_of("torch-models"):
        table = make_table(results)
    if make_table is not make_torch_models_table:
        provenance = "\n\n".join(dict.fromkeys(result["provenance"] for result in results))
        legend = f"{legend}\n\n{provenance}"
    show(table, args, section, legend)
    return 0


def make_torch_models_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with one row per network, and the geometric mean in the last row. The results are those that
    `tvmconv bench torch-models` writes; others raise KeyError.
    """
    lines, speedups = [], []
    for result in sorted(results, key=lambda item: (item["network"], item["batch"], item["dtype"])):
        timings = {timing["name"]: timing for timing in result["timed"]}
        pytorch, compiled_pytorch, tvmconv, compiled_tvmconv = seconds = [
            _find_min_seconds(timings, name, is_compiled=is_compiled)
            for name in (PYTORCH, TVMCONV)
            for is_compiled in (False, True)
        ]
        speedups.append(min(pytorch, compiled_pytorch) / min(tvmconv, compiled_tvmconv))
        from_log = timings.get(f"{TVMCONV}, {FROM_LOG_LABEL}")
        lines.append(
            (
                *(result["network"], result["dtype"], str(result["batch"])),
                *(format_micros(each) if math.isfinite(each) else EMPTY_CELL for each in seconds),
                format_significant(speedups[-1]),
                format_significant(timings[TVMCONV]["made"]),
                format_optional(from_log and from_log["made"]),
                *(f"{timings[name]['error']:.1e}" for name in (PYTORCH, TVMCONV)),
            )
        )
    if speedups:
        lines.append(("geometric mean", *(EMPTY_CELL,) * 6, format_mean(speedups), *(EMPTY_CELL,) * 4))
    return Table(HEADERS, lines, {"network", "dtype"})


def make_quantized_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with rows per network: PyTorch, the network in its own precision, and quantized ones."""
    lines = []
    for result in sorted(results, key=lambda item: (item["network"], item["batch"], item["dtype"])):
        timings = {timing["name"]: timing for timing in result["timed"]}
        best = min(timing["graph"] for name, timing in timings.items() if name.startswith(PYTORCH))
        ours = timings[TVMCONV]
        names = {PYTORCH: f"{result['dtype']}, PyTorch", TVMCONV: result["dtype"]}
        names |= {f"{TVMCONV}, {text}": text for text in QUANTIZED_LABELS}
        for name, label in names.items():
            if name not in timings:
                continue
            seconds = best if name == PYTORCH else timings[name]["graph"]
            layers = result.get(f"layers in {label}", [])
            num_quantized = sum(f",{label}," in layer["workload"] for layer in layers)
            lines.append(
                (
                    *(result["network"], label, str(result["batch"]), format_micros(seconds)),
                    *(format_significant(other / seconds) for other in (best, ours["graph"])),
                    f"{num_quantized} of {len(layers)}" if layers else EMPTY_CELL,
                    f"{timings[name]['error']:.1e}",
                )
            )
    return Table(QUANTIZED_HEADERS, lines, {"network", "dtype"})


def make_layout_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with one row per network, which compares its runs in the two memory formats.

    Timings of PyTorch in the format that a run was not for have the name of that format.
    """
    rows: dict[tuple[str, str, int], dict[str, float]] = {}
    for result in results:
        timings = {timing["name"]: timing for timing in result["timed"]}
        layouts = (CONTIGUOUS, CHANNELS_LAST)
        layout, other = layouts if f"{PYTORCH}, {CHANNELS_LAST}" in timings else layouts[::-1]
        row = rows.setdefault((result["network"], result["dtype"], result["batch"]), {})
        row[f"{TVMCONV}, {layout}"] = _find_min_seconds(timings, TVMCONV, is_compiled=False)
        row[f"{PYTORCH}, {layout}"] = timings[PYTORCH]["graph"]
        row.setdefault(f"{PYTORCH}, {other}", timings[f"{PYTORCH}, {other}"]["graph"])
    lines = []
    for (network, dtype, batch), row in sorted(rows.items()):
        ours, pytorch = row.get(LAYOUT_COLUMNS[2]), min(row[name] for name in LAYOUT_COLUMNS[:2])
        cells = [format_speedup(other, ours) for other in (pytorch, row.get(LAYOUT_COLUMNS[3]))]
        lines.append((network, dtype, str(batch), *(format_micros(row.get(name)) for name in LAYOUT_COLUMNS), *cells))
    return Table(LAYOUT_HEADERS, lines, {"network", "dtype"})


def _find_min_seconds(timings: Mapping[str, Mapping[str, Any]], name_prefix: str, *, is_compiled: bool) -> float:
    """Return the shortest time in a CUDA graph among the timings whose names have a prefix."""
    return min(
        (
            float(timing["graph"])
            for name, timing in timings.items()
            if name.startswith(name_prefix)
            and (COMPILED_LABEL in name) == is_compiled
            and not name.endswith(QUANTIZED_LABELS)
        ),
        default=float("inf"),
    )
