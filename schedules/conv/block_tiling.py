"""Block tiles for `direct` and `implicit_gemm`, with optional sliced reductions and pipelines.

A block computes a tile of the output. For each k-tile, its threads copy the operands to shared memory and multiply
them. Two options keep more of the GPU busy:

* Slices: several threads share the reduction of one output, each with a slice of the input channels of every k-tile,
  and add up their sums in shared memory at the end. This gives more warps per tile, for small images.
* Pipeline: the next k-tile's operands are loaded while this one is computed, into registers or by asynchronous copies
  (cp.async since sm_80; synchronous elsewhere).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvmconv.space import Tile
from tvmconv.target import BANK_BYTES, NUM_BANKS
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from ..primitives import (
    bind_grid,
    bind_innermost,
    block_loops,
    inline_consumers,
    order_channels_innermost,
    split_tiles,
    unroll,
)
from .direct_config import PIPELINE_COPIES, VECTOR_ELEMENTS, DirectTileConfig

MAX_UNROLLED_COPIES = 64  # per thread and k-tile

LoopOrder = Callable[[list[LoopRV]], list[LoopRV]]


class LoopNest(NamedTuple):
    """Loops of the multiplying block inside its threads: over the k-tiles, and over the taps of a k-tile."""

    step_loops: list[LoopRV]
    tap_loops: list[LoopRV]


class ReductionBlocks(NamedTuple):
    """Blocks of a convolution, and the loops of the multiplying block that are tiled."""

    multiply_block: SBlockRV
    reduce_block: SBlockRV | None  # the block that adds up the slices; None without slices
    outer_loop: LoopRV  # the loop that is not tiled: images, groups
    output_loops: list[LoopRV]  # loops over the output, channels first
    reduction_loops: list[LoopRV]  # loops over the reduction, input channels first


def split_reduction(
    s: Schedule,
    block: SBlockRV,
    outer_loop: LoopRV,
    output_loops: list[LoopRV],
    reduction_loops: list[LoopRV],
    config: DirectTileConfig,
    *,
    stores_output: bool = True,
) -> ReductionBlocks:
    """Accumulate a block in registers, with each output's reduction shared among `config.sliced_k` threads.

    Channels come first among the loops. Unless `stores_output`, the sums are partial ones for a second kernel.
    """
    multiply_block, reduce_block = block, None
    if config.sliced_k > 1:
        channel_loop, *other_loops = reduction_loops
        step_loop, slice_loop, tap_loop = s.split(channel_loop, [None, config.sliced_k, config.reduction[0].tap])
        s.reorder(slice_loop, outer_loop, *output_loops, step_loop, tap_loop, *other_loops)
        multiply_block, reduce_block = s.rfactor(slice_loop, 0), block
        s.set_scope(s.cache_write(multiply_block, 0, "local"), 0, "shared")
    store = s.cache_write(block, 0, "local")
    if stores_output:
        inline_consumers(s, store)
    return ReductionBlocks(multiply_block, reduce_block, outer_loop, output_loops, reduction_loops)


def tile_output(s: Schedule, blocks: ReductionBlocks, config: DirectTileConfig) -> LoopNest:
    """Split the output into blocks, virtual threads, threads and elements; return the loops around the products."""
    if blocks.reduce_block is not None:
        return _tile_with_sliced_k(s, blocks.multiply_block, blocks.reduce_block, config)
    store = s.get_consumers(blocks.multiply_block)[0]
    block_loops, vthread_loops, thread_loops, point_loops = split_tiles(s, blocks.output_loops, config.output)
    step_loops, tap_loops = split_tiles(s, blocks.reduction_loops, config.reduction)
    threads = order_channels_innermost(thread_loops)
    s.reorder(blocks.outer_loop, *block_loops, *vthread_loops, *threads, *step_loops, *tap_loops, *point_loops)
    bind_blocks(s, blocks.outer_loop, block_loops)
    bind_innermost(s, "vthread", vthread_loops)
    bind_innermost(s, "threadIdx", thread_loops)
    s.reverse_compute_at(store, threads[-1])
    return LoopNest(step_loops, tap_loops)


def _tile_with_sliced_k(
    s: Schedule, partial_block: SBlockRV, reduce_block: SBlockRV, config: DirectTileConfig
) -> LoopNest:
    """Tile a sliced reduction; after the last k-tile, the threads of a block add up the partial sums of its tile."""
    partial_copy, store = s.get_consumers(partial_block)[0], s.get_consumers(reduce_block)[0]
    num_axes = len(config.output)
    slice_loop, outer_loop, *spatial = s.get_loops(reduce_block)[: 2 + num_axes]  # loops of extent 1 may follow
    tiles = [
        Tile(tile.extent, {"block": tile.block, "vthread": tile.vthread, "inner": tile.thread * tile.local})
        for tile in config.output
    ]
    block, vthread, inner_loops = split_tiles(s, spatial, tiles)
    s.reorder(outer_loop, *block, *vthread, *inner_loops, slice_loop)
    bind_blocks(s, outer_loop, block)
    _each, *thread = s.split(s.fuse(*inner_loops), [None, *reversed(config.thread_shape)])
    bind_innermost(s, "threadIdx", thread)
    s.reverse_compute_at(store, thread[-1])

    # TVM multiplies the size of shared memory by loops bound to virtual threads. They are bound after `compute_at`, so
    # that `partial_copy` covers the tile of one virtual thread.
    s.compute_at(partial_copy, vthread[-1], preserve_unit_loops=True)
    bind_innermost(s, "vthread", vthread)
    slice_loop, *own_axes = block_loops(s, partial_copy)
    tiles = [Tile(tile.size // tile.vthread, {"thread": tile.thread, "local": tile.local}) for tile in config.output]
    thread, point = split_tiles(s, own_axes[-num_axes:], tiles)
    s.reorder(*own_axes[:-num_axes], *thread[1:], slice_loop, thread[0], *point)
    thread[0] = s.fuse(slice_loop, thread[0])
    bind_innermost(s, "threadIdx", thread)

    s.compute_at(partial_block, order_channels_innermost(thread)[-1], preserve_unit_loops=True)
    own_axes = block_loops(s, partial_block)
    num_reduction_loops = len(config.reduction) + 1
    output, (step_rc, tap_rc, *other_loops) = own_axes[:-num_reduction_loops], own_axes[-num_reduction_loops:]
    step_loops, tap_loops = split_tiles(s, other_loops, config.reduction[1:]) if other_loops else ([], [])
    loop_nest = LoopNest([step_rc, *step_loops], [tap_rc, *tap_loops])
    s.reorder(*loop_nest.step_loops, *loop_nest.tap_loops, *output)
    return loop_nest


def pipeline_operand_copies(
    s: Schedule,
    multiply_block: SBlockRV,
    copies: Sequence[SBlockRV],
    orders: Sequence[LoopOrder],
    loop_nest: LoopNest,
    config: DirectTileConfig,
) -> None:
    """Copy the operands to shared memory for each k-tile, with a pipeline if configured, and unroll the products.

    Each of `orders` puts the axes of a copy in the operand's memory order.
    """
    step_loop = loop_nest.step_loops[-1] if config.pipeline == "none" else s.fuse(*loop_nest.step_loops)
    for copy, order in zip(copies, orders, strict=True):
        s.compute_at(copy, step_loop, preserve_unit_loops=True)
        element_loop = cooperative_fetch(s, order(block_loops(s, copy)), config)
        if config.copy_order != "contiguous":
            unroll(s, element_loop, MAX_UNROLLED_COPIES)
        if config.pipeline == "registers":
            s.annotate(copy, "tirx.manifest_shared_memory_local_stage", 1)
    s.decompose_reduction(multiply_block, loop_nest.step_loops[0] if config.pipeline == "none" else step_loop)
    if config.pipeline == "registers":  # load both operands, store both, multiply; loads run one k-tile ahead
        s.annotate(step_loop, "software_pipeline_stage", [0, 0, 0, 0, 1])
        s.annotate(step_loop, "software_pipeline_order", [0, 3, 1, 4, 2])
    elif config.pipeline != "none":
        s.annotate(step_loop, "software_pipeline_stage", [0, 0, PIPELINE_COPIES[config.pipeline] - 1])
        s.annotate(step_loop, "software_pipeline_order", [0, 1, 2])
        s.annotate(step_loop, "software_pipeline_async_stages", [0])
    s.annotate(loop_nest.tap_loops[0], "pragma_auto_unroll_max_step", config.max_unrolled_statements)
    s.annotate(loop_nest.tap_loops[0], "pragma_unroll_explicit", bool(config.unrolls_explicitly))


def set_weight_layout(s: Schedule, w: Conv, copy: SBlockRV, config: DirectTileConfig) -> None:
    """Set the shared-memory layout of a weight's copy (group, output channel, input channel, taps)."""
    if config.weight_layout == "ihwo":
        s.transform_layout(copy, ("write", 0), lambda g, o, *inner: (g, *inner, o))
        if config.weight_pad_words:
            words = BANK_BYTES // get_itemsize(w.storage)  # elements per word
            s.storage_align(copy, 0, axis=-2, factor=NUM_BANKS * words, offset=config.weight_pad_words * words)


def cooperative_fetch(s: Schedule, loops: Sequence[LoopRV], config: DirectTileConfig) -> LoopRV:
    """Distribute a copy among all threads, and return the loop over the elements of one thread."""
    s.reorder(*loops)
    fused_loop = s.fuse(*loops)
    outermost_first = tuple(reversed(config.thread_shape))
    if config.copy_order == "coalesced":
        element_loop, *thread = s.split(fused_loop, [None, *outermost_first])
    elif config.copy_order == "vectorized":
        element_loop, *thread, vector = s.split(fused_loop, [None, *outermost_first, VECTOR_ELEMENTS])
        s.vectorize(vector)
    else:
        *thread, element_loop = s.split(fused_loop, [*outermost_first, None])
    bind_innermost(s, "threadIdx", thread)
    return element_loop


def bind_blocks(s: Schedule, outer_loop: LoopRV, block_loops: Sequence[LoopRV]) -> None:
    """Bind the outer loop and the block loops of two or three axes to the grid."""
    if len(block_loops) > 2:
        outer_loop, block_loops = s.fuse(outer_loop, block_loops[0]), block_loops[1:]
    bind_grid(s, outer_loop, *block_loops)
