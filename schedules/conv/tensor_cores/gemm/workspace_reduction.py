"""Split reduction through a workspace in global memory: partial sums, and a second kernel that adds them up in order.

Source: CUTLASS, `include/cutlass/reduction/kernel/reduce_split_k.h`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

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
from .epilogue_ops import EpilogueOps, apply_to_pixels, apply_to_vector
from .mma_sync_mainloop import WarpTiling
from .tile_scheduler import WorkTile


def store_partial_sums(
    workspace: Buffer,
    accumulators: Buffer,
    tiling: WarpTiling,
    tile: WorkTile,
    split: Expr,
    shape: ImplicitGemmShape,
    *,
    is_atomic: bool = False,
) -> None:
    """Store the accumulators of a work tile to the workspace (parts, rows, columns of all groups).

    With `is_atomic`, the workspace has one part, to which all parts are added.
    """
    width, pair = math.gcd(shape.n, 2), allocate("partial_pair", 2, "float32")
    part = 0 if is_atomic else split
    m_loop, n_loop = unrolled_loop(tiling.mmas_m, "i"), unrolled_loop(tiling.mmas_n, "j")
    with m_loop as mma_m, n_loop as mma_n, unrolled_loop(2, "h") as half:
        row, column = tiling.row(tile, mma_m, half), tiling.column(tile, mma_n)
        index = (part * shape.m + row) * (shape.groups * shape.n) + tile.group * shape.n + column
        for first in range(0, 2, width):
            with if_(tiling.is_inside(shape, row, column + first)):
                for e in range(width):
                    store(pair, e, accumulators[tiling.accumulator(mma_m, mma_n, half) + first + e])
                store_sums(workspace, index + first, [pair[e] for e in range(width)], is_atomic=is_atomic)


def store_sums(workspace: Buffer, index: Expr, sums: Sequence[Expr], *, is_atomic: bool) -> None:
    """Store neighbouring float32 sums to global memory, or add them to it atomically, in no fixed order."""
    if is_atomic:
        for e, value in enumerate(sums):
            emit_ptx("red.global.add.f32", workspace.access_ptr("rw", offset=index + e), value)
        return
    mnemonic = f"st.global{f'.v{len(sums)}' if len(sums) > 1 else ''}.b32"
    emit_ptx(mnemonic, workspace.access_ptr("w", offset=index), *sums)


def emit_zeros(buffer: Buffer, count: int, num_threads: int) -> None:
    """Emit a kernel that sets the first elements of a float32 array to zero."""
    vector, zeros = math.gcd(count, 4), allocate("zeros", 4, "uint32")
    with thread_per_item(count // vector, num_threads) as item:
        for e in range(vector):
            store(zeros, e, T.uint32(0))
        store_global(buffer, item * vector, zeros, vector)


class OutputVector(NamedTuple):
    """Neighbouring channels of the output that a thread adds up, or neighbouring pixels of a channel."""

    channel: Expr  # first channel
    index: Expr  # index of the first element of the output
    locate: Callable[[Expr], Expr]  # function from a part to the index of the first partial sum in the workspace
    is_inside: Expr = True  # whether the vector lies inside the output


@dataclass(frozen=True)
class WorkspaceReduction:
    """The kernel that adds up partial sums in order and applies the epilogue; each thread computes a vector of outputs.

    On Hopper it may start before the previous launch ends, for which it waits.

    Attributes:
        num_vectors: Number of vectors.
        vector: Channels per vector.
        num_parts: Partial sums per output.
        locate: Function from the index of a thread to its vector.
        num_threads: Threads per CTA.
        has_vectors_of_pixels: Whether a vector has neighbouring pixels of a channel.
    """

    num_vectors: int
    vector: int
    num_parts: int
    locate: Callable[[Expr], OutputVector]
    num_threads: int
    has_vectors_of_pixels: bool = False

    def emit(self, workspace: Buffer, ops: EpilogueOps, arguments: Mapping[str, Buffer], output: str) -> None:
        """Emit the kernel; `output` is the name of the argument that receives the results."""
        vector, sums, words = self.vector, allocate("sums", 8, "float32"), allocate("words", 8, "uint32")
        with thread_per_item(self.num_vectors, self.num_threads, uses_pdl=True) as item:
            position = self.locate(item)
            with if_(position.is_inside):
                fill_zeros(sums, vector)
                with unrolled_loop(self.num_parts, "part") as part:
                    load_global(words, workspace, position.locate(part), vector, is_constant=False)
                    for e, value in enumerate(unpack(words, vector, ACCUMULATOR)):
                        store(sums, e, sums[e] + value)
                apply = apply_to_pixels if self.has_vectors_of_pixels else apply_to_vector
                apply(ops, arguments, position.channel, position.index, vector, sums, words)
                store_global(arguments[output], position.index, words, vector)
