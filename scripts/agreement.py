"""What is counted from the code beside what Nsight Compute counted: sectors, requests and wavefronts of whole kernels.

    python scripts/agreement.py tuning_logs/*/*-counters.json --into docs/explain.md

The counters are those that `scripts/counters.py` took on a GPU; the kernels are built again, for its architecture.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tvmconv as tc
from tvmconv.analysis.nsight.counted import counted
from tvmconv.cli.errors import Parser, UsageError, guarded
from tvmconv.reports.tables import NOTHING, Table, significant, with_section

SECTION = "agreement"
KINDS = ("load", "store")
UNITS = (("global", "sectors"), ("global", "requests"), ("shared", "wavefronts"))
LEGEND = (
    "Counted over measured, of the whole kernel: sectors by `l1tex__t_sectors_pipe_lsu_mem_global_op_ld` and `_st`, "
    "their requests, and wavefronts by `l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld` and `_st`."
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
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
            rows += [_row(each, args.arch) for each in told["kernels"]]
        except (OSError, ValueError, LookupError) as error:
            raise UsageError(f"cannot read {file}: {type(error).__name__}: {error}") from error
    headers = ("workload", "schedule")
    what = [f"{name} {kind}s" for name in ("sectors,", "requests,", "wavefronts,") for kind in KINDS]
    table = Table((*headers, *what), rows, left=frozenset(headers))
    print(table.text())
    if args.into:
        page = args.into.read_text(encoding="utf-8")
        args.into.write_text(with_section(page, SECTION, f"{table.markdown()}\n\n{LEGEND}"), encoding="utf-8")
    return 0


def _row(measured: Mapping[str, Any], arch: str) -> tuple[str, ...]:
    kernel = tc.build(tc.parse(measured["workload"]), measured["schedule"], arch=arch, config=measured.get("config"))
    metrics, ours = measured["metrics"], counted(kernel, kernel.steps[0]).counts
    names = [f"{of}_{kind}_{unit}" for of, unit in UNITS for kind in KINDS]
    return measured["workload"], measured["schedule"], *(_share(ours.get(name, 0), metrics[name]) for name in names)


def _share(counted: float, measured: float) -> str:
    return significant(counted / measured) if measured else NOTHING


if __name__ == "__main__":
    sys.exit(main())
