"""Split reduction through a workspace in global memory: partial sums, and a second kernel that adds them up in order.

Source: CUTLASS, `include/cutlass/reduction/kernel/reduce_split_k.h`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvmconv.workloads.dtypes import ACCUMULATOR

from ....tir_builder import (
    Buffer,
    Expr,
    allocate,
    emit_ptx,
    fill_zeros,
    if_,
    load_global,
    store,
    store_global,
    thread_per_item,
    unpack,
    unrolled_loop,
)
from ..implicit_gemm_shape import ImplicitGemmShape
from .epilogue_ops import EpilogueOps, apply_to_vector
from .mma_sync_mainloop import WarpTiling
from .tile_scheduler import WorkTile


def store_partial_sums(
    workspace: Buffer, accumulators: Buffer, tiling: WarpTiling, tile: WorkTile, split: Expr, shape: ImplicitGemmShape
) -> None:
    """Store the accumulators of a work tile to the workspace (parts, rows, columns of all groups)."""
    width, pair = math.gcd(shape.n, 2), allocate("partial_pair", 2, "float32")
    m_loop, n_loop = unrolled_loop(tiling.mmas_m, "i"), unrolled_loop(tiling.mmas_n, "j")
    with m_loop as mma_m, n_loop as mma_n, unrolled_loop(2, "h") as half:
        row, column = tiling.row(tile, mma_m, half), tiling.column(tile, mma_n)
        index = (split * shape.m + row) * (shape.groups * shape.n) + tile.group * shape.n + column
        for first in range(0, 2, width):
            with if_(tiling.is_inside(shape, row, column + first)):
                for e in range(width):
                    store(pair, e, accumulators[tiling.accumulator(mma_m, mma_n, half) + first + e])
                mnemonic = f"st.global{'.v2' if width == 2 else ''}.b32"
                emit_ptx(mnemonic, workspace.access_ptr("w", offset=index + first), *(pair[e] for e in range(width)))


@dataclass(frozen=True)
class WorkspaceReduction:
    """The kernel that adds up partial sums and applies the epilogue; a thread computes a vector of channels.

    Attributes:
        num_outputs: Number of outputs.
        channels: Channels, which are the innermost axis of the output.
        vector: Neighbouring channels per thread.
        num_parts: Partial sums per output.
        locate: Function from a part and an output's index to the index of its partial sum in the workspace.
        num_threads: Threads per CTA.
        uses_pdl: Whether the kernel may start before the previous launch ends.
    """

    num_outputs: int
    channels: int
    vector: int
    num_parts: int
    locate: Callable[[Expr, Expr], Expr]
    num_threads: int
    uses_pdl: bool

    def emit(self, workspace: Buffer, ops: EpilogueOps, arguments: Mapping[str, Buffer], output: str) -> None:
        """Emit the kernel.

        Args:
            workspace: The partial sums.
            ops: The epilogue.
            arguments: Argument buffers by name.
            output: Name of the argument that receives the results.
        """
        vector, sums, words = self.vector, allocate("sums", 8, "float32"), allocate("words", 8, "uint32")
        with thread_per_item(self.num_outputs // vector, self.num_threads, uses_pdl=self.uses_pdl) as item:
            output_index, channel = item * vector, item % (self.channels // vector) * vector
            fill_zeros(sums, vector)
            with unrolled_loop(self.num_parts, "part") as part:
                load_global(words, workspace, self.locate(part, output_index), vector, is_constant=not self.uses_pdl)
                for e, value in enumerate(unpack(words, vector, ACCUMULATOR)):
                    store(sums, e, sums[e] + value)
            apply_to_vector(ops, arguments, channel, output_index, vector, sums, words)
            store_global(arguments[output], output_index, words, vector)
