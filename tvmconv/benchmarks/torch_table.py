"""Make a table of whole networks inside PyTorch, one line each, from the results of `tvmconv bench torch-models`.

tvmconv bench torch-table tuning_logs/*/torch/torch-*.json --update-page docs/torch.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tvmconv.benchmarks.common import show
from tvmconv.cli import options
from tvmconv.cli.errors import UsageError
from tvmconv.reports.torch_models import make_torch_models_table

SECTION = "torch-models"
LEGEND = (
    "Microseconds per call in a CUDA graph: of PyTorch in the faster memory format, and under `torch.compile`; of the "
    "optimized model, and of it under `torch.compile`. *Time ×*: the better time of tvmconv divided by the better time "
    "of PyTorch. *Made in*, *again in*: seconds of `optimize`, and of the same call with the log of the first. "
    "*Error*: relative L2 difference of the network's output from that in float64. Each line is one run, whose "
    "page lists its layers, versions, date and command."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="Files torch-NAME.json of networks.")
    options.add_page(parser)


def run(args: argparse.Namespace) -> int:
    """Read the results, print the table and write it into a page."""
    results = []
    for file in args.results:
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {file}: {error}") from error
        if isinstance(result, dict) and "network" in result:  # torch-overhead.json has no network
            results.append(result)
    try:
        table = make_torch_models_table(results)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the files were not written by tvmconv bench torch-models: {error!r}") from error
    show(table, args, SECTION, LEGEND)
    return 0
