"""Counted from the code beside counted by the GPU: kernels that are built anywhere, and launched once under ncu."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, cast

from tvmconv import workloads
from tvmconv.analysis.nsight import ncu
from tvmconv.analysis.nsight.by_access import ByAccess
from tvmconv.analysis.nsight.counted import counted
from tvmconv.analysis.nsight.source_view import Executed
from tvmconv.compiler.program import Program
from tvmconv.devices import Device, find
from tvmconv.errors import AnalysisError, DeviceError
from tvmconv.kernel import Kernel, build
from tvmconv.measuring import programs

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


class CountedStep(TypedDict, total=False):
    """What is counted of a step: `tvmconv.analysis.nsight.counted.Counted.plain`, or `error`, why it is not."""

    error: str
    counts: dict[str, float]
    limits: dict[str, int]
    occupancy: float
    registers: int


class AccessCounts(TypedDict):
    """What is counted of an access and what was measured, as `of_accesses` tells them."""

    space: str
    kind: str
    arrays: list[str]
    line: int | None
    counts: dict[str, float]
    rows: int
    measured: dict[str, float]


@dataclass(frozen=True)
class Beside:
    """One step of a kernel.

    Attributes:
        workload: its text.
        schedule: its name.
        config: the knobs' values.
        step: its index among the kernel's.
        counted: see `CountedStep`.
        measured: by the names of `METRICS`.
        accesses: see `AccessCounts`; none in files of before that was measured.
    """

    workload: str
    schedule: str
    config: dict[str, bool | int | float | str | list[int]]
    step: int
    counted: CountedStep
    measured: dict[str, float]
    accesses: list[AccessCounts] = field(default_factory=list)


def told_of(kernel: Kernel) -> dict[str, Any]:
    """What goes with a program: what it computes, and what is counted of it."""
    steps: list[dict[str, Any]] = []
    for step in kernel.steps:
        try:
            steps.append(counted(kernel, step).plain())
        except AnalysisError as error:
            steps.append({"error": str(error)})
    w = kernel.workload
    return {
        "workload": w.text,
        "schedule": kernel.schedule.name,
        "config": dict(kernel.config),
        "arch": kernel.device.arch,
        "steps": steps,
    }


def measured(built: Sequence[tuple[dict[str, Any], Program]], device: Device) -> list[Beside]:
    """Launch each program once, and put what the GPU counted beside what is told of it.

    Args:
        built: programs, with what `told_of` tells of each.
        device: an NVIDIA GPU.

    Raises:
        DeviceError: ncu is not installed or fails, or a program is of another architecture.
    """
    for told, _ in built:
        if told["arch"] != device.arch:
            raise DeviceError(f"the programs are for {told['arch']}, and {device.text} is {device.arch or device.kind}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "programs.zip"
        programs.save(file, built)
        command = [sys.executable, "-m", __name__, str(file), device.text]
        read, launches = list(ncu.profile(command, METRICS)), ncu.source_view(command)
    expected = sum(len(program.steps) for _, program in built)
    if {len(read), len(launches)} != {expected}:
        raise DeviceError(f"ncu saw {len(read)} and {len(launches)} launches of {expected}")
    return list(_rows(built, iter(read), iter(launches)))


def recounted(rows: Sequence[Beside], arch: str) -> Iterator[Beside]:
    """What was measured, beside what is counted by now: the kernels are built anew.

    Args:
        rows: as `measured` gave them.
        arch: of the GPU that they were measured on.
    """
    kernel: Kernel | None = None
    for row in rows:
        key = row.workload, row.schedule, row.config
        if kernel is None or key != (kernel.workload.text, kernel.schedule.name, dict(kernel.config)):
            kernel = build(workloads.parse(row.workload), row.schedule, arch=arch, config=row.config)
            steps = told_of(kernel)["steps"]
        if not 0 <= row.step < len(steps):
            raise AnalysisError(
                f"{row.workload} by {row.schedule} has {len(steps)} steps, and none numbered {row.step}"
            )
        counted = steps[row.step]
        known = {(each["space"], each["kind"], each["line"]): each["measured"] for each in row.accesses}
        accesses = [
            _beside(each, known[each["space"], each["kind"], each["line"]])
            for each in counted.get("accesses", ())
            if (each["space"], each["kind"], each["line"]) in known
        ]
        yield replace(row, counted=_whole(counted), accesses=accesses)


def of_accesses(counted: Mapping[str, Any], launch: Sequence[Executed]) -> list[AccessCounts]:
    """What a launch took for each access that is counted, beside that.

    Args:
        counted: as `told_of` tells of a step.
        launch: its instructions.

    Returns:
        For each access its space, kind, arrays, line and counts, as `ByAccess` has them, how many instructions it
        became, and what was measured.

    Raises:
        DeviceError: it is the launch of something else.
    """
    found = []
    for each in (ByAccess(**access) for access in counted.get("accesses", ())):
        if max(each.rows, default=0) >= len(launch):
            raise DeviceError(f"ncu tells of {len(launch)} instructions, which are fewer than the kernel has")
        found.append(_beside(asdict(each), each.measured(launch)))
    return found


def _beside(access: Mapping[str, Any], measured: Mapping[str, float]) -> AccessCounts:
    return cast(AccessCounts, {**access, "rows": len(access["rows"]), "measured": dict(measured)})


def _whole(counted: Mapping[str, Any]) -> CountedStep:
    """Without the accesses, which are told by themselves."""
    return cast(CountedStep, {name: value for name, value in counted.items() if name != "accesses"})


def _rows(
    built: Iterable[tuple[dict[str, Any], Program]],
    read: Iterator[dict[str, float]],
    launches: Iterator[Sequence[Executed]],
) -> Iterator[Beside]:
    for told, program in built:
        for place in range(len(program.steps)):
            counted = told["steps"][place]
            yield Beside(
                workload=told["workload"],
                schedule=told["schedule"],
                config=told["config"],
                step=place,
                counted=_whole(counted),
                measured=next(read),
                accesses=of_accesses(counted, next(launches)),
            )


def launch_all(file: Path, device: Device, ready: Callable[[str], None] = lambda text: None) -> None:
    """Launch each program of a file once, on random inputs."""
    inputs: dict[str, Sequence[Any]] = {}
    for told, program in programs.load(file):
        text = told["workload"]
        if text not in inputs:
            inputs = {text: workloads.parse(text).inputs(seed=0)}  # of one at a time: they may be large
        ready(text)
        device.load(program).run(inputs[text])


if __name__ == "__main__":
    launch_all(Path(sys.argv[1]), find(sys.argv[2]))
