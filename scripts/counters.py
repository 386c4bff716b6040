"""Why one schedule beats another: what a GPU counts while each runs, beside what is counted from its code.

    python scripts/counters.py filter2d:8192x8192x1,5x5 --device cuda:0 -o results
    python scripts/counters.py filter1d:268435456,k5 --schedules basic,shuffle,register -o results
    python scripts/counters.py --from results/filter1d-counters.json -o results      # the tables again
    python scripts/counters.py --from results/filter1d-counters.json --into README.md

Needs ncu on the PATH and the right to read the GPU's counters. Every kernel is launched once on random inputs, with its
default config; --log adds the fastest kernel of a log. Writes OPERATOR-counters.json, all that was read, and
OPERATOR-counters.md, the tables.
"""

from __future__ import annotations

import math
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tvmconv as tc
from tvmconv import devices
from tvmconv.analysis import ncu
from tvmconv.analysis import traffic as code
from tvmconv.cli.errors import Parser, guarded
from tvmconv.cli.options import tell_choice, told_fallbacks
from tvmconv.errors import Error
from tvmconv.experiments.provenance import provenance
from tvmconv.experiments.readings import Readings
from tvmconv.experiments.run import TUNED, choose
from tvmconv.reports.tables import NOTHING, Table, significant, with_section

