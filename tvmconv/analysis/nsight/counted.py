"""What Nsight Compute would count of a kernel, from its code: sectors, requests and wavefronts of whole launches.

Blocks at the border of the grid do less than those inside, so several are counted, evenly over the grid, and their mean
stands for all: of all blocks where there are few.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.analysis.emulation.blocks import Block, with_clusters
from tvmconv.analysis.emulation.observe import observe
from tvmconv.analysis.emulation.watch import Several
from tvmconv.analysis.lowered.tir import has_instructions
from tvmconv.analysis.machine_code.merged import as_compiled
from tvmconv.analysis.memory.banks import BankWatch, SharedAccess
from tvmconv.analysis.memory.coalescing import GlobalAccess, SectorWatch, accesses_of_each
from tvmconv.analysis.nsight.by_access import Accesses, ByAccess
from tvmconv.analysis.occupancy import occupancy_of

if TYPE_CHECKING:
    from tvmconv.compiler.lower import LoweredStep
    from tvmconv.kernel import Kernel

BLOCKS = 64  # of a grid that are counted
SHARED_BLOCKS = 8  # whose shared memory is counted, of those that are evaluated
EXECUTED_BLOCKS = 256  # of those that are executed


@dataclass(frozen=True)
class Counted:
    """One launch of one step.

    Attributes:
        counts: by ncu's words: `global_load_sectors`, `global_load_requests`, `shared_load_wavefronts`, and of stores.
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
        AnalysisError: an access cannot be executed, or depends on the data.
        CompileError: it does not compile.
    """
    by_access = Accesses(kernel, step)
    total: defaultdict[str, float] = defaultdict(float)
    for touched, owned, blocks in _of_blocks(kernel, step):
        by_access.add([*touched, *owned], blocks)
        for each in touched:
            total[f"global_{each.kind}_sectors"] += each.sectors * blocks
            total[f"global_{each.kind}_requests"] += each.requests * blocks
        for own in owned:
            total[f"shared_{own.kind}_wavefronts"] += own.wavefronts * blocks
    full = occupancy_of(kernel, step)
    registers = kernel.cubin.kernels[step.name].registers
    return Counted(dict(total), dict(full.limits), full.share, registers, by_access.all())


def _of_blocks(kernel: Kernel, step: LoweredStep) -> Iterator[tuple[list[GlobalAccess], list[SharedAccess], float]]:
    """The accesses of some blocks, and how many blocks of the grid these stand for."""
    grid = step.launch.grid
    if has_instructions(step.function):
        chosen = with_clusters(step.launch, sampled(grid, EXECUTED_BLOCKS))
        banks, sectors = BankWatch(), SectorWatch()
        observe(step, kernel.spaces, chosen, Several(banks, sectors))
        yield sectors.accesses(), banks.accesses(), math.prod(grid) / len(chosen)
        return
    chosen = sampled(grid, BLOCKS)
    for accesses in accesses_of_each(kernel, step, chosen):
        yield accesses, [], math.prod(grid) / len(chosen)
    chosen = sampled(grid, SHARED_BLOCKS)
    for block in chosen:
        yield [], as_compiled(kernel, step, block), math.prod(grid) / len(chosen)


def sampled(grid: Block, most: int) -> list[Block]:
    """Blocks of a grid, as (x, y, z): all where there are few, else so many, spread evenly.

    Those of a long grid are some constant share of it apart that no tile's width divides: the golden ratio's (the
    additive recurrence of Roberts, "The Unreasonable Effectiveness of Quasirandom Sequences").
    """
    count = math.prod(grid)
    if count <= most:
        numbers = np.arange(count)
    else:
        share = (np.arange(most) * (math.sqrt(5) - 1) / 2 + 0.5) % 1
        numbers = np.unique((share * count).astype(np.int64))
    z, y, x = np.unravel_index(numbers, grid[::-1])
    return list(zip(x.tolist(), y.tolist(), z.tolist(), strict=True))
