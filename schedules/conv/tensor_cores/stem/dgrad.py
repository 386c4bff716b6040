"""Gradients of inputs of first layers, and transposed convolutions to few channels, by mma.sync.

dX has few channels, which alone would fill no column tile of an mma. With a stride, the taps that reach a pixel depend
on its residue class (`..gemm.residue_classes`), and all classes at a position read the same few elements of dY. The
channels of all classes together are therefore the columns of one product: its rows are positions, and its reduction
runs over the elements of dY of a position. Filters have zeros where a class has no tap.

A CTA copies a window of dY to shared memory, where an element of a position is only another address of ldmatrix. A
warp loads each row of the window once for each tap along the row, and multiplies it for all rows of positions that
read it. Sums pass through shared memory, and are stored in vectors of pixels.
"""

from __future__ import annotations

import math
from typing import Any

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.registry import schedule
from tvmconv.requirements import ONE_GROUP, Requirement, all_of
from tvmconv.space import Knobs
from tvmconv.workloads.conv_gradient import InputGradient
from tvmconv.workloads.dtypes import ACCUMULATOR

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
    items_loop,
    load_shared,
    logical_and,
    serial_loop,
    store,
    store_global,
    thread_axis,
    to_uint32,
    unrolled_loop,
)
from ...gradient_conversion import build_channels_last_gradient
from ...gradient_operators import DGRAD, TRANSPOSE
from ..gemm.atoms import MmaSyncAtom, ThreadPosition, ldmatrix_x4
from ..gemm.cp_async import copy_elements
from ..gemm.cta import allocate_smem
from ..gemm.epilogue_ops import EpilogueOps, apply_to_vector
from ..gemm.residue_classes import divide
from ..implicit_gemm_shape import ACCUMULATOR_BYTES, VECTOR_BYTES
from .dgrad_config import StemDgradConfig, can_merge_classes
from .schedule import DTYPES, MAX_CHANNELS
from .volume_view import view_gradient

FILTERS_IN_FLIGHT = 8  # elements of the weight that a thread loads at a time

FEW_RESULT_CHANNELS = Requirement(
    f"at most {MAX_CHANNELS} channels of the result",
    lambda w: w.forward.C <= MAX_CHANNELS,
    lambda w: f"{w.forward.C} channels of the result",
)


@schedule(
    *(*DGRAD, *TRANSPOSE),
    dtypes=DTYPES,
    usage=lambda w, columns: StemDgradConfig.compute_usage(view_gradient(w), columns),
    condition=all_of(ONE_GROUP, FEW_RESULT_CHANNELS, can_merge_classes),
    search_if=lambda w: w.forward.C < MAX_CHANNELS,
    supersedes=("mma_sync", "implicit_gemm", "tiling"),
    starting_configs=lambda w: StemDgradConfig.list_starting_configs(view_gradient(w)),
    device_kinds=("cuda",),
    min_arch=80,
)
def stem(s: Schedule, w: InputGradient, k: Knobs) -> Schedule:
    """Multiply a window of dY in shared memory by the filters of all residue classes."""
    config = StemDgradConfig.declare_knobs(view_gradient(w), k)

    def emit(arguments: dict[str, Buffer]) -> None:
        grid, block = thread_axis(int(config.num_blocks), "blockIdx.x"), thread_axis(config.num_threads, "threadIdx.x")
        with grid as cta, block as thread:
            smem = allocate_smem(int(config.smem_bytes))
            StemDgradKernel(config, arguments, cta, ThreadPosition(thread), smem).emit()

    return build_channels_last_gradient(w, emit)


