"""What Nsight Compute would count of a kernel, from its code: sectors, requests and wavefronts of whole launches.

Blocks at the border of the grid do less than those inside, so several are counted, evenly over the grid, and their mean
stands for all: of all blocks where there are few.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.analysis.coalescing import Block, accesses_of_each
from tvmconv.analysis.merged import as_compiled
from tvmconv.analysis.occupancy import occupancy_of
from tvmconv.analysis.tir import has_instructions

if TYPE_CHECKING:
    from tvmconv.compiler.lower import LoweredStep
    from tvmconv.kernel import Kernel

BLOCKS = 64  # of a grid that are counted
EXECUTED_BLOCKS = 8  # of those that are executed, and of shared memory


@dataclass(frozen=True)
class Counted:
    """One launch of one step.

    Attributes:
        counts: by ncu's words: `global_load_sectors`, `global_load_requests`, `shared_load_wavefronts`, and of stores.
        limits: blocks on a multiprocessor that each limit would allow, as `tvmconv.analysis.occupancy` names them.
        occupancy: the share of a multiprocessor's warps that the blocks have which fit, 0 to 1.
        registers: a thread's.
    """

    counts: dict[str, float]
    limits: dict[str, int]
    occupancy: float
    registers: int

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
    grid = step.launch.grid
    chosen = sampled(grid, EXECUTED_BLOCKS if has_instructions(step.function) else BLOCKS)
    total: defaultdict[str, float] = defaultdict(float)
    for accesses in accesses_of_each(kernel, step, chosen):
        for touched in accesses:
            total[f"global_{touched.kind}_sectors"] += touched.sectors
            total[f"global_{touched.kind}_requests"] += touched.requests
    scale = math.prod(grid) / len(chosen)
    few = sampled(grid, EXECUTED_BLOCKS)
    for block in few:
        for own in as_compiled(kernel, step, block):
            total[f"shared_{own.kind}_wavefronts"] += own.wavefronts * len(chosen) / len(few)
    full = occupancy_of(kernel, step)
    registers = kernel.cubin.kernels[step.name].registers
    return Counted({name: count * scale for name, count in total.items()}, dict(full.limits), full.share, registers)


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
