"""Bank conflicts of shared memory: measured by Nsight Compute beside what `analysis.memory.banks` counts from the TIR.

    python scripts/bank_conflicts.py --device cuda:0 -o results
    python scripts/bank_conflicts.py --suite resnet50 --only 3x3 --device cuda:0 -o results
    python scripts/bank_conflicts.py --suite resnet50 --dtype f16 --layout nhwc --schedule mma_sync --log FILE
    python scripts/bank_conflicts.py --from results/d2l-banks.json -o results      # the table again

Needs ncu on the PATH and the right to read the GPU's counters. Schedules have their default configs, with a log those
of its fastest records too. Writes NAME-banks.json and NAME-banks.md.
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
from tvmconv.analysis.memory import banks
from tvmconv.analysis.nsight import ncu
from tvmconv.cli.errors import Parser, guarded
from tvmconv.cli.options import add_suite, chosen_layers
from tvmconv.errors import DeviceError
from tvmconv.experiments.provenance import provenance
from tvmconv.experiments.readings import Readings
from tvmconv.reports.tables import Table

SCHEDULES = ("tiling", "columns", "vthread", "conflict_free")  # where none is named; default has no shared memory
LEGEND = (
    "Bank conflicts of one launch: measured by ncu, as a share of the wavefronts, and counted from the TIR's 4-byte "
    "accesses, before the compiler merges neighbouring ones."
)
METRICS = {
    "load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
}


@dataclass(frozen=True)
class Conflicts:
    """Bank conflicts and wavefronts of one kernel launch, as the GPU counted them and as the TIR has them."""

    layer: str
    schedule: str
    load_conflicts: int
    load_wavefronts: int
    store_conflicts: int
    store_wavefronts: int
    expected_load_conflicts: int
    expected_store_conflicts: int


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    return guarded("bank_conflicts", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="bank_conflicts", description="Shared-memory bank conflicts of the ladder on a suite's layers."
    )
    add_suite(parser, "d2l")
    parser.add_argument("--device", default="cuda:0", help="a CUDA device (default: %(default)s)")
    parser.add_argument(
        "--schedule", action="append", metavar="S", help="this one (may be repeated; default: the ladder)"
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="measure the fastest records of this log too")
    parser.add_argument("--from", dest="file", type=Path, metavar="FILE", help="do not measure: read this JSON")
    parser.add_argument("-o", dest="out", type=Path, metavar="DIR", help="write JSON and Markdown to this folder")
    parser.add_argument("--launch-only", action="store_true", help="launch each kernel once and print nothing, for ncu")
    args = parser.parse_args(argv)

    if args.launch_only:
        for _, kernel in _kernels(args):
            kernel(*kernel.workload.inputs(seed=0))
        return 0
    if args.file:
        measured = Readings.read(args.file, Conflicts)
    else:
        name = f"{chosen_layers(args).name}-banks"
        source = provenance(devices.find(args.device), shlex.join(["python", "scripts/bank_conflicts.py", *argv]))
        profiled = iter(ncu.profile([sys.executable, __file__, *argv, "--launch-only"], METRICS))
        rows = [_row(name, kernel, [next(profiled) for _ in kernel.steps]) for name, kernel in _kernels(args)]
        measured = Readings(name, source, rows)
    table = _table(measured.kernels)
    print(table.text())
    print(measured.provenance)
    if args.out:
        measured.write(args.out, f"{table.markdown()}\n\n{LEGEND} {measured.provenance}")
    return 0


def _kernels(args: Namespace) -> Iterator[tuple[str, tc.Kernel]]:
    """Every layer's name with the kernel of every schedule."""
    device = devices.find(args.device)
    for layer in chosen_layers(args).layers.values():
        known = [schedule.name for schedule in tc.schedules(layer.workload)]
        for name in args.schedule or SCHEDULES:
            if name in known:
                yield layer.name, tc.build(layer.workload, name, device=device)
                if args.log:
                    yield f"{layer.name}, tuned", tc.build(layer.workload, name, device=device, log=args.log)


def _row(layer: str, kernel: tc.Kernel, steps: list[dict[str, float]]) -> Conflicts:
    """What was counted of a kernel's steps, together."""
    for counts in steps:
        if missing := [metric for name, metric in METRICS.items() if name not in counts]:
            raise DeviceError(f"ncu does not read {', '.join(missing)} on this GPU")
    blocks = kernel.launch.blocks  # only the first step of a kernel has shared memory
    return Conflicts(
        layer=layer,
        schedule=kernel.schedule.name,
        **{name: int(sum(counts[name] for counts in steps)) for name in METRICS},
        expected_load_conflicts=blocks * banks.conflicts(kernel, "load"),
        expected_store_conflicts=blocks * banks.conflicts(kernel, "store"),
    )


def _table(rows: list[Conflicts]) -> Table:
    header = (
        "layer",
        "schedule",
        "loads: measured",
        "of wavefronts",
        "TIR",
        "stores: measured",
        "of wavefronts",
        "TIR",
    )
    body = [
        (
            row.layer,
            row.schedule,
            f"{row.load_conflicts:,}",
            f"{row.load_conflicts / max(row.load_wavefronts, 1):.1%}",
            f"{row.expected_load_conflicts:,}",
            f"{row.store_conflicts:,}",
            f"{row.store_conflicts / max(row.store_wavefronts, 1):.2%}",
            f"{row.expected_store_conflicts:,}",
        )
        for row in rows
    ]
    return Table(header, body, left=frozenset(header[:2]))


if __name__ == "__main__":
    sys.exit(main())
