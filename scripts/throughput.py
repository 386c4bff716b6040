"""How many trials a second: tvmconv's tuner, and beside it TVM's own search, MetaSchedule, in the same run.

    python scripts/throughput.py --device cuda:0 -o results
    python scripts/throughput.py --trials 200 --device opencl:0      # tvmconv alone: TVM's wheel has no OpenCL runtime

Both get the same workload and target; MetaSchedule builds and runs with its LocalBuilder and LocalRunner as they come,
and needs psutil and cloudpickle. Prints the rates and where the time of our trials goes. Writes DIR/throughput.md,
throughput.json and metaschedule.log, MetaSchedule's output. Exit status 1 says that a search failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tvmconv import devices, workloads
from tvmconv.baselines import metaschedule
from tvmconv.baselines.metaschedule import Searched
from tvmconv.cli.errors import Parser, guarded
from tvmconv.cli.options import EXAMPLE, count, positive, seed_number, tell_choice, workers
from tvmconv.cli.progress import progress_line
from tvmconv.cli.tune import progress_text
from tvmconv.devices import Device
from tvmconv.errors import DeviceError, Error
from tvmconv.experiments.provenance import provenance
from tvmconv.reports.tables import NOTHING, Table, significant
from tvmconv.workloads import Workload

OURS, THEIRS = "tvmconv", "MetaSchedule"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    return guarded("throughput", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    workload = workloads.parse(args.workload)
    device = devices.find(args.device)
    tell_choice(args.device, device)
    args.out.mkdir(parents=True, exist_ok=True)  # before measuring: it may not be allowed

    searched, phases = measure_ours(workload, device, args)
    searches, notes, ok = {OURS: searched}, [], searched.succeeded > 0
    try:
        searches[THEIRS] = measure_metaschedule(workload, device, args)
    except Error as error:
        notes.append(f"{error}.")
        ok &= isinstance(error, DeviceError)  # not here, as opposed to failed
    else:
        notes += comparison(searches[OURS], searches[THEIRS])
        ok &= searches[THEIRS].succeeded > 0
    notes.append(provenance(device, shlex.join(["python", "scripts/throughput.py", *argv])))

    title = f"{workload.text} on {device.text}, {device.name}"
    tables = [searches_table(searches), phases_table(phases)]
    print("\n\n".join([title, *(table.text() for table in tables), "\n".join(notes)]))
    page = "\n\n".join([f"# {title}", *(table.markdown() for table in tables), *notes])
    (args.out / "throughput.md").write_text(page + "\n", encoding="utf-8")
    data = {
        "workload": workload.text,
        "device_name": device.name,
        "searches": {name: dataclasses.asdict(search) for name, search in searches.items()},
        "stage_milliseconds": phases,
        "notes": notes,
    }
    (args.out / "throughput.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0 if ok else 1


def _parser() -> Parser:
    parser = Parser(prog="throughput", description="Trials a second of tvmconv's tuner and of TVM's MetaSchedule.")
    parser.add_argument("workload", metavar="WORKLOAD", nargs="?", default=EXAMPLE, help="(default: %(default)s)")
    parser.add_argument("--trials", metavar="N", type=count, default=2000, help="of tvmconv (default: %(default)s)")
    parser.add_argument(
        "--meta-trials",
        metavar="N",
        type=count,
        default=metaschedule.TRIALS_A_ROUND,
        help="of MetaSchedule (default: %(default)s, a round)",
    )
    parser.add_argument(
        "--meta-seconds",
        metavar="T",
        type=positive,
        default=300.0,
        help="end MetaSchedule after so long; the rounds that it completed count (default: %(default)g)",
    )
    parser.add_argument("--device", metavar="D", default="auto", help="cuda:0, opencl:N or auto (default: %(default)s)")
    parser.add_argument("--workers", metavar="N", type=workers, help="processes that build for tvmconv")
    parser.add_argument("--seed", metavar="N", type=seed_number, default=0, help="of both (default: %(default)s)")
    parser.add_argument("-o", dest="out", type=Path, default=Path("results"), metavar="DIR", help="where results go")
    return parser


def measure_ours(workload: Workload, device: Device, args: argparse.Namespace) -> tuple[Searched, dict[str, float]]:
    """Tune into a log that is thrown away; what came of it, and mean milliseconds a trial by phase."""
    from tvmconv.searching.tune import tune

    with tempfile.TemporaryDirectory() as folder, progress_line(f"{OURS}: ") as show:
        tuned = tune(
            workload,
            trials=args.trials,
            log=Path(folder) / "log.jsonl",
            device=device,
            seed=args.seed,
            workers=args.workers,
            compare=False,
            progress=lambda status: show(progress_text(status)),
        )
    status = tuned.status
    succeeded = status.done - status.errors.total()
    return Searched(status.done, succeeded, tuned.seconds, tuned.final.cost if tuned.final else None), tuned.phases


def measure_metaschedule(workload: Workload, device: Device, args: argparse.Namespace) -> Searched:
    """As `metaschedule.search`, telling what goes on."""
    metaschedule.check_runs(device)
    with progress_line(f"{THEIRS}: ") as show:
        show(f"{args.meta_trials} trials, at most {args.meta_seconds:g} s")
        return metaschedule.search(
            workload,
            device,
            args.meta_trials,
            log=args.out / "metaschedule.log",
            seed=args.seed,
            seconds=args.meta_seconds,
        )


def searches_table(searches: Mapping[str, Searched]) -> Table:
    """One line a tuner."""
    headers = ("tuner", "trials", "succeeded", "seconds", "trials/s", "best [µs]")
    rows = [
        (
            name,
            f"{search.trials:,}",
            f"{search.succeeded:,}",
            f"{search.seconds:,.1f}",
            significant(search.trials / search.seconds),
            NOTHING if search.best is None else significant(search.best * 1e6),
        )
        for name, search in searches.items()
    ]
    return Table(headers, rows, left=frozenset({"tuner"}))


def phases_table(phases: Mapping[str, float]) -> Table:
    """Where the time of a trial of tvmconv goes."""
    header = "stage of a trial"
    return Table((header, "ms"), [(phase, f"{ms:.1f}") for phase, ms in phases.items()], left=frozenset({header}))


def comparison(ours: Searched, theirs: Searched) -> list[str]:
    """What the two rates say, and what they do not."""
    lines = []
    if theirs.succeeded:
        trials, succeeded = (
            significant(getattr(ours, what) / ours.seconds / (getattr(theirs, what) / theirs.seconds))
            for what in ("trials", "succeeded")
        )
        lines.append(f"{OURS} makes {trials} × the trials a second of {THEIRS}, and {succeeded} × those that succeed.")
    lines.append(f"{OURS} verifies every trial, {THEIRS} none. Each tuner's best time is its own measurement.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
