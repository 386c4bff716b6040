"""Selection of the blocks of a grid to execute, and the number of lanes per block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tvmconv.arithmetic import round_up
from tvmconv.errors import AnalysisError
from tvmconv.target import WARP_SIZE

if TYPE_CHECKING:
    from tvmconv.compiler.executable import LaunchConfig
    from tvmconv.compiler.lowered_module import LoweredKernel

NUM_SAMPLED_BLOCKS = 8  # size of the sample that stands for all blocks

BlockIndex = tuple[int, int, int]  # index of a block in the grid, or the grid's extents, as (x, y, z)


def expand_to_clusters(launch: LaunchConfig, blocks: Sequence[BlockIndex] | None = None) -> list[BlockIndex]:
    """Return blocks (all by default) and the others of their clusters, cluster by cluster in the order of the ranks."""
    cluster = launch.cluster
    if any(extent % step for extent, step in zip(launch.grid, cluster, strict=True)):
        raise AnalysisError(f"the grid {launch.grid} is not divisible by the cluster {cluster}")
    if blocks is None:
        x, y, z = (range(0, extent, step) for extent, step in zip(launch.grid, cluster, strict=True))
        blocks = [(i, j, k) for k in z for j in y for i in x]
    origins = (tuple(index - index % step for index, step in zip(block, cluster, strict=True)) for block in blocks)
    first_blocks = dict.fromkeys(origins)
    cluster_x, cluster_y, cluster_z = cluster
    return [
        (i + dx, j + dy, k + dz)
        for i, j, k in first_blocks
        for dz in range(cluster_z)
        for dy in range(cluster_y)
        for dx in range(cluster_x)
    ]


def sample_blocks(grid: BlockIndex) -> list[BlockIndex]:
    """Return a fixed sample of blocks: the middle one, and some drawn at random.

    The middle block alone is not representative: it may lie at an image's border if a schedule fuses the grid's axes.
    """
    random_blocks = np.random.default_rng(0).integers(grid, size=(NUM_SAMPLED_BLOCKS - 1, 3)).tolist()
    x, y, z = (extent // 2 for extent in grid)
    return list(dict.fromkeys([(x, y, z), *((x, y, z) for x, y, z in random_blocks)]))


def count_lanes(lowered_kernel: LoweredKernel) -> int:
    """Return the number of emulated lanes per block, which is the number of threads rounded up to whole warps."""
    return round_up(lowered_kernel.launch.threads_per_block, WARP_SIZE)
