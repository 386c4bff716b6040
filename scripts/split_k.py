"""What splitting a reduction over blocks gains on a network's small images: searched, then timed in turns.

    python scripts/split_k.py --suite resnet50 --pixels 196 --seconds 20 --device cuda:0 -o results

Each layer whose output has at most so many pixels is searched with `implicit_gemm`, whose knob `split_k` is. The
fastest config with a split reduction and the fastest of the logs that were measured before (`--before`), without one,
are then built anew, verified, and timed in turns. Writes DIR/split_k.jsonl, which the same command goes on with, and
split_k.md.
"""

from __future__ import annotations

import math
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import tvmconv as tc
from tvmconv import devices
from tvmconv.cli.errors import Parser, guarded
from tvmconv.cli.options import add_suite, chosen_layers, count, positive
from tvmconv.cli.progress import progress_line
from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.experiments.provenance import provenance
from tvmconv.logs.best import best
from tvmconv.logs.lines import BadLines
from tvmconv.logs.log import read
from tvmconv.measuring.standing import standing
from tvmconv.reports.tables import NOTHING, Table, significant
from tvmconv.verify import Problem
from tvmconv.workloads import Conv, Layer

SCHEDULE, KNOB = "implicit_gemm", "split_k"


def main(argv: Sequence[str] | None = None) -> int:
    """Search and compare."""
    return guarded("split_k", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="split_k", description="What splitting a reduction over blocks gains on small images.")
    add_suite(parser, "resnet50")
    parser.add_argument("--pixels", type=count, default=196, metavar="N", help="outputs at most (default: %(default)s)")
    parser.add_argument("--seconds", type=positive, default=20.0, metavar="T", help="a layer (default: %(default)s)")
    parser.add_argument(
        "--before", type=Path, default=Path("tuning_logs"), metavar="LOG", help="(default: %(default)s)"
    )
    parser.add_argument("--rounds", type=count, default=7, metavar="N", help="turns of each (default: %(default)s)")
    parser.add_argument("--device", default="cuda:0", help="where to measure (default: %(default)s)")
    parser.add_argument("-o", dest="out", type=Path, default=Path("results"), metavar="DIR", help="where results go")
    args = parser.parse_args(argv)

    device = devices.find(args.device)
    selection = chosen_layers(args)
    layers = [each for each in selection.layers.values() if _is_small(each, args.pixels)]
    if not layers:
        raise Error(f"no layer of {selection.name} has at most {args.pixels} pixels")
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "split_k.jsonl"
    with standing():
        for number, layer in enumerate(layers, 1):
            with progress_line(f"{number} of {len(layers)}, {layer.name}: ") as tell:
                tell("searching")
                tc.tune(
                    layer.workload, SCHEDULE, seconds=args.seconds, log=log, device=device, compare=False, confirm=False
                )
    rows, gains = [], []
    for layer in layers:
        cells, gain = _compare(layer, log, args.before, device, args.rounds)
        rows.append(cells)
        gains += [gain] if gain else []
    mean = math.exp(statistics.fmean(map(math.log, gains))) if gains else math.nan
    headers = ("layer", "workload", "without [µs]", "by", "with [µs]", KNOB, "gain")
    table = Table(headers, rows, left=frozenset({"layer", "workload", "by"}))
    source = provenance(device, shlex.join(["python", "scripts/split_k.py", *argv]))
    said = f"Without: the fastest record of {args.before}. Gain: geometric mean {mean:.3f}. {source}"
    print(f"{table.text()}\n\n{said}")
    (args.out / "split_k.md").write_text(f"{table.markdown()}\n\n{said}\n", encoding="utf-8")
    return 0


def _is_small(layer: Layer, pixels: int) -> bool:
    w = layer.workload
    return isinstance(w, Conv) and w.N * math.prod(w.out) <= pixels


def _compare(
    layer: Layer, log: Path, before: Path, device: Device, rounds: int
) -> tuple[tuple[str, ...], float | None]:
    """A layer's row, and how many times as fast it is with a split reduction; None where one of the two is missing."""
    without = best(before, layer.workload, device=device.name)
    split = min(
        (r for r in read(log, BadLines(), layer.workload) if r.ok and int(r.config.get(KNOB, 1)) > 1),
        key=lambda record: record.cost,
        default=None,
    )
    name = (layer.name, layer.workload.text)
    if without is None or split is None:
        return (*name, *(NOTHING,) * 5), None
    problem = Problem(layer.workload)
    kernels = []
    for record in (without, split):
        kernel = tc.build(record.workload, record.schedule, config=record.config, device=device)
        if not kernel.verify(problem).ok:
            raise Error(f"{kernel} is wrong")
        kernels.append(kernel)
    turns = [[kernel.time(problem, seconds=0.05).median for kernel in kernels] for _ in range(rounds)]
    old, new = (statistics.median(times) for times in zip(*turns, strict=True))
    times = (significant(old * 1e6), without.schedule, significant(new * 1e6))
    return (*name, *times, str(split.config[KNOB]), f"{old / new:.2f}×"), old / new


if __name__ == "__main__":
    sys.exit(main())
