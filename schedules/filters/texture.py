"""The image through texture fetches: the border's zeros come from the hardware, without a test in the code.

A texture has elements of one, two or four values, whereas an image has any number of channels. A row of the texture is
therefore an image row with interleaved channels, and a tap to the right is `channels` texels further on. Texels outside
are zero in the texture's border mode; a row ends with its last pixel, so this is also the image's border.

The L1 cache serves fetches like other loads, but through the texture units: an SM has four, each of which fetches one
texel per clock, whereas a load reads 32 words. It is for CUDA only.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx
from tvm.ir import Call, PointerType, PrimType
from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.target import MAX_TEXTURE_HEIGHT, MAX_TEXTURE_WIDTH
from tvmconv.workloads import Filter2d
from tvmconv.workloads.filters_te import declare_correlation

from ..primitives import set_memory_scope, unroll
from .output_tiling import MAX_UNROLLED_TAPS, cache_accumulator, can_place_mask_in_constant_memory


def can_fit_texture(w: Filter2d) -> bool:
    """Whether the image does not exceed the size of a texture, and the mask fits constant memory."""
    return w.W * w.C <= MAX_TEXTURE_WIDTH and w.H <= MAX_TEXTURE_HEIGHT and can_place_mask_in_constant_memory(w)


@schedule("filter2d", device_kinds=("cuda",), condition=can_fit_texture)
def texture(s: Schedule, w: Filter2d, k: Knobs) -> Schedule:
    """Compute one output per thread, with interleaved channels, from texels."""
    threads_x = k.choice("threads_x", (8, 16, 32, 64, 128), default=32)
    threads_y = k.choice("threads_y", (1, 2, 4, 8), default=8)
    s = Schedule(te.create_prim_func(list(_declare_texture_filter(w))))
    set_memory_scope(s, K="constant", X="texture")
    sum_block = cache_accumulator(s)
    line, column, channel, *taps = s.get_loops(sum_block)
    lines, ty = s.split(line, [None, threads_y])
    columns, tx = s.split(s.fuse(column, channel), [None, threads_x])
    s.reorder(lines, columns, ty, tx, *taps)
    s.bind(s.fuse(lines, columns), "blockIdx.x")
    s.bind(ty, "threadIdx.y")
    s.bind(tx, "threadIdx.x")
    s.reverse_compute_at(s.get_consumers(sum_block)[0], tx)
    s.decompose_reduction(sum_block, taps[0])
    unroll(s, tx, MAX_UNROLLED_TAPS)
    return s


def _declare_texture_filter(w: Filter2d) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    """Declare the filter without ghost cells, because the texture of X is zero outside."""
    X = te.placeholder(w.signal_shape, w.dtype, name="X")
    K = te.placeholder(w.mask_shape, w.dtype, name="K")
    image = Call("tirx.address_of", [X(0, 0, 0)], ret_ty=PointerType(PrimType(w.dtype)))

    def fetch_texel(output_index: Sequence[tirx.Expr], tap: Sequence[tirx.Expr]) -> tirx.Expr:
        line, column = (i + j - radius for i, j, radius in zip(output_index, tap, w.radius, strict=False))
        texel_center = (
            index.astype("float32") + tirx.const(0.5, "float32") for index in (column * w.C + output_index[-1], line)
        )
        return tirx.call_pure_extern(w.dtype, "tex2D<float>", image, *texel_center)

    return X, K, declare_correlation(w, K, fetch_texel)
