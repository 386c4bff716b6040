"""What Nsight Compute would count of a kernel, from its code: sectors, requests and wavefronts of whole launches.

Its machine code is executed as far as addresses and branches need it (`tvmconv.analysis.machine_code.executed`), in all
blocks of the grid where these are few or short, else in some that stand for all.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tvmconv.analysis.machine_code.executed.asked import asked_of_grid
from tvmconv.analysis.machine_code.linked import linked
from tvmconv.analysis.machine_code.mix import ACCESSES
from tvmconv.analysis.memory.coalescing import GLOBAL
from tvmconv.analysis.memory.footprint import KINDS, footprints, moved_bytes
from tvmconv.analysis.nsight.by_access import ByAccess, by_access
from tvmconv.analysis.occupancy import occupancy_of
from tvmconv.gpu import l2_bytes

if TYPE_CHECKING:
    from tvmconv.analysis.machine_code.executed.asked import Grid
    from tvmconv.analysis.machine_code.linked import Linked
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.kernel import Kernel


STAYS = 1 / 3  # of L2, written lines that are still there when a kernel ends: measured of filters, on an H200


@dataclass(frozen=True)
class Counted:
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
    accesses: list[ByAccess]

    def plain(self) -> dict[str, Any]:
        """As what JSON has."""
        return asdict(self)


def counted(kernel: Kernel, step: LoweredStep) -> Counted:
    """Count one step of a kernel.

    Args:
        kernel: for an NVIDIA architecture.
        step: one of `kernel.steps`.

    Raises:
        AnalysisError: its machine code is not understood, takes too long, or asks what depends on the data.
        CompileError: it does not compile, or there is no nvdisasm.
    """
    place = kernel.steps.index(step)
    own = linked(kernel)[place]
    grid = asked_of_grid(kernel.program.steps[place], own.listing, str(kernel.device.arch))
    total: defaultdict[str, float] = defaultdict(float)
    for (space, kind), opcodes in ACCESSES.items():
        for instruction, each in zip(own.listing, grid.counts, strict=True):
            if instruction.opcode in opcodes and space == "global":
                total[f"global_{kind}_sectors"] += each.sectors / grid.share
                total[f"global_{kind}_requests"] += each.requests / grid.share
            elif instruction.opcode in opcodes:
                total[f"shared_{kind}_wavefronts"] += each.wavefronts / grid.share
    total |= _dram(kernel, own, grid)
    total["warp_instructions"] = sum(each.executed for each in grid.counts) / grid.share
    full = occupancy_of(kernel, step)
    registers = kernel.cubin.kernels[step.name].registers
    return Counted(dict(total), dict(full.limits), full.share, registers, by_access(kernel, own, grid))


def _dram(kernel: Kernel, own: Linked, grid: Grid) -> dict[str, float]:
    capacity = l2_bytes(str(kernel.device.arch))
    touched = footprints(kernel, own.step)
    arrays = [*kernel.program.arrays, *kernel.program.scratch]
    sizes = {parameter.index: arrays[parameter.index].nbytes for parameter in own.step.parameters}
    if touched is None:  # each array once
        stored = _stored(own, grid) | {len(kernel.program.arrays) - 1}
        moved = {kind: sum(sizes[n] for n in sizes if (n in stored) == (kind == "store")) for kind in KINDS}
    else:
        moved = moved_bytes(own.step, touched, capacity)
        spaces = list(kernel.spaces.values())
        moved["load"] += sum(sizes[n] for n in sizes if n < len(spaces) and spaces[n] != GLOBAL)
    told = {"dram_read_bytes": float(moved["load"])}
    if sum(sizes.values()) > capacity:
        told["dram_write_bytes"] = max(0.0, moved["store"] - capacity * STAYS)
    return told


def _stored(own: Linked, grid: Grid) -> set[int]:
    """The arrays that threads store to, by their index."""
    return set().union(
        *(
            counts.arrays
            for instruction, counts in zip(own.listing, grid.counts, strict=True)
            if instruction.opcode in ACCESSES["global", "store"]
        )
    )
