"""Split reduction through a workspace in global memory: partial sums, and a second kernel that adds them up in order.

Source: CUTLASS, `include/cutlass/reduction/kernel/reduce_split_k.h`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.workloads.dtypes import ACCUMULATOR

from ....tir_builder import (
    Buffer,
    Expr,
    allocate,
    emit_call,
    emit_ptx,
    fill_zeros,
    if_,
    is_below,
    load_global,
    logical_and,
    store,
    store_global,
    thread_axis,
    thread_per_item,
    unpack,
    unrolled_loop,
)
from ..implicit_gemm_shape import ImplicitGemmShape
from .epilogue_ops import EpilogueOps, apply_to_pixels, apply_to_vector
from .mma_sync_mainloop import WarpTiling
from .tile_scheduler import WorkTile

MIN_THREADS = 132 * 256  # threads below which several share the parts of a vector
MAX_CHAINS = 16  # threads that share the parts of a vector
MIN_PARTS_PER_CHAIN = 4
VECTORS_PER_CTA = 16  # at least, for contiguous loads


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
    joined, values = tiling.joined_columns, allocate("partial_sums_of_row", 2 * tiling.joined_columns, "float32")
    width = math.gcd(shape.n, 2 * joined)
    part = 0 if is_atomic else split
    m_loop, n_loop = unrolled_loop(tiling.mmas_m, "i"), unrolled_loop(tiling.mmas_n // joined, "j")
    with m_loop as mma_m, n_loop as j, unrolled_loop(2, "h") as half:
        row, column = tiling.row(tile, mma_m, half), tiling.column(tile, j * joined)
        index = (part * shape.m + row) * (shape.groups * shape.n) + tile.group * shape.n + column
        for first in range(0, 2 * joined, width):
            with if_(tiling.is_inside(shape, row, column + first)):
                for e in range(width):
                    mma_n, rest = j * joined + (first + e) // 2, (first + e) % 2
                    store(values, e, accumulators[tiling.accumulator(mma_m, mma_n, half) + rest])
                store_sums(workspace, index + first, [values[e] for e in range(width)], is_atomic=is_atomic)


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
    """The kernel that adds up partial sums in a fixed order and applies the epilogue.

    A thread adds up a vector of outputs. If these are too few to fill the GPU and have many parts, several threads
    share them: each adds up a chain of every so many parts, and one of them adds up the chains in order. On Hopper the
    kernel may start before the previous launch ends, for which it waits.

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

        def finish(position: OutputVector) -> None:
            apply = apply_to_pixels if self.has_vectors_of_pixels else apply_to_vector
            bound_ops = ops.bind_tensor_args(arguments, uses_registers=False)
            apply(bound_ops, arguments, position.channel, position.index, vector, sums, words)
            store_global(arguments[output], position.index, words, vector)

        if self.num_chains > 1:
            self._emit_chains(workspace, sums, words, finish)
            return
        with thread_per_item(self.num_vectors, self.num_threads, uses_pdl=True) as item:
            position = self.locate(item)
            with if_(position.is_inside):
                fill_zeros(sums, vector)
                with unrolled_loop(self.num_parts, "part") as part:
                    self._add_part(workspace, position, part, sums, words)
                finish(position)

    @property
    def num_chains(self) -> int:
        """Threads that share the parts of a vector."""
        chains = 1
        while 2 * chains <= min(MAX_CHAINS, self.num_parts // MIN_PARTS_PER_CHAIN) and (
            self.num_vectors * chains < MIN_THREADS
        ):
            chains *= 2
        return chains

    def _emit_chains(
        self, workspace: Buffer, sums: Buffer, words: Buffer, finish: Callable[[OutputVector], None]
    ) -> None:
        """Emit the kernel whose threads share the parts of vectors; neighbouring threads have neighbouring vectors."""
        vector, chains = self.vector, self.num_chains
        width = max(VECTORS_PER_CTA, self.num_threads // chains)  # vectors of a CTA
        with (
            thread_axis(ceil_div(self.num_vectors, width), "blockIdx.x") as block,
            thread_axis(width * chains, "threadIdx.x") as thread,
        ):
            emit_ptx("griddepcontrol.wait")
            emit_ptx("griddepcontrol.launch_dependents")
            shared = allocate("chain_sums", chains * width * vector, "float32", "shared")
            lane, chain = thread % width, thread // width
            item = block * width + lane
            position, exists = self.locate(item), is_below(item, self.num_vectors, width)
            fill_zeros(sums, vector)
            steps = unrolled_loop(ceil_div(self.num_parts, chains), "step")
            with if_(logical_and(exists, position.is_inside)), steps as step:
                part = step * chains + chain
                with if_(is_below(part, self.num_parts, chains)):
                    self._add_part(workspace, position, part, sums, words)
            for e in range(vector):
                store(shared, (chain * vector + e) * width + lane, sums[e])
            emit_call(T.cuda.cta_sync())
            with if_(logical_and(chain == 0, exists, position.is_inside)):
                for other in range(1, chains):
                    for e in range(vector):
                        store(sums, e, sums[e] + shared[(other * vector + e) * width + lane])
                finish(position)

    def _add_part(self, workspace: Buffer, position: OutputVector, part: Expr, sums: Buffer, words: Buffer) -> None:
        load_global(words, workspace, position.locate(part), self.vector, is_constant=False)
        for e, value in enumerate(unpack(words, self.vector, ACCUMULATOR)):
            store(sums, e, sums[e] + value)
