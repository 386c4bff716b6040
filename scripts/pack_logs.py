"""Pack the valid records of logs into a small file for training, without digits that exceed the noise.

    python scripts/pack_logs.py results/f32-*.jsonl -o tuning_logs/sampled/f32.jsonl.xz
    python scripts/pack_logs.py results/long-*.jsonl --every 10 -o tuning_logs/searches/long.jsonl.gz

Times keep five digits, and timestamps whole seconds. The same records give the same bytes. `tvmconv train` reads such
files.
"""

from __future__ import annotations

import gzip
import lzma
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tvmconv.cli import options
from tvmconv.cli.errors import CommandParser, run_guarded
from tvmconv.logs.ranking import list_log_files
from tvmconv.logs.record import Record
from tvmconv.training import read_valid_records
from tvmconv.workloads import Workload


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script, and return its exit status."""
    return run_guarded("pack_logs", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="pack_logs", description="Pack the valid records of logs.")
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="Logs, or folders of logs.")
    parser.add_argument(
        "-o", dest="out", type=Path, required=True, metavar="FILE", help="File to write (.jsonl.xz, or .jsonl.gz)."
    )
    text = "Keep only every N-th trial of each search, new best trials, the last trial and final timings"
    options.add_option(parser, "--every", "N", text, type=options.parse_count, default=1)
    args = parser.parse_args(argv)
    kept = (record for log in list_log_files(args.logs) for record in _thin(args.every, list(read_valid_records(log))))
    lines = dict.fromkeys(record.rounded().line() for record in kept)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{line}\n" for line in lines).encode()
    if args.out.suffix == ".xz":
        packed = lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)
    else:
        packed = gzip.compress(content, 9, mtime=0)
    args.out.write_bytes(packed)
    print(f"{len(lines):,} records in {args.out}, {args.out.stat().st_size / 1e6:.2f} MB")
    return 0


def _thin(n: int, records: Sequence[Record]) -> Iterator[Record]:
    """Yield every n-th trial of each workload, its new best trials, its last trial, and its final timings."""
    last = {record.workload: number for number, record in enumerate(records) if not record.final}
    fastest: dict[Workload, float] = {}
    trials: Counter[Workload] = Counter()
    for number, record in enumerate(records):
        w = record.workload
        faster = record.cost < fastest.get(w, math.inf)
        if faster or record.final or number == last[w] or trials[w] % n == 0:
            yield record
        trials[w] += 1
        fastest[w] = min(record.cost, fastest.get(w, math.inf))


if __name__ == "__main__":
    sys.exit(main())
