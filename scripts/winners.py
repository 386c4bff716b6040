"""Which schedules win where: layers of comparisons by channels, image and batch, as tables and a picture.

    python scripts/winners.py tuning_logs/nvidia-h200/winograd/*-tuned.json --log tuning_logs/nvidia-h200
    python scripts/winners.py results/*-tuned.json --log results --kind winograd -o results/winners

A comparison is what `scripts/tune_suite.py` writes; the logs tell what the other schedules took. Writes NAME.md, a line
a layer, and NAME.png; `--into` puts a line a network and batch between a page's markers.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tvmconv.cli.errors import Parser, guarded
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.best import log_files
from tvmconv.reports.tables import with_section
from tvmconv.reports.winners import contests, draw, layers_table, networks_table
from tvmconv.training import measured

SECTION = "winners"
LEGEND = (
    "×: times as fast as the library, the geometric mean over the layers; TFLOP/s of the direct count of operations; "
    "errors are relative L2 ones against float64."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Read, print, and write."""
    return guarded("winners", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="winners", description="Which schedules win where.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="NAME-tuned.json")
    parser.add_argument(
        "--kind", action="append", default=[], metavar="SCHEDULE", help="a kind of its own; all others are one"
    )
    parser.add_argument(
        "--log", action="append", default=[], type=Path, metavar="LOG", help="a log, or a folder of logs"
    )
    parser.add_argument("-o", dest="out", type=Path, metavar="NAME", help="write NAME.md and NAME.png")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put the networks between this page's markers")
    parser.add_argument("--section", default=SECTION, metavar="NAME", help="of these markers (default: %(default)s)")
    args = parser.parse_args(argv)
    sweeps = [Sweep.read(file) for file in args.files]
    records = (record for log in log_files(args.log) for record in measured(log)) if args.log else ()
    found = contests(sweeps, records, args.kind)
    networks = networks_table(found)
    print(networks.text())
    if args.out:
        draw(found, args.kind, args.out.with_name(f"{args.out.name}.png"))
        made = [f"* {sweep.name}: {sweep.provenance}" for sweep in sweeps]
        command = f"Written by `{shlex.join(['python', 'scripts/winners.py', *argv])}` from these:"
        text = "\n\n".join([layers_table(found, args.kind).markdown(), LEGEND, command, "\n".join(made)])
        args.out.with_name(f"{args.out.name}.md").write_text(f"{text}\n", encoding="utf-8")
    if args.into:
        page = args.into.read_text(encoding="utf-8")
        args.into.write_text(with_section(page, args.section, f"{networks.markdown()}\n\n{LEGEND}"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
