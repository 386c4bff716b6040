"""Only the tile itself in shared memory: the halo is read where it is needed, through the L2 cache.

It differs from `halo_threads` in that the block is as large as the output tile and copies that tile alone, in one step,
one element per thread, without a guard; for an image, one channel at a time. The halo belongs to the tiles of other
blocks, so its elements are probably in the L2 cache, and are read from there for each tap. The copy is the simplest
possible, but each tap tests where its element is, and warps at the tile's edge diverge.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx
from tvm.s_tir import Schedule

from tvmconv.arithmetic import ceil_div
from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads.filters import Filter
from tvmconv.workloads.filters_te import declare_correlation

from ..primitives import set_memory_scope
from .output_tiling import cache_accumulator, can_place_mask_in_constant_memory, declare_block_knobs, tile_output

TirIndices = Sequence[tirx.Expr]


@schedule("filter1d", "filter2d", condition=can_place_mask_in_constant_memory)
def caching(s: Schedule, w: Filter, k: Knobs) -> Schedule:
    """Compute as many samples or pixels per block as it has threads."""
    threads = declare_block_knobs(k, w)
    s = Schedule(te.create_prim_func(list(_declare_tiled_filter(w, threads))))
    sum_block = cache_accumulator(s)
    copy = s.get_sblock("tiles")
    s.set_scope(copy, 0, "shared")
    tile_output(s, sum_block, threads, threads, copy)
    set_memory_scope(s, K="constant")
    return s


def _declare_tiled_filter(w: Filter, tile_sizes: Sequence[int]) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    """Declare the filter with a stage `tiles` instead of `padded`: X as tiles (blocks, positions, channels).

    The last tile of an axis is padded with zeros.
    """
    X = te.placeholder(w.signal_shape, w.dtype, name="X")
    K = te.placeholder(w.mask_shape, w.dtype, name="K")
    num_axes = len(tile_sizes)
    radius = w.radius[-num_axes:]
    blocks = [ceil_div(n, size) for n, size in zip(w.signal_shape, tile_sizes, strict=False)]

    def read_signal(coords: TirIndices, channel: TirIndices) -> tirx.Expr:
        input_index = (*coords, *channel)
        return te.if_then_else(_is_inside(coords, w.signal_shape[:num_axes]), X[input_index], tirx.const(0.0, w.dtype))

    def tile_element(*tile_index: tirx.Var) -> tirx.Expr:
        block, tile_coords = tile_index[:num_axes], tile_index[num_axes : 2 * num_axes]
        channel = tile_index[2 * num_axes :]
        return read_signal([b * size + i for b, size, i in zip(block, tile_sizes, tile_coords, strict=True)], channel)

    tiles = te.compute((*blocks, *tile_sizes, *w.signal_shape[num_axes:]), tile_element, name="tiles")

    def read_input(output_index: TirIndices, tap: TirIndices) -> tirx.Expr:
        tap_offsets = [j - r for j, r in zip(tap, radius, strict=True)]
        block = [i // size for i, size in zip(output_index, tile_sizes, strict=False)]
        tile_coords = [i % size + d for i, size, d in zip(output_index, tile_sizes, tap_offsets, strict=False)]
        tile_index = (*block, *tile_coords, *output_index[num_axes:])
        global_value = read_signal(
            [i + d for i, d in zip(output_index, tap_offsets, strict=False)], output_index[num_axes:]
        )
        return te.if_then_else(_is_inside(tile_coords, tile_sizes), tiles[tile_index], global_value)

    return X, K, declare_correlation(w, K, read_input)


def _is_inside(coords: TirIndices, extents: Sequence[int]) -> tirx.Expr:
    return te.all(*(te.all(i >= 0, i < extent) for i, extent in zip(coords, extents, strict=True)))
