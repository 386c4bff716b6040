"""Gradients of inputs of grouped convolutions with few channels per group, by mma.sync.

For each unit of groups, the product has pixels of dX as rows and channels of dX as columns, and its reduction runs over
(tap, channel of dY). A CTA copies a window of dY to shared memory. A row of an 8 × 8 matrix of ldmatrix is the octet of
a pixel, so a tap is only another address. The filters' fragments stay in registers for all tiles of a CTA; elements
between groups of the same octet are zeros.

With a stride, the pixels of dX that meet dY below the same taps are a class. Classes are computed one after another
from the same window, so that there is no work on zeros. The tile of dX is arranged in shared memory, and stored in
vectors of 16 bytes.

Source: PTX ISA, "mma.sync", "ldmatrix" and "cp.async".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads.conv_gradient import InputGradient
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
    is_below,
    load_shared,
    logical_and,
    pack,
    serial_loop,
    store,
    store_global,
    thread_axis,
    to_uint32,
)
from ...gradient_conversion import build_channels_last_gradient, view_channels_last
from ...gradient_operators import DGRAD, TRANSPOSE
from ..gemm.atoms import MmaSyncAtom, ThreadPosition, ldmatrix_x4
from ..stem.cta import join_halves
from .dgrad_config import GroupedDgradConfig, Tap, can_form_gradient_units, list_class_taps
from .pixel_copies import ITEM_BYTES, OCTET, PixelTile, for_each_element, wait_for_copies
from .tile_config import MMA_PIXELS


@schedule(
    *(*DGRAD, *TRANSPOSE),
    dtypes=("float16", "bfloat16"),
    usage=GroupedDgradConfig.compute_usage,
    condition=can_form_gradient_units,
    search_if=can_form_gradient_units,
    starting_configs=lambda w: GroupedDgradConfig.list_starting_configs(view_channels_last(w)),
    supersedes=("implicit_gemm",),
    device_kinds=("cuda",),
    min_arch=80,
)
def grouped_mma_sync(s: Schedule, w: InputGradient, k: Knobs) -> Schedule:
    """Multiply octets of channels of dY, in shared memory, by filters that stay in registers."""
    config = GroupedDgradConfig.declare_knobs(view_channels_last(w), k)
    return build_channels_last_gradient(w, lambda arguments: GroupedDgradKernel(config, arguments).emit())


class GroupedDgradKernel:
    """Emitter of the kernel."""

    def __init__(self, config: GroupedDgradConfig, arguments: dict[str, Buffer]) -> None:
        self.config, self.shape, self.view = config, config.shape, config.convolution
        arrays = {config.argument_roles.get(name, name): array for name, array in arguments.items()}
        self.arguments = arguments
        self.image_array, self.filters, self.output = arrays["X"], arrays["K"], arrays["Y"]
        self.atom = MmaSyncAtom(config.w.dtype, config.w.dtype)

    def emit(self) -> None:
        """Emit the kernel."""
        config = self.config
        channels = config.units * config.inputs_per_unit
        grid = block_axes(int(config.pixel_blocks), config.unit_blocks)
        with grid as (pixel_block, unit_block), thread_axis(config.num_threads, "threadIdx.x") as thread:
            smem = allocate("smem", config.smem_bytes // 4, "uint32", "shared.dyn")
            inputs = Register("inputs", "uint32", T.cuda.cvta_generic_to_shared(smem.access_ptr("rw"))).value
            self.outputs = inputs + to_uint32(config.input_bytes)
            self.position, self.first_unit = ThreadPosition(thread), unit_block * config.units
            warp = self.position.warp
            self.unit, self.n_warp = warp % config.units, warp // config.units % config.warps_n
            self.pixel_warp = warp // (config.units * config.warps_n)
            num_pixels = config.window[0] * config.window[1]
            first_channel = self.first_unit * config.inputs_per_unit
            self.window = PixelTile(self.image_array, inputs, num_pixels, channels, first_channel)
            self.a_fragment = allocate("a_fragment", self.atom.a_registers, "uint32")
            self.b_fragments = allocate("b_fragments", config.num_filter_registers, "uint32")
            self.accumulators = allocate("accumulators", config.mmas_n * 4, ACCUMULATOR)
            self.packed = allocate("packed", 4, "uint32")
            self.load_filters()
            with config.for_each_tile(pixel_block) as origin:
                self.copy_window(*origin)
                wait_for_copies()
                first_register = 0
                for first_pixel, taps in list_class_taps(self.shape).items():
                    self.multiply_class(first_pixel, taps, first_register)
                    first_register += self.count_k_octets(taps) * config.mmas_n
                emit_call(T.cuda.cta_sync())
                self.store_tile(*origin)

    def count_k_octets(self, taps: list[Tap]) -> int:
        """Return the octets of the reduction of a class; an even number."""
        return ceil_div(len(taps) * (self.config.inputs_per_unit // OCTET), 2) * 2

    def load_filters(self) -> None:
        """Load the warp's fragments of the filters, with zeros between groups and behind the last octet."""
        config, view, lane = self.config, self.view, self.position.lane
        inputs, outputs, octets = view.C // view.groups, view.O // view.groups, config.inputs_per_unit // OCTET
        register = 0
        for taps in list_class_taps(self.shape).values():
            for k_octet in range(self.count_k_octets(taps)):
                for mma_n in range(config.mmas_n):
                    if k_octet >= len(taps) * octets:
                        store(self.b_fragments, register, T.uint32(0))
                    else:
                        tap = taps[k_octet // octets].number
                        channel = (self.n_warp * config.mmas_n + mma_n) * OCTET + lane // 4
                        halves = []
                        for e in range(2):
                            channel_in = k_octet % octets * OCTET + lane % 4 * 2 + e
                            index = self.locate_filter(tap, channel, channel_in)
                            half = T.reinterpret("uint16", self.filters[index])
                            if config.groups_per_unit > 1:
                                is_same_group = channel_in // inputs == channel // outputs
                                half = T.Select(is_same_group, half, T.uint16(0))
                            halves.append(half)
                        store(self.b_fragments, register, join_halves(*halves))
                    register += 1

    def locate_filter(self, tap: int, channel: Expr, channel_in: Expr) -> tuple[Expr, ...]:
        """Return the index in K of a tap's weight, from a channel of dY in a unit to one of dX."""
        first_input = (self.first_unit + self.unit) * self.config.inputs_per_unit
        coords = self.shape.tap_from_index(tap)
        return self.shape.array_index(first_input + channel_in, coords, channel % (self.view.O // self.view.groups))

    def copy_window(self, image: Expr, row: Expr, column: Expr) -> None:
        """Start the copies of the window of dY, with zeros outside of the image."""
        config, shape = self.config, self.shape
        _, num_rows, num_columns = shape.input_size
        first_row, first_column = shape.first_input(1, row), shape.first_input(2, column)

        def locate(pixel: Expr) -> tuple[Expr, Expr, Any]:
            y, x = first_row + pixel // config.window[1], first_column + pixel % config.window[1]
            return y, x, logical_and(y >= 0, y < num_rows, x >= 0, x < num_columns)

        self.window.copy(self.position.thread, config.num_threads, image, (num_rows, num_columns), locate)

    def multiply_class(self, first_pixel: tuple[int, int], taps: list[Tap], first_register: int) -> None:
        """Compute the pixels of a class, 16 at a time, and put them into the tile of dX in shared memory."""
        config, lane, pitch = self.config, self.position.lane, self.window.pitch
        octets, k_octets = config.inputs_per_unit // OCTET, self.count_k_octets(taps)
        tiles = ceil_div(config.num_pixels, MMA_PIXELS)
        steps = ceil_div(tiles, config.warps_pixels)
        pixel_address = Register("pixel_address", "uint32")

        def offset(k_octet: int) -> int:
            tap = taps[min(k_octet // octets, len(taps) - 1)]  # weights behind the last octet are zeros
            pixel = tap.row * config.window[1] + tap.column
            return (pixel * pitch + k_octet % octets * OCTET) * ITEM_BYTES

        with serial_loop(steps, "pixel_step") as i:
            step = i * config.warps_pixels + self.pixel_warp
            with if_(True if steps * config.warps_pixels == tiles else step < tiles):
                pixel = T.min(step * MMA_PIXELS + lane % 16, config.num_pixels - 1)
                _, stride_y, stride_x = self.shape.strides
                position = pixel // config.pixels_x * (stride_y * config.window[1]) + pixel % config.pixels_x * stride_x
                element = position * pitch + self.unit * config.inputs_per_unit
                pixel_address.set(self.window.address + to_uint32(element * ITEM_BYTES))
                fill_zeros(self.accumulators, config.mmas_n * 4)
                for k_octet in range(0, k_octets, 2):
                    a_registers = [self.a_fragment[e] for e in range(self.atom.a_registers)]
                    shift = T.Select(lane < 16, T.uint32(offset(k_octet)), T.uint32(offset(k_octet + 1)))
                    ldmatrix_x4(a_registers, pixel_address.value + shift)
                    for mma_n in range(config.mmas_n):
                        sums = [self.accumulators[mma_n * 4 + e] for e in range(4)]
                        registers = [
                            self.b_fragments[first_register + (k_octet + e) * config.mmas_n + mma_n] for e in range(2)
                        ]
                        self.atom.emit(sums, a_registers, registers)
                self.put_sums(step, first_pixel)

    def put_sums(self, step: Expr, first_pixel: tuple[int, int]) -> None:
        """Put a warp's 16 pixels of a class into the tile of dX."""
        config, lane = self.config, self.position.lane
        _, step_y, step_x = self.shape.upsampling
        for half in range(2):
            row = step * MMA_PIXELS + half * 8 + lane // 4
            with if_(is_below(row, config.num_pixels, MMA_PIXELS)):
                y = row // config.pixels_x * step_y + first_pixel[0]
                x = row % config.pixels_x * step_x + first_pixel[1]
                for mma_n in range(config.mmas_n):
                    channel = (self.n_warp * config.mmas_n + mma_n) * OCTET + lane % 4 * 2
                    channel = channel + self.unit * config.outputs_per_unit
                    sums = [self.accumulators[mma_n * 4 + half * 2 + e] for e in range(2)]
                    self.pack_results(sums, channel)
                    element = (y * config.tile_size[1] + x) * config.output_pitch + channel
                    emit_ptx("st.shared.b32", self.outputs + to_uint32(element * ITEM_BYTES), self.packed[0])

    def pack_results(self, sums: Sequence[Expr], channel: Expr) -> None:
        """Round the sums of two neighbouring channels of the CTA to a word."""
        pack(self.packed, 0, sums, self.view.storage)

    def store_tile(self, image: Expr, row: Expr, column: Expr) -> None:
        """Store the tile of dX, an octet of channels at a time."""
        config, (_, num_rows, num_columns) = self.config, self.shape.output_size
        octets, first_channel = (
            config.units * config.outputs_per_unit // OCTET,
            self.first_unit * config.outputs_per_unit,
        )
        height, width = config.tile_size

        def emit_store(number: Expr) -> None:
            pixel, octet = number // octets, number % octets
            y, x = row + pixel // width, column + pixel % width
            with if_(logical_and(is_below(y, num_rows, height), is_below(x, num_columns, width))):
                element = pixel * config.output_pitch + octet * OCTET
                load_shared(self.packed, self.outputs + to_uint32(element * ITEM_BYTES), OCTET * ITEM_BYTES)
                index = ((image * num_rows + y) * num_columns + x) * self.view.O + first_channel + octet * OCTET
                store_global(self.output, index, self.packed, OCTET)

        for_each_element(height * width * octets, self.position.thread, config.num_threads, emit_store)
