"""What Nsight Compute would count of a kernel, from its code: sectors, requests and wavefronts of whole launches.

Its machine code is executed as far as addresses and branches need it (`tvmconv.analysis.sass.interpreter`), in all
blocks of the grid where these are few or short, else in some that stand for all.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tvmconv.analysis.memory.coalescing import GLOBAL
from tvmconv.analysis.memory.footprint import ACCESS_KINDS, compute_footprints, count_moved_bytes
from tvmconv.analysis.nsight.access_counters import AccessCounters, group_by_access
from tvmconv.analysis.occupancy import compute_kernel_occupancy
from tvmconv.analysis.sass.instruction_mix import ACCESSES
from tvmconv.analysis.sass.interpreter.request_counts import count_launch_requests
from tvmconv.analysis.sass.linked_sources import link_sources
from tvmconv.gpu_specs import get_l2_bytes

if TYPE_CHECKING:
    from tvmconv.analysis.sass.interpreter.request_counts import LaunchCounts
    from tvmconv.analysis.sass.linked_sources import LinkedSources
    from tvmconv.compiler.lowered_module import LoweredKernel
    from tvmconv.kernel import Kernel


RESIDENT_WRITE_FRACTION = (
    1 / 3
)  # of L2, written lines that are still there when a kernel ends: measured of filters, on an H200


@dataclass(frozen=True)
class PredictedCounters:
    """One launch of one step.

    Attributes:
        counts: by ncu's words: `global_load_sectors`, `global_load_requests`, `shared_load_wavefronts`, and of stores;
            `warp_instructions`; `dram_read_bytes`, of caches that are empty at first, and `dram_write_bytes`, where the
            step's arrays exceed the L2 cache, but for what stays there at the end: else all of it does.
        limits: blocks on a multiprocessor that each limit would allow, as `tvmconv.analysis.occupancy` names them.
        occupancy: the share of a multiprocessor's warps that the blocks have which fit, 0 to 1.
        registers: a thread's.
        accesses: the same counts by access.
    """

    counts: dict[str, float]
    limits: dict[str, int]
    occupancy: float
    registers: int
    accesses: list[AccessCounters]

    def to_json(self) -> dict[str, Any]:
        """As what JSON has."""
        return asdict(self)


def predict_counters(kernel: Kernel, lowered_kernel: LoweredKernel) -> PredictedCounters:
    """Count one step of a kernel.

    Args:
        kernel: for an NVIDIA architecture.
        lowered_kernel: one of `kernel.steps`.

    Raises:
        AnalysisError: its machine code is not understood, takes too long, or asks what depends on the data.
        CompileError: it does not compile, or there is no nvdisasm.
    """
    kernel_index = kernel.kernels.index(lowered_kernel)
    sources = link_sources(kernel)[kernel_index]
    launch_counts = count_launch_requests(
        kernel.executable.kernels[kernel_index], sources.listing, str(kernel.device.arch)
    )
    totals: defaultdict[str, float] = defaultdict(float)
    for (space, kind), opcodes in ACCESSES.items():
        for instruction, counts in zip(sources.listing, launch_counts.instruction_counts, strict=True):
            if instruction.opcode in opcodes and space == "global":
                totals[f"global_{kind}_sectors"] += counts.num_sectors / launch_counts.block_fraction
                totals[f"global_{kind}_requests"] += counts.num_requests / launch_counts.block_fraction
            elif instruction.opcode in opcodes:
                totals[f"shared_{kind}_wavefronts"] += counts.num_wavefronts / launch_counts.block_fraction
    totals |= _predict_dram_bytes(kernel, sources, launch_counts)
    totals["warp_instructions"] = (
        sum(counts.num_executed for counts in launch_counts.instruction_counts) / launch_counts.block_fraction
    )
    kernel_occupancy = compute_kernel_occupancy(kernel, lowered_kernel)
    registers = kernel.cubin.kernels[lowered_kernel.name].registers
    return PredictedCounters(
        dict(totals),
        dict(kernel_occupancy.block_limits),
        kernel_occupancy.warp_fraction,
        registers,
        group_by_access(kernel, sources, launch_counts),
    )


def _predict_dram_bytes(kernel: Kernel, sources: LinkedSources, launch_counts: LaunchCounts) -> dict[str, float]:
    l2_capacity_bytes = get_l2_bytes(str(kernel.device.arch))
    array_footprints = compute_footprints(kernel, sources.lowered_kernel)
    arrays = [*kernel.executable.arrays, *kernel.executable.workspace]
    array_bytes = {parameter.index: arrays[parameter.index].nbytes for parameter in sources.lowered_kernel.parameters}
    if array_footprints is None:  # each array once
        stored_arrays = _find_stored_arrays(sources, launch_counts) | {len(kernel.executable.arrays) - 1}
        moved_by_kind = {
            kind: sum(
                array_bytes[array_index]
                for array_index in array_bytes
                if (array_index in stored_arrays) == (kind == "store")
            )
            for kind in ACCESS_KINDS
        }
    else:
        moved_by_kind = count_moved_bytes(sources.lowered_kernel, array_footprints, l2_capacity_bytes)
        memory_scopes = list(kernel.memory_scopes.values())
        moved_by_kind["load"] += sum(
            array_bytes[array_index]
            for array_index in array_bytes
            if array_index < len(memory_scopes) and memory_scopes[array_index] != GLOBAL
        )
    predicted_bytes = {"dram_read_bytes": float(moved_by_kind["load"])}
    if sum(array_bytes.values()) > l2_capacity_bytes:
        predicted_bytes["dram_write_bytes"] = max(
            0.0, moved_by_kind["store"] - l2_capacity_bytes * RESIDENT_WRITE_FRACTION
        )
    return predicted_bytes


def _find_stored_arrays(sources: LinkedSources, launch_counts: LaunchCounts) -> set[int]:
    """The arrays that threads store to, by their index."""
    return set().union(
        *(
            instruction_counts.array_indices
            for instruction, instruction_counts in zip(sources.listing, launch_counts.instruction_counts, strict=True)
            if instruction.opcode in ACCESSES["global", "store"]
        )
    )
