"""Which blocks of a grid are executed, and how many lanes each of them has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tvmconv.arithmetic import round_up
from tvmconv.errors import AnalysisError
from tvmconv.gpu_specs import WARP_SIZE

if TYPE_CHECKING:
    from tvmconv.compiler.executable import LaunchConfig
    from tvmconv.compiler.lowered_module import LoweredKernel

NUM_SAMPLED_BLOCKS = 8  # that stand for all

BlockIndex = tuple[int, int, int]  # its place in the grid, or the grid, as (x, y, z)


def expand_to_clusters(launch: LaunchConfig, blocks: Sequence[BlockIndex] | None = None) -> list[BlockIndex]:
    """Blocks, all by default, and the others of their clusters: those of one in a row, in the order of their ranks."""
    x, y, z = (
        range(0, extent, cluster_extent) for extent, cluster_extent in zip(launch.grid, launch.cluster, strict=True)
    )
    if any(extent % cluster_extent for extent, cluster_extent in zip(launch.grid, launch.cluster, strict=True)):
        raise AnalysisError(f"a grid of {launch.grid} blocks in clusters of {launch.cluster}")
    if blocks is None:
        blocks = [(i, j, k) for k in z for j in y for i in x]
    first_blocks = dict.fromkeys(
        tuple(
            coordinate - coordinate % cluster_extent
            for coordinate, cluster_extent in zip(block, launch.cluster, strict=True)
        )
        for block in blocks
    )
    cluster_x, cluster_y, cluster_z = launch.cluster
    return [
        (i + dx, j + dy, k + dz)
        for i, j, k in first_blocks
        for dz in range(cluster_z)
        for dy in range(cluster_y)
        for dx in range(cluster_x)
    ]


def sample_blocks(grid: BlockIndex) -> list[BlockIndex]:
    """Blocks spread over a grid: the one in the middle, and some drawn at random, always the same.

    The middle alone will not do: where a schedule has fused the grid's axes, it may lie at an image's border.
    """
    random_blocks = np.random.default_rng(0).integers(grid, size=(NUM_SAMPLED_BLOCKS - 1, 3)).tolist()
    x, y, z = (extent // 2 for extent in grid)
    return list(dict.fromkeys([(x, y, z), *((x, y, z) for x, y, z in random_blocks)]))


def count_lanes(lowered_kernel: LoweredKernel) -> int:
    """The lanes that a block has where it is executed: its threads, in whole warps."""
    return round_up(lowered_kernel.launch.threads_per_block, WARP_SIZE)
