"""How much slower than the best schedule without tuning a predicted kernel is, on layers that the model was not taught.

    python scripts/prediction_safety.py --device cuda:0
    python scripts/prediction_safety.py --layers mine.json --device cuda:0 -o safety.md

For each layer the kernel that `tvmconv.build(workload)` gives is timed beside the default configs of all schedules but
the naive one, in rounds, on the same inputs. The layers are those of a file of a suite; without one, layers of networks
on which nothing here was developed (tuning_logs/unseen-layers.json): RepLKNet-31B, SLaK, ConvNeXt V2, NFNet, Swin V2,
Conformer, X3D, HRNet, MobileViT, GhostNet, DenseNet-169, PANNs, WaveNet, DeepLab, 3-D U-Net, C3D, ResNeXt-101, RegNetY,
QuartzNet, EDSR and MixNet. The sizes are those of the networks' papers and reference implementations.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tvmconv import devices, workloads
from tvmconv.cli.errors import Parser, UsageError, guarded
from tvmconv.cli.options import positive
from tvmconv.cli.progress import progress_line
from tvmconv.errors import Error
from tvmconv.experiments.provenance import provenance
from tvmconv.knowledge.model import known_for
from tvmconv.predicted import CHECK_SECONDS, contenders
from tvmconv.reports.tables import NOTHING, Table, significant
from tvmconv.verify import Problem

if TYPE_CHECKING:
    from tvmconv.compiler.program import Program
    from tvmconv.devices import Device
    from tvmconv.devices.base import Loaded

LAYERS = Path(__file__).parents[1] / "tuning_logs/unseen-layers.json"
ROUNDS, ROUND_SECONDS = 3, 0.01  # of each kernel, in turn
CLOSE = 2.0  # times the fastest, up to which a kernel of the check is timed again


@dataclass(frozen=True)
class Built:
    """A kernel as a process built it.

    Attributes:
        schedule: its name.
        expected_seconds: what the model expects; None for a default.
        program: for the device.
    """

    schedule: str
    expected_seconds: float | None
    program: Program


@dataclass(frozen=True)
class Outcome:
    """What was measured of a layer.

    Attributes:
        text: of its workload.
        chosen: the schedule that is built, with "predicted" where it is the prediction.
        seconds: of the chosen kernel.
        predicted: the prediction's seconds before the check on the device; None where there is none.
        untuned: the schedule that is the fastest without tuning.
        untuned_seconds: of that schedule.
        failure: why the layer has no times; empty where it has.
    """

    text: str
    chosen: str = NOTHING
    seconds: float = math.nan
    predicted: float | None = None
    untuned: str = NOTHING
    untuned_seconds: float = math.nan
    failure: str = ""

    @property
    def ratio(self) -> float:
        """Seconds of the chosen kernel over those of the best schedule without tuning."""
        return self.seconds / self.untuned_seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Build, time, and print a table; the exit status is 1 where a layer is slower than `--limit` allows."""
    return guarded("prediction_safety", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="prediction_safety", description="How safe predictions are, on layers that are new to the model."
    )
    parser.add_argument("--layers", type=Path, default=LAYERS, metavar="FILE", help="a suite (default: %(default)s)")
    parser.add_argument("--device", default="cuda:0", metavar="D", help="a GPU of the model (default: %(default)s)")
    parser.add_argument("--limit", type=positive, default=1.3, metavar="X", help="ratio allowed (default: %(default)g)")
    parser.add_argument("-o", dest="out", type=Path, metavar="FILE", help="write the table to this page, too")
    args = parser.parse_args(argv)
    device = devices.find(args.device)
    known = known_for(device.arch)
    if known is None:
        raise UsageError(f"no model knows {device.text} ({device.arch or device.kind})")
    layers = {layer.workload.text: layer.workload for layer in workloads.suite(str(args.layers))}
    texts = [text for text, w in layers.items() if not known.seen([w])]
    with progress_line("prediction_safety: ") as show:
        outcomes = []
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=context) as pool:
            built = [pool.submit(build, text, str(device.arch)) for text in texts]
            for number, (text, future) in enumerate(zip(texts, built, strict=True), 1):
                show(f"{number} of {len(texts)}: {text}")
                outcomes.append(_measured(text, future.result(), device))
    table, note = _table(outcomes), _note(outcomes, len(layers) - len(texts), device, args.limit)
    print(f"{table.text()}\n\n{note}")
    if args.out:
        command = shlex.join(["python", "scripts/prediction_safety.py", *argv])
        source = provenance(device, command)
        args.out.write_text(f"{table.markdown()}\n\n{note}\n\n{source}\n", encoding="utf-8")
    return 0 if all(outcome.ratio <= args.limit for outcome in outcomes) else 1


