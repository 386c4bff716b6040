"""Evaluate tuners on recorded spaces, without a device.

Run tuners on recorded spaces, and print the fraction of the optimum's throughput that their best config reaches after a
number of trials: mean ± standard deviation over the seeds, for each space and for the mean of all spaces.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvmconv.cli import output
from tvmconv.cli.options import add_option, make_integer_parser, parse_count, parse_image_path
from tvmconv.cli.progress import progress_line
from tvmconv.compat import rename_tuner
from tvmconv.errors import escape_unprintable
from tvmconv.reports.simulation import (
    TunerComparison,
    compute_mean_summaries,
    compute_panels,
    draw_panels,
    make_relative_throughput_table,
)
from tvmconv.search.recorded_space import (
    MIN_CONFIGS,
    SimulationSummary,
    find_recorded_spaces,
    select_checkpoints,
    simulate_search,
)
from tvmconv.search.tuners import TUNERS
from tvmconv.tvm_import import import_tvm

MAX_TRIALS, MAX_SEEDS = 100_000, 10_000


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    text = "Cache file of Kernel Tuner or T4 results (also .gz), tuning log (.jsonl), or folder of such files."
    parser.add_argument("files", metavar="CACHEFILE", nargs="+", help=text)
    text = "Tuner to run (default: all)"
    add_option(parser, "--tuner", None, text, type=rename_tuner, choices=TUNERS, repeat=True)
    text = "Number of trials in each search"
    add_option(parser, "--trials", "N", text, type=make_integer_parser(1, MAX_TRIALS), default=100)
    text = "Number of searches by each tuner, with different seeds"
    add_option(parser, "--seeds", "N", text, type=make_integer_parser(1, MAX_SEEDS), default=10)
    text = "Minimum number of configs of a workload and schedule of a log"
    add_option(parser, "--min-configs", "N", text, former="--fewest", type=parse_count, default=MIN_CONFIGS)
    text = "PNG, SVG or PDF file to draw the searches to."
    parser.add_argument("-o", dest="out", metavar="IMAGE", type=parse_image_path, help=text)
    output.add_table_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the tuners, print tables or a JSON object, and draw the searches."""
    import_tvm()
    spaces = dict(find_recorded_spaces(args.files, args.min_configs))
    tuners = list(dict.fromkeys(args.tuner or TUNERS))
    comparisons = []
    for space_number, (name, recording) in enumerate(spaces.items(), start=1):
        prefix = f"{space_number} of {len(spaces)}, " if len(spaces) > 1 else ""
        with progress_line(f"{prefix}{name}: ") as progress:
            summaries = []
            for tuner in tuners:
                runs = []
                for seed in range(args.seeds):
                    progress(f"{tuner}, seed {seed + 1} of {args.seeds}")
                    runs.append(simulate_search(recording, tuner, args.trials, seed))
                summaries.append(SimulationSummary(tuner, runs))
        comparisons.append(TunerComparison(name, recording, summaries))
        if not (args.json or args.csv):
            text = escape_unprintable(comparisons[-1].heading)
            table = make_relative_throughput_table(summaries, comparisons[-1].num_trials)
            text += f"\n\n{output.format_table(table, is_wide=args.wide)}"
            print(text, end="\n\n" if len(spaces) > 1 else "\n", flush=True)
    if args.json:
        print(json.dumps(_comparisons_to_json(comparisons)))
    elif len(comparisons) > 1 or args.csv:
        table = make_relative_throughput_table(compute_mean_summaries(comparisons), args.trials)
        mean = f"mean of {len(comparisons)} spaces\n\n{output.format_table(table, is_wide=args.wide)}"
        print(table.format_csv().rstrip("\n") if args.csv else mean)
    if args.out:
        draw_panels(compute_panels(comparisons), Path(args.out))
    return 0


def _comparisons_to_json(comparisons: Sequence[TunerComparison]) -> dict[str, Any]:
    """Return the object of the only space, or of all spaces with the mean relative throughput of each tuner."""
    if len(comparisons) == 1:
        return comparisons[0].to_json()
    counts = select_checkpoints(comparisons[0].num_trials)
    return {
        "spaces": [comparison.to_json() for comparison in comparisons],
        "mean_share": {
            mean.tuner: {str(n): float(mean.get_throughput_after(n).mean()) for n in counts}
            for mean in compute_mean_summaries(comparisons)
        },
    }
