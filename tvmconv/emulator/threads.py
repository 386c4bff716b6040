"""Threads that the emulator executes together, the blocks of a grid that they are, and their shared addresses."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmconv.arithmetic import round_up
from tvmconv.compiler.executable import LaunchConfig
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.errors import AnalysisError
from tvmconv.target import WARP_SIZE

SHARED_BASE_ADDRESS = 1024  # first address of shared memory, so that address 0 is invalid
CLUSTER_WINDOW_BYTES = 1 << 24  # size of each block's window in the shared addresses of a cluster
CHUNK_BYTES = 16  # granularity of the accesses of the async proxy


Lanes = NDArray[np.intp]  # indices of threads among all that are executed together


@dataclass(frozen=True)
class EmulatedThreads:
    """Threads that are executed together.

    Blocks consist of `block_shape` threads and clusters of `cluster_shape` blocks, as (x, y, z). The indices of the
    blocks in the grid, of shape (blocks, 3), are listed cluster by cluster.
    """

    block_shape: tuple[int, int, int]
    block_indices: NDArray[np.int64]
    cluster_shape: tuple[int, int, int] = (1, 1, 1)

    @functools.cached_property
    def cluster_size(self) -> int:
        """Number of blocks per cluster."""
        return math.prod(self.cluster_shape)

    @functools.cached_property
    def threads_per_block(self) -> int:
        """Number of threads per block."""
        return math.prod(self.block_shape)

    @functools.cached_property
    def lanes_per_block(self) -> int:
        """Number of lanes per block, which is the number of threads rounded up to whole warps."""
        return round_up(self.threads_per_block, WARP_SIZE)

    @functools.cached_property
    def num_lanes(self) -> int:
        """Number of lanes of all blocks."""
        return len(self.block_indices) * self.lanes_per_block

    def describe_block(self, index: int) -> str:
        """Return the index of a block in the grid as text."""
        return str(tuple(self.block_indices[index].tolist()))

    def describe_lane(self, lane: int) -> str:
        """Return the name of a lane for messages."""
        block, thread = divmod(lane, self.lanes_per_block)
        return f"thread {thread} of block {self.describe_block(block)}"

    def describe_lanes(self, lanes: Lanes) -> str:
        """Return the name of lanes for messages: the first and the last thread of the first block."""
        blocks = np.unique(lanes // self.lanes_per_block)
        thread_indices = lanes[lanes // self.lanes_per_block == blocks[0]] % self.lanes_per_block
        first, last = int(thread_indices.min()), int(thread_indices.max())
        block_text = f"of block {self.describe_block(int(blocks[0]))}"
        more_text = f" and {len(blocks) - 1} more" if len(blocks) > 1 else ""
        thread_text = f"thread {first}" if first == last else f"threads {first} to {last}"
        return f"{thread_text} {block_text}{more_text}"


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
