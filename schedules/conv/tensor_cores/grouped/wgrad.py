"""Gradients of the weights of grouped convolutions with few channels per group, by mma.sync.

For each unit of groups, the product has (tap, channel of X) as rows and channels of dY as columns, and its reduction
runs over pixels. A CTA copies a tile of dY and the window of X around it to shared memory. A row of an 8 × 8 matrix of
ldmatrix is the octet of a pixel, so a tap is only another address, for any stride and dilation. Both operands are
transposed by ldmatrix. Pixels lie at odd multiples of 16 bytes, so that no bank conflicts arise.

A warp keeps the sums of its taps in registers over all tiles of the CTA's part of the pixels. Each warp then stores its
sums to a workspace, and a second kernel adds these in order, so that each run returns the same bits.

Source: PTX ISA, "mma.sync", "ldmatrix" and "cp.async".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads import epilogue
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import ACCUMULATOR

from ....tir_builder import (
    Buffer,
    Expr,
    Register,
    allocate,
    block_axes,
    emit_call,
    emit_ptx,
    fill_zeros,
    if_,
    logical_and,
    serial_loop,
    store,
    thread_axis,
    to_uint32,
    unrolled_loop,
)
from ...gradient_conversion import build_channels_last_gradient, view_channels_last
from ...gradient_operators import WGRAD
from ...nhwc_direct.sum_of_parts import emit_sum_of_parts
from ..gemm.atoms import MmaSyncAtom, ThreadPosition, ldmatrix_x4
from ..gemm.cta import allow_dependent_launch
from .pixel_copies import ITEM_BYTES, OCTET, PixelTile, wait_for_copies
from .tile_config import MMA_PIXELS
from .wgrad_config import GroupedWgradConfig, can_form_units


@schedule(
    *WGRAD,
    dtypes=("float16", "bfloat16"),
    usage=GroupedWgradConfig.compute_usage,
    condition=can_form_units,
    search_if=can_form_units,
    starting_configs=lambda w: GroupedWgradConfig.list_starting_configs(view_channels_last(w)),
    supersedes=("implicit_gemm",),
    device_kinds=("cuda",),
    min_arch=80,
)
def grouped_mma_sync(s: Schedule, w: WeightGradient, k: Knobs) -> Schedule:
    """Multiply octets of channels of X and dY over tiles of pixels in shared memory, and add parts in order."""
    config = GroupedWgradConfig.declare_knobs(view_channels_last(w), k)
    result_shape = config.w.argument_shapes[-1]
    num_sums = math.prod(result_shape)

    def emit(arguments: dict[str, Buffer]) -> None:
        workspace = allocate("partial_sums", config.num_partial_sums * num_sums, ACCUMULATOR, "global")
        GroupedWgradKernel(config, arguments, workspace).emit()
        result = arguments[w.RESULT]

        def store_result(number: Expr, value: Expr) -> None:
            index = _split_index(number, result_shape)
            rounded = epilogue.apply_to_expression(
                w.epilogue, value, lambda name: arguments[name][index].astype(ACCUMULATOR)
            )
            T.buffer_store(result, rounded.astype(str(result.dtype)), [*index])

        emit_sum_of_parts(config.num_partial_sums, num_sums, workspace, store_result)

    return build_channels_last_gradient(w, emit)


class GroupedWgradKernel:
    """Emitter of the first kernel."""

    def __init__(self, config: GroupedWgradConfig, arguments: dict[str, Buffer], workspace: Buffer) -> None:
        self.config, self.shape, self.workspace = config, config.shape, workspace
        self.dy, self.x = (arguments[name] for name in config.w.OPERANDS)
        self.atom = MmaSyncAtom(config.w.dtype, config.w.dtype)

    def emit(self) -> None:
        """Emit the kernel."""
        config = self.config
        grid = block_axes(config.pixel_blocks, config.unit_blocks)
        with grid as (part, unit_block), thread_axis(config.num_threads, "threadIdx.x") as thread:
            allow_dependent_launch()
            smem = allocate("smem", config.smem_bytes // 4, "uint32", "shared.dyn")
            self.inputs = Register("inputs", "uint32", T.cuda.cvta_generic_to_shared(smem.access_ptr("rw"))).value
            self.gradient = self.inputs + to_uint32(config.input_bytes)
            self.position = ThreadPosition(thread)
            self.first_unit = unit_block * config.units
            warp = self.position.warp
            self.unit, self.tap_warp = warp % config.units, warp // config.units % config.warps_taps
            self.pixel_warp = warp // (config.units * config.warps_taps)
            self.accumulators = allocate("accumulators", config.num_accumulators, ACCUMULATOR)
            fill_zeros(self.accumulators, config.num_accumulators)
            self.a_fragment = allocate("a_fragment", self.atom.a_registers, "uint32")
            self.b_fragments = allocate("b_fragments", config.mmas_n * self.atom.b_registers, "uint32")
            self.tap_offsets = allocate("tap_offset", config.mmas_m, "uint32")
            self.locate_taps()
            with config.for_each_tile(part) as origin:
                self.copy_inputs(*origin)
                self.copy_gradient(*origin)
                wait_for_copies()
                self.multiply()
                emit_call(T.cuda.cta_sync())
            self.store_sums(part)

    def copy_inputs(self, image: Expr, row: Expr, column: Expr) -> None:
        """Start the copies of the window of X, with zeros outside of the image."""
        config, shape = self.config, self.shape
        _, num_rows, num_columns = shape.input_size
        columns = config.window[1]

        def locate(pixel: Expr) -> tuple[Expr, Expr, Expr]:
            y = row * shape.strides[1] - shape.pad_low[1] + pixel // columns
            x = column * shape.strides[2] - shape.pad_low[2] + pixel % columns
            return y, x, logical_and(y >= 0, y < num_rows, x >= 0, x < num_columns)

        channels, num_pixels = config.units * config.inputs_per_unit, config.window[0] * columns
        tile = PixelTile(self.x, self.inputs, num_pixels, channels, self.first_unit * config.inputs_per_unit)
        tile.copy(self.position.thread, config.num_threads, image, (num_rows, num_columns), locate)

    def copy_gradient(self, image: Expr, row: Expr, column: Expr) -> None:
        """Start the copies of the tile of dY, with zeros behind its pixels and outside of the image."""
        config, (_, num_rows, num_columns) = self.config, self.shape.output_size

        def locate(pixel: Expr) -> tuple[Expr, Expr, Expr]:
            y, x = row + pixel // config.pixels_x, column + pixel % config.pixels_x
            return y, x, logical_and(pixel < config.num_pixels, y < num_rows, x < num_columns)

        channels, num_pixels = config.units * config.outputs_per_unit, config.pixel_steps * MMA_PIXELS
        tile = PixelTile(self.dy, self.gradient, num_pixels, channels, self.first_unit * config.outputs_per_unit)
        tile.copy(self.position.thread, config.num_threads, image, (num_rows, num_columns), locate)

    def locate_taps(self) -> None:
        """Compute the offsets of the octets of X that this lane's matrices begin with, for each instruction."""
        config, shape = self.config, self.shape
        octets = config.inputs_per_unit // OCTET
        second = self.position.lane // 8 % 2  # odd matrices have the second octet of rows
        _, _, filter_columns = shape.kernel_size
        with unrolled_loop(config.mmas_m, "i") as i:
            octet = T.min(i * 2 + second, config.octets_of_rows - 1)  # sums of one that does not exist are not stored
            tap = T.min(self.tap_warp * config.taps_per_warp + octet // octets, shape.num_taps - 1)
            row, column = tap // filter_columns * shape.dilations[1], tap % filter_columns * shape.dilations[2]
            pixel = row * config.window[1] + column
            store(self.tap_offsets, i, to_uint32((pixel * config.input_pitch + octet % octets * OCTET) * ITEM_BYTES))

    def multiply(self) -> None:
        """Multiply the pixels of the warp, 16 at a time."""
        config, shape, lane = self.config, self.shape, self.position.lane
        steps = ceil_div(config.pixel_steps, config.warps_pixels)
        is_exact = steps * config.warps_pixels == config.pixel_steps
        with serial_loop(steps, "pixel_step") as i:
            step = i * config.warps_pixels + self.pixel_warp
            with if_(True if is_exact else step < config.pixel_steps):
                pixel = step * MMA_PIXELS + lane % 16
                channel = self.unit * config.outputs_per_unit
                address = self.gradient + to_uint32((pixel * config.output_pitch + channel) * ITEM_BYTES)
                for mma_n in range(config.mmas_n):
                    registers = self._b_fragment(mma_n)
                    mnemonic = "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16"
                    emit_ptx(mnemonic, *registers, address + to_uint32(mma_n * OCTET * ITEM_BYTES))
                # Matrices 0 and 1 have the first eight pixels, matrices 2 and 3 the others. Pixels behind the tile are
                # zeros of dY, so that any pixel of X will do.
                pixel = T.min(step * MMA_PIXELS + lane % 8 + lane // 16 * 8, config.num_pixels - 1)
                row, column = pixel // config.pixels_x * shape.strides[1], pixel % config.pixels_x * shape.strides[2]
                element = (row * config.window[1] + column) * config.input_pitch + self.unit * config.inputs_per_unit
                first = Register("pixel_address", "uint32", self.inputs + to_uint32(element * ITEM_BYTES)).value
                for mma_m in range(config.mmas_m):
                    a_registers = [self.a_fragment[e] for e in range(self.atom.a_registers)]
                    ldmatrix_x4(a_registers, first + self.tap_offsets[mma_m], transposed=True)
                    for mma_n in range(config.mmas_n):
                        number = (mma_m * config.mmas_n + mma_n) * self.atom.num_accumulators
                        sums = [self.accumulators[number + e] for e in range(self.atom.num_accumulators)]
                        self.atom.emit(sums, a_registers, self._b_fragment(mma_n))

    def store_sums(self, part: Expr) -> None:
        """Store the warp's sums to the workspace, in the order of dK."""
        config, shape, w, lane = self.config, self.shape, self.config.w, self.position.lane
        inputs, outputs = w.C // w.groups, w.O // w.groups
        octets, num_taps = config.inputs_per_unit // OCTET, shape.num_taps
        first = (part * config.warps_pixels + self.pixel_warp) * math.prod(w.argument_shapes[-1])
        first_group = (self.first_unit + self.unit) * config.groups_per_unit
        with unrolled_loop(config.mmas_m, "i") as mma_m, unrolled_loop(config.mmas_n, "j") as mma_n:
            for e in range(self.atom.num_accumulators):
                octet = mma_m * 2 + e // 2
                tap = self.tap_warp * config.taps_per_warp + octet // octets
                channel_in, channel = octet % octets * OCTET + lane // 4, mma_n * OCTET + lane % 4 * 2 + e % 2
                conditions = []
                if config.octets_of_rows % 2:
                    conditions.append(octet < config.octets_of_rows)
                if num_taps % config.taps_per_warp:
                    conditions.append(tap < num_taps)
                if config.groups_per_unit > 1:
                    conditions.append(channel_in // inputs == channel // outputs)
                with if_(logical_and(*conditions)):
                    output = first_group * outputs + channel
                    index = (output * num_taps + tap) * inputs + channel_in % inputs
                    value = self.accumulators[(mma_m * config.mmas_n + mma_n) * self.atom.num_accumulators + e]
                    store(self.workspace, first + index, value)

    def _b_fragment(self, mma_n: int) -> list[Expr]:
        size = self.atom.b_registers
        return [self.b_fragments[mma_n * size + e] for e in range(size)]


def _split_index(number: Expr, shape: Sequence[int]) -> tuple[Expr, ...]:
    """Return the index in an array of the element with a number in memory order."""
    index: list[Expr] = []
    for size in reversed(shape[1:]):
        index.append(number % size)
        number = number // size
    return (number, *reversed(index))
