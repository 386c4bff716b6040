"""Tuned networks beside libraries, a line each: from the comparisons that `scripts/tune_suite.py` wrote.

python scripts/networks.py tuning_logs/nvidia-h200/*-tuned.json
python scripts/networks.py tuning_logs/nvidia-h200/*-tuned.json --into docs/results.md
python scripts/networks.py tuning_logs/nvidia-h200/*-nhwc*-tuned.json --into docs/tensor-cores.md
python scripts/networks.py tuning_logs/nvidia-h200/*-tuned.json --predicted --into docs/knowledge.md
python scripts/networks.py tuning_logs/nvidia-h200/*-tuned.json --slower --into docs/knowledge.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tvmconv.cli.errors import Parser, guarded
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.networks import networks
from tvmconv.reports.predicted import predictions, slower_layers
from tvmconv.reports.tables import with_section

SECTION = "networks"
LEGEND = (
    "Distinct layers, and how many of them are slower than the library; how many times as fast ours are; times of all "
    "layers, each as often as the network has it. Each line is of one run, whose page names versions, date and command."
)

PREDICTED_SECTION = "predicted"
PREDICTED_LEGEND = (
    "×: times as fast as cuDNN, geometric means over the distinct layers. *Attainable*: by a kernel that takes no "
    "longer than a launch and then its arithmetic or its bytes, whichever takes longer, at the best rates that "
    "any kernel on tensor cores has reached on this GPU; and how many layers leave less than 1.5 × of that. How "
    "many layers of what is predicted have less than 0.8 of cuDNN's speed; times of all layers, each as often as "
    "the network has it. Each line is of one run, whose page names versions, date, command and model."
)

SLOWER_SECTION = "slower"
SLOWER_LEGEND = (
    "The layers of the networks above whose tuned kernels have less than 0.97 of cuDNN's speed, and how many times as "
    "fast as cuDNN's a kernel without any loss would be."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Read, print, and write into a page."""
    return guarded("networks", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="networks", description="Tuned networks beside libraries, a line each.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="NAME-tuned.json")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put the table between this page's markers")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--predicted", action="store_true", help="instead: what was predicted without any trial")
    what.add_argument(
        "--slower", action="store_true", help="instead: of these, the layers that are slower, a line each"
    )
    args = parser.parse_args(argv)
    sweeps = [Sweep.read(file) for file in args.files]
    make, name, legend = networks, SECTION, LEGEND
    if args.predicted:
        make, name, legend = predictions, PREDICTED_SECTION, PREDICTED_LEGEND
    elif args.slower:
        make, name, legend = slower_layers, SLOWER_SECTION, SLOWER_LEGEND
    table = make(sweeps)
    print(table.text())
    if args.into:
        page = args.into.read_text(encoding="utf-8")
        args.into.write_text(with_section(page, name, f"{table.markdown()}\n\n{legend}"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
