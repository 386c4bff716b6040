"""The threads that are executed together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmconv.arithmetic import round_up
from tvmconv.gpu import WARP

Lanes = NDArray[np.intp]  # threads, by their number among all


@dataclass(frozen=True)
class Threads:
    """The threads that are executed together.

    Attributes:
        block: threads of a block, as (x, y, z).
        blocks: the place of each block in the grid, shape (blocks, 3), in x, y, z; those of a cluster in a row.
        clusters: blocks of a cluster, as (x, y, z).
    """

    block: tuple[int, int, int]
    blocks: NDArray[np.int64]
    clusters: tuple[int, int, int] = (1, 1, 1)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return math.prod(self.clusters)

    @property
    def real(self) -> int:
        """Threads of a block."""
        return math.prod(self.block)

    @property
    def padded(self) -> int:
        """Lanes of a block: whole warps."""
        return round_up(self.real, WARP)

    @property
    def lanes(self) -> int:
        """Lanes of all blocks."""
        return len(self.blocks) * self.padded

    def block_name(self, index: int) -> str:
        """A block by its place in the grid."""
        return str(tuple(self.blocks[index].tolist()))

    def name(self, lane: int) -> str:
        """A lane, as messages name it."""
        block, thread = divmod(lane, self.padded)
        return f"thread {thread} of block {self.block_name(block)}"

    def names(self, lanes: Lanes) -> str:
        """Lanes, as messages name them: the first and the last of a block."""
        blocks = np.unique(lanes // self.padded)
        inside = lanes[lanes // self.padded == blocks[0]] % self.padded
        first, last = int(inside.min()), int(inside.max())
        of = f"of block {self.block_name(int(blocks[0]))}"
        more = f" and {len(blocks) - 1} more" if len(blocks) > 1 else ""
        return f"thread {first} {of}{more}" if first == last else f"threads {first} to {last} {of}{more}"
