"""Golden kernels of TMA: tiled and im2col loads, and stores."""

import numpy as np
from golden_parts import KERNELS, LOAD, STORE, GoldenKernel, copy_out, emitted, hash_words, init_mbarriers, one_block
from tvm.script import tirx as T  # noqa: N812

from tvmconv.arithmetic import ceil_div
from tvmconv.builtin import tir_builder as p
from tvmconv.tensor_map import TensorMap, make_im2col_map, make_tiled_map

FILL = 0x01020304  # what shared memory contains where nothing is copied


def count_rows(tensor_map: TensorMap) -> int:
    """Return the number of rows of a box."""
    if tensor_map.is_im2col:
        return tensor_map.box[1]
    steps = zip(tensor_map.box[1:], tensor_map.element_strides[1:], strict=True)
    return int(np.prod([ceil_div(box, step) for box, step in steps]))


def tma_load(tensor_map: TensorMap, at: tuple[int, ...], offsets: tuple[int, ...] = (), *, shift: int = 0):
    """A copy by a tensor map of X at a place; Y is the shared memory as it lies, of rows of the swizzle's width.

    Args:
        tensor_map: Layout of X and of the copy.
        at: Coordinates.
        offsets: Offsets of a filter tap, for im2col.
        shift: Bytes by which the destination lies beside its alignment.
    """
    itemsize = np.dtype(tensor_map.dtype).itemsize
    row_bytes = tensor_map.box[0] * itemsize
    num_words = count_rows(tensor_map) * max(row_bytes, tensor_map.swizzle) // 4
    bar_at = ceil_div(num_words * 4, 1024) * 1024
    mnemonic = LOAD.format(len(tensor_map.extents), ".im2col" if tensor_map.is_im2col else "")

    def emit(buffers, block, thread, x_map):
        bar = block.address(bar_at + 512)
        with p.serial_loop(ceil_div(num_words, 32), "i") as i:
            p.emit_ptx("st.shared.b32", block.address((i * 32 + thread) * 4), T.uint32(FILL))
        p.emit_ptx("fence.proxy.async.shared::cta")
        with p.if_(thread == 0):
            init_mbarriers((bar, 1))
        p.emit_call(T.cuda.cta_sync())
        with p.if_(thread == 0):
            nbytes = count_rows(tensor_map) * row_bytes
            p.emit_ptx("mbarrier.arrive.expect_tx.shared.b64", bar, T.uint32(nbytes))
            taps = [T.Cast("uint16", offset) for offset in offsets]
            p.emit_ptx(mnemonic, block.address(shift), x_map, *at, bar, *taps)
        p.emit_call(T.cuda.mbarrier_wait(bar, 0))
        copy_out(buffers, block, thread, num_words, 32)

    num_elements = tensor_map.nbytes // itemsize
    x = (hash_words(num_elements) % np.uint32(100)).astype(np.float32).astype(tensor_map.dtype)
    return emitted((x,), ((num_words,), "uint32"), one_block(bar_at + 1024, 32, emit, X=tensor_map))