LEGEND = (
    "One launch under ncu, with cold caches and free clocks: its time is not that of a benchmark. Busy: the share of "
    "its peak rate at which a unit works; the L1 has shared memory and textures in it. Bytes are for each "
    "output; instructions, requests and wavefronts are of warps, for each 32 outputs. Stalled: the warps that wait for "
    "that reason, on average, when an instruction is issued. Code: counted from the TIR of the busiest block, "
    "before the compiler merges loads of one element; flop/load is per element loaded from global memory."
)
SUMMARY_LEGEND = (
    "One launch under ncu, the fastest first. Busy: the share of its peak rate at which a unit works; the L1 has "
    "shared memory and textures in it. Instructions are of warps, for each 32 outputs, and bytes for each output. "
    "Stalled: the warps that wait for that reason when an instruction is issued. Code: operations for each element "
    "loaded from global memory, counted from the TIR."
)
METRICS = {
    "nanoseconds": "gpu__time_duration.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "dram_busy_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1_busy_percent": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "issue_busy_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "l2_sectors": "lts__t_sectors.sum",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "l1_hit_percent": "l1tex__t_sector_hit_rate.pct",
    "global_load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "global_load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "global_store_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "global_store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "texture_requests": "l1tex__t_requests_pipe_tex_mem_texture.sum",
    "texture_sectors": "l1tex__t_sectors_pipe_tex_mem_texture.sum",
    "shared_load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "constant_requests": "idc__requests.sum",
    "constant_misses": "idc__requests_lookup_miss.sum",
    "warp_instructions": "smsp__inst_executed.sum",
    "thread_fmas": "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
    "registers": "launch__registers_per_thread",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
# Nsight Compute's Profiling Guide, "Warp Stall Reasons".
STALLS = {
    reason: f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"
    for reason in (
        "barrier",
        "branch_resolving",
        "dispatch_stall",
        "drain",
        "imc_miss",
        "lg_throttle",
        "long_scoreboard",
        "math_pipe_throttle",
        "membar",
        "mio_throttle",
        "no_instruction",
        "not_selected",
        "short_scoreboard",
        "tex_throttle",
        "wait",
    )
}
SECTOR_BYTES = 32
WARP = 32
TOP = 2  # stall reasons that the table names


@dataclass(frozen=True)
class Counters:
    """One kernel launch.

    Attributes:
        workload: its text.
        schedule: its name, or `tuned` for what a log has.
        outputs: elements of the output.
        metrics: what ncu read, by the names of `METRICS` that it knows.
        stalls: warps waiting when an instruction is issued, by the reasons of `STALLS`.
        code: requests of warps for each 32 outputs of the busiest block, as `tvmconv.analysis.traffic` counts them.
        ratio: floating-point operations for each element read from global memory, likewise; None if none is read.
    """

    workload: str
    schedule: str
    outputs: int
    metrics: Mapping[str, float]
    stalls: Mapping[str, float]
    code: Mapping[str, float]
    ratio: float | None

    def each(self, metrics: Sequence[str], scale: float) -> float | None:
        """The sum of metrics, times a scale, for each output; None if ncu lacks one."""
        if any(metric not in self.metrics for metric in metrics):
            return None
        return sum(self.metrics[metric] for metric in metrics) * scale / self.outputs


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    return guarded("counters", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if bool(args.workloads) == bool(args.file):
        raise Error("give workloads to measure or --from FILE to read, and not both")
    if args.launch_only:
        for _, kernel in _kernels(args):
            kernel(*kernel.workload.inputs(seed=0))
        return 0
    if args.file:
        measured = Readings.read(args.file, Counters)
    else:
        device = devices.find(args.device)
        tell_choice(args.device, device)
        operators = dict.fromkeys(tc.parse(text).operator for text in args.workloads)
        name = f"{'-'.join(operators)}-counters"
        source = provenance(device, shlex.join(["python", "scripts/counters.py", *argv]))
        profiled = ncu.profile([sys.executable, __file__, *argv, "--launch-only"], {**METRICS, **STALLS})
        with told_fallbacks():
            rows = [_row(*built, read) for built, read in zip(_kernels(args), profiled, strict=True)]
        measured = Readings(name, source, rows)
    texts = dict.fromkeys(row.workload for row in measured.kernels)
    sections = {text: [row for row in measured.kernels if row.workload == text] for text in texts}
    for text, part in sections.items():
        print("\n\n".join([text, *(table.text() for table in tables(part))]), end="\n\n")
    print(measured.provenance)
    if args.out:
        pages = [
            "\n\n".join([f"## {text}", *(table.markdown() for table in tables(part))])
            for text, part in sections.items()
        ]
        measured.write(args.out, "\n\n".join([*pages, f"{LEGEND} {measured.provenance}"]))
    if args.into:
        summaries = [f"`{text}`:\n\n{summary(part).markdown()}" for text, part in sections.items()]
        section = "\n\n".join([*summaries, f"{SUMMARY_LEGEND} {measured.provenance}"])
        page = args.into.read_text(encoding="utf-8")
        args.into.write_text(with_section(page, measured.name, f"{section}\n"), encoding="utf-8")
    return 0


def _parser() -> Parser:
    parser = Parser(prog="counters", description="Hardware counters of a workload's schedules, by Nsight Compute.")
    parser.add_argument("workloads", metavar="WORKLOAD", nargs="*", help="such as filter2d:8192x8192x1,5x5")
    parser.add_argument("--schedules", metavar="A,B", help="these and the naive one (default: all that apply)")
    parser.add_argument(
        "--log", metavar="FILE", action="append", help="logs, whose fastest kernel runs as well, as tuned"
    )
    parser.add_argument("--device", default="cuda:0", help="a CUDA device (default: %(default)s)")
    parser.add_argument("--from", dest="file", type=Path, metavar="FILE", help="do not measure: read this JSON")
    parser.add_argument("-o", dest="out", type=Path, metavar="DIR", help="write JSON and Markdown to this folder")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put a summary between this file's markers for NAME")
    parser.add_argument("--launch-only", action="store_true", help="launch each kernel once and print nothing, for ncu")
    return parser


def _kernels(args: Namespace) -> Iterator[tuple[str, tc.Kernel]]:
    """The schedules that were asked for, by name, and their kernels, for every workload."""
    device = devices.find(args.device)
    names = args.schedules.split(",") if args.schedules else None
    for text in args.workloads:
        workload = tc.parse(text)
        for schedule in choose(workload, names, device):
            yield schedule.name, tc.build(workload, schedule, device=device)
        if args.log:
            yield TUNED, tc.build(workload, device=device, log=args.log)


def _row(schedule: str, kernel: tc.Kernel, read: Mapping[str, float]) -> Counters:
    counted = code.traffic(kernel)
    return Counters(
        workload=kernel.workload.text,
        schedule=schedule,
        outputs=math.prod(kernel.workload.argument_shapes[-1]),
        metrics={name: read[name] for name in METRICS if name in read},
        stalls={reason: read[reason] for reason in STALLS if reason in read},
        code={name: count.requests * WARP / counted.outputs for name, count in counted.counts.items()},
        ratio=counted.ratio if math.isfinite(counted.ratio) else None,
    )


def tables(rows: Sequence[Counters]) -> list[Table]:
    """One line a schedule: what moved and what warps waited for; then the instructions and requests."""
    return [_table(rows, columns) for columns in (MOVED, EXECUTED)]


def summary(rows: Sequence[Counters]) -> Table:
    """One line a schedule, the fastest first: what was busy, and how much there was to do."""
    return _table(sorted(rows, key=lambda row: row.metrics.get("nanoseconds", math.inf)), SUMMARY)


def _table(rows: Sequence[Counters], columns: Cells) -> Table:
    lines = [[row.schedule, *(cell(row) for cell in columns.values())] for row in rows]
    return Table(["schedule", *columns], lines, left=frozenset({"schedule", "stalled"}))


def _stalled(row: Counters) -> str:
    first = sorted(row.stalls.items(), key=lambda stall: stall[1], reverse=True)[:TOP]
    return ", ".join(f"{reason.replace('_', ' ')} {warps:.2f}" for reason, warps in first) or NOTHING


def _shown(value: float | None, scale: float = 1) -> str:
    return NOTHING if value is None else significant(value * scale)


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}%"


Cells = dict[str, Callable[[Counters], str]]  # of a line, by the headers of their columns

MOVED: Cells = {
    "time [µs]": lambda row: _shown(row.metrics.get("nanoseconds"), 1e-3),
    "DRAM busy": lambda row: _percent(row.metrics.get("dram_busy_percent")),
    "L1 busy": lambda row: _percent(row.metrics.get("l1_busy_percent")),
    "issue busy": lambda row: _percent(row.metrics.get("issue_busy_percent")),
    "DRAM read [B]": lambda row: _shown(row.each(["dram_read_bytes"], 1)),
    "DRAM written [B]": lambda row: _shown(row.each(["dram_write_bytes"], 1)),
    "L2 [B]": lambda row: _shown(row.each(["l2_sectors"], SECTOR_BYTES)),
    "L2 hits": lambda row: _percent(row.metrics.get("l2_hit_percent")),
    "L1 loads [B]": lambda row: _shown(row.each(["global_load_sectors", "texture_sectors"], SECTOR_BYTES)),
    "L1 hits": lambda row: _percent(row.metrics.get("l1_hit_percent")),
    "registers": lambda row: _shown(row.metrics.get("registers")),
    "warps active": lambda row: _percent(row.metrics.get("occupancy_percent")),
    "stalled": _stalled,
}
EXECUTED: Cells = {
    "instructions": lambda row: _shown(row.each(["warp_instructions"], WARP)),
    "FMA": lambda row: _shown(row.each(["thread_fmas"], 1)),
    "global loads": lambda row: _shown(row.each(["global_load_requests"], WARP)),
    "global, code": lambda row: _shown(row.code[code.GLOBAL_LOADS]),
    "texture": lambda row: _shown(row.each(["texture_requests"], WARP)),
    "texture, code": lambda row: _shown(row.code[code.TEXTURE_FETCHES]),
    "shared wavefronts": lambda row: _shown(row.each(["shared_load_wavefronts", "shared_store_wavefronts"], WARP)),
    "shared, code": lambda row: _shown(row.code[code.SHARED_LOADS] + row.code[code.SHARED_STORES]),
    "constant": lambda row: _shown(row.each(["constant_requests"], WARP)),
    "constant misses": lambda row: _shown(row.each(["constant_misses"], WARP)),
    "constant, code": lambda row: _shown(row.code[code.CONSTANT_LOADS]),
    "shuffles, code": lambda row: _shown(row.code[code.SHUFFLES]),
    "flop/load, code": lambda row: _shown(row.ratio),
}
SUMMARY: Cells = {
    header: {**MOVED, **EXECUTED}[header]
    for header in (
        "time [µs]",
        "DRAM busy",
        "L1 busy",
        "issue busy",
        "instructions",
        "DRAM read [B]",
        "flop/load, code",
        "stalled",
    )
}


if __name__ == "__main__":
    sys.exit(main())
