"""Hardware counters of kernel launches, together with counts from the code of the kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tvmconv.analysis.memory.traffic import count_traffic
from tvmconv.devices import Device
from tvmconv.errors import AnalysisError
from tvmconv.experiments.preparation import select_schedules
from tvmconv.experiments.results import TUNED
from tvmconv.kernel import Kernel
from tvmconv.logs.build import build
from tvmconv.logs.ranking import LogPaths
from tvmconv.target import WARP_SIZE
from tvmconv.workloads import Workload

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


@dataclass(frozen=True)
class Counters:
    """The counters of one kernel launch."""

    workload: str
    schedule: str  # name, or `tuned` for the best record of a log
    outputs: int  # number of elements of the output
    metrics: Mapping[str, float]  # values that ncu measured, by the available names of `METRICS`
    stalls: Mapping[str, float]  # mean number of stalled warps per issued instruction, by the reasons of `STALLS`
    # Warp requests per 32 outputs of the busiest block, by `tvmconv.analysis.memory.traffic`; empty if not counted.
    code: Mapping[str, float]
    ratio: float | None  # floating-point operations per element read from global memory; None: none, or not counted

    def __post_init__(self) -> None:
        if self.outputs < 1:
            raise AnalysisError(f"outputs: expected at least 1, got {self.outputs}")

    def compute_per_output(self, metrics: Sequence[str], scale: float) -> float | None:
        """Return the sum of metrics per output, times a scale; None if a metric is missing."""
        if any(metric not in self.metrics for metric in metrics):
            return None
        return sum(self.metrics[metric] for metric in metrics) * scale / self.outputs


def iterate_kernels(
    workloads: Sequence[Workload], schedules: Sequence[str] | None, device: Device, log: LogPaths | None = None
) -> Iterator[tuple[str, Kernel]]:
    """Yield the name of the schedule and the kernel for each default config, and for the best records of logs. The
    naive schedule is added to the named ones. The fastest kernel in the logs comes last, with the name `tuned`; it is
    the only one if `schedules` has this name alone.
    """
    for workload in workloads:
        for schedule in [] if schedules == [TUNED] else select_schedules(workload, schedules, device):
            yield schedule.name, build(workload, schedule, device=device)
        if log:
            yield TUNED, build(workload, device=device, log=log)


def make_counters(schedule: str, kernel: Kernel, metrics: Mapping[str, float], *, counts_code: bool = True) -> Counters:
    """Return the metrics of a launch, by `METRICS` and `STALLS`, together with counts from the kernel's code, which
    take a minute for a kernel of thousands of instructions.
    """
    code, ratio = dict[str, float](), math.inf
    if counts_code:
        traffic = count_traffic(kernel)
        ratio = traffic.flops_per_load
        for name, access_count in traffic.counts.items():
            code[name] = access_count.num_requests * WARP_SIZE / traffic.num_outputs
    return Counters(
        workload=kernel.workload.text,
        schedule=schedule,
        outputs=math.prod(kernel.workload.argument_shapes[-1]),
        metrics={name: metrics[name] for name in METRICS if name in metrics},
        stalls={reason: metrics[reason] for reason in STALLS if reason in metrics},
        code=code,
        ratio=ratio if math.isfinite(ratio) else None,
    )
