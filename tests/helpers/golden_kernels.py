"""One small kernel for each variant of an instruction that the emulator executes.

The same TIR is emulated and compiled for sm_90a, where `golden_record` records what the hardware computes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with NumPy
import numpy as np
from tvm.script import tirx as T  # noqa: N812

import tvmconv as tc
from tvmconv import devices
from tvmconv.arithmetic import ceil_div
from tvmconv.builtin import tir_builder as p
from tvmconv.compiler.device_lowering import lower_module
from tvmconv.compiler.lowered_module import LoweredModule
from tvmconv.tensor_map import TensorMap, make_im2col_map, make_tiled_map

LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global{}.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.{}d.global.shared::cta.bulk_group"


@dataclass(frozen=True)
class GoldenKernel:
    """A kernel and its inputs."""

    inputs: tuple[np.ndarray, ...]  # values of the arguments but the output
    lower: Callable[[], LoweredModule]
    # absolute difference that the order and precision of sums or approximate functions explain, relative to the largest
    # output; 0 where the emulator has to agree bit by bit
    tolerance: float = 0


def lower_arrays(arrays: dict[str, tuple[tuple[int, ...], str]], emit: Callable[[dict[str, Any]], None]):
    """Lower a kernel of arrays, (shape, dtype) by name, that a function emits from the buffers by name."""
    signature = SimpleNamespace(
        argument_names=list(arrays),
        argument_shapes=[shape for shape, _ in arrays.values()],
        argument_dtypes=[dtype for _, dtype in arrays.values()],
    )
    return lower_module(p.build_schedule(signature, emit).mod, devices.find_device("sm_90a").make_target())


def emitted(
    inputs: tuple[np.ndarray, ...],
    output: tuple[tuple[int, ...], str],
    emit: Callable[[dict[str, Any]], None],
    tolerance: float = 0,
) -> GoldenKernel:
    """A kernel of the values of X, and of W if they are given, to Y of a shape and dtype, that a function emits."""
    arrays = {name: (values.shape, values.dtype.name) for name, values in zip("XW", inputs, strict=False)}
    arrays["Y"] = output
    return GoldenKernel(inputs, lambda: lower_arrays(arrays, emit), tolerance)


KERNELS: dict[str, GoldenKernel] = {}


# --- values: reproducible without a random generator, whose stream may change with NumPy's version ---


def hash_words(count: int, seed: int = 1) -> np.ndarray:
    """Words without a pattern."""
    words = np.arange(count, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(seed * 40503 + 1)
    for shift, factor in ((15, 2246822519), (13, 3266489917), (16, 668265263)):
        words = (words ^ words >> np.uint32(shift)) * np.uint32(factor)
    return words ^ words >> np.uint32(16)


def small_integers(shape: tuple[int, ...], dtype: str, seed: int = 1, limit: int = 2) -> np.ndarray:
    """Integers from -limit to limit, whose products and sums are exact in any order."""
    words = hash_words(int(np.prod(shape)), seed) % np.uint32(2 * limit + 1)
    return (words.astype(np.float32) - limit).astype(dtype).reshape(shape)


def fractions(shape: tuple[int, ...], dtype: str, seed: int = 1) -> np.ndarray:
    """Numbers between -1 and 1 with all bits of the mantissa."""
    values = hash_words(int(np.prod(shape)), seed).astype(np.float64) / 2**31 - 1
    return values.astype(np.float32).astype(dtype).reshape(shape)


# --- parts of kernels ---


class Block:
    """A block's shared memory, of which `address` gives the address of a byte."""

    def __init__(self, nbytes: int) -> None:
        self.smem = p.allocate("smem", nbytes // 4, "uint32", "shared.dyn")
        self.base = p.allocate("base", 1, "uint32")
        p.store(self.base, 0, T.cuda.cvta_generic_to_shared(self.smem.access_ptr("rw")))

    def address(self, at: Any) -> Any:
        return self.base[0] + p.to_uint32(at)


def one_block(nbytes: int, num_threads: int, emit: Callable[..., None], **tensor_maps: TensorMap):
    """Return an emitter of a kernel of one block; `emit` receives buffers, the block, the thread and tensor maps."""

    def emit_kernel(buffers: dict[str, Any]) -> None:
        maps = [p.declare_tensor_map(f"{name}_map", buffers[name], each) for name, each in tensor_maps.items()]
        with p.thread_axis(1, "blockIdx.x"), p.thread_axis(num_threads, "threadIdx.x") as thread:
            emit(buffers, Block(nbytes), thread, *maps)

    return emit_kernel


def init_mbarriers(*barriers: tuple[Any, int]) -> None:
    """Initialize mbarriers of (address, count); the calling thread has to be the only one."""
    for address, count in barriers:
        p.emit_ptx("mbarrier.init.shared.b64", address, T.uint32(count))
    p.emit_ptx("fence.mbarrier_init.release.cluster")


def load_word(block: Block, at: Any, space: str = "shared") -> Any:
    word = p.allocate("word", 1, "uint32")
    p.emit_ptx(f"ld.{space}.b32", word[0], at if space != "shared" else block.address(at))
    return word[0]


def copy_out(buffers: dict[str, Any], block: Block, thread: Any, num_words: int, num_threads: int) -> None:
    """Copy the first words of shared memory to Y."""
    with p.serial_loop(ceil_div(num_words, num_threads), "i") as i:
        at = i * num_threads + thread
        with p.if_(at < num_words):
            p.store(buffers["Y"], at, load_word(block, at * 4))


# --- TMA loads and stores ---


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


# --- wgmma ---

WGMMA_TYPES = {"f16": "float16", "bf16": "bfloat16", "tf32": "float32", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


def wgmma(
    a_type: str,
    n: int,
    swizzle: int,
    b_type: str | None = None,
    *,
    kind: str = "integers",
    signs=(1, 1),
    keeps=True,
    fence=True,
) -> GoldenKernel:
    """A product of X, 64 × k, and the transpose of W, n × k, that threads have stored as rows of `swizzle` bytes.

    Args:
        a_type: PTX type of X.
        n: Rows of W.
        swizzle: Bytes of a row, which are swizzled; 0 for core matrices of 8 rows × 16 bytes, with k of 64 bytes.
        b_type: PTX type of W, `a_type` by default.
        kind: Values: "integers" with exact sums, or "fractions".
        signs: Factors of X and W in the product.
        keeps: Whether all products but the first are added to the accumulators.
        fence: Whether a fence is between the stores and wgmma; without it, the kernel is wrong.
    """
    b_type = b_type or a_type
    itemsize = np.dtype(WGMMA_TYPES[a_type]).itemsize
    row_bytes = swizzle or 64
    k = row_bytes // itemsize
    make = small_integers if kind == "integers" else fractions
    x, w = make((64, k), WGMMA_TYPES[a_type]), make((n, k), WGMMA_TYPES[b_type], 2)
    mnemonic = f"wgmma.mma_async.sync.aligned.m64n{n}k{32 // itemsize}.f32.{a_type}.{b_type}"
    transposed = (0, 0) if itemsize == 2 else ()
    tiles = {"X": (64, 0), "W": (n, ceil_div(64 * row_bytes, 1024) * 1024)}
    mode = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle]

    def emit(buffers, block, thread):
        acc = p.allocate("acc", n // 2, "float32")
        for name, (rows, first) in tiles.items():
            num_chunks = row_bytes // 16
            with p.serial_loop(ceil_div(rows * num_chunks, 128), "i") as i:
                row, chunk = (i * 128 + thread) // num_chunks, (i * 128 + thread) % num_chunks
                if swizzle:
                    swizzled = T.bitwise_xor(chunk, row // (128 // swizzle) % num_chunks)
                    place = first + row * row_bytes + swizzled * 16
                else:
                    place = first + chunk * (rows * 16) + row * 16
                with p.if_(row < rows):
                    words = [buffers[name][row * (row_bytes // 4) + chunk * 4 + e] for e in range(4)]
                    p.emit_ptx("st.shared.v4.b32", block.address(place), *words)
        if fence:
            p.emit_ptx("fence.proxy.async")
        p.emit_call(T.cuda.cta_sync())
        p.emit_ptx("wgmma.fence.sync.aligned")
        for step in range(row_bytes // 32):
            descriptors = []
            for rows, first in tiles.values():
                leading, stride = (16, 8 * swizzle) if swizzle else (rows * 16, 128)
                start = first + step * (32 if swizzle else 2 * rows * 16)
                low = T.shift_right(block.address(start), T.uint32(4)) | T.uint32(leading >> 4 << 16)
                high = T.Cast("uint64", T.uint32(stride >> 4 | mode << 30))
                descriptors.append(T.bitwise_or(T.Cast("uint64", low), T.shift_left(high, T.uint64(32))))
            sums = [acc[e] for e in range(n // 2)]
            p.emit_ptx(mnemonic, *sums, *descriptors, keeps and step > 0, *signs, *transposed)
        p.emit_ptx("wgmma.commit_group.sync.aligned")
        p.emit_ptx("wgmma.wait_group.sync.aligned", 0)
        for i in range(n // 2):
            row, column = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2
            p.store(buffers["Y"], row * n + column, acc[i])

    words = tuple(values.reshape(-1).view(np.uint8).view(np.uint32) for values in (x, w))
    # Tensor cores truncate aligned products; those of 8 bits keep 13 bits of the fraction.
    tolerance = 0 if kind == "integers" else 1e-3 if itemsize == 1 else 5e-7
    return emitted(words, ((64 * n,), "float32"), one_block(tiles["W"][1] + n * row_bytes + 1024, 128, emit), tolerance)


for number, a_type in enumerate(WGMMA_TYPES):
    for swizzle in (0, 32, 64, 128):
        n = (8, 24, 16, 40)[(number + swizzle // 32) % 4]
        KERNELS[f"wgmma_{a_type}_n{n}_swizzle{swizzle}"] = wgmma(a_type, n, swizzle)
    KERNELS[f"wgmma_{a_type}_fractions"] = wgmma(a_type, 16, 128, kind="fractions")
for n in (8, 48, 72, 96, 128, 184, 256):
    KERNELS[f"wgmma_f16_n{n}"] = wgmma("f16", n, 32)
KERNELS |= {
    "wgmma_e4m3_e5m2": wgmma("e4m3", 8, 32, "e5m2"),
    "wgmma_e5m2_e4m3": wgmma("e5m2", 8, 32, "e4m3"),
    "wgmma_negated_a": wgmma("f16", 8, 64, signs=(-1, 1)),
    "wgmma_negated_both": wgmma("bf16", 8, 64, signs=(-1, -1)),
    "wgmma_overwriting": wgmma("f16", 8, 64, keeps=False),
}


# --- mma.sync, ldmatrix and stmatrix ---


def mma(size: str, kind: str, values: str) -> GoldenKernel:
    """A product of fragments, of which each lane loads and stores its own registers."""
    dtype = WGMMA_TYPES[kind]
    k, packed = int(size.rpartition("k")[2]), 4 // np.dtype(dtype).itemsize
    num_a, num_b = 16 * k // 32 // packed, 8 * k // 32 // packed
    make = small_integers if values == "integers" else fractions
    a, b, c = make((32 * num_a * packed,), dtype), make((32 * num_b * packed,), dtype, 2), make((128,), "float32", 3)
    x = np.concatenate([a.view(np.uint8), b.view(np.uint8)]).view(np.uint32)

    def emit(buffers, block, thread):
        a, b = p.allocate("a", num_a, "uint32"), p.allocate("b", num_b, "uint32")
        d = p.allocate("d", 4, "float32")
        for e in range(num_a):
            p.store(a, e, buffers["X"][thread * num_a + e])
        for e in range(num_b):
            p.store(b, e, buffers["X"][32 * num_a + thread * num_b + e])
        for e in range(4):
            p.store(d, e, buffers["W"][thread * 4 + e])
        registers = ([d[e] for e in range(4)], [a[e] for e in range(num_a)], [b[e] for e in range(num_b)])
        mnemonic = f"mma.sync.aligned.{size}.row.col.f32.{kind}.{kind}.f32"
        p.emit_ptx(mnemonic, *registers[0], *registers[1], *registers[2], *registers[0])
        for e in range(4):
            p.store(buffers["Y"], thread * 4 + e, d[e])

    tolerance = 0 if values == "integers" else 5e-7
    return emitted((x, c), ((128,), "float32"), one_block(16, 32, emit), tolerance)


for size, kind in (
    *(("m16n8k16", "f16"), ("m16n8k8", "f16"), ("m16n8k16", "bf16")),
    *(("m16n8k8", "bf16"), ("m16n8k8", "tf32"), ("m16n8k4", "tf32")),
):
    for values in ("integers", "fractions"):
        KERNELS[f"mma_{size}_{kind}_{values}"] = mma(size, kind, values)


def matrices(count: int, instruction: str, *, is_transposed: bool) -> GoldenKernel:
    """Matrices that a warp loads or stores at rows in a permuted order, of which each lane has a register."""
    shape = f"sync.aligned.m8n8.x{count}{'.trans' if is_transposed else ''}.shared.b16"

    def emit(buffers, block, thread):
        r = p.allocate("r", 4, "uint32")
        registers = [r[e] for e in range(count)]
        row_address = block.address(thread * 5 % 32 * 16)
        if instruction == "ldmatrix":
            for e in range(4):
                p.emit_ptx("st.shared.b32", block.address(thread * 16 + e * 4), buffers["X"][thread * 4 + e])
            p.emit_call(T.cuda.warp_sync())
            p.emit_ptx(f"ldmatrix.{shape}", *registers, row_address)
            for e in range(count):
                p.store(buffers["Y"], thread * count + e, r[e])
        else:
            for e in range(4):
                p.emit_ptx("st.shared.b32", block.address(thread * 16 + e * 4), T.uint32(0))
            for e in range(count):
                p.store(r, e, buffers["X"][thread * count + e])
            p.emit_call(T.cuda.warp_sync())
            p.emit_ptx(f"stmatrix.{shape}", row_address, *registers)
            p.emit_call(T.cuda.warp_sync())
            copy_out(buffers, block, thread, 128, 32)

    num_words = 32 * count if instruction == "ldmatrix" else 128
    x = np.arange(256, dtype=np.uint16).view(np.uint32)
    return emitted((x,), ((num_words,), "uint32"), one_block(512, 32, emit))


for instruction in ("ldmatrix", "stmatrix"):
    for count in (1, 2, 4):
        for is_transposed in (False, True):
            name = f"{instruction}_x{count}{'_trans' if is_transposed else ''}"
            KERNELS[name] = matrices(count, instruction, is_transposed=is_transposed)


# --- copies of threads, loads and stores ---


def cp_async(nbytes: int, cache: str, form: str) -> GoldenKernel:
    """Copies of 32 threads to permuted places, in two groups that are awaited one after the other."""

    def emit(buffers, block, thread):
        for e in range(nbytes // 2):  # what is not copied is known: 64 places of `nbytes`
            p.emit_ptx("st.shared.b32", block.address((e * 32 + thread) * 4), T.uint32(0x01020304))
        p.emit_call(T.cuda.cta_sync())
        for group in range(2):
            place = block.address(((thread * 7 + 3) % 32 * 2 + group) * nbytes)
            source = buffers["X"].access_ptr("r", offset=(group * 32 + thread) * (nbytes // 4))
            mnemonic = f"cp.async.{cache}.shared.global"
            if form == "plain":
                p.emit_ptx(mnemonic, place, source, nbytes)
            elif form == "src_size":
                p.emit_ptx(mnemonic, place, source, nbytes, p.to_uint32(thread % (nbytes + 1)))
            else:
                p.emit_ptx(mnemonic, place, source, nbytes, T.ptx.pred(T.Cast("uint32", thread % 3 == 0)))
            p.emit_ptx("cp.async.commit_group")
        for group in range(2):
            p.emit_ptx("cp.async.wait_group", 1 - group)
            p.emit_call(T.cuda.cta_sync())
            for e in range(nbytes // 4):
                at = (thread * 2 + group) * nbytes + e * 4
                p.store(buffers["Y"], (group * 32 + thread) * (nbytes // 4) + e, load_word(block, at))

    num_words = 16 * nbytes
    return emitted((hash_words(num_words),), ((num_words,), "uint32"), one_block(64 * nbytes, 32, emit))


for nbytes, cache in ((4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")):
    for form in ("plain", "src_size", "ignore_src"):
        KERNELS[f"cp_async_{cache}_{nbytes}_{form}"] = cp_async(nbytes, cache, form)


def vectors(suffix: str, num_words: int) -> GoldenKernel:
    """Words that pass through global and shared memory in accesses of `num_words`."""

    def emit(buffers, block, thread):
        r = p.allocate("r", num_words, "uint32")
        registers = [r[e] for e in range(num_words)]
        p.emit_ptx(f"ld.global.nc.{suffix}", *registers, buffers["X"].access_ptr("r", offset=(31 - thread) * num_words))
        p.emit_ptx(f"st.shared.{suffix}", block.address((thread * 5 % 32) * num_words * 4), *registers)
        p.emit_call(T.cuda.cta_sync())
        p.emit_ptx(f"ld.shared.{suffix}", *registers, block.address(thread * num_words * 4))
        p.emit_ptx(f"st.global.{suffix}", buffers["Y"].access_ptr("w", offset=thread * num_words), *registers)

    return emitted((hash_words(32 * num_words),), ((32 * num_words,), "uint32"), one_block(128 * num_words, 32, emit))


def halves() -> GoldenKernel:
    """Accesses of 16 bits."""

    def emit(buffers, block, thread):
        half = p.allocate("half", 1, "uint16")
        p.emit_ptx("ld.global.b16", half[0], buffers["X"].access_ptr("r", offset=31 - thread))
        p.emit_ptx("st.shared.b16", block.address(thread * 5 % 32 * 2), half[0])
        p.emit_call(T.cuda.cta_sync())
        p.emit_ptx("ld.shared.b16", half[0], block.address(thread * 2))
        p.emit_ptx("st.global.b16", buffers["Y"].access_ptr("w", offset=thread), half[0])

    x = hash_words(32).astype(np.uint16)
    return emitted((x,), ((32,), "uint16"), one_block(64, 32, emit))


def misaligned(load: str) -> GoldenKernel:
    """A load of 16 bytes or of rows of 16 bytes, of shared memory that is not aligned to 16 bytes."""

    def emit(buffers, block, thread):
        r = p.allocate("r", 4, "uint32")
        for e in range(5):
            p.emit_ptx("st.shared.b32", block.address((e * 32 + thread) * 4), buffers["X"][thread])
        p.emit_call(T.cuda.cta_sync())
        p.emit_ptx(load, *[r[e] for e in range(4)], block.address(thread * 16 + 4))
        for e in range(4):
            p.store(buffers["Y"], thread * 4 + e, r[e])

    return emitted((hash_words(32),), ((128,), "uint32"), one_block(1024, 32, emit))


KERNELS |= {
    "ld_misaligned": misaligned("ld.shared.v4.b32"),
    "ldmatrix_misaligned": misaligned("ldmatrix.sync.aligned.m8n8.x4.shared.b16"),
    "ld_st_b16": halves(),
    "ld_st_b32": vectors("b32", 1),
    "ld_st_v2": vectors("v2.b32", 2),
    "ld_st_v4": vectors("v4.b32", 4),
}


# --- conversions and arithmetic ---

SPECIAL_BITS = np.array(
    [
        *(0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x00000001, 0x807FFFFF, 0x00800000),
        *(0x3F801000, 0x3F803000, 0x3F800FFF, 0x3F801001, 0x3F801FFF, 0xBF801000, 0x7F7FFFFF, 0xFF7FFFFF),
        *(0x477FE000, 0x477FEFFF, 0x477FF000, 0x477FFFFF, 0x33000000, 0x33000001, 0x33800000, 0x387FC000),
        *(0x3F808000, 0x3F818000, 0x3F807FFF, 0x7F7F8000, 0x387FE000, 0xB8000001, 0xC0490FDB, 0x42F6E979),
    ],
    np.uint32,
)  # zeros, infinities, NaN, subnormal numbers, ties and overflows of TF32, float16 and bfloat16


def converted(mnemonic: str, num_sources: int = 1) -> GoldenKernel:
    """A conversion of float32 to a 32-bit register."""

    def emit(buffers, block, thread):
        r = p.allocate("r", 1, "uint32")
        sources = [T.reinterpret("float32", buffers["X"][(thread + i * 7) % 64]) for i in range(num_sources)]
        p.emit_ptx(mnemonic, r[0], *sources)
        p.store(buffers["Y"], thread, r[0])

    x = np.concatenate([SPECIAL_BITS, fractions((32,), "float32").view(np.uint32)])
    return emitted((x,), ((64,), "uint32"), one_block(16, 64, emit))


def converted_scalar(mnemonic: str, dtype: str, source: str, target: str) -> GoldenKernel:
    """A conversion of numbers of a dtype, in registers of the type `source`, to registers of the type `target`."""

    def emit(buffers, block, thread):
        r = p.allocate("r", 1, target)
        p.emit_ptx(mnemonic, r[0], buffers["X"][thread])
        p.store(buffers["Y"], thread, r[0])

    bits = np.concatenate([SPECIAL_BITS, fractions((32,), "float32").view(np.uint32)])
    with np.errstate(over="ignore"):
        x = bits.view(np.float32).astype(dtype)
    return emitted((x.view(source),), ((64,), target), one_block(16, 64, emit))


KERNELS |= {
    **{f"cvt_tf32_{rounding}": converted(f"cvt.{rounding}.tf32.f32") for rounding in ("rna", "rn", "rz")},
    **{
        f"cvt_{kind}{relu.replace('.', '_')}": converted(f"cvt.rn{relu}.{kind}.f32", 2)
        for kind in ("f16x2", "bf16x2")
        for relu in ("", ".relu")
    },
    "cvt_f32_to_f16": converted_scalar("cvt.rn.f16.f32", "float32", "float32", "float16"),
    "cvt_f16_to_f32": converted_scalar("cvt.f32.f16", "float16", "float16", "float32"),
    "cvt_f32_to_bf16": converted_scalar("cvt.rn.bf16.f32", "float32", "float32", "uint16"),
    "cvt_bf16_to_f32": converted_scalar("cvt.f32.bf16", "bfloat16", "uint16", "float32"),
}


def arithmetic(functions: list[Callable[[Any, Any], Any]], dtype: str, tolerance: float = 0) -> GoldenKernel:
    """Functions of two elements; Y has a row for each."""

    def emit(buffers, block, thread):
        for row, function in enumerate(functions):
            value = function(buffers["X"][thread], buffers["W"][thread])
            p.store(buffers["Y"], row * 64 + thread, T.Cast(dtype, value))

    words = [hash_words(64, seed) for seed in (1, 2)]
    if dtype == "float32":
        inputs = tuple(fractions((64,), dtype, seed) * 4 for seed in (1, 2))
    elif dtype == "int32":
        inputs = (words[0].view(np.int32) >> 3, (words[1].view(np.int32) >> 24) | 1)
    else:
        inputs = (words[0], words[1] | 1)
    return emitted(inputs, ((len(functions) * 64,), dtype), one_block(16, 64, emit), tolerance)


KERNELS |= {
    "arithmetic_int32": arithmetic(
        [
            *(lambda a, b: a + b, lambda a, b: a - b, T.truncdiv, T.truncmod, T.min, T.max),
            *(lambda a, b: T.floordiv(a, 7), lambda a, b: T.floormod(a, 7)),
            *(T.bitwise_and, T.bitwise_or, T.bitwise_xor, lambda a, b: T.shift_right(a, 5)),
            lambda a, b: T.Select(a > b, a, b),
        ],
        "int32",
    ),
    "arithmetic_uint32": arithmetic(
        [
            *(lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, T.min, T.max),
            *(lambda a, b: T.shift_left(a, T.uint32(7)), lambda a, b: T.shift_right(a, T.uint32(7))),
        ],
        "uint32",
    ),
    "arithmetic_float32": arithmetic(
        [
            *(lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, T.min, T.max, lambda a, b: T.floor(a)),
            *(lambda a, b: T.ceil(a), lambda a, b: T.trunc(a), lambda a, b: T.fabs(a)),
        ],
        "float32",
    ),
    "arithmetic_float32_approximate": arithmetic(
        [
            *(lambda a, b: a / b, lambda a, b: T.exp(a), lambda a, b: T.tanh(a), lambda a, b: T.erf(a)),
            *(lambda a, b: T.sigmoid(a), lambda a, b: T.sqrt(T.fabs(a)), lambda a, b: T.log(T.fabs(b))),
        ],
        "float32",
        1e-6,
    ),
}


# --- exchanges within a warp ---


def shuffles(mode: str, dtype: str) -> GoldenKernel:
    """Shuffles of several widths and distances."""
    cases = [(width, distance) for width in (32, 16, 8) for distance in (1, 3, 7)]

    def emit(buffers, block, thread):
        for row, (width, distance) in enumerate(cases):
            operand = (thread * 3 + distance) % 32 if mode == "" else distance
            name = f"tirx.cuda.__shfl{'_' + mode if mode else ''}_sync"
            received = T.call_intrin(dtype, name, T.uint32(0xFFFFFFFF), buffers["X"][thread], operand, width)
            p.store(buffers["Y"], row * 64 + thread, received)

    x = np.arange(64).astype(dtype)
    return emitted((x,), ((len(cases) * 64,), dtype), one_block(16, 64, emit))


def election() -> GoldenKernel:
    """The lane that is elected of a warp, as an expression."""

    def emit(buffers, block, thread):
        p.store(buffers["Y"], thread, T.uint32(0))
        with p.if_(T.cuda.elect_sync()):
            p.store(buffers["Y"], thread, buffers["X"][thread])

    return emitted((hash_words(96),), ((96,), "uint32"), one_block(16, 96, emit))


KERNELS |= {
    f"shfl{mode}_{dtype}": shuffles(mode, dtype) for mode in ("", "up", "down", "xor") for dtype in ("float32",)
}
KERNELS["shflxor_int32"] = shuffles("xor", "int32")
KERNELS["elect_sync"] = election()


# --- barriers ---


def mbarrier_phases(wait: str, arrival: str) -> GoldenKernel:
    """A warp hands words to another through a ring of two stages, whose mbarriers go through several phases."""
    steps, stages = 5, 2

    def emit(buffers, block, thread):
        done, word = p.allocate("done", 1, "uint32"), p.allocate("word", 1, "uint32")

        def barrier(stage, number):
            return block.address(512 + stage * 16 + number * 8)

        def await_phase(address, parity):
            if wait == "helper":
                p.emit_call(T.cuda.mbarrier_wait(address, parity))
                return
            p.store(done, 0, T.uint32(0))
            with p.ir.While(done[0] == T.uint32(0)):
                p.emit_ptx("mbarrier.try_wait.parity.shared.b64", done[0], address, T.Cast("uint32", parity))

        def arrive(address):
            if arrival == "each":
                p.emit_ptx("mbarrier.arrive.shared.b64", address)
                return
            p.emit_call(T.cuda.warp_sync())
            with p.if_(thread % 32 == 0):
                p.emit_ptx("mbarrier.arrive.shared.b64", address, T.uint32(32))

        with p.if_(thread == 0):
            init_mbarriers(*((barrier(stage, number), 32) for stage in range(stages) for number in range(2)))
        p.emit_call(T.cuda.cta_sync())
        with p.serial_loop(steps, "step") as step:
            slot = step % stages
            with p.ir.If(thread < 32):
                with p.ir.Then():
                    await_phase(barrier(slot, 1), step // stages % 2 ^ 1)
                    value = buffers["X"][step * 32 + thread]
                    p.emit_ptx("st.shared.b32", block.address(slot * 128 + thread * 4), value)
                    arrive(barrier(slot, 0))
                with p.ir.Else():
                    await_phase(barrier(slot, 0), step // stages % 2)
                    p.emit_ptx("ld.shared.b32", word[0], block.address(slot * 128 + (63 - thread) * 4))
                    arrive(barrier(slot, 1))
                    p.store(buffers["Y"], step * 32 + thread - 32, word[0])

    return emitted((hash_words(steps * 32),), ((steps * 32,), "uint32"), one_block(1024, 64, emit))


def mbarrier_bytes() -> GoldenKernel:
    """A phase of two copies and two arrivals, of which one expects the bytes; the mbarrier is then made anew."""
    tiles = make_tiled_map("float32", 4, (32, 8), (32,), (32, 1), 0)

    def emit(buffers, block, thread, x_map):
        bar = block.address(1024)
        for phase in range(2):
            with p.if_(thread == 0):
                init_mbarriers((bar, 2))
            p.emit_call(T.cuda.cta_sync())
            with p.if_(thread == 0):
                p.emit_ptx("mbarrier.expect_tx.relaxed.cta.shared::cta.b64", bar, T.uint32(128))
                for tile in range(2):
                    p.emit_ptx(LOAD.format(2, ""), block.address(tile * 128), x_map, 0, phase * 3 + tile, bar)
                p.emit_ptx("mbarrier.arrive.shared.b64", bar, T.uint32(1))
            with p.if_(thread == 32):
                p.emit_ptx("mbarrier.arrive.expect_tx.shared.b64", bar, T.uint32(128))
            p.emit_call(T.cuda.mbarrier_wait(bar, 0))
            p.store(buffers["Y"], phase * 64 + thread, load_word(block, thread * 4))
            p.emit_call(T.cuda.cta_sync())
            with p.if_(thread == 0):
                p.emit_ptx("mbarrier.inval.shared.b64", bar)

    x = small_integers((256,), "float32", limit=100)
    return emitted((x,), ((128,), "uint32"), one_block(2048, 64, emit, X=tiles))


def named_barriers() -> GoldenKernel:
    """Two warpgroups that take turns: each arrives at the barrier for which the other waits."""

    def emit(buffers, block, thread):
        half = thread // 128
        word = p.allocate("word", 1, "uint32")
        p.store(word, 0, T.uint32(0))
        with p.if_(half == 0):
            p.emit_ptx("st.shared.b32", block.address(thread * 4), buffers["X"][thread])
        with p.if_(half == 1):
            p.emit_ptx("bar.arrive", T.uint32(1), 256)
        with p.serial_loop(3, "step"):
            p.emit_ptx("bar.sync", p.to_uint32(1 + half), 256)
            p.emit_ptx("ld.shared.b32", word[0], block.address((127 - thread % 128) * 4))
            p.emit_ptx("bar.sync", p.to_uint32(3 + half), 128)
            p.emit_ptx("st.shared.b32", block.address(thread % 128 * 4), word[0] + T.uint32(1))
            p.emit_ptx("bar.arrive", p.to_uint32(2 - half), 256)
        p.store(buffers["Y"], thread, word[0])

    return emitted((hash_words(128),), ((256,), "uint32"), one_block(512, 256, emit))


KERNELS |= {
    "mbarrier_helper_each": mbarrier_phases("helper", "each"),
    "mbarrier_helper_count": mbarrier_phases("helper", "count"),
    "mbarrier_try_wait_each": mbarrier_phases("try_wait", "each"),
    "mbarrier_bytes": mbarrier_bytes(),
    "named_barriers": named_barriers(),
}


# --- clusters ---


def cluster_exchange(size: int, direction: str, *, before: bool = True, behind: bool = True) -> GoldenKernel:
    """Blocks that read from, or store to, the shared memory of the next block of their cluster.

    Without a barrier of the cluster `before` or `behind` the access, the kernel is wrong.
    """
    blocks = 2 * size

    def emit(buffers):
        axes = (p.thread_axis(blocks, "blockIdx.x"), p.thread_axis(size, "clusterCtaIdx.x"))
        with axes[0] as block_index, axes[1] as rank, p.thread_axis(32, "threadIdx.x") as thread:
            block, peer, word = Block(256), p.allocate("peer", 1, "uint32"), p.allocate("word", 1, "uint32")
            own, given = block.address(thread * 4), buffers["X"][block_index * 32 + thread]
            p.emit_ptx("st.shared.b32", own, given if direction == "load" else T.uint32(0))
            p.emit_ptx("barrier.cluster.arrive")
            if before:
                p.emit_ptx("barrier.cluster.wait")
            p.emit_ptx("mapa.shared::cluster.u32", peer[0], own, T.Cast("uint32", (rank + 1) % size))
            if direction == "load":
                p.emit_ptx("ld.shared::cluster.b32", word[0], peer[0])
            else:
                p.emit_ptx("st.shared::cluster.b32", peer[0], given)
                if behind:
                    p.emit_call(T.cuda.cluster_sync())
                p.emit_ptx("ld.shared.b32", word[0], own)
            p.store(buffers["Y"], block_index * 32 + thread, word[0])
            if behind:
                p.emit_call(T.cuda.cluster_sync())

    return emitted((hash_words(blocks * 32),), ((blocks * 32,), "uint32"), emit)


def multicast(size: int, mask: int, *, synchronized=True, released=True, end=True, receiving=None) -> GoldenKernel:
    """Blocks that each copy a part of a row to the blocks of a mask, twice, with arrivals at mbarriers of all.

    The kernel is wrong unless the blocks are `synchronized` after the initialization, all stages are `released`, and
    the blocks end together. By default, the blocks of the mask are those that receive the copies.
    """
    steps, part = 2, 32
    words = part * size
    tiles = make_tiled_map("float32", 4, (words, steps * 2), (words,), (part, 1), 0)
    receiving = mask if receiving is None else receiving
    num_receiving = receiving.bit_count()

    def emit(buffers):
        x_map = p.declare_tensor_map("X_map", buffers["X"], tiles)
        axes = (p.thread_axis(2 * size, "blockIdx.x"), p.thread_axis(size, "clusterCtaIdx.x"))
        with axes[0] as block_index, axes[1] as rank, p.thread_axis(64, "threadIdx.x") as thread:
            block, peer = Block(2048), p.allocate("peer", 1, "uint32")
            full, empty = block.address(1024), block.address(1032)
            with p.if_(thread == 0):
                init_mbarriers((full, 1), (empty, num_receiving))
            p.emit_call(T.cuda.cluster_sync() if synchronized else T.cuda.cta_sync())
            is_receiving = T.shift_right(T.int32(receiving), rank) % 2 == 1
            with p.ir.If(thread < 32):
                with p.ir.Then(), p.if_(thread == 0), p.serial_loop(steps, "step") as step:
                    p.emit_call(T.cuda.mbarrier_wait(empty, step % 2 ^ 1))
                    with p.if_(is_receiving):
                        p.emit_ptx("mbarrier.arrive.expect_tx.shared.b64", full, T.uint32(words * 4))
                    place, row = block.address(rank * part * 4), block_index // size * steps + step
                    load = LOAD.format(2, "") + ".multicast::cluster"
                    p.emit_ptx(load, place, x_map, rank * part, row, full, T.uint16(mask))
                with p.ir.Else(), p.if_(is_receiving), p.serial_loop(steps, "step") as step:
                    p.emit_call(T.cuda.mbarrier_wait(full, step % 2))
                    for e in range(size):
                        at = e * 32 + thread - 32
                        p.store(buffers["Y"], (block_index * steps + step) * words + at, load_word(block, at * 4))
                    p.emit_call(T.cuda.warp_sync())
                    with p.if_(thread - 32 < (size if released else 1)):
                        p.emit_ptx("mapa.shared::cluster.u32", peer[0], empty, T.Cast("uint32", thread - 32))
                        p.emit_ptx("mbarrier.arrive.shared::cluster.b64", peer[0])
            if end:
                p.emit_call(T.cuda.cluster_sync())

    x = small_integers((2 * steps * words,), "float32", limit=100)
    return emitted((x,), ((2 * size * steps * words,), "uint32"), emit)


KERNELS |= {
    **{f"cluster_{size}_{way}": cluster_exchange(size, way) for size in (2, 4) for way in ("load", "store")},
    "cluster_2_multicast": multicast(2, 3),
    "cluster_4_multicast": multicast(4, 15),
    "cluster_4_multicast_to_some": multicast(4, 0b1010),
}


# --- schedules, which use TVM's intrinsics for the tensor cores and whole pipelines ---


def scheduled(text: str, schedule: str, config: dict[str, Any], tolerance: float) -> GoldenKernel:
    """A workload of fractions with a schedule of the library."""
    workload = tc.parse(text)
    shapes = list(zip(workload.argument_shapes, workload.argument_dtypes, strict=True))[:-1]
    inputs = tuple(fractions(shape, dtype, seed) for seed, (shape, dtype) in enumerate(shapes, 1))
    return GoldenKernel(
        inputs, lambda: tc.build(workload, schedule, arch="sm_90", config=config).lowered_module, tolerance
    )


CONV = "conv2d:1x32x8x8,32x32x3x3,s1,p1"
HALF, SINGLE = 2e-4, 1e-6  # rounding of the output to float16, and of sums in another order
HOPPER = {"warpgroups": 1, "wgmma_m_tiles": 1, "block_n": 16, "block_k_bytes": 64, "stages": 2}
KERNELS |= {
    "schedule_implicit_gemm": scheduled(CONV, "implicit_gemm", {"pipeline": "async3"}, SINGLE),
    "schedule_tensor_core": scheduled(f"{CONV},f16,nhwc", "tensor_core", {}, HALF),
    "schedule_mma_sync": scheduled(f"{CONV},f16,nhwc", "mma_sync", {}, HALF),
    "schedule_mma_sync_tf32": scheduled(f"{CONV},tf32,nhwc", "mma_sync", {}, SINGLE),
    "schedule_hopper": scheduled(f"{CONV},f16,nhwc", "hopper", HOPPER, HALF),
    "schedule_shuffle": scheduled("filter1d:1024,k5", "shuffle", {}, SINGLE),
}
