"""Dot products of four 8-bit integers by one instruction, `dp4a`, in tiles as those of `tiling`.

Channels are contiguous in channels last, so that four of them are a word of 32 bits. `dp4a` multiplies the four bytes
of two words and adds the products to an int32 sum: four multiplications and additions in the time of one. It differs
from `tiling` in three steps:

1. Shared memory has the channels innermost, so that the four bytes lie in one word.
2. `blockize` makes a block of the loop over the bytes of a word before the tiles are split, so that conditions of tiles
   that overhang stay outside of it.
3. `tensorize` replaces that block by the instruction. CUDA has the function `__dp4a`. For OpenCL, which lacks it, the
   source has a function of that name in plain C.

GPUs have it since sm_61. Tensor cores multiply integers faster, so that searches leave this schedule out.
"""

# Annotations of TVMScript are calls, which a type checker does not know.
# mypy: disable-error-code="valid-type"

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm.s_tir import Schedule, TensorIntrin
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads import Conv2d
from tvmconv.workloads.dtypes import INT8
from tvmconv.workloads.layout import CHANNELS_LAST

from .. import tvm_script
from ..primitives import bind, bind_grid, block_loops, order_channels_innermost, split_tiles
from .axis_tiles import AxisTiles, declare_tile_knobs
from .reduction import accumulate_in_registers, cache_operands, get_conv_loops, sort_axes_by_memory

if TYPE_CHECKING:
    from tvm.s_tir.schedule import SBlockRV

BYTES = 4  # of a word, which `dp4a` multiplies at once
INTRINSIC = "tvmconv_dp4a"
OUTPUT_FACTORS = {"c": {"thread": 16, "local": 4}, "h": {"thread": 2, "local": 2}, "w": {"thread": 8, "local": 2}}
REDUCTION_FACTORS = {"rc": {"word": 8}, "rh": {"tap": 1}, "rw": {"tap": 3}}  # a step is staged in shared memory


def has_words_of_channels(w: Conv2d) -> bool:
    """Whether channels are last and input channels of a group are multiples of 4."""
    return w.input_layout == w.output_layout == CHANNELS_LAST and w.C // w.groups % BYTES == 0


@schedule("conv2d", dtypes=(INT8.name,), condition=has_words_of_channels)
def dp4a(s: Schedule, w: Conv2d, k: Knobs) -> None:
    """Tile outputs as (block, thread, local) and words of input channels as (step, word)."""
    tiles = declare_tile_knobs(k, w, OUTPUT_FACTORS, REDUCTION_FACTORS, BYTES)
    conv = s.get_sblock("sum")
    store = accumulate_in_registers(s)
    shared = cache_operands(s, conv, "shared")
    for copy in shared:
        s.transform_layout(copy, ("write", 0), lambda first, second, c, *taps: (first, second, *taps, c))

    outer, channel, space, depth, taps = get_conv_loops(s, w)
    words, byte = s.split(depth, [None, BYTES])
    s.reorder(outer, channel, *space, words, *taps, byte)
    dot_product = s.blockize(byte)
    block, thread, point = split_tiles(s, (channel, *space), tiles.output)
    step, substep = split_tiles(s, (words, *taps), tiles.reduction)
    threads = order_channels_innermost(thread)
    s.reorder(outer, *block, *threads, *step, *substep, *point)
    bind_grid(s, s.fuse(outer, block[0]), *block[1:])
    bind(s, "threadIdx", *threads)

    s.reverse_compute_at(store, threads[-1])
    for copy in shared:
        s.compute_at(copy, step[-1], preserve_unit_loops=True)
        copy_words(s, w, copy, tiles)
    s.decompose_reduction(dot_product, step[0])
    register_intrinsic()
    s.tensorize(s.get_loops(conv)[-1], INTRINSIC)


def copy_words(s: Schedule, w: Conv2d, copy: SBlockRV, tiles: AxisTiles) -> None:
    """Distribute a copy to shared memory among all threads of the block, a word at a time."""
    *others, channel = sort_axes_by_memory(w, block_loops(s, copy))
    word, byte = s.split(channel, [None, BYTES])
    s.reorder(*others, word, byte)
    c, h, x = (tile.thread for tile in tiles.output)
    _, *threads = s.split(s.fuse(*others, word), [None, h, x, c])
    bind(s, "threadIdx", *threads)
    s.vectorize(byte)


def register_intrinsic() -> None:
    """Register the instruction: what it computes, and the call that computes it."""

    @tvm_script.prim_func(s_tir=True)
    def description(
        A: T.Buffer((4,), "int8", offset_factor=1, align=4, scope="shared"),
        B: T.Buffer((4,), "int8", offset_factor=1, align=4, scope="shared"),
        C: T.Buffer((1,), "int32", offset_factor=1, align=4, scope="local"),
    ) -> None:
        with T.sblock("root"):
            T.reads(C[0], A[0:4], B[0:4])
            T.writes(C[0])
            for i in range(4):
                with T.sblock("update"):
                    byte = T.axis.remap("R", [i])
                    C[0] = C[0] + T.cast(A[byte], "int32") * T.cast(B[byte], "int32")

    @tvm_script.prim_func(s_tir=True)
    def implementation(
        A: T.Buffer((4,), "int8", offset_factor=1, align=4, scope="shared"),
        B: T.Buffer((4,), "int8", offset_factor=1, align=4, scope="shared"),
        C: T.Buffer((1,), "int32", offset_factor=1, align=4, scope="local"),
    ) -> None:
        with T.sblock("root"):
            T.reads(C[0], A[0:4], B[0:4])
            T.writes(C[0])
            C[0] = T.call_pure_extern("__dp4a", A.vload([0], "int8x4"), B.vload([0], "int8x4"), C[0], dtype="int32")

    TensorIntrin.register(INTRINSIC, description, implementation, override=True)