class StemDgradKernel:
    """Emitter of the kernel; shared memory has the filters, then the window of dY, which the sums replace."""

    def __init__(
        self, config: StemDgradConfig, arguments: dict[str, Buffer], cta: Expr, position: ThreadPosition, smem: Expr
    ) -> None:
        self._config, self._arguments, self._cta, self._position = config, arguments, cta, position
        self._forward, self._axes = config.w.forward, config.residues.axes
        self._gradient, self._weight = (arguments[name] for name in config.w.OPERANDS)
        self._filters, self._window = smem, smem + to_uint32(config.filter_bytes)
        self._atom = MmaSyncAtom(config.w.dtype, config.w.dtype)
        self._accumulators = allocate("accumulators", int(config.num_accumulators), ACCUMULATOR)
        self._a_fragment = allocate("a_fragment", self._atom.a_registers, "uint32")
        num_filters = config.union_taps[1] * config.mmas_n * self._atom.b_registers
        self._b_fragments = allocate("b_fragments", num_filters, "uint32")
        self._column_offsets = allocate("column_offset", config.mmas_n * 2, "uint32")
        self._union_tap, self._column = Register("union_tap"), Register("column")
        self._origin = [Register(name) for name in ("image", "depth", "row", "column")]

    def emit(self) -> None:
        """Emit the kernel."""
        config, num_blocks = self._config, int(self._config.num_blocks)
        self._locate_columns()
        self._load_filters()
        with serial_loop(int(config.iterations), "iteration") as iteration:
            tile = self._cta + iteration * num_blocks
            is_exact = config.num_tiles % num_blocks == 0
            with if_(True if is_exact else tile < int(config.num_tiles)):
                self._locate_tile(tile)
                self._compute_sums()
                self._put_sums()
                emit_call(T.cuda.cta_sync())
                self._store_results()
                emit_call(T.cuda.cta_sync())

    def _locate_tile(self, tile: Expr) -> None:
        """Set the image of a tile, and its first position along each axis."""
        image, *corner = self._origin
        sizes = zip(corner, self._config.pixel_tiles, self._config.tile_size, strict=True)
        for register, count, size in reversed(list(sizes)):
            register.set(tile % int(count) * int(size))
            tile = tile // int(count)
        image.set(tile)

    def _compute_sums(self) -> None:
        """Multiply the planes of the window; with two stages, one is copied while another is multiplied."""
        num_planes, num_ahead = self._config.union_taps[0], self._config.stages - 1
        fill_zeros(self._accumulators, int(self._config.num_accumulators))
        for plane in range(num_ahead):
            self._copy_plane(plane)
            emit_call(T.ptx.cp.async_.commit_group())
        with serial_loop(num_planes, "plane") as plane:
            with if_(plane + num_ahead < num_planes):
                self._copy_plane(plane + num_ahead)
            emit_call(T.ptx.cp.async_.commit_group())
            emit_call(T.ptx.cp.async_.wait_group(num_ahead))
            emit_call(T.cuda.cta_sync())
            self._multiply_plane(plane)
            emit_call(T.cuda.cta_sync())  # the next plane, or the sums, replace this one

    def _plane_address(self, plane: Expr) -> Expr:
        return self._window + to_uint32(plane % self._config.stages * int(self._config.plane_bytes))

    def _split_column(self, column: Expr) -> tuple[list[Expr], Expr]:
        """Return the residue class along each axis, and the channel, of a column of the product."""
        number, channel = column // self._forward.C, column % self._forward.C
        _, along_y, along_x = self._config.classes_with_taps
        return [number // (along_y * along_x), number // along_x % along_y, number % along_x], channel

    def _locate_columns(self) -> None:
        """Compute where the sums of this lane's columns are in the tile of dX, from the position of a row on."""
        config = self._config
        for mma_n in range(config.mmas_n):
            for e in range(2):
                column = mma_n * self._atom.n + self._position.lane % 4 * 2 + e
                parts, channel = self._split_column(column)
                z, y, x = (axis.first_pixel(part) for axis, part in zip(self._axes, parts, strict=True))
                row = z * int(config.rows_per_result_plane) + y
                element = row * int(config.result_row_elements) + x * self._forward.C + channel
                store(self._column_offsets, mma_n * 2 + e, to_uint32(element * ACCUMULATOR_BYTES))

    def _locate_weight(self, row: Expr, filter_idx: Expr) -> tuple[Expr, Expr]:
        """Return the index in K of an element of the filters in shared memory, and whether it is no zero.

        Registers hold what several expressions need, as TVM would take seconds to simplify these otherwise.
        """
        config, forward = self._config, self._forward
        self._union_tap.set(divide(row, config.columns))
        self._column.set(row - self._union_tap.value * config.columns)
        parts, channel = self._split_column(self._column.value)
        (_, taps_y, taps_x), rows = config.union_taps, divide(self._union_tap.value, config.union_taps[-1])
        planes = divide(rows, taps_y)
        offsets = planes, rows - planes * taps_y, self._union_tap.value - rows * taps_x
        checks, tap_idx = [self._union_tap.value < math.prod(config.union_taps), filter_idx < forward.O], 0
        for axis, part, offset in zip(self._axes, parts, offsets, strict=True):
            distance = axis.first_offset(part) - offset
            number = distance // axis.offset_step
            checks += [distance >= 0, number < axis.num_taps(part)]
            if axis.offset_step > 1:
                checks.append(distance % axis.offset_step == 0)
            tap_idx = tap_idx * axis.taps + axis.first_tap(part) + number * axis.tap_step
        index = (filter_idx * math.prod(forward.kernel) + tap_idx) * forward.C + channel
        return index, logical_and(*checks)

    def _load_filters(self) -> None:
        """Arrange the filters of all classes in shared memory: elements of dY × columns × channels of dY."""
        config, num_threads = self._config, int(self._config.num_threads)
        elements = config.k_steps * self._atom.k_bytes // config.itemsize
        total = config.filter_rows * elements
        suffix, dtype = ("b16", "uint16") if config.itemsize == 2 else ("b32", "uint32")
        values = allocate("filter_values", FILTERS_IN_FLIGHT, dtype)
        with serial_loop(ceil_div(total, num_threads * FILTERS_IN_FLIGHT), "batch") as batch:
            first = batch * FILTERS_IN_FLIGHT
            with unrolled_loop(FILTERS_IN_FLIGHT, "i") as i:
                item = (first + i) * num_threads + self._position.thread
                index, is_weight = self._locate_weight(item // elements, item % elements)
                store(values, i, T.Cast(dtype, T.uint32(0)))
                with if_(logical_and(item < total, is_weight)):
                    emit_ptx(f"ld.global.nc.{suffix}", values[i], self._weight.access_ptr("r", offset=index))
            with unrolled_loop(FILTERS_IN_FLIGHT, "i") as i:
                item = (first + i) * num_threads + self._position.thread
                address = self._filters + to_uint32(item // elements * config.pixel_bytes)
                with if_(item < total):
                    emit_ptx(f"st.shared.{suffix}", address + to_uint32(item % elements * config.itemsize), values[i])

    def _copy_plane(self, plane: Expr) -> None:
        """Start the copies of a plane of the window of dY, with zeros outside of dY and beyond its channels."""
        config, forward, half = self._config, self._forward, allocate("gathered", 1, "uint32")
        (planes, rows, columns), (_, window_rows, window_columns) = forward.output_size, map(int, config.window)
        image, *corner = (register.value for register in self._origin)
        first_z, first_y, first_x = (first + axis.lower_corner for first, axis in zip(corner, self._axes, strict=True))
        z, address = first_z + plane, self._plane_address(plane)
        vectors, elements = config.k_steps * self._atom.k_bytes // VECTOR_BYTES, VECTOR_BYTES // config.itemsize
        contiguous = math.gcd(forward.O, elements)
        total, num_threads = window_rows * window_columns * vectors, int(config.num_threads)
        with items_loop(total, self._position.thread, num_threads) as item:
            pixel, vector = item // vectors, item % vectors
            y, x = first_y + pixel // window_columns, first_x + pixel % window_columns
            first = vector * elements
            destination = address + to_uint32(pixel * config.pixel_bytes) + to_uint32(vector * VECTOR_BYTES)
            index = (((image * planes + z) * rows + y) * columns + x) * forward.O + first
            for element in range(0, elements, contiguous):
                is_channel = is_below(first + element, forward.O, vectors * elements)
                is_inside = logical_and(z >= 0, z < planes, y >= 0, y < rows, x >= 0, x < columns, is_channel)
                piece, nbytes = destination + to_uint32(element * config.itemsize), contiguous * config.itemsize
                copy_elements(piece, self._gradient, index + element, nbytes, is_inside, half)

    def _multiply_plane(self, plane: Expr) -> None:
        """Multiply a plane of the window by its filters."""
        config, lane, atom = self._config, self._position.lane, self._atom
        _, taps_y, taps_x = config.union_taps
        columns, pixel_bytes, k_bytes = config.columns, config.pixel_bytes, atom.k_bytes
        filters = self._filters + to_uint32(plane * (taps_y * taps_x * columns * pixel_bytes))
        window_row = self._warp_y * config.rows_per_warp
        pixel = window_row * int(config.window[2]) + self._warp_x * atom.m + lane % 16
        pixels = self._plane_address(plane) + to_uint32(pixel * pixel_bytes) + to_uint32(lane // 16 * VECTOR_BYTES)
        # ldmatrix reads 16 columns at a time, or the last 8.
        chunk = lane // 8 % 2 * VECTOR_BYTES
        pair = filters + to_uint32((lane % 8 + lane // 16 * 8) * pixel_bytes + chunk)
        single = filters + to_uint32(lane % 8 * pixel_bytes + chunk)
        registers = [
            Register(name, "uint32", value) for name, value in (("a", pixels), ("b", pair), ("b_last", single))
        ]
        with serial_loop(taps_x * config.k_steps, "slice") as k_slice:
            tap, step = k_slice // config.k_steps, k_slice % config.k_steps
            a, b, b_last = (register.value + to_uint32(step * k_bytes) for register in registers)
            a = a + to_uint32(tap * pixel_bytes)
            for tap_y in range(taps_y):
                row = to_uint32((tap_y * taps_x + tap) * (columns * pixel_bytes))
                for mma_n in range(0, config.mmas_n, 2):
                    offset = row + to_uint32(mma_n * atom.n * pixel_bytes)
                    if mma_n + 1 < config.mmas_n:
                        ldmatrix_x4(self._b_registers(tap_y, mma_n, 2), b + offset)
                    else:
                        mnemonic = "ldmatrix.sync.aligned.m8n8.x2.shared.b16"
                        emit_ptx(mnemonic, *self._b_registers(tap_y, mma_n, 1), b_last + offset)
            for i in range(config.rows_per_warp + taps_y - 1):
                a_registers = [self._a_fragment[e] for e in range(atom.a_registers)]
                ldmatrix_x4(a_registers, a + to_uint32(i * int(config.window[2]) * pixel_bytes))
                for tap_y in range(max(0, i - config.rows_per_warp + 1), min(taps_y, i + 1)):
                    for mma_n in range(config.mmas_n):
                        atom.emit(self._sums(i - tap_y, mma_n), a_registers, self._b_registers(tap_y, mma_n, 1))

    def _put_sums(self) -> None:
        """Put the sums of the warp into the tile of dX; pixels of classes without taps are zeros."""
        config, lane, forward = self._config, self._position.lane, self._forward
        strides = [axis.stride for axis in self._axes]
        if math.prod(config.classes_with_taps) < math.prod(strides):
            with items_loop(int(config.result_bytes) // 4, self._position.thread, int(config.num_threads)) as item:
                emit_ptx("st.shared.b32", self._window + to_uint32(item * ACCUMULATOR_BYTES), T.float32(0))
            emit_call(T.cuda.cta_sync())
        for row in range(config.rows_per_warp):
            y = (self._warp_y * config.rows_per_warp + row) * strides[1]
            for half in range(2):
                x = (self._warp_x * self._atom.m + half * 8 + lane // 4) * strides[2]
                element = y * int(config.result_row_elements) + x * forward.C
                address = self._window + to_uint32(element * ACCUMULATOR_BYTES)
                for mma_n in range(config.mmas_n):
                    for e in range(2):
                        column = mma_n * self._atom.n + lane % 4 * 2 + e
                        is_inside = is_below(column, config.columns, self._atom.n)
                        with if_(is_inside):
                            offset = self._column_offsets[mma_n * 2 + e]
                            emit_ptx("st.shared.b32", address + offset, self._sums(row, mma_n)[half * 2 + e])

    def _store_results(self) -> None:
        """Apply the epilogue and store the tile of dX, in vectors of neighbouring pixels and channels."""
        config, forward, vector = self._config, self._forward, self._config.store_vector
        (planes, rows, columns), row_elements = forward.input_size, int(config.result_row_elements)
        rows_per_plane, vectors_per_row = int(config.rows_per_result_plane), row_elements // vector
        image, *corner = (register.value for register in self._origin)
        first_z, first_y, first_x = (first * axis.stride for first, axis in zip(corner, self._axes, strict=True))
        values, words = allocate("values", 8, "float32"), allocate("words", 8, "uint32")
        ops, result = EpilogueOps.from_workload(config.w), self._arguments[config.w.RESULT]
        num_vectors = int(config.result_rows) * vectors_per_row
        with items_loop(num_vectors, self._position.thread, int(config.num_threads)) as item:
            row, element = item // vectors_per_row, item % vectors_per_row * vector
            z, y = first_z + row // rows_per_plane, first_y + row % rows_per_plane
            x = first_x * forward.C + element
            with if_(logical_and(z < planes, y < rows, x < columns * forward.C)):
                address = self._window + to_uint32((row * row_elements + element) * ACCUMULATOR_BYTES)
                load_shared(values, address, vector * ACCUMULATOR_BYTES)
                index = ((image * planes + z) * rows + y) * (columns * forward.C) + x
                apply_to_vector(ops, self._arguments, x % forward.C, index, vector, values, words)
                store_global(result, index, words, vector)

    @property
    def _warp_x(self) -> Expr:
        return self._position.warp % self._config.warps_x

    @property
    def _warp_y(self) -> Expr:
        return self._position.warp // self._config.warps_x

    def _sums(self, row: int, mma_n: int) -> list[Any]:
        first = (row * self._config.mmas_n + mma_n) * self._atom.num_accumulators
        return [self._accumulators[first + e] for e in range(self._atom.num_accumulators)]

    def _b_registers(self, tap_y: int, mma_n: int, count: int) -> list[Any]:
        size = self._atom.b_registers
        return [self._b_fragments[(tap_y * self._config.mmas_n + mma_n) * size + e] for e in range(size * count)]
