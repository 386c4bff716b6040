"""What each part of a search is worth on a GPU: layers searched with one part after another left out.

    python scripts/ablate_searches.py --suite yolov8s --dtype f16 --layout nhwc --seconds 4 --device cuda:0 -o results

Prints for each variant how fast the kernels are that it ends with, as shares of the fastest kernel that any variant
found for the layer: geometric mean, and the worst layer. Each variant has a log of its own in the folder of -o, and the
same command goes on where it was interrupted; the table is written there, too.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tvmconv import devices, library
from tvmconv.cli.errors import Parser, UsageError, guarded
from tvmconv.cli.options import add_knowledge, add_suite, chosen_layers, positive, workers
from tvmconv.cli.progress import progress_line
from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.knowledge import model
from tvmconv.measuring.ready import begin_processes
from tvmconv.measuring.standing import standing
from tvmconv.reports.tables import Table
from tvmconv.searching.network import one_after_another
from tvmconv.searching.request import Request
from tvmconv.searching.tuners.parts import Parts
from tvmconv.searching.tuners.xgb import XGBTuner
from tvmconv.version import VERSION
from tvmconv.workloads import Workload

WHOLE = Parts()


@dataclass(frozen=True)
class Variant:
    """A search with something left out.

    Attributes:
        name: in the table.
        tuner: its tuner's name.
        parts: of the tuner `xgb`.
        model: whether the model of what was measured drafts and guesses.
        first: whether only the first of the schedules is searched.
    """

    name: str
    tuner: str = "xgb"
    parts: Parts = WHOLE
    model: bool = True
    first: bool = False

    @property
    def log(self) -> str:
        """The name of its log."""
        return f"{self.name.replace(' ', '-')}.jsonl"


VARIANTS = (
    Variant("all of it"),
    Variant("without the model", model=False),
    Variant("trees in place of the processes", parts=replace(WHOLE, process=False)),
    Variant("a genetic algorithm in place of both", tuner="ga"),
    Variant("random configs alone", tuner="random"),  # which begins with nothing, whatever the model says
    Variant("the first schedule alone", first=True),
)
NAME = "searches-ablation.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Search, print and write."""
    return guarded("ablate_searches", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="ablate_searches", description="What each part of a search is worth on a GPU.")
    add_suite(parser, "d2l")
    parser.add_argument(
        "--seconds", type=positive, default=4, metavar="T", help="of each search (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto", metavar="D", help="cuda:N, opencl:N or auto (default: %(default)s)")
    parser.add_argument("--workers", type=workers, metavar="N", help="processes that build (default: cores - 1)")
    parser.add_argument("-o", dest="out", type=Path, required=True, metavar="DIR", help="where logs and the table go")
    add_knowledge(parser)
    args = parser.parse_args(argv)
    workloads = list(dict.fromkeys(chosen_layers(args).workloads.values()))
    place = devices.find(args.device)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {args.out}: {error.strerror}") from error
    request = Request(seconds=args.seconds, workers=args.workers, compare=False)
    costs: dict[str, list[float]] = {}
    with standing():
        begin_processes(args.workers, [place])
        for variant in VARIANTS:
            with _left_out(variant), progress_line(f"{variant.name}: ") as show:
                own = replace(request, tuner=variant.tuner, log=args.out / variant.log)
                found = _searched(variant, workloads, place, own)
                costs[variant.name] = []
                for number, cost in enumerate(found, 1):
                    costs[variant.name].append(cost)
                    show(f"{number} of {len(workloads)} layers")
    table = _table(costs)
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    told = (
        f"Speed of the kernel that a search ends with, as a share of the fastest that any of them ended with; "
        f"{len(workloads)} layers, {args.seconds:g} seconds each; {place.name}; tvmconv {VERSION}; {today}; "
        f"`python scripts/ablate_searches.py {shlex.join(argv)}`"
    )
    (args.out / NAME).write_text(f"{table.markdown()}\n\n{told}\n", encoding="utf-8")
    print(f"{table.text()}\n\n{told}")
    return 0


@contextlib.contextmanager
def _left_out(variant: Variant) -> Iterator[None]:
    """Within the block, searches do without what the variant leaves out."""
    whole = XGBTuner.parts
    XGBTuner.parts = variant.parts
    try:
        with contextlib.nullcontext() if variant.model else model.nothing_known():
            yield
    finally:
        XGBTuner.parts = whole


def _searched(variant: Variant, workloads: Sequence[Workload], place: Device, request: Request) -> Iterator[float]:
    """The time of the best kernel of each search, in seconds; infinite where it failed."""
    named = {}
    if variant.first:
        named = {w: [library.to_tune(w, place.kind, place.arch)[0].name] for w in workloads}
    for _, search in one_after_another(dict.fromkeys(workloads, 1), [place], request, named=named):
        try:
            yield search(lambda _: None).cost
        except Error:
            yield math.inf


def _table(costs: Mapping[str, Sequence[float]]) -> Table:
    """A line a variant."""
    best = [min(each) for each in zip(*costs.values(), strict=True)]
    rows = []
    for name, own in costs.items():
        shares = [least / cost for least, cost in zip(best, own, strict=True) if math.isfinite(least)]
        mean = statistics.geometric_mean(shares) if shares and min(shares) > 0 else 0.0
        within = sum(share >= 0.97 for share in shares)
        rows.append([name, f"{mean:.3f}", f"{min(shares, default=0):.3f}", f"{within} of {len(shares)}"])
    return Table(["search", "mean", "worst layer", "within 3 %"], rows, left=frozenset({"search"}))


if __name__ == "__main__":
    raise SystemExit(main())
