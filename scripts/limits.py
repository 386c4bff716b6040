"""What holds the tuned kernels of a suite back: the share of each unit's peak that they reach, by Nsight Compute.

    python scripts/limits.py --suite resnet50 --dtype f16 --layout nhwc --batch 32 --log FILE --device cuda:0 -o results
    python scripts/limits.py --from results/resnet50-f16-nhwc-b32-limits.json -o results      # the table again

Needs ncu on the PATH and the right to read the GPU's counters; every kernel is launched once, with cold caches. Writes
NAME-limits.json and NAME-limits.md.
"""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tvmconv as tc
from tvmconv import devices
from tvmconv.analysis import ncu
from tvmconv.cli.errors import Parser, UsageError, guarded
from tvmconv.cli.options import add_suite, chosen_layers, told_fallbacks
from tvmconv.errors import DeviceError
from tvmconv.experiments.provenance import provenance
from tvmconv.experiments.readings import Readings
from tvmconv.reports.tables import Table

METRICS = {
    "tensor": "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_active",
    "l2": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.per_cycle_active",
    "active": "sm__cycles_active.avg",
    "elapsed": "sm__cycles_elapsed.max",
}
UNITS = {"tensor": "tensor cores, by mma.sync", "issue": "issue slots", "shared": "shared memory", "l2": "L2 cache"}
UNITS |= {"memory": "memory"}
BUSY = 60  # percent of a unit's peak from which on it is what holds a kernel back
IDLE = 85  # percent of the time that multiprocessors have a block, below which there are too few blocks
LEGEND = (
    "Percent of each unit's peak while a multiprocessor has a block (tensor cores, issue slots, shared memory) or over "
    f"the whole launch (L2 cache, memory); how long multiprocessors have one, and how many warps. From {BUSY} % on a "
    "unit is what limits; else latency does, with too few warps to hide it or too few blocks to go round. The peak of "
    "the tensor cores is what mma.sync can reach, about 60 % of what wgmma can."
)


@dataclass(frozen=True)
class Limits:
    """What one kernel reached.

    Attributes:
        layer: the layer's name.
        schedule: the schedule's name.
        blocks: of the grid.
        units: percent of the peak, by the names of `UNITS`.
        busy: percent of the launch that a multiprocessor had a block, on average.
        warps: of a multiprocessor, while it had one.
    """

    layer: str
    schedule: str
    blocks: int
    units: dict[str, float]
    busy: float
    warps: float

    @property
    def reason(self) -> str:
        """What holds it back, in words."""
        unit, share = max(self.units.items(), key=lambda unit: unit[1])
        if share >= BUSY:
            return UNITS[unit]
        return "latency: too few blocks" if self.busy < IDLE else f"latency: {self.warps:.0f} warps"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    return guarded("limits", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="limits", description="What holds the tuned kernels of a suite back.")
    add_suite(parser, "resnet50")
    parser.add_argument("--log", type=Path, metavar="FILE", help="where the tuned kernels are from")
    parser.add_argument("--device", default="cuda:0", help="a CUDA device (default: %(default)s)")
    parser.add_argument("--from", dest="file", type=Path, metavar="FILE", help="do not measure: read this JSON")
    parser.add_argument("-o", dest="out", type=Path, metavar="DIR", help="write JSON and Markdown to this folder")
    parser.add_argument("--launch-only", action="store_true", help="launch each kernel once and print nothing, for ncu")
    args = parser.parse_args(argv)
    if not args.file and not args.log:
        raise UsageError("give a --log with tuned kernels, or --from FILE")

    if args.launch_only:
        for _, kernel in _kernels(args):
            kernel(*kernel.workload.inputs(seed=0))
        return 0
    if args.file:
        measured = Readings.read(args.file, Limits)
    else:
        source = provenance(devices.find(args.device), shlex.join(["python", "scripts/limits.py", *argv]))
        profiled = iter(list(ncu.profile([sys.executable, __file__, *argv, "--launch-only"], METRICS)))
        rows = [_row(name, kernel, [next(profiled) for _ in kernel.steps]) for name, kernel in _kernels(args)]
        measured = Readings(f"{chosen_layers(args).name}-limits", source, rows)
    table = _table(measured.kernels)
    print(table.text())
    print(measured.provenance)
    if args.out:
        measured.write(args.out, f"{table.markdown()}\n\n{LEGEND} {measured.provenance}")
    return 0


def _kernels(args: Namespace) -> Iterator[tuple[str, tc.Kernel]]:
    """Every layer's name with its tuned kernel."""
    with told_fallbacks():
        for layer in chosen_layers(args).layers.values():
            yield layer.name, tc.build(layer.workload, device=args.device, log=args.log)


def _row(layer: str, kernel: tc.Kernel, steps: list[dict[str, float]]) -> Limits:
    """What the first step of a kernel reached, which does the work."""
    read = steps[0]
    if missing := [metric for name, metric in METRICS.items() if name not in read]:
        raise DeviceError(f"ncu does not read {', '.join(missing)} on this GPU")
    units = {name: read[name] for name in UNITS}
    busy = 100 * read["active"] / read["elapsed"]
    return Limits(layer, kernel.schedule.name, kernel.launch.blocks, units, busy, read["warps"])


def _table(rows: Sequence[Limits]) -> Table:
    header = ("layer", "schedule", "blocks", *(f"{name} [%]" for name in UNITS.values()), "busy [%]", "warps", "limit")
    body = [
        (
            row.layer,
            row.schedule,
            f"{row.blocks:,}",
            *(f"{row.units[name]:.0f}" for name in UNITS),
            f"{row.busy:.0f}",
            f"{row.warps:.0f}",
            row.reason,
        )
        for row in rows
    ]
    return Table(header, body, left=frozenset(("layer", "schedule", "limit")))


if __name__ == "__main__":
    sys.exit(main())
