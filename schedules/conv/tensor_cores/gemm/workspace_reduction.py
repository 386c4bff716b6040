"""Split reduction through a workspace in global memory: partial sums, and a second kernel that adds them up.

Source: CUTLASS, `include/cutlass/reduction/kernel/reduce_split_k.h`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tvmconv.arithmetic import ceil_div

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
    thread_axis,
    unpack,
    unrolled_loop,
)
from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape
from .epilogue_ops import EpilogueOps, apply_to_vector
from .mma_sync_mainloop import WarpTiling
from .tile_scheduler import WorkTile

REDUCTION_THREADS = 256  # threads per CTA


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


def emit_workspace_reduction(
    shape: ImplicitGemmShape, num_parts: int, ops: EpilogueOps, arguments: Mapping[str, Buffer], workspace: Buffer
) -> None:
    """Emit the kernel that adds up partial sums and applies the epilogue; a thread computes a vector of channels.

    Args:
        shape: The product.
        num_parts: Partial sums per output.
        ops: The epilogue.
        arguments: Argument buffers by name.
        workspace: The partial sums.
    """
    channels = shape.groups * shape.n
    vector = math.gcd(channels, VECTOR_BYTES // shape.itemsize)
    vectors_per_pixel = channels // vector
    num_vectors = shape.m * vectors_per_pixel
    totals, words = allocate("total", 8, "float32"), allocate("words", 8, "uint32")
    grid = thread_axis(ceil_div(num_vectors, REDUCTION_THREADS), "blockIdx.x")
    with grid as cta, thread_axis(REDUCTION_THREADS, "threadIdx.x") as thread:
        index = cta * REDUCTION_THREADS + thread
        pixel, channel = index // vectors_per_pixel, index % vectors_per_pixel * vector
        with if_(True if num_vectors % REDUCTION_THREADS == 0 else index < num_vectors):
            fill_zeros(totals, vector)
            with unrolled_loop(num_parts, "g") as part:
                load_global(words, workspace, (part * shape.m + pixel) * channels + channel, vector)
                for e, value in enumerate(unpack(words, vector, "float32")):
                    store(totals, e, totals[e] + value)
            output_index = pixel * channels + channel
            apply_to_vector(ops, arguments, channel, output_index, vector, totals, words)
            store_global(arguments["Y"], output_index, words, vector)
