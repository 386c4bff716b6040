"""`tvmconv simulate`: tuners tried on recorded spaces, without a device."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvmconv.cli.options import count, count_up_to, image
from tvmconv.cli.progress import progress_line
from tvmconv.errors import printable
from tvmconv.reports.simulation import Comparison, draw, means, panels, shares_table
from tvmconv.searching.recordings import FEWEST, find
from tvmconv.searching.simulate import Summary, checkpoints, search
from tvmconv.searching.tuners import TUNERS
from tvmconv.without_torch import import_tvm

MAX_TRIALS, MAX_SEEDS = 100_000, 10_000


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "simulate",
        help="try tuners on recorded spaces; no device is needed",
        description="Replay tuners on recorded spaces, and print the share of the optimum's speed that their best "
        "config reaches after so many measurements: mean ± standard deviation over the seeds, for each space and in "
        "the mean of all.",
    )
    parser.add_argument(
        "files",
        metavar="CACHEFILE",
        nargs="+",
        help="a cache file of Kernel Tuner, or T4 results, also .gz; a tuning log, .jsonl; or a folder of such",
    )
    parser.add_argument(
        "--tuner",
        choices=TUNERS,
        action="append",
        help="which; may be given several times (default: all)",
    )
    parser.add_argument(
        "--trials",
        metavar="N",
        type=count_up_to(MAX_TRIALS),
        default=100,
        help="measurements (default: %(default)s)",
    )
    parser.add_argument(
        "--seeds",
        metavar="N",
        type=count_up_to(MAX_SEEDS),
        default=10,
        help="searches each (default: %(default)s)",
    )
    parser.add_argument(
        "--fewest",
        metavar="N",
        type=count,
        default=FEWEST,
        help="of a log, only workloads and schedules of as many configs (default: %(default)s)",
    )
    parser.add_argument("-o", dest="out", metavar="IMAGE", type=image, help="draw the searches: a PNG, SVG or PDF file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print tables, or a JSON object; draw."""
    import_tvm()
    spaces = dict(find(args.files, args.fewest))
    tuners = list(dict.fromkeys(args.tuner or TUNERS))
    comparisons = []
    for place, (name, recording) in enumerate(spaces.items(), start=1):
        with progress_line(f"{name}: " if len(spaces) == 1 else f"{place} of {len(spaces)}, {name}: ") as progress:
            summaries = []
            for tuner in tuners:
                runs = []
                for seed in range(args.seeds):
                    progress(f"{tuner}, seed {seed + 1} of {args.seeds}")
                    runs.append(search(recording, tuner, args.trials, seed))
                summaries.append(Summary(tuner, runs))
        comparisons.append(Comparison(name, recording, summaries))
        if not args.json:
            print(printable(comparisons[-1].text()), end="\n\n" if len(spaces) > 1 else "\n", flush=True)
    if args.json:
        print(json.dumps(_json(comparisons)))
    elif len(comparisons) > 1:
        print(f"mean of {len(comparisons)} spaces\n\n{shares_table(means(comparisons), args.trials).text()}")
    if args.out:
        draw(panels(comparisons), Path(args.out))
    return 0


def _json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Of one space its object; of several all, and the mean shares by tuner and number of trials."""
    if len(comparisons) == 1:
        return comparisons[0].to_json()
    counts = checkpoints(comparisons[0].trials)
    return {
        "spaces": [each.to_json() for each in comparisons],
        "mean_share": {
            mean.tuner: {str(n): float(mean.after(n).mean()) for n in counts} for mean in means(comparisons)
        },
    }
