"""How soon searches are as fast as a library, and nearly as fast as they will ever be: from their logs.

    python scripts/reach.py with.jsonl without.jsonl --beside tuning_logs/nvidia-h200/yolov8s-tuned.json
    python scripts/reach.py tuning_logs/searches/*.gz --beside tuning_logs/*/*-tuned.json --into docs/knowledge.md

A log is that of `tvmconv tune` or `scripts/tune_suite.py`, whole, and may be packed and thinned by
`scripts/pack_logs.py`; a comparison is what `tune_suite.py` writes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tvmconv.cli.errors import Parser, guarded
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.reach import NEARLY, reach
from tvmconv.reports.tables import with_section
from tvmconv.training import measured

SECTION = "reach"
LEGEND = (
    "Seconds from the begin of a layer's search to the first record that is as fast; median over all layers, and the "
    f"latest of those that get there. The best is the fastest config that any of the searches found; {NEARLY:.0%} is "
    "of its speed. *Seconds a layer*: when its last record came in, on average."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Read, print, and write into a page."""
    return guarded("reach", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="reach", description="How soon searches are fast, from their logs.")
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="of a search")
    parser.add_argument("--beside", nargs="+", required=True, type=Path, metavar="FILE", help="NAME-tuned.json")
    parser.add_argument("--library", default="cudnn", metavar="L", help="in the comparisons (default: %(default)s)")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put the table between this page's markers")
    args = parser.parse_args(argv)
    searches = {log.name.partition(".")[0]: list(measured(log)) for log in args.logs}
    table = reach(searches, [Sweep.read(file) for file in args.beside], args.library)
    print(table.text())
    if args.into:
        page = args.into.read_text(encoding="utf-8")
        args.into.write_text(with_section(page, SECTION, f"{table.markdown()}\n\n{LEGEND}"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
