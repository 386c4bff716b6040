"""The threads that are executed together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmconv.arithmetic import round_up
from tvmconv.gpu_specs import WARP_SIZE

Lanes = NDArray[np.intp]  # threads, by their number among all


@dataclass(frozen=True)
class EmulatedThreads:
    """The threads that are executed together.

    Attributes:
        block_shape: threads of a block, as (x, y, z).
        block_indices: the place of each block in the grid, shape (blocks, 3), in x, y, z; those of a cluster in a row.
        cluster_shape: blocks of a cluster, as (x, y, z).
    """

    block_shape: tuple[int, int, int]
    block_indices: NDArray[np.int64]
    cluster_shape: tuple[int, int, int] = (1, 1, 1)

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster."""
        return math.prod(self.cluster_shape)

    @property
    def threads_per_block(self) -> int:
        """Threads of a block."""
        return math.prod(self.block_shape)

    @property
    def lanes_per_block(self) -> int:
        """Lanes of a block: whole warps."""
        return round_up(self.threads_per_block, WARP_SIZE)

    @property
    def num_lanes(self) -> int:
        """Lanes of all blocks."""
        return len(self.block_indices) * self.lanes_per_block

    def describe_block(self, index: int) -> str:
        """A block by its place in the grid."""
        return str(tuple(self.block_indices[index].tolist()))

    def describe_lane(self, lane: int) -> str:
        """A lane, as messages name it."""
        block, thread = divmod(lane, self.lanes_per_block)
        return f"thread {thread} of block {self.describe_block(block)}"

    def describe_lanes(self, lanes: Lanes) -> str:
        """Lanes, as messages name them: the first and the last of a block."""
        blocks = np.unique(lanes // self.lanes_per_block)
        thread_indices = lanes[lanes // self.lanes_per_block == blocks[0]] % self.lanes_per_block
        first, last = int(thread_indices.min()), int(thread_indices.max())
        block_text = f"of block {self.describe_block(int(blocks[0]))}"
        more_text = f" and {len(blocks) - 1} more" if len(blocks) > 1 else ""
        return (
            f"thread {first} {block_text}{more_text}"
            if first == last
            else f"threads {first} to {last} {block_text}{more_text}"
        )
