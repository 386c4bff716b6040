"""Which blocks of a grid are executed, and how many lanes each of them has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tvmconv.arithmetic import round_up
from tvmconv.errors import AnalysisError
from tvmconv.gpu import WARP

if TYPE_CHECKING:
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.compiler.program import Launch

BLOCKS = 8  # that stand for all

Block = tuple[int, int, int]  # its place in the grid, or the grid, as (x, y, z)


def with_clusters(launch: Launch, blocks: Sequence[Block] | None = None) -> list[Block]:
    """Blocks, all by default, and the others of their clusters: those of one in a row, in the order of their ranks."""
    x, y, z = (range(0, extent, step) for extent, step in zip(launch.grid, launch.cluster, strict=True))
    if any(extent % step for extent, step in zip(launch.grid, launch.cluster, strict=True)):
        raise AnalysisError(f"a grid of {launch.grid} blocks in clusters of {launch.cluster}")
    if blocks is None:
        blocks = [(i, j, k) for k in z for j in y for i in x]
    firsts = dict.fromkeys(tuple(at - at % step for at, step in zip(b, launch.cluster, strict=True)) for b in blocks)
    cx, cy, cz = launch.cluster
    return [(i + dx, j + dy, k + dz) for i, j, k in firsts for dz in range(cz) for dy in range(cy) for dx in range(cx)]


def some_blocks(grid: Block) -> list[Block]:
    """Blocks spread over a grid: the one in the middle, and some drawn at random, always the same.

    The middle alone will not do: where a schedule has fused the grid's axes, it may lie at an image's border.
    """
    drawn = np.random.default_rng(0).integers(grid, size=(BLOCKS - 1, 3)).tolist()
    x, y, z = (extent // 2 for extent in grid)
    return list(dict.fromkeys([(x, y, z), *((x, y, z) for x, y, z in drawn)]))


def lanes_of(step: LoweredStep) -> int:
    """The lanes that a block has where it is executed: its threads, in whole warps."""
    return round_up(step.launch.threads, WARP)
