"""Tune every workload of a suite, then compare the suite with libraries in one run, as a table and a chart.

    python scripts/tune_suite.py --suite mobilenet --only depthwise --seconds 20 --device cuda:0 -o results
    python scripts/tune_d2l.py -o results              # 60 s a shape
    python scripts/tune_resnet50.py -o results         # 30 s a shape
    python scripts/tune_suite.py --suite filter2d --baseline copy --baseline cupy --device cuda:0 -o results

Measurements go to a log, DIR/NAME.jsonl or --log; the same command goes on where it was interrupted. Then the naive
schedule, the best one without tuning, the best kernel of the log (`tuned`) and the libraries, cuDNN if none is named,
are timed side by side: DIR/NAME-tuned.json, .md and .png. Prints the speed-up over each library, layer by layer and as
geometric mean.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tvmconv import baselines as libraries
from tvmconv import devices
from tvmconv.cli.errors import Parser, UsageError, guarded
from tvmconv.cli.options import count, tell_choice
from tvmconv.cli.progress import progress_line
from tvmconv.cli.tune import add_search, phase_lines, results_table, search
from tvmconv.experiments.sweep import measure_sweep, select_layers
from tvmconv.measuring.standing import standing
from tvmconv.reports.sweep import speedups, table, write

COMPARED = {
    "conv2d": ("default", "conflict_free"),
    "filter1d": ("basic", "register"),
    "filter2d": ("basic", "register"),
}
TIMING_SECONDS = 0.1  # of each kernel in the comparison


def main(argv: Sequence[str] | None = None, *, prog: str = "tune_suite", **defaults: object) -> int:
    """Tune and compare a suite.

    Args:
        argv: the command line's arguments.
        prog: the script's name.
        defaults: of the options, for scripts that are about one suite.
    """
    return guarded(prog, lambda: _run(sys.argv[1:] if argv is None else argv, prog, defaults))


def _run(argv: Sequence[str], prog: str, defaults: dict[str, object]) -> int:
    parser = Parser(prog=prog, description="Tune every layer of a suite, then compare the suite with libraries.")
    parser.add_argument("--suite", default="d2l", help="whose layers (default: %(default)s)")
    parser.add_argument("--only", metavar="TEXT", help="only layers whose name contains this, such as 3x3")
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="images at a time (default: %(default)s)")
    parser.add_argument("-o", dest="out", type=Path, default=Path("results"), metavar="DIR", help="where results go")
    parser.add_argument(
        "--baseline",
        action="append",
        choices=(*libraries.known(), "none"),
        help="to compare with (default: cudnn alone)",
    )
    parser.add_argument("--tune-only", action="store_true", help="do not compare")
    add_search(parser)
    parser.set_defaults(log=None, **defaults)
    args = parser.parse_args(argv)
    baselines = [name for name in args.baseline or ["cudnn"] if name != "none"]
    if args.device.startswith("rpc:") and not args.tune_only:
        raise UsageError(f"kernels cannot be compared on {args.device}: tune there with --tune-only")

    workloads = select_layers(args.suite, args.batch, args.only)
    name = f"{args.suite}-{args.only}" if args.only else args.suite
    args.out.mkdir(parents=True, exist_ok=True)
    args.log = args.log or args.out / f"{name}.jsonl"

    results = []
    with standing():
        for number, workload in enumerate(dict.fromkeys(workloads.values()), 1):
            print(f"{number}: {workload.text}", file=sys.stderr, flush=True)
            results += search(args, workload, compare=False, confirm=False)  # the comparison does that
    print(results_table(results).text())
    print("\n".join(phase_lines(results)), end="\n\n", flush=True)
    if args.tune_only:
        return 0

    device = devices.find(args.device)
    tell_choice(args.device, device)
    sweep = measure_sweep(
        f"{name}-tuned",
        workloads,
        device,
        shlex.join(["python", f"scripts/{prog}.py", *argv]),
        progress=progress_line,
        done=lambda sweep: None,
        schedules=COMPARED[next(iter(workloads.values())).operator],
        log=args.log,
        baselines=baselines,
        cold=None,  # where the arrays exceed the cache
        seconds=TIMING_SECONDS,
    )
    write(sweep, args.out)
    print(table(sweep).text())
    if baselines:
        print(speedups(sweep, baselines).text())
    return 0 if all(result.ok for result in sweep.results) else 1


if __name__ == "__main__":
    sys.exit(main())
