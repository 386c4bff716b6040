"""Make a table of training steps of PyTorch models, one line each, from the results of `tvmconv bench torch-training`.

tvmconv bench torch-training-table tuning_logs/*/torch-training/*.json.gz --update-page docs/torch-training.md
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tvmconv.benchmarks.common import read_results, require_files_of, show
from tvmconv.benchmarks.torch_training import OURS, PYTORCH
from tvmconv.cli import options
from tvmconv.reports.tables import EMPTY_CELL, Table, format_mean, format_micros, format_optional, format_significant

SECTION = "torch-training"
HEADERS = (
    *("network", "GPU", "dtype", "batch", "PyTorch [µs]", "compiled [µs]", "tvmconv [µs]", "as a graph [µs]"),
    *("× PyTorch", "made in [s]", "compiled in [s]", "PyTorch's in [s]"),
)
LEGEND = (
    "Microseconds per step in a CUDA graph: of PyTorch, eager and under `torch.compile`; of the network that "
    "`optimize(train=True)` returns; of the same with `fused=True`, under the backend `tvmconv`, or under "
    "`torch.compile`, whichever is faster. "
    "*× PyTorch*: the better time of PyTorch divided by the better time of tvmconv. *Made in*, *compiled in*: seconds "
    "of `optimize`, and of both compilations; with `fused=True`, the second are those of `optimize`. Each line is one "
    "run."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="Files torch-training-NAME.json, or .gz.")
    options.add_page(parser)


def run(args: argparse.Namespace) -> int:
    """Read the results, print the table and write it into a page."""
    results = read_results(args.results)
    with require_files_of("torch-training"):
        table = make_training_table(results)
        provenance = "\n\n".join(dict.fromkeys(result["provenance"] for result in results))
    show(table, args, SECTION, f"{LEGEND}\n\n{provenance}")
    return 0


def make_training_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with one row per network and GPU, and the geometric mean of each GPU in the last rows.

    The results are those that `tvmconv bench torch-training` writes; others raise KeyError.
    """
    lines, speedups_by_gpu = [], dict[str, list[float]]()
    for result in sorted(results, key=lambda item: (item["network"], item["batch"], item["dtype"])):
        gpu = result["provenance"].partition(";")[0]
        timed = {each["name"]: each for each in result["timed"]}
        fastest: list[Mapping[str, Any] | None] = []
        for name in (PYTORCH, OURS):
            compiled = [each for key, each in timed.items() if key.startswith(f"{name}, ") and each["graph"]]
            plain = timed.get(name)
            fastest += [plain if plain and plain["graph"] else None, min(compiled, key=_get_graph, default=None)]
        pytorch, tvmconv = ([each["graph"] for each in pair if each] for pair in (fastest[:2], fastest[2:]))
        speedup = min(pytorch) / min(tvmconv)
        speedups_by_gpu.setdefault(gpu, []).append(speedup)
        made = [each["made"] if each else None for each in (timed.get(OURS), fastest[3], fastest[1])]
        lines.append(
            (
                *(result["network"], gpu, result["dtype"], str(result["batch"])),
                *(format_micros(each["graph"] if each else None) for each in fastest),
                format_significant(speedup),
                *map(format_optional, made),
            )
        )
    for gpu, speedups in sorted(speedups_by_gpu.items()):
        lines.append(("geometric mean", gpu, *(EMPTY_CELL,) * 6, format_mean(speedups), *(EMPTY_CELL,) * 3))
    return Table(HEADERS, lines, {"network", "GPU", "dtype"})


def _get_graph(timing: Mapping[str, Any]) -> float:
    return float(timing["graph"])
