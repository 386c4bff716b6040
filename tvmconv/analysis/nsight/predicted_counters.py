"""Prediction of Nsight Compute's counters from the machine code: sectors, requests and wavefronts of whole launches.

The machine code is interpreted as far as addresses and branches depend on it (`tvmconv.analysis.sass.interpreter`). All
blocks of the grid are interpreted if they are few or short, else a sample of them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from tvmconv.analysis.memory.footprint import ACCESS_KINDS, compute_footprints, count_moved_bytes
from tvmconv.analysis.nsight.access_counters import AccessCounters, group_by_access
from tvmconv.analysis.occupancy import compute_kernel_occupancy
from tvmconv.analysis.sass.instruction_mix import ACCESSES
from tvmconv.analysis.sass.interpreter.request_counts import LaunchCounts, count_launch_requests
from tvmconv.analysis.sass.linked_sources import LinkedSources, link_sources
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.kernel import Kernel
from tvmconv.target import RESIDENT_WRITE_FRACTION, find_architecture


@dataclass(frozen=True)
class PredictedCounters:
    """Predicted counters of one launch of one device kernel."""

    # counts by ncu's terms: `global_load_sectors`, `global_load_requests`, `shared_load_wavefronts`, the same for
    # stores, and `warp_instructions`. `dram_read_bytes` assumes empty caches. `dram_write_bytes` exists only if the
    # arrays exceed L2, and leaves out what stays in L2 at the end
    counts: dict[str, float]
    # blocks per multiprocessor that each limit allows, as named in `tvmconv.analysis.occupancy`
    limits: dict[str, int]
    occupancy: float  # fraction of a multiprocessor's warps that the resident blocks use, from 0 to 1
    registers: int  # registers per thread
    accesses: list[AccessCounters]  # the same counts by access

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dictionary for JSON."""
        return asdict(self)


def predict_counters(kernel: Kernel, lowered_kernel: LoweredKernel) -> PredictedCounters:
    """Predict the counters of one device kernel."""
    kernel_index = kernel.kernels.index(lowered_kernel)
    sources = link_sources(kernel)[kernel_index]
    compiled_kernel, arch = kernel.executable.kernels[kernel_index], str(kernel.device.arch)
    launch_counts = count_launch_requests(compiled_kernel, sources.listing, arch)
    totals: defaultdict[str, float] = defaultdict(float)
    for (space, kind), opcodes in ACCESSES.items():
        for instruction, counts in zip(sources.listing, launch_counts.instruction_counts, strict=True):
            if instruction.opcode in opcodes and space == "global":
                totals[f"global_{kind}_sectors"] += counts.num_sectors / launch_counts.block_fraction
                totals[f"global_{kind}_requests"] += counts.num_requests / launch_counts.block_fraction
            elif instruction.opcode in opcodes:
                totals[f"shared_{kind}_wavefronts"] += counts.num_wavefronts / launch_counts.block_fraction
    totals |= _predict_dram_bytes(kernel, sources, launch_counts)
    num_executed = sum(counts.num_executed for counts in launch_counts.instruction_counts)
    totals["warp_instructions"] = num_executed / launch_counts.block_fraction
    occupancy = compute_kernel_occupancy(kernel, lowered_kernel)
    return PredictedCounters(
        counts=dict(totals),
        limits=dict(occupancy.block_limits),
        occupancy=occupancy.warp_fraction,
        registers=kernel.cubin.kernels[lowered_kernel.name].registers,
        accesses=group_by_access(kernel, sources, launch_counts),
    )


def _predict_dram_bytes(kernel: Kernel, sources: LinkedSources, launch_counts: LaunchCounts) -> dict[str, float]:
    l2_capacity_bytes = find_architecture(str(kernel.device.arch)).l2_bytes
    footprints = compute_footprints(kernel, sources.lowered_kernel)
    arrays = [*kernel.executable.arrays, *kernel.executable.workspace]
    array_bytes = {parameter.index: arrays[parameter.index].nbytes for parameter in sources.lowered_kernel.parameters}
    if footprints is None:  # each array counts once
        stored_arrays = _find_stored_arrays(sources, launch_counts) | {len(kernel.executable.arrays) - 1}
        moved_bytes = {
            kind: sum(nbytes for index, nbytes in array_bytes.items() if (index in stored_arrays) == (kind == "store"))
            for kind in ACCESS_KINDS
        }
    else:
        moved_bytes = count_moved_bytes(sources.lowered_kernel, footprints, l2_capacity_bytes)
        scopes = list(kernel.memory_scopes.values())
        moved_bytes["load"] += sum(
            nbytes for index, nbytes in array_bytes.items() if index < len(scopes) and scopes[index] != "global"
        )
    predicted_bytes = {"dram_read_bytes": float(moved_bytes["load"])}
    if sum(array_bytes.values()) > l2_capacity_bytes:
        resident_bytes = l2_capacity_bytes * RESIDENT_WRITE_FRACTION
        predicted_bytes["dram_write_bytes"] = max(0.0, moved_bytes["store"] - resident_bytes)
    return predicted_bytes


def _find_stored_arrays(sources: LinkedSources, launch_counts: LaunchCounts) -> set[int]:
    instructions = zip(sources.listing, launch_counts.instruction_counts, strict=True)
    stores = (counts for instruction, counts in instructions if instruction.opcode in ACCESSES["global", "store"])
    return {index for counts in stores for index in counts.array_indices}
