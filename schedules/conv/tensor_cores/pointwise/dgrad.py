"""Gradients of inputs of narrow 1×1 layers by mma.sync: pixels go from global memory to registers and back.

The product has channels of dX as rows and pixels as columns, and its reduction runs over the channels of dY. These
layers are bound by memory. Shared memory has only the weight, in the order of fragments, so that no thread waits for
another one after the first barrier, and each warp has loads of its own under way.

The order of the reduction and that of the channels are free. Four lanes load 64 neighbouring bytes of a pixel, 16 each,
which are operand B of two mmas. The sums of a lane are neighbouring channels of two pixels, which it stores at once.
While a warp stores a tile of pixels, it loads the next one.

Source: PTX ISA, "mma.sync".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.target import WARP_SIZE
from tvmconv.workloads.conv_gradient import InputGradient
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    emit_call,
    emit_ptx,
    fill_zeros,
    if_,
    is_below,
    logical_and,
    serial_loop,
    store,
    store_global,
    to_uint32,
    unrolled_loop,
)
from ...gradient_conversion import build_channels_last_gradient, view_channels_last
from ...gradient_operators import DGRAD, TRANSPOSE
from ..gemm.atoms import MmaSyncAtom, ThreadPosition
from ..gemm.cta import allocate_smem, allow_dependent_launch, open_cta
from ..gemm.epilogue_ops import EpilogueOps, apply_to_vector
from ..hopper.tma_requirements import is_pixel_matrix
from ..implicit_gemm_shape import VECTOR_BYTES
from .dgrad_config import FRAGMENT_BYTES, GROUP_BYTES, MMA_M, OCTET, PointwiseConfig

DTYPES = ("float16", "bfloat16", "tf32")
MAX_ROW_BYTES = 192  # bytes of the narrower rows of dX and dY, up to which a search tries the schedule
MAX_FILTER_BATCH = 24  # parts of the weight that a thread loads before it stores them
CHUNKS = GROUP_BYTES // VECTOR_BYTES  # lanes that load neighbouring bytes of a pixel


def is_pointwise(w: InputGradient) -> bool:
    """Whether the gradient is a product of all pixels with few channels, of which dY fills vectors of 16 bytes."""
    viewed = view_channels_last(w)
    conv = viewed.direct_convolution
    if conv is None or conv.groups > 1 or not is_pixel_matrix(conv) or conv.has_large_tensors:
        return False
    fills_vectors = conv.C * get_itemsize(conv.storage) % VECTOR_BYTES == 0 and conv.O % 2 == 0
    return fills_vectors and PointwiseConfig.has_config(viewed)


def is_narrow(w: InputGradient) -> bool:
    """Return whether dX or dY has rows of at most 192 bytes, so that memory bounds the gradient."""
    return min(w.C, w.O) * get_itemsize(w.storage) <= MAX_ROW_BYTES


@schedule(
    *(*DGRAD, *TRANSPOSE),
    dtypes=DTYPES,
    usage=lambda w, columns: PointwiseConfig.compute_usage(view_channels_last(w), columns),
    condition=is_pointwise,
    search_if=is_narrow,
    starting_configs=lambda w: PointwiseConfig.list_starting_configs(view_channels_last(w)),
    supersedes=("implicit_gemm", "tiling"),
    device_kinds=("cuda",),
    min_arch=80,
)
def pointwise_mma_sync(s: Schedule, w: InputGradient, k: Knobs) -> Schedule:
    """Keep the weight in shared memory, and multiply tiles of pixels that warps load to registers."""
    config = PointwiseConfig.declare_knobs(view_channels_last(w), k)
    dy, filters = w.OPERANDS
    roles = {dy: "X", filters: "K", w.RESULT: "Y"}

    def emit(arguments: dict[str, Buffer]) -> None:
        arguments = {roles.get(name, name): each for name, each in arguments.items()}
        emit_kernel(config, arguments)

    return build_channels_last_gradient(w, emit)


def emit_kernel(config: PointwiseConfig, arguments: dict[str, Buffer], *, has_filter_rows: bool = False) -> None:
    """Emit the kernel; see `copy_filters` for the last argument."""
    num_ctas, warps, num_tiles = int(config.num_blocks), int(config.warps), int(config.num_tiles)
    with open_cta(num_ctas, int(config.num_threads), 1, splits_in_cluster=False) as cta:
        smem = allocate_smem(int(config.smem_bytes))
        allow_dependent_launch()
        tile = Register("tile", value=cta.index * warps + cta.thread.warp)
        pixels = RegisterTile.allocate(config, arguments, cta.thread)
        load_pixels = functools.partial(pixels.load, tile.value)
        copy_filters(config, arguments["K"], smem, cta.thread.thread, load_pixels, has_filter_rows=has_filter_rows)
        emit_call(T.cuda.cta_sync())
        with serial_loop(int(config.rounds), "round"), if_(tile.value < num_tiles):
            pixels.multiply(smem)
            if config.rounds > 1:
                pixels.load(tile.value + num_ctas * warps)
            pixels.store_sums(tile.value)
            tile.set(tile.value + num_ctas * warps)


def copy_filters(
    config: PointwiseConfig,
    filters: Buffer,
    smem: Expr,
    thread: Expr,
    load_pixels: Callable[[], None],
    *,
    has_filter_rows: bool,
) -> None:
    """Copy the weight to shared memory, as operand A of each step and mma.

    The first loads of pixels follow those of the weight, which products wait for first.

    An item is half a fragment of a lane: two channels of dX of the same channels of dY, one of 32 bits or two of 16.
    With `has_filter_rows`, the weight is (channels of dX, channels of dY), as that of a forward convolution is if its
    filters stand for the channels of dX. Otherwise it is (channels of dY, channels of dX).
    """
    shape, items_per_step, num_threads = config.shape, config.mmas_m * 2 * WARP_SIZE, int(config.num_threads)
    num_items = 2 * config.k_groups * items_per_step
    num_batches = ceil_div(num_items, num_threads * MAX_FILTER_BATCH)
    batch_size = ceil_div(num_items, num_threads * num_batches)
    words = 4 // config.itemsize  # elements of a word, and so loads of an item
    loaded, packed = (allocate(name, 2 * batch_size, "uint32") for name in ("loaded", "packed"))

    def locate(item: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the first channel of dY and of dX of an item, and its offset in shared memory."""
        lane, half = item % WARP_SIZE, item // WARP_SIZE % 2  # a warp loads neighbouring channels of few rows
        mma_m, step = item // (2 * WARP_SIZE) % config.mmas_m, item // items_per_step
        k = (step // 2 * CHUNKS + lane % CHUNKS) * (VECTOR_BYTES // config.itemsize) + (step % 2 * 2 + half) * words
        offset = item // (2 * WARP_SIZE) * FRAGMENT_BYTES + lane * VECTOR_BYTES + half * 8
        return k, config.channel(2 * mma_m, lane // CHUNKS), offset

    if num_batches > 1:
        load_pixels()
    with serial_loop(num_batches, "batch") as batch:
        first = batch * (batch_size * num_threads) + thread
        with unrolled_loop(batch_size, "i") as i:
            item = first + i * num_threads
            k, channel, _ = locate(item)
            for e in range(2):
                store(loaded, 2 * i + e, T.uint32(0))
            with if_(logical_and(item < num_items, k < shape.k, is_below(channel, shape.n, config.mmas_m * MMA_M))):
                for e in range(2 if has_filter_rows else 0):
                    pointer = filters.access_ptr("r", offset=(channel + e) * shape.k + k)
                    emit_ptx("ld.global.b32", loaded[2 * i + e], pointer)
                for e in range(0 if has_filter_rows else words):
                    pointer = filters.access_ptr("r", offset=(k + e) * shape.n + channel)
                    destinations = [loaded[2 * i + e]] if words == 2 else [loaded[2 * i], loaded[2 * i + 1]]
                    emit_ptx("ld.global.b32" if words == 2 else "ld.global.v2.b32", *destinations, pointer)
        if num_batches == 1:
            load_pixels()
        with unrolled_loop(batch_size, "i") as i:
            item = first + i * num_threads
            lower, upper = loaded[2 * i], loaded[2 * i + 1]
            if (
                words == 2 and not has_filter_rows
            ):  # two channels of dX of two of dY become two channels of dY of two of dX
                store(packed, 2 * i, lower & T.uint32(0xFFFF) | T.shift_left(upper, T.uint32(16)))
                store(packed, 2 * i + 1, T.shift_right(lower, T.uint32(16)) | upper & T.uint32(0xFFFF0000))
                lower, upper = packed[2 * i], packed[2 * i + 1]
            with if_(item < num_items):
                emit_ptx("st.shared.v2.b32", smem + to_uint32(locate(item)[2]), lower, upper)


@dataclass(frozen=True)
class RegisterTile:
    """The pixels of a warp and their sums, in registers."""

    config: PointwiseConfig
    arguments: dict[str, Buffer]  # arguments by their roles in a convolution
    thread: ThreadPosition  # position in the CTA
    words: Buffer  # dY: (octet of pixels, group of the reduction, word)
    sums: Buffer  # sums: (mma along the channels, octet of pixels, accumulator)
    fragment: Buffer  # operand A of an mma

    @classmethod
    def allocate(cls, config: PointwiseConfig, arguments: dict[str, Buffer], thread: ThreadPosition) -> RegisterTile:
        """Allocate the registers, and set those of pixels to zero that the first tile may lack."""
        num_words = int(config.k_groups * config.pixel_octets * 4)
        words = allocate("pixels", num_words, "uint32")
        if config.shape.m % (OCTET * config.pixel_octets):
            with unrolled_loop(num_words, "i") as i:
                store(words, i, T.uint32(0))
        sums, fragment = allocate("sums", int(config.num_accumulators), "float32"), allocate("filters", 4, "uint32")
        return cls(config, arguments, thread, words, sums, fragment)

    def load(self, tile: Expr) -> None:
        """Load the pixels of a tile, with zeros beyond the channels of dY; there are none beyond the last pixel."""
        config, shape, lane = self.config, self.config.shape, self.thread.lane
        elements, groups = VECTOR_BYTES // config.itemsize, config.k_groups
        # Column n of an mma is pixel n % 2 * 4 + n // 2, so that a lane of each four stores neighbouring pixels.
        lane_pixel = lane // 4 % 2 * 4 + lane // 8
        with unrolled_loop(config.pixel_octets, "p") as octet, unrolled_loop(groups, "group") as group:
            pixel, k = self._pixel(tile, octet) + lane_pixel, (group * CHUNKS + lane % 4) * elements
            registers = [self.words[(octet * groups + group) * 4 + e] for e in range(4)]
            has_channel = is_below(k, shape.k, CHUNKS * elements)
            if has_channel is not True:
                for e in range(4):
                    store(self.words, (octet * groups + group) * 4 + e, T.uint32(0))
            with if_(logical_and(pixel < shape.m, has_channel)):
                pointer = self.arguments["X"].access_ptr("r", offset=pixel * shape.k + k)
                emit_ptx("ld.global.v4.b32", *registers, pointer)

    def multiply(self, smem: Expr) -> None:
        """Multiply the pixels in registers."""
        config, atom = self.config, MmaSyncAtom(self.config.w.dtype, self.config.w.dtype)
        fill_zeros(self.sums, int(config.num_accumulators))
        registers, address = [self.fragment[e] for e in range(4)], smem + to_uint32(self.thread.lane * 16)
        with unrolled_loop(2 * config.k_groups, "step") as step, unrolled_loop(config.mmas_m, "m") as mma_m:
            offset = to_uint32((step * config.mmas_m + mma_m) * FRAGMENT_BYTES)
            emit_ptx("ld.shared.v4.b32", *registers, address + offset)
            with unrolled_loop(config.pixel_octets, "p") as octet:
                first = (octet * config.k_groups + step // 2) * 4 + step % 2 * 2
                sums = [self.sums[self._first_sum(mma_m, octet) + e] for e in range(4)]
                atom.emit(sums, registers, [self.words[first + e] for e in range(2)])

    def store_sums(self, tile: Expr) -> None:
        """Apply the epilogue, and store vectors of channels of dX."""
        config, shape, lane = self.config, self.config.shape, self.thread.lane
        values, packed = allocate("values", 8, "float32"), allocate("packed", 8, "uint32")
        ops = EpilogueOps.from_workload(config.convolution).bind_tensor_args(self.arguments, uses_registers=True)
        for first, vector in config.vectors:
            channel = config.channel(first, lane // 4)
            with unrolled_loop(config.pixel_octets, "p") as octet, unrolled_loop(2, "e") as e:
                pixel = self._pixel(tile, octet) + e * 4 + lane % 4
                with if_(logical_and(pixel < shape.m, is_below(channel, shape.n, config.mmas_m * MMA_M))):
                    for i in range(vector):
                        mma_m, half = divmod(first + i, 2)
                        store(values, i, self.sums[self._first_sum(mma_m, octet) + half * 2 + e])
                    index = pixel * shape.n + channel
                    apply_to_vector(ops, self.arguments, channel, index, vector, values, packed)
                    store_global(self.arguments["Y"], index, packed, vector)

    def _pixel(self, tile: Expr, octet: Expr) -> Expr:
        return (tile * self.config.pixel_octets + octet) * OCTET

    def _first_sum(self, mma_m: Expr, octet: Expr) -> Expr:
        return (mma_m * self.config.pixel_octets + octet) * 4
