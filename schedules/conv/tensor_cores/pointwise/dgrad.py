"""Gradients of inputs of narrow 1×1 layers by mma.sync: pixels go from global memory to registers and back.

The product has channels of dX as rows and pixels as columns, and its reduction runs over the channels of dY. These
layers are bound by memory. Shared memory has only the weight, in the order of fragments, so that no thread waits for
another one after the first barrier, and each warp has loads of its own under way.

The order of the reduction and that of the channels are free. Four lanes load 64 neighbouring bytes of a pixel, 16 each,
which are operand B of two mmas. The sums of a lane are neighbouring channels of two pixels, which it stores at once.
While a warp stores a tile of pixels, it loads the next one.

With `stages`, cp.async copies the tiles of a CTA to shared memory instead, where they are contiguous, and `ldmatrix`
loads the operands. More bytes are under way then, and pixels of many channels need no registers.

Sources: PTX ISA, "mma.sync", "cp.async" and "ldmatrix".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from ..gemm.atoms import MmaSyncAtom, ThreadPosition, ldmatrix_x4
from ..gemm.cta import Cta, allocate_smem, allow_dependent_launch, open_cta
from ..gemm.epilogue_ops import EpilogueOps, apply_to_vector
from ..gemm.pipelines import CpAsyncPipeline
from ..hopper.tma_requirements import is_pixel_matrix
from ..implicit_gemm_shape import VECTOR_BYTES
from .dgrad_config import FRAGMENT_BYTES, GROUP_BYTES, MMA_M, OCTET, PointwiseConfig
from .pixel_operand import PixelOperand

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
    """Emit the kernel; see `FilterCopy` for the last argument."""
    num_ctas, warps, rounds = int(config.num_blocks), int(config.warps), int(config.rounds)
    with open_cta(num_ctas, int(config.num_threads), 1, splits_in_cluster=False) as cta:
        smem = allocate_smem(int(config.smem_bytes))
        allow_dependent_launch()
        tile = Register("tile", value=cta.index * warps + cta.thread.warp)
        sums = PixelSums.allocate(config, arguments, cta.thread, smem)
        filter_copy = FilterCopy(config, arguments["K"], smem, cta.thread.thread, has_filter_rows)
        if config.stages:
            staged = StagedTile(config, arguments["X"], sums, cta, smem + to_uint32(config.filter_bytes))
            pipeline = CpAsyncPipeline(int(config.stages))
            pipeline.fill(rounds, staged.copy)
            filter_copy.emit(load_pixels=lambda: None)

            def compute(stage: Expr) -> None:
                staged.multiply(stage)
                sums.store(tile.value)
                tile.set(tile.value + num_ctas * warps)

            pipeline.run(rounds, staged.copy, compute, staged.is_valid)
            return
        pixels = RegisterTile.allocate(config, arguments["X"], sums)
        filter_copy.emit(load_pixels=lambda: pixels.load(tile.value))
        emit_call(T.cuda.cta_sync())
        with serial_loop(rounds, "round"), if_(tile.value < int(config.num_tiles)):
            pixels.multiply()
            if rounds > 1:
                pixels.load(tile.value + num_ctas * warps)
            sums.store(tile.value)
            tile.set(tile.value + num_ctas * warps)


@dataclass(frozen=True)
class FilterCopy:
    """The copy of the weight to shared memory, as operand A of each step and mma.

    An item is half a fragment of a lane: two channels of dX of the same channels of dY, one of 32 bits or two of 16.
    """

    config: PointwiseConfig
    filters: Buffer  # the weight
    smem: Expr  # shared-memory address of the copy
    thread: Expr  # index of the thread in the CTA
    # Whether the weight is (channels of dX, channels of dY), as that of a forward convolution is if its filters stand
    # for the channels of dX. Otherwise it is (channels of dY, channels of dX).
    has_filter_rows: bool

    @property
    def word_elements(self) -> int:
        """Elements of a word of 32 bits."""
        return 4 // self.config.itemsize

    @property
    def items_per_step(self) -> int:
        """Items of a step of the reduction."""
        return self.config.mmas_m * 2 * WARP_SIZE

    def locate(self, item: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the first channel of dY and of dX of an item, and its offset in shared memory.

        `ldmatrix` and loads to registers have different orders of the reduction.
        """
        config, vector, word_elements = self.config, VECTOR_BYTES // self.config.itemsize, self.word_elements
        lane, half = item % WARP_SIZE, item // WARP_SIZE % 2  # a warp loads neighbouring channels of few rows
        mma_m, step = item // (2 * WARP_SIZE) % config.mmas_m, item // self.items_per_step
        k = (step // 2 * CHUNKS + lane % CHUNKS) * vector + (step % 2 * 2 + half) * word_elements
        if config.stages:
            k = (2 * step + half) * vector + lane % CHUNKS * word_elements
        offset = item // (2 * WARP_SIZE) * FRAGMENT_BYTES + lane * VECTOR_BYTES + half * 8
        return k, config.channel(2 * mma_m, lane // CHUNKS), offset

    def emit(self, load_pixels: Callable[[], None]) -> None:
        """Copy the weight in batches; the first loads of pixels follow those of the weight, which products wait for."""
        num_threads, num_items = int(self.config.num_threads), 2 * self.config.k_groups * self.items_per_step
        num_batches = ceil_div(num_items, num_threads * MAX_FILTER_BATCH)
        batch_size = ceil_div(num_items, num_threads * num_batches)
        loaded, packed = (allocate(name, 2 * batch_size, "uint32") for name in ("loaded", "packed"))
        if num_batches > 1:
            load_pixels()
        with serial_loop(num_batches, "batch") as batch:
            first = batch * (batch_size * num_threads) + self.thread
            with unrolled_loop(batch_size, "i") as i:
                self._load(first + i * num_threads, num_items, loaded, 2 * i)
            if num_batches == 1:
                load_pixels()
            with unrolled_loop(batch_size, "i") as i:
                self._store(first + i * num_threads, num_items, loaded, packed, 2 * i)

    def _load(self, item: Expr, num_items: int, loaded: Buffer, first: Expr) -> None:
        """Load the two words of an item to registers, with zeros beyond the channels."""
        config, shape = self.config, self.config.shape
        k, channel, _ = self.locate(item)
        for e in range(2):
            store(loaded, first + e, T.uint32(0))
        with if_(logical_and(item < num_items, k < shape.k, is_below(channel, shape.n, config.mmas_m * MMA_M))):
            if self.has_filter_rows:
                for e in range(2):
                    pointer = self.filters.access_ptr("r", offset=(channel + e) * shape.k + k)
                    emit_ptx("ld.global.b32", loaded[first + e], pointer)
            elif self.word_elements == 2:
                for e in range(2):
                    pointer = self.filters.access_ptr("r", offset=(k + e) * shape.n + channel)
                    emit_ptx("ld.global.b32", loaded[first + e], pointer)
            else:
                pointer = self.filters.access_ptr("r", offset=k * shape.n + channel)
                emit_ptx("ld.global.v2.b32", loaded[first], loaded[first + 1], pointer)

    def _store(self, item: Expr, num_items: int, loaded: Buffer, packed: Buffer, first: Expr) -> None:
        """Store an item to shared memory, a word for each of the two channels of dX."""
        lower, upper = loaded[first], loaded[first + 1]
        if self.word_elements == 2 and not self.has_filter_rows:  # words of two channels of dX of a channel of dY
            store(packed, first, lower & T.uint32(0xFFFF) | T.shift_left(upper, T.uint32(16)))
            store(packed, first + 1, T.shift_right(lower, T.uint32(16)) | upper & T.uint32(0xFFFF0000))
            lower, upper = packed[first], packed[first + 1]
        with if_(item < num_items):
            emit_ptx("st.shared.v2.b32", self.smem + to_uint32(self.locate(item)[2]), lower, upper)


@dataclass(frozen=True)
class PixelSums:
    """The sums of a warp's pixels, in registers, and the weight, which all pixels are multiplied by."""

    config: PointwiseConfig
    arguments: dict[str, Buffer]  # arguments by their roles in a convolution
    thread: ThreadPosition  # position in the CTA
    sums: Buffer  # sums: (mma along the channels, octet of pixels, accumulator)
    fragment: Buffer  # operand A of an mma
    filters: Expr  # shared-memory address of this lane's part of the weight

    @classmethod
    def allocate(
        cls, config: PointwiseConfig, arguments: dict[str, Buffer], thread: ThreadPosition, smem: Expr
    ) -> PixelSums:
        """Allocate the registers."""
        sums, fragment = allocate("sums", int(config.num_accumulators), "float32"), allocate("filters", 4, "uint32")
        return cls(config, arguments, thread, sums, fragment, smem + to_uint32(thread.lane * VECTOR_BYTES))

    def clear(self) -> None:
        """Set the sums to zero."""
        fill_zeros(self.sums, int(self.config.num_accumulators))

    def multiply(self, step: Expr, locate_words: Callable[[Expr], Sequence[Expr]]) -> None:
        """Add the products of a step of the reduction; `locate_words` returns operand B of an octet of pixels."""
        config, atom = self.config, MmaSyncAtom(self.config.w.dtype, self.config.w.dtype)
        registers = [self.fragment[e] for e in range(4)]
        with unrolled_loop(config.mmas_m, "m") as mma_m:
            offset = to_uint32((step * config.mmas_m + mma_m) * FRAGMENT_BYTES)
            emit_ptx("ld.shared.v4.b32", *registers, self.filters + offset)
            with unrolled_loop(config.pixel_octets, "p") as octet:
                sums = [self.sums[self._first_sum(mma_m, octet) + e] for e in range(4)]
                atom.emit(sums, registers, locate_words(octet))

    def store(self, tile: Expr) -> None:
        """Apply the epilogue, and store vectors of channels of dX."""
        config, shape, lane = self.config, self.config.shape, self.thread.lane
        values, packed = allocate("values", 8, "float32"), allocate("packed", 8, "uint32")
        ops = EpilogueOps.from_workload(config.convolution).bind_tensor_args(self.arguments, uses_registers=True)
        for first, vector in config.vectors:
            channel = config.channel(first, lane // 4)
            with unrolled_loop(config.pixel_octets, "p") as octet, unrolled_loop(2, "e") as e:
                pixel = (tile * config.pixel_octets + octet) * OCTET + e * 4 + lane % 4
                with if_(logical_and(pixel < shape.m, is_below(channel, shape.n, config.mmas_m * MMA_M))):
                    for i in range(vector):
                        mma_m, half = divmod(first + i, 2)
                        store(values, i, self.sums[self._first_sum(mma_m, octet) + half * 2 + e])
                    index = pixel * shape.n + channel
                    apply_to_vector(ops, self.arguments, channel, index, vector, values, packed)
                    store_global(self.arguments["Y"], index, packed, vector)

    def _first_sum(self, mma_m: Expr, octet: Expr) -> Expr:
        return (mma_m * self.config.pixel_octets + octet) * 4


def permute_pixels(column: Expr) -> Expr:
    """Return the pixel of a column of an mma, so that a lane of each four stores neighbouring pixels."""
    return column % 2 * 4 + column // 2


@dataclass(frozen=True)
class RegisterTile:
    """The pixels of a warp, in registers."""

    config: PointwiseConfig
    pixels: Buffer  # dY
    sums: PixelSums
    words: Buffer  # registers: (octet of pixels, group of the reduction, word)

    @classmethod
    def allocate(cls, config: PointwiseConfig, pixels: Buffer, sums: PixelSums) -> RegisterTile:
        """Allocate the registers, and set those of pixels to zero that the first tile may lack."""
        num_words = int(config.k_groups * config.pixel_octets * 4)
        words = allocate("pixels", num_words, "uint32")
        if config.shape.m % (OCTET * config.pixel_octets):
            with unrolled_loop(num_words, "i") as i:
                store(words, i, T.uint32(0))
        return cls(config, pixels, sums, words)

    def load(self, tile: Expr) -> None:
        """Load the pixels of a tile, with zeros beyond the channels of dY; there are none beyond the last pixel."""
        config, shape, lane = self.config, self.config.shape, self.sums.thread.lane
        elements, groups = VECTOR_BYTES // config.itemsize, config.k_groups
        lane_pixel = permute_pixels(lane // 4)
        with unrolled_loop(config.pixel_octets, "p") as octet, unrolled_loop(groups, "group") as group:
            pixel = (tile * config.pixel_octets + octet) * OCTET + lane_pixel
            k = (group * CHUNKS + lane % 4) * elements
            registers = [self.words[(octet * groups + group) * 4 + e] for e in range(4)]
            has_channel = is_below(k, shape.k, CHUNKS * elements)
            if has_channel is not True:
                for e in range(4):
                    store(self.words, (octet * groups + group) * 4 + e, T.uint32(0))
            with if_(logical_and(pixel < shape.m, has_channel)):
                pointer = self.pixels.access_ptr("r", offset=pixel * shape.k + k)
                emit_ptx("ld.global.v4.b32", *registers, pointer)

    def multiply(self) -> None:
        """Multiply the pixels in registers."""
        groups = self.config.k_groups
        self.sums.clear()
        with unrolled_loop(2 * groups, "step") as step:

            def locate_words(octet: Expr) -> list[Expr]:
                first = (octet * groups + step // 2) * 4 + step % 2 * 2
                return [self.words[first + e] for e in range(2)]

            self.sums.multiply(step, locate_words)


@dataclass(frozen=True)
class StagedTile:
    """The pixels of a CTA, in stages in shared memory."""

    config: PointwiseConfig
    pixels: Buffer  # dY
    sums: PixelSums
    cta: Cta  # position in the grid
    stages: Expr  # shared-memory address of the first stage

    @property
    def operand(self) -> PixelOperand:
        """The copies of a tile."""
        return PixelOperand(self.pixels, self.config.shape.k, self.config.shape.k)

    def is_valid(self, iteration: Expr) -> Expr:
        """Return whether the CTA has pixels in an iteration."""
        return self._tile(iteration) * int(self.config.block_pixels) < self.config.shape.m

    def copy(self, iteration: Expr, stage: Expr) -> None:
        """Start the copies of the tile of an iteration to a stage, with zeros beyond the last pixel."""
        config, thread = self.config, self.cta.thread.thread
        with if_(self.is_valid(iteration)):
            tile = Register("copied_tile", value=self._tile(iteration)).value
            address = Register("copy_address", "uint32", self._stage(stage)).value
            sizes = config.shape.m, int(config.block_pixels), thread, int(config.num_threads)
            self.operand.copy(address, tile, *sizes)

    def multiply(self, stage: Expr) -> None:
        """Multiply the pixels of this warp in a stage.

        An `ldmatrix` loads operand B of an octet of pixels for two steps, each of its matrices a chunk of 16 bytes of
        the pixels. Chunks beyond the last one are zeros.
        """
        config, thread, pitch = self.config, self.cta.thread, self.operand.pitch_bytes
        chunks, lane_chunk = self.operand.chunks, thread.lane // 8
        pixel = thread.warp * (config.pixel_octets * OCTET) + permute_pixels(thread.lane % 8)
        first = Register("read_address", "uint32", self._stage(stage) + to_uint32(pixel * pitch)).value
        words = allocate("pixels", int(config.pixel_octets) * 4, "uint32")
        self.sums.clear()
        for group in range(config.k_groups):
            num_chunks = min(CHUNKS, chunks - group * CHUNKS)
            chunk = lane_chunk if num_chunks == CHUNKS else T.min(lane_chunk, num_chunks - 1)
            for octet in range(config.pixel_octets):
                offset = to_uint32(octet * OCTET * pitch + (group * CHUNKS + chunk) * VECTOR_BYTES)
                ldmatrix_x4([words[octet * 4 + e] for e in range(4)], first + offset)
                for e in range(num_chunks, CHUNKS):
                    store(words, octet * 4 + e, T.uint32(0))
            for step in range(ceil_div(num_chunks, 2)):

                def locate_words(octet: Expr, step: int = step) -> list[Expr]:
                    return [words[octet * 4 + step * 2 + e] for e in range(2)]

                self.sums.multiply(2 * group + step, locate_words)

    def _tile(self, iteration: Expr) -> Expr:
        return iteration * int(self.config.num_blocks) + self.cta.index

    def _stage(self, stage: Expr) -> Expr:
        return self.stages + to_uint32(stage * int(self.config.stage_bytes))