def build(text: str, arch: str) -> list[Built] | str:
    """Build the kernels of a layer that a check on a device compares, in a process of its own; or tell why not."""
    try:
        kernels = contenders(workloads.parse(text), devices.find(arch))
        return [
            Built(kernel.schedule.name, kernel.prediction.seconds if kernel.prediction else None, kernel.program)
            for kernel in kernels
        ]
    except Error as error:
        return str(error)


def _measured(text: str, built: list[Built] | str, device: Device) -> Outcome:
    """Choose as `tvmconv.build` does, verify, and time in rounds."""
    if isinstance(built, str):
        return Outcome(text, failure=built)
    problem = Problem(workloads.parse(text), 0)
    loaded: dict[int, Loaded] = {}
    checked: dict[int, float] = {}
    for place, each in enumerate(built):
        with contextlib.suppress(Error):
            loaded[place] = device.load(each.program)
            checked[place] = loaded[place].time(problem.inputs, seconds=CHECK_SECONDS).median
    defaults = [place for place in checked if built[place].expected_seconds is None]
    if not defaults:
        return Outcome(text, failure="no default config runs")
    chosen = min(checked, key=lambda place: checked[place])
    close = [place for place in checked if place == chosen or checked[place] <= CLOSE * checked[chosen]]
    close += [] if set(close) & set(defaults) else [min(defaults, key=lambda place: checked[place])]
    rounds: dict[int, list[float]] = {place: [] for place in close}
    for _ in range(ROUNDS):
        for place in close:
            rounds[place].append(loaded[place].time(problem.inputs, seconds=ROUND_SECONDS).median)
    seconds = {place: statistics.median(times) for place, times in rounds.items()}
    untuned = min((place for place in seconds if place in defaults), key=lambda place: seconds[place])
    predicted = next((checked[place] for place in checked if built[place].expected_seconds is not None), None)
    for place in {chosen, untuned}:
        if not problem.check(loaded[place].run(problem.inputs)).ok:
            return Outcome(text, failure=f"{built[place].schedule} computes a wrong result")
    name = built[chosen].schedule + (", predicted" if chosen not in defaults else "")
    return Outcome(text, name, seconds[chosen], predicted, built[untuned].schedule, seconds[untuned])


def _table(outcomes: Sequence[Outcome]) -> Table:
    headers = (
        "layer",
        "built",
        "built [µs]",
        "prediction alone [µs]",
        "best untuned",
        "untuned [µs]",
        "built / untuned",
    )
    rows = [
        (each.text, each.failure, *[NOTHING] * 5)
        if each.failure
        else (
            each.text,
            each.chosen,
            significant(each.seconds * 1e6),
            significant(each.predicted * 1e6) if each.predicted else NOTHING,
            each.untuned,
            significant(each.untuned_seconds * 1e6),
            significant(each.ratio),
        )
        for each in outcomes
    ]
    return Table(headers, rows, left=frozenset({"layer", "built", "best untuned"}))


def _note(outcomes: Sequence[Outcome], taught: int, device: Device, limit: float) -> str:
    timed = [each for each in outcomes if not each.failure]
    failed = len(outcomes) - len(timed)
    if not timed:
        return f"None of {len(outcomes)} layers could be timed on {device.name}."
    worst = max(timed, key=lambda each: each.ratio)
    alone = [each.predicted / each.untuned_seconds for each in timed if each.predicted]
    lines = [
        f"{len(timed)} layers on {device.name}, {failed} failed; {taught} that the model was taught are left out.",
        f"Built over best untuned: worst {worst.ratio:.3g} ({worst.text}), geometric mean "
        f"{statistics.geometric_mean(each.ratio for each in timed):.3g}; "
        f"{sum(each.ratio > limit for each in timed)} above {limit:g}.",
    ]
    if alone:
        above = sum(each > limit for each in alone)
        lines.append(f"Without the timing on the device: worst {max(alone):.3g}, {above} above {limit:g}.")
    return " ".join(lines)


if __name__ == "__main__":
    sys.exit(main())
