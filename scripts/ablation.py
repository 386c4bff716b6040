"""What each part of the tuner is worth: `xgb` with one part after another left out, on recorded spaces.

    python scripts/ablation.py tests/data --seeds 30 -o docs/ablation.md

Prints the share of the optimum's speed that the best config reaches after so many measurements, mean over the seeds and
± its standard error, as Markdown; -o writes it as a page.
"""

from __future__ import annotations

import datetime
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from tvmconv.cli.errors import Parser, guarded
from tvmconv.cli.options import count
from tvmconv.cli.progress import progress_line
from tvmconv.reports.tables import Table
from tvmconv.searching.recordings import find
from tvmconv.searching.replay import Recording
from tvmconv.searching.simulate import Summary, search
from tvmconv.searching.tuners.parts import Parts
from tvmconv.searching.tuners.xgb import XGBTuner
from tvmconv.version import VERSION

WHOLE = Parts()
VARIANTS = {
    "all of it": WHOLE,
    "with neighbours of the best": replace(WHOLE, near=True),
    "ranks alone": replace(WHOLE, shares=False),
    "shares alone": replace(WHOLE, ranks=False),
    "blind to how often two divides": replace(WHOLE, twos=False),
    "numbers compared like words": replace(WHOLE, numbers=True),
    "without rivals": replace(WHOLE, rivals=False),
    "trees in place of the processes": replace(WHOLE, process=False),
}
AFTER = (25, 50, 100)
TITLE = "# What each part of the tuner is worth"


def main(argv: Sequence[str] | None = None) -> int:
    """Search, print and write."""
    return guarded("ablation", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="ablation", description="What each part of the tuner is worth, on recorded spaces.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="recorded spaces, as tvmconv simulate takes them")
    parser.add_argument("--seeds", type=count, default=30, metavar="N", help="searches each (default: %(default)s)")
    parser.add_argument("-o", dest="out", type=Path, metavar="PAGE", help="write the table as a Markdown page")
    args = parser.parse_args(argv)
    spaces = dict(find(args.files))
    rows = []
    for name, parts in VARIANTS.items():
        with progress_line(f"{name}: ") as progress:
            cells = []
            for place, recording in enumerate(spaces.values(), start=1):
                progress(f"space {place} of {len(spaces)}")
                cells.append(_shares(recording, parts, args.seeds))
        rows.append([name, *cells])
    table = Table(["", *(_short(name) for name in spaces)], rows, left=frozenset({""}))
    page = f"{TITLE}\n\n{table.markdown()}\n\n{_provenance(argv, args.seeds)}"
    print(page)
    if args.out:
        args.out.write_text(page + "\n", encoding="utf-8")
    return 0


def _shares(recording: Recording, parts: Parts, seeds: int) -> str:
    """The cell of a variant and a space: the shares after each of `AFTER`, and the error of the last."""
    variant = type("Variant", (XGBTuner,), {"parts": parts})
    summary = Summary("", [search(recording, variant, AFTER[-1], seed) for seed in range(seeds)])
    shares = [summary.after(n) for n in AFTER]
    error = shares[-1].std() / math.sqrt(seeds)
    return f"{' / '.join(f'{each.mean():.3f}' for each in shares)} ± {error:.3f}"


def _short(name: str) -> str:
    return Path(name).name.partition(".")[0] if ": " not in name else name.partition(": ")[2]


def _provenance(argv: Sequence[str], seeds: int) -> str:
    """What the numbers are, what made them, when, and the command; folders of files elsewhere are not named."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in argv]
    versions = ", ".join([f"tvmconv {VERSION}", *(f"{name} {metadata.version(name)}" for name in ("numpy", "xgboost"))])
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    shown = f"after {', '.join(map(str, AFTER[:-1]))} and {AFTER[-1]} measurements"
    return (
        f"Share of the optimum's speed {shown}, mean of {seeds} seeds, ± the standard error of the last; "
        f"{versions}; {today}; `python scripts/ablation.py {shlex.join(words)}`"
    )


if __name__ == "__main__":
    raise SystemExit(main())
