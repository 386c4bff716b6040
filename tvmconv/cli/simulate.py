"""`tvmconv simulate`: tuners tried on a recorded space, without a device."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tvmconv.cli.options import count
from tvmconv.cli.progress import progress_line
from tvmconv.reports.tables import Table
from tvmconv.searching.replay import Recording, load
from tvmconv.searching.simulate import Summary, checkpoints, search
from tvmconv.searching.tuners import TUNERS


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "simulate",
        help="try tuners on a recorded, fully measured space; no device is needed",
        description="Replay tuners on a recorded, fully measured space, and print the share of the optimum's speed "
        "that their best config reaches after so many measurements: mean ± standard deviation over the seeds.",
    )
    parser.add_argument("file", metavar="CACHEFILE", help="a cache file of Kernel Tuner, or T4 results; also .gz")
    parser.add_argument(
        "--tuner",
        choices=TUNERS,
        action="append",
        help="which; may be given several times (default: all)",
    )
    parser.add_argument("--trials", metavar="N", type=count, default=100, help="measurements (default: %(default)s)")
    parser.add_argument("--seeds", metavar="N", type=count, default=10, help="searches each (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a table, or a JSON object."""
    recording = load(args.file)
    summaries = []
    with progress_line(f"{args.file}: ") as progress:
        for tuner in dict.fromkeys(args.tuner or TUNERS):
            runs = []
            for seed in range(args.seeds):
                progress(f"{tuner}, seed {seed + 1} of {args.seeds}")
                runs.append(search(recording, tuner, args.trials, seed))
            summaries.append(Summary(tuner, runs))
    if args.json:
        print(json.dumps(_json(args, recording, summaries)))
    else:
        print(_text(args, recording, summaries))
    return 0


def _text(args: argparse.Namespace, recording: Recording, summaries: list[Summary]) -> str:
    counts = checkpoints(args.trials)
    headers = ("tuner", *(f"after {n}" for n in counts), "tuner [s]")
    rows = [[summary.tuner, *(_share(summary, n) for n in counts), f"{summary.seconds:.2f}"] for summary in summaries]
    heading = (
        f"{args.file}: {len(recording.space.listed):,} configs, {recording.failed:,} of them failed, "
        f"the best takes {recording.best * 1e3:.4g} ms; share of its speed over {args.seeds} seeds"
    )
    return f"{heading}\n\n{Table(headers, rows, left=frozenset({'tuner'})).text()}"


def _share(summary: Summary, trials: int) -> str:
    shares = summary.after(trials)
    return f"{shares.mean():.3f} ± {shares.std():.3f}"


def _json(args: argparse.Namespace, recording: Recording, summaries: list[Summary]) -> dict[str, Any]:
    return {
        "file": args.file,
        "configs": len(recording.space.listed),
        "failed": recording.failed,
        "best_seconds": recording.best,
        "trials": args.trials,
        "seeds": args.seeds,
        "tuners": [
            {
                "tuner": summary.tuner,
                "seconds": summary.seconds,
                "shares": {str(n): summary.after(n).tolist() for n in checkpoints(args.trials)},
                "mean_share": {str(n): float(summary.after(n).mean()) for n in checkpoints(args.trials)},
            }
            for summary in summaries
        ],
    }
