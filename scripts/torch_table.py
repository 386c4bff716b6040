"""Whole networks inside PyTorch in one table, of what `scripts/torch_models.py` measured.

python scripts/torch_table.py tuning_logs/*/torch/torch-*.json --into docs/torch.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tvmconv.cli.errors import Parser, UsageError, guarded
from tvmconv.reports.tables import with_section
from tvmconv.reports.torch_models import torch_models

SECTION = "torch-models"
LEGEND = (
    "Microseconds of a call in a CUDA graph: by PyTorch in the faster of both memory formats, and under "
    "`torch.compile`; of what `optimize` made, and of that under `torch.compile`. *Time ×*: the better of ours over "
    "the better of PyTorch's. *Made in*, *again in*: seconds of `optimize`, and of the same call again, from the log. "
    "*Error*: relative L2 difference of the network's output from that in float64. Each line is of one run, whose page "
    "has its layers, versions, date and command."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Read, print, and write into a page."""
    return guarded("torch_table", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="torch_table", description="Whole networks inside PyTorch in one table.")
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="torch-NAME.json of a network")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put the table between this page's markers")
    args = parser.parse_args(argv)
    results = []
    for file in args.results:
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {file}: {error}") from error
        if isinstance(result, dict) and "network" in result:  # not of what a call costs
            results.append(result)
    try:
        table = torch_models(results)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"these are not of scripts/torch_models.py: {error!r}") from error
    print(table.text())
    if args.into:
        page = args.into.read_text(encoding="utf-8")
        args.into.write_text(with_section(page, SECTION, f"{table.markdown()}\n\n{LEGEND}"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
