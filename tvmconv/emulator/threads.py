"""Threads that the emulator executes together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmconv.arithmetic import round_up
from tvmconv.target import WARP_SIZE

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

    @property
    def cluster_size(self) -> int:
        """Number of blocks per cluster."""
        return math.prod(self.cluster_shape)

    @property
    def threads_per_block(self) -> int:
        """Number of threads per block."""
        return math.prod(self.block_shape)

    @property
    def lanes_per_block(self) -> int:
        """Number of lanes per block, which is the number of threads rounded up to whole warps."""
        return round_up(self.threads_per_block, WARP_SIZE)

    @property
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