def tma_store(tensor_map: TensorMap, *places: tuple[int, ...]) -> GoldenKernel:
    """A store of the same tile by a tensor map of Y to several places; what no copy writes stays as it is."""
    itemsize = np.dtype(tensor_map.dtype).itemsize
    num_words = count_rows(tensor_map) * max(tensor_map.box[0] * itemsize, tensor_map.swizzle) // 4

    def emit(buffers, block, thread, y_map):
        with p.serial_loop(ceil_div(num_words, 32), "i") as i, p.if_(i * 32 + thread < num_words):
            at = i * 32 + thread
            p.emit_ptx("st.shared.b32", block.address(at * 4), buffers["X"][at])
        p.emit_ptx("fence.proxy.async.shared::cta")
        p.emit_call(T.cuda.cta_sync())
        with p.if_(thread == 0):
            for at in places:
                p.emit_ptx(STORE.format(len(at)), y_map, *at, block.address(0))
                p.emit_ptx("cp.async.bulk.commit_group")
            p.emit_ptx("cp.async.bulk.wait_group.read", 1)
            p.emit_ptx("cp.async.bulk.wait_group", 0)

    values = (hash_words(num_words * 4 // itemsize) % np.uint32(100)).astype(np.float32).astype(tensor_map.dtype)
    y = ((tensor_map.nbytes // itemsize,), tensor_map.dtype)
    return emitted((values.view(np.uint32),), y, one_block(num_words * 4 + 1024, 32, emit, Y=tensor_map))


PLACES = {"inside": (8, 1, 1), "below": (-8, -1, -1), "beyond": (56, 4, 3)}
for swizzle, columns in ((0, 24), (32, 16), (64, 32), (128, 64), (64, 16), (128, 32)):
    tiles = make_tiled_map("float16", 2, (72, 7, 5), (72, 7 * 72), (columns, 5, 3), swizzle)
    for place, at in PLACES.items():
        KERNELS[f"tma_load_tiled_{columns}_of_{swizzle}_{place}"] = tma_load(tiles, at)
    KERNELS[f"tma_store_tiled_{columns}_of_{swizzle}"] = tma_store(tiles, (8, 1, 0), (56, 4, 3))
tiles = make_tiled_map("float16", 2, (72, 7, 5), (72, 7 * 72), (32, 5, 3), 64)
KERNELS |= {
    "tma_store_below_columns": tma_store(tiles, (-8, 1, 1)),
    "tma_store_below_rows": tma_store(tiles, (8, -1, 1)),
    "tma_store_below_planes": tma_store(tiles, (8, 1, -1)),
    "tma_store_beyond_all": tma_store(tiles, (72, 1, 1)),
    "tma_load_1d": tma_load(TensorMap("float32", (40,), (), (16,), (1,), 0), (28,)),
    "tma_load_2d_floats": tma_load(make_tiled_map("float32", 4, (40, 9), (40,), (32, 8), 128), (12, 3)),
    "tma_load_2d_odd_extent": tma_load(make_tiled_map("bfloat16", 2, (37, 9), (40,), (32, 8), 64), (16, 2)),
    "tma_load_2d_padded_rows": tma_load(make_tiled_map("float32", 4, (12, 9), (20,), (8, 4), 32), (4, -2)),
    "tma_load_3d_broadcast": tma_load(TensorMap("float16", (16, 4, 3), (32, 32), (16, 4, 3), (1, 1, 1), 32), (0, 0, 0)),
    "tma_load_4d": tma_load(make_tiled_map("float32", 4, (8, 3, 4, 2), (8, 24, 96), (8, 2, 2, 2), 32), (0, 2, -1, 1)),
    "tma_load_5d": tma_load(
        make_tiled_map("float16", 2, (8, 3, 2, 3, 2), (8, 24, 48, 144), (8, 2, 2, 2, 2), 0), (0, -1, 1, 2, 0)
    ),
    "tma_load_steps": tma_load(TensorMap("float16", (32, 9), (64,), (32, 8), (1, 2), 64), (0, 1)),
    "tma_load_steps_odd": tma_load(TensorMap("float16", (32, 9, 7), (64, 640), (32, 7, 5), (1, 3, 2), 64), (0, -1, 2)),
    "tma_store_steps": tma_store(TensorMap("float32", (8, 9), (32,), (8, 8), (1, 2), 32), (0, 1), (0, 6)),
    "tma_store_1d": tma_store(TensorMap("float32", (40,), (), (16,), (1,), 0), (4,), (32,)),
    "tma_store_4d": tma_store(
        make_tiled_map("float16", 2, (16, 3, 4, 2), (16, 48, 192), (16, 2, 2, 2), 32), (0, 2, 1, 1), (0, 0, 3, 0)
    ),
    # The hardware refuses these, except the copy to 128 bytes, and the stores from negative coordinates above.
    "tma_load_between_chunks": tma_load(tiles, (4, 1, 1)),
    "tma_load_1d_between_chunks": tma_load(TensorMap("float32", (40,), (), (16,), (1,), 0), (30,)),
    "tma_load_2d_between_chunks": tma_load(make_tiled_map("float32", 4, (40, 9), (40,), (32, 8), 128), (5, 3)),
    "tma_load_to_16_bytes": tma_load(tiles, (8, 1, 1), shift=16),
    "tma_load_to_64_bytes": tma_load(tiles, (8, 1, 1), shift=64),
    "tma_load_to_128_bytes": tma_load(make_tiled_map("float32", 4, (40, 9), (40,), (32, 4), 128), (4, 3), shift=128),
    "tma_store_1d_between_chunks": tma_store(TensorMap("float32", (40,), (), (16,), (1,), 0), (3,)),
}

for stride, dilation, padding in ((1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 1, 0)):
    out = tuple((extent + 2 * padding - 2 * dilation - 1) // stride + 1 for extent in (11, 9))
    pixels = make_im2col_map("float16", 2, (72, 11, 9, 2), (64, 48), (stride, stride), (-padding, -padding), out, 128)
    for offsets in ((0, 0), (1, 2)):
        for first in ((64, 1, 2, 0), (0, 3, 1, 1), (0, 0, 0, 2)):
            at = (first[0], *(first[1 + i] * stride - padding for i in range(2)), first[3])
            name = f"tma_load_im2col_s{stride}_d{dilation}_p{padding}_offset{offsets[0]}{offsets[1]}_image{first[3]}"
            KERNELS[name] = tma_load(pixels, at, tuple(offset * dilation for offset in offsets))
KERNELS |= {
    "tma_load_im2col_3d": tma_load(
        make_im2col_map("float32", 4, (8, 13, 3), (8, 20), (2,), (-1,), (7,), 32), (0, 5, 1), (2,)
    ),
    "tma_load_im2col_5d": tma_load(
        make_im2col_map("bfloat16", 2, (16, 5, 4, 3, 2), (16, 40), (1, 2, 1), (-1, -1, 0), (5, 2, 2), 0),
        (0, 2, 1, 1, 0),
        (1, 0, 1),
    ),
    "tma_load_im2col_narrow": tma_load(
        make_im2col_map("float16", 2, (72, 11, 9, 2), (16, 20), (1, 1), (-1, -1), (11, 9), 128), (16, 2, 3, 0), (1, 1)
    ),
    "tma_load_im2col_between_chunks": tma_load(
        make_im2col_map("float16", 2, (72, 11, 9, 2), (16, 20), (1, 1), (-1, -1), (11, 9), 32), (4, 2, 3, 0), (1, 1)
    ),
    "tma_load_im2col_before_box": tma_load(
        make_im2col_map("float16", 2, (72, 11, 9, 2), (16, 20), (1, 1), (-1, -1), (11, 9), 32), (0, -2, 3, 0), (1, 1)
    ),
    "tma_load_im2col_behind_box": tma_load(
        make_im2col_map("float16", 2, (72, 11, 9, 2), (16, 20), (1, 1), (-1, -1), (11, 9), 32), (0, 10, 3, 0), (1, 1)
    ),
    "tma_load_im2col_between_strides": tma_load(
        make_im2col_map("float16", 2, (72, 11, 9, 2), (16, 20), (2, 2), (-1, -1), (6, 5), 32), (0, 2, 3, 0), (1, 1)
    ),
}
