"""What holds the tuned kernels of a suite back: the share of each unit's peak that they reach, by Nsight Compute.

    python scripts/limits.py --suite resnet50 --dtype f16 --layout nhwc --batch 32 --log FILE --device cuda:0 -o results
    python scripts/limits.py --archive kernels.zip --device cuda:0 -o results     # built apart: needs no TVM
    python scripts/limits.py --from results/resnet50-f16-nhwc-b32-limits.json -o results      # the table again

Needs ncu on the PATH and the right to read the GPU's counters; every kernel is launched once, with cold caches. Writes
NAME-limits.json and NAME-limits.md.

What --launch-only launches, another tool can watch. The driver's refusals are no errors (cuda-bindings asks it for
functions of every version there is), and there are more of them than the tool prints errors:

    compute-sanitizer --tool memcheck --report-api-errors no python scripts/limits.py --archive FILE --launch-only

A kernel that fails is named on stderr, with its number. The process can use the GPU no more where that was a fault:
--first NUMBER goes on behind it.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from prebuild import entries

import tvmconv as tc
from tvmconv import devices
from tvmconv.analysis.nsight import ncu
from tvmconv.cli.errors import Parser, UsageError, guarded
from tvmconv.cli.options import add_suite, chosen_layers, count, told_fallbacks
from tvmconv.devices.base import LostError
from tvmconv.errors import DeviceError, Error
from tvmconv.experiments.provenance import provenance
from tvmconv.experiments.readings import Readings
from tvmconv.knobs import Config
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
    "loads": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "stores": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
}
UNITS = {"tensor": "tensor cores", "issue": "issue slots", "shared": "shared memory", "l2": "L2 cache"}
UNITS |= {"memory": "memory"}
BUSY = 60  # percent of a unit's peak from which on it is what holds a kernel back
IDLE = 85  # percent of the time that multiprocessors have a block, below which there are too few blocks
LEGEND = (
    "Percent of each unit's peak while a multiprocessor has a block (tensor cores, issue slots, shared memory) or over "
    f"the whole launch (L2 cache, memory); how long multiprocessors have one, and how many warps. From {BUSY} % on a "
    "unit is what limits; else latency does, with too few warps to hide it or too few blocks to go round. mma.sync "
    "keeps the tensor cores busy at about 60 % of the rate that wgmma does. Bank conflicts are those of shared "
    "loads and stores in a launch; the counter has those with data on their way through the L1 cache in it."
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
        conflicts: bank conflicts of shared loads and stores.
        warps: of a multiprocessor, while it had one.
    """

    layer: str
    schedule: str
    blocks: int
    units: dict[str, float]
    busy: float
    warps: float
    conflicts: tuple[int, int]

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
    parser.add_argument("--archive", type=Path, metavar="FILE", help="instead: kernels that were built apart")
    parser.add_argument("--device", default="cuda:0", help="a CUDA device (default: %(default)s)")
    parser.add_argument("--from", dest="file", type=Path, metavar="FILE", help="do not measure: read this JSON")
    parser.add_argument("-o", dest="out", type=Path, metavar="DIR", help="write JSON and Markdown to this folder")
    parser.add_argument("--launch-only", action="store_true", help="launch each kernel once, for ncu or others")
    parser.add_argument("--first", type=count, default=1, metavar="N", help="launch from the N-th on (--launch-only)")
    args = parser.parse_args(argv)
    if not (args.file or args.log or args.archive):
        raise UsageError("give a --log with tuned kernels, an --archive of kernels, or --from FILE")

    if args.launch_only:
        return 0 if _launch(_kernels(args), args.first) else 1
    if args.file:
        measured = Readings.read(args.file, Limits)
    else:
        built = [entry["versions"] for entry, _, _ in entries(args.archive)] if args.archive else []
        command = shlex.join(["python", "scripts/limits.py", *argv])
        source = provenance(devices.find(args.device), command, built=built)
        profiled = iter(list(ncu.profile([sys.executable, __file__, *argv, "--launch-only"], METRICS)))
        rows = [_row(kernel, [next(profiled) for _ in range(kernel.steps)]) for kernel in _kernels(args)]
        name = args.archive.stem if args.archive else chosen_layers(args).name
        measured = Readings(f"{name}-limits", source, rows)
    table = _table(measured.kernels)
    print(table.text())
    print(measured.provenance)
    if args.out:
        measured.write(args.out, f"{table.markdown()}\n\n{LEGEND} {measured.provenance}")
    return 0


@dataclass(frozen=True)
class _Kernel:
    """A kernel to launch: of which layer, schedule and config, with how many blocks in how many steps."""

    layer: str
    schedule: str
    config: Config
    blocks: int
    steps: int
    run: Callable[[], Any]


def _kernels(args: Namespace) -> Iterator[_Kernel]:
    device = devices.find(args.device)
    if args.archive:
        for entry, _, program in entries(args.archive):
            w = tc.parse(entry["workload"])

            def run(w: Any = w, program: Any = program) -> Any:
                return device.load(program).run(w.inputs(seed=0))

            blocks = math.prod(program.steps[0].launch.grid)
            yield _Kernel(f"`{w}`", entry["schedule"], entry["config"], blocks, len(program.steps), run)
        return
    with told_fallbacks():
        for layer in chosen_layers(args).layers.values():
            built = tc.build(layer.workload, device=device, log=args.log)

            def call(built: tc.Kernel = built) -> Any:
                return built(*built.workload.inputs(seed=0))

            yield _Kernel(layer.name, built.schedule.name, built.config, built.launch.blocks, len(built.steps), call)


def _launch(kernels: Iterable[_Kernel], first: int) -> bool:
    """Launch each kernel once, from the first that is asked for on; say which of them fail, and whether none does."""
    right = True
    for number, kernel in islice(enumerate(kernels, 1), first - 1, None):
        try:
            kernel.run()
        except Error as error:
            config = json.dumps(kernel.config)
            print(f"limits: kernel {number}, {kernel.layer} {kernel.schedule} {config}: {error}", file=sys.stderr)
            right = False
            if isinstance(error, LostError):
                print(f"limits: --first {number + 1} goes on behind it", file=sys.stderr)
                break
    return right


def _row(kernel: _Kernel, steps: list[dict[str, float]]) -> Limits:
    """What the first step of a kernel reached, which does the work."""
    read = steps[0]
    if missing := [metric for name, metric in METRICS.items() if name not in read]:
        raise DeviceError(f"ncu does not read {', '.join(missing)} on this GPU")
    units = {name: read[name] for name in UNITS}
    busy = 100 * read["active"] / read["elapsed"]
    conflicts = int(read["loads"]), int(read["stores"])
    return Limits(kernel.layer, kernel.schedule, kernel.blocks, units, busy, read["warps"], conflicts)


def _table(rows: Sequence[Limits]) -> Table:
    header = (
        "layer",
        "schedule",
        "blocks",
        *(f"{name} [%]" for name in UNITS.values()),
        "busy [%]",
        "warps",
        "limit",
        "conflicts",
    )
    body = [
        (
            row.layer,
            row.schedule,
            f"{row.blocks:,}",
            *(f"{row.units[name]:.0f}" for name in UNITS),
            f"{row.busy:.0f}",
            f"{row.warps:.0f}",
            row.reason,
            " + ".join(f"{count:,}" for count in row.conflicts),
        )
        for row in rows
    ]
    return Table(header, body, left=frozenset(("layer", "schedule", "limit")))


if __name__ == "__main__":
    sys.exit(main())
