"""Comparison of counts from the code of kernels with the GPU's counters, for kernels that are launched under ncu."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, cast

from tvmconv import workloads
from tvmconv.analysis.nsight import ncu
from tvmconv.analysis.nsight.access_counters import AccessCounters
from tvmconv.analysis.nsight.ncu import ProfiledInstruction
from tvmconv.analysis.nsight.predicted_counters import predict_counters
from tvmconv.compiler.executable import Executable
from tvmconv.devices import Device, find_device, sharing
from tvmconv.errors import AnalysisError, DeviceError
from tvmconv.kernel import Kernel, build
from tvmconv.measure import kernel_archive

METRICS = {
    "global_load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "global_store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "global_load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "global_store_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "shared_load_wavefronts": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_store_wavefronts": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "shared_wavefronts": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared.sum",
    "shared_load_wavefronts, pipe": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_store_wavefronts, pipe": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "shared_load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "shared_store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "local_load_sectors": "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",
    "occupancy_percent": "sm__maximum_warps_per_active_cycle_pct",
    "blocks by registers": "launch__occupancy_limit_registers",
    "blocks by shared memory": "launch__occupancy_limit_shared_mem",
    "blocks by warps": "launch__occupancy_limit_warps",
    "blocks by blocks": "launch__occupancy_limit_blocks",
    "registers": "launch__registers_per_thread",
    "warp_instructions": "smsp__inst_executed.sum",
    "thread_fmas": "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_load_sectors": "lts__t_sectors_srcunit_tex_op_read.sum",
    "nanoseconds": "gpu__time_duration.sum",
}


class PredictedKernelCounters(TypedDict, total=False):
    """The counts from the code of one kernel (`PredictedCounters.to_json`), or the reason why there are none."""

    error: str
    counts: dict[str, float]
    limits: dict[str, int]
    occupancy: float
    registers: int


class AccessCounts(TypedDict):
    """The counts and the measured values of one memory access, by `AccessCounters`."""

    space: str
    kind: str
    arrays: list[str]
    line: int | None
    counts: dict[str, float]
    rows: int  # number of instructions
    measured: dict[str, float]


@dataclass(frozen=True)
class CounterComparison:
    """The counts and the measured values of one device function of a kernel."""

    workload: str
    schedule: str
    config: dict[str, bool | int | float | str | list[int]]
    step: int  # index of the device function in the kernel's launch order
    counted: PredictedKernelCounters
    measured: dict[str, float]  # by the names of `METRICS`
    accesses: list[AccessCounts] = field(default_factory=list)  # empty in older files


def describe_kernel(kernel: Kernel) -> dict[str, Any]:
    """Return the description of a kernel for an archive: workload, schedule, config, architecture and counts."""
    kernel_counters: list[dict[str, Any]] = []
    for step in kernel.kernels:
        try:
            kernel_counters.append(predict_counters(kernel, step).to_json())
        except AnalysisError as error:
            kernel_counters.append({"error": str(error)})
    return {
        "workload": kernel.workload.text,
        "schedule": kernel.schedule.name,
        "config": dict(kernel.config),
        "arch": kernel.device.arch,
        "steps": kernel_counters,
    }


def measure_counters(
    described_programs: Sequence[tuple[dict[str, Any], Executable]], device: Device
) -> list[CounterComparison]:
    """Launch each program once under ncu, and compare its counters with the counts of its `describe_kernel`.

    Raises:
        DeviceError: ncu is not installed or fails, or a program is for another architecture.
    """
    for description, _ in described_programs:
        if description["arch"] != device.arch:
            raise DeviceError(
                f"the programs are for {description['arch']}, and {device.text} is {device.arch or device.kind}"
            )
    with tempfile.TemporaryDirectory() as folder:
        archive_path = Path(folder) / "programs.zip"
        kernel_archive.save_kernels(archive_path, described_programs)
        command = [sys.executable, "-m", __name__, str(archive_path), device.text]
        metrics, launches = list(ncu.profile_command(command, METRICS)), ncu.read_source_view(command)
    num_launches = sum(len(program.kernels) for _, program in described_programs)
    if {len(metrics), len(launches)} != {num_launches}:
        raise DeviceError(f"expected {num_launches} launches, but ncu reported {len(metrics)} and {len(launches)}")
    steps = [(description, step) for description, program in described_programs for step in range(len(program.kernels))]
    return [
        CounterComparison(
            workload=description["workload"],
            schedule=description["schedule"],
            config=description["config"],
            step=step,
            counted=_without_accesses(description["steps"][step]),
            measured=measured,
            accesses=compare_accesses(description["steps"][step], launch),
        )
        for (description, step), measured, launch in zip(steps, metrics, launches, strict=True)
    ]


def profile_launches(
    programs: Sequence[tuple[dict[str, Any], Executable]], device: Device, metrics: Mapping[str, str]
) -> Iterator[dict[str, float]]:
    """Launch each program once under ncu, on the inputs of its description's workload, and yield the metrics of each
    launch. The process that launches them loads no compilers.
    """
    with tempfile.TemporaryDirectory() as folder:
        archive_path = Path(folder) / "programs.zip"
        kernel_archive.save_kernels(archive_path, programs)
        with sharing.hold_gpu():
            command = [sys.executable, "-m", __name__, str(archive_path), device.text]
            launches = [*ncu.profile_command(command, metrics)]
    yield from launches


def recount(comparisons: Sequence[CounterComparison], arch: str) -> Iterator[CounterComparison]:
    """Build the kernels again for the GPU of the measurements, and yield these with the counts of this version."""
    counted_kernel = None
    for comparison in comparisons:
        kernel_key = comparison.workload, comparison.schedule, comparison.config
        if kernel_key != counted_kernel:
            w, counted_kernel = workloads.parse(comparison.workload), kernel_key
            kernel = build(w, comparison.schedule, arch=arch, config=comparison.config)
            kernel_counters = describe_kernel(kernel)["steps"]
        if not 0 <= comparison.step < len(kernel_counters):
            raise AnalysisError(
                f"{comparison.workload} by {comparison.schedule} has {len(kernel_counters)} steps, but the file has "
                f"step {comparison.step}"
            )
        predicted = kernel_counters[comparison.step]
        measured_by_access = {_identify_access(access): access["measured"] for access in comparison.accesses}
        accesses = [
            _make_access_counts(access, measured_by_access[_identify_access(access)])
            for access in predicted.get("accesses", ())
            if _identify_access(access) in measured_by_access
        ]
        yield replace(comparison, counted=_without_accesses(predicted), accesses=accesses)


def _identify_access(access: Mapping[str, Any]) -> tuple[str, str, int | None]:
    return access["space"], access["kind"], access["line"]


def compare_accesses(predicted: Mapping[str, Any], launch: Sequence[ProfiledInstruction]) -> list[AccessCounts]:
    """Return the counts of each access of one device function, by `describe_kernel`, with the values of its launch.

    Raises:
        DeviceError: The launch has fewer instructions than the kernel.
    """
    access_counts = []
    for access_counters in (AccessCounters(**access) for access in predicted.get("accesses", ())):
        if max(access_counters.rows, default=0) >= len(launch):
            raise DeviceError(f"ncu reported {len(launch)} instructions, fewer than the kernel has")
        access_counts.append(_make_access_counts(asdict(access_counters), access_counters.sum_measured(launch)))
    return access_counts


def _make_access_counts(access: Mapping[str, Any], measured_counts: Mapping[str, float]) -> AccessCounts:
    return cast(AccessCounts, {**access, "rows": len(access["rows"]), "measured": dict(measured_counts)})


def _without_accesses(predicted: Mapping[str, Any]) -> PredictedKernelCounters:
    """Return the counts without the accesses, which `CounterComparison.accesses` has."""
    return cast(PredictedKernelCounters, {name: value for name, value in predicted.items() if name != "accesses"})


def launch_all(archive_path: Path, device: Device) -> None:
    """Launch each program of an archive once, on random inputs."""
    inputs: dict[str, Sequence[Any]] = {}
    for description, program in kernel_archive.load_kernels(archive_path):
        text = description["workload"]
        if text not in inputs:
            inputs = {text: workloads.parse(text).inputs(seed=0)}  # only those of one workload, as they may be large
        device.load(program).run(inputs[text])


if __name__ == "__main__":
    launch_all(Path(sys.argv[1]), find_device(sys.argv[2]))
