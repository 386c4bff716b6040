"""What is counted from the code beside what Nsight Compute counted: sectors, requests and wavefronts of whole kernels.

    python scripts/agreement.py tuning_logs/*/*-counters.json --into docs/explain.md

The counters are those that `scripts/counters.py` took on a GPU; the kernels are built again, for its architecture.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tvmconv as tc
from tvmconv.cli.errors import Parser, guarded
from tvmconv.reports.agreement import WHAT, counted, measured, read_counters, share
from tvmconv.reports.tables import Table, with_section

SECTION = "agreement"
LEGEND = (
    "Counted over measured, of the whole kernel: the middle block times the number of blocks, over the counters "
    "`l1tex__t_sectors_pipe_lsu_mem_global_op_ld` and `_st`, their requests, and the wavefronts of shared memory."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Count, print, and write into a page."""
    return guarded("agreement", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="agreement", description="What is counted from the code beside what a profiler counted.")
    parser.add_argument("counters", nargs="+", type=Path, metavar="FILE", help="NAME-counters.json")
    parser.add_argument("--arch", default="sm_90", metavar="A", help="of the GPU (default: %(default)s)")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put the table between this page's markers")
    args = parser.parse_args(argv)
    rows = []
    for file in args.counters:
        _, kernels = read_counters(file)
        rows += [_row(each, args.arch) for each in kernels]
    headers = ("workload", "schedule")
    table = Table((*headers, *WHAT), rows, left=frozenset(headers))
    print(table.text())
    if args.into:
        page = args.into.read_text(encoding="utf-8")
        args.into.write_text(with_section(page, SECTION, f"{table.markdown()}\n\n{LEGEND}"), encoding="utf-8")
    return 0


def _row(profiled: Mapping[str, Any], arch: str) -> tuple[str, ...]:
    kernel = tc.build(tc.parse(profiled["workload"]), profiled["schedule"], arch=arch, config=profiled.get("config"))
    count, measure = counted(kernel), measured(profiled["metrics"])
    return profiled["workload"], profiled["schedule"], *(share(count[what], measure[what]) for what in WHAT)


if __name__ == "__main__":
    sys.exit(main())
