"""What is counted from the code beside what Nsight Compute counted, summed up over kernels.

    python scripts/agreement.py tuning_logs/nvidia-h200/kernels-beside.json.gz --into docs/explain.md

The file is one of `tvmconv counters -o DIR`, which may be compressed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tvmconv.cli.errors import Parser, UsageError, guarded
from tvmconv.experiments.beside import Beside
from tvmconv.experiments.readings import Readings
from tvmconv.reports.beside import LEGEND, differences, summary
from tvmconv.reports.tables import with_section

SECTION = "agreement"


def main(argv: Sequence[str] | None = None) -> int:
    """Sum up, print, and write into a page."""
    return guarded("agreement", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="agreement", description="What is counted from the code beside what a profiler counted.")
    parser.add_argument("counters", type=Path, metavar="FILE", help="counters.json, or .gz")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put the tables between this page's markers")
    args = parser.parse_args(argv)
    try:
        readings = Readings.read(args.counters, Beside)
    except OSError as error:
        raise UsageError(f"cannot read {args.counters}: {error.strerror}") from error
    tables = summary(readings.kernels), differences(readings.kernels)
    print("\n\n".join(table.text() for table in tables))
    if args.into:
        page = args.into.read_text(encoding="utf-8")
        agree, differ = (table.markdown() for table in tables)
        parts = (agree, "Those that differ by more, counted over measured:", differ, f"{LEGEND} {readings.provenance}")
        args.into.write_text(with_section(page, SECTION, "\n\n".join(parts)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
