"""Logs to learn from, in a file that is small: the valid records, without what tells nothing of the config.

    python scripts/pack_logs.py results/f32-*.jsonl -o tuning_logs/sampled/f32.jsonl.gz

Times keep five digits, moments the second; the same records give the same bytes. `tvmconv train` reads such files.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Sequence
from pathlib import Path

from tvmconv.cli.errors import Parser, guarded
from tvmconv.logs.best import log_files
from tvmconv.training import measured


def main(argv: Sequence[str] | None = None) -> int:
    """Pack."""
    return guarded("pack_logs", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="pack_logs", description="Pack the valid records of logs.")
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="logs, or folders of logs")
    parser.add_argument("-o", dest="out", type=Path, required=True, metavar="FILE", help="a .jsonl.gz")
    args = parser.parse_args(argv)
    lines = dict.fromkeys(record.thinned().line() for log in log_files(args.logs) for record in measured(log))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with open(args.out, "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
        packed.writelines(f"{line}\n".encode() for line in lines)
    print(f"{len(lines):,} records in {args.out}, {args.out.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
