"""Matrix multiplication by warpgroups: wgmma.

The result is in the registers at once, but they may not be accessed before a wait. Source: PTX ISA, "Asynchronous
Warpgroup Level Matrix Multiply-Accumulate Instructions", with its "Matrix Descriptor Format" and "Register Fragments
and Shared Memory Matrix Layouts".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.errors import ExecutionError, RaceError
from tvmconv.emulator.instructions.eight_bit_sums import add_float8_products, add_integer_products
from tvmconv.emulator.instructions.operands import Instruction, executes, require_uniform, translates
from tvmconv.emulator.instructions.tma import swizzle_addresses
from tvmconv.emulator.memory.registers import RegisterBuffer
from tvmconv.emulator.observers import MemoryAccess
from tvmconv.emulator.state import Mask, StatementCode
from tvmconv.emulator.threads import CHUNK_BYTES
from tvmconv.errors import AnalysisError
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE
from tvmconv.workloads.dtypes import get_numpy_dtype

TILE_M, K_BYTES = 64, 32
_DTYPES = {"f16": "float16", "bf16": "bfloat16", "tf32": "float32"}
_FLOAT8_DTYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_DTYPES |= {**_FLOAT8_DTYPES, "s8": "int8"}
_SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}
_ADDRESS_FIELD_MASK = 0x3FFF  # a descriptor has addresses and distances in units of 16 bytes


def _find_chunks(
    descriptor: NDArray[np.uint64], count: int, is_mn_major: bool, description: str
) -> tuple[NDArray[np.int64], int]:
    """Return the addresses of the 16-byte chunks of an operand with `count` rows along M or N, and the swizzle bytes.

    For the descriptor of each warpgroup, the addresses of a K-major operand have the shape (warpgroups, rows, 2). An
    MN-major operand has 16-bit elements and the shape (warpgroups, rows / 8, 16), because a chunk is 8 elements along M
    or N. A row of shared memory is then one element of K, as wide as the swizzle. The leading byte offset leads to the
    next swizzle width along M or N, and the stride byte offset to the next 8 rows along K.
    """

    def extract_field(shift: int, bits: int = _ADDRESS_FIELD_MASK) -> NDArray[np.int64]:
        return ((descriptor >> np.uint64(shift)) & np.uint64(bits)).astype(np.int64)

    start, leading_bytes, stride_bytes = (extract_field(shift)[:, None, None] * CHUNK_BYTES for shift in (0, 16, 32))
    swizzle_modes = np.unique(extract_field(62, 3))
    swizzle = _SWIZZLES[int(swizzle_modes[0])]
    if len(swizzle_modes) > 1 or extract_field(49, 7).any() or (is_mn_major and not swizzle):
        reason = "operands of several swizzles, with a base offset, or MN-major without a swizzle"
        raise AnalysisError(f"{description} has {reason}, which is not supported")
    if is_mn_major:
        column, k, chunks_per_row = np.arange(count // 8)[:, None], np.arange(16), swizzle // CHUNK_BYTES
        addresses = start + column // chunks_per_row * leading_bytes + column % chunks_per_row * CHUNK_BYTES
        return swizzle_addresses(addresses + k // 8 * stride_bytes + k % 8 * swizzle, swizzle), swizzle
    row, chunk = np.arange(count)[:, None], np.arange(K_BYTES // CHUNK_BYTES)
    if not swizzle:  # core matrices of 8 rows of 16 bytes
        return start + row // 8 * stride_bytes + row % 8 * CHUNK_BYTES + chunk * leading_bytes, swizzle
    addresses = start + row // 8 * stride_bytes + row % 8 * swizzle + chunk * CHUNK_BYTES
    return swizzle_addresses(addresses, swizzle), swizzle


def _decode_elements(row_bytes: NDArray[np.uint8], dtype_name: str) -> NDArray[np.float32]:
    """Return the elements of rows as float32 as they are multiplied, of shape (warpgroups, rows, k)."""
    flat = np.ascontiguousarray(row_bytes).reshape(*row_bytes.shape[:2], -1)
    if dtype_name == "tf32":  # tensor cores read only 10 bits of the mantissa of float32
        return (flat.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return flat.view(get_numpy_dtype(_DTYPES[dtype_name])).astype(np.float32)


def _distribute_accumulators(sums: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rearrange D from (warpgroups, 64, n) to the registers of each lane, (n / 2, lanes).

    Register i of thread t of a warpgroup has row 16 (t / 32) + t % 32 / 4 + 8 (i / 2 % 2) and column 8 (i / 4) +
    2 (t % 4) + i % 2.
    """
    num_warpgroups, _, n = sums.shape
    # Axes: warpgroup, warp, row half, row; group of 8 columns, column pair, column of the pair.
    fragments = sums.reshape(num_warpgroups, 4, 2, 8, n // 8, 4, 2)
    return fragments.transpose(4, 2, 6, 0, 1, 3, 5).reshape(n // 2, num_warpgroups * WARPGROUP_SIZE)


def _collect_accumulators(registers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Invert `_distribute_accumulators`."""
    n = len(registers) * 2
    fragments = registers.reshape(n // 8, 2, 2, -1, 4, 8, 4)
    return fragments.transpose(3, 4, 1, 5, 0, 6, 2).reshape(-1, TILE_M, n)


class _Operand(NamedTuple):
    """An operand in shared memory."""

    descriptor_index: int  # index of its descriptor among the operands of the instruction
    num_rows: int  # elements along M or N
    dtype_name: str
    is_mn_major: bool


class _Multiply:
    """wgmma.mma_async.sync.aligned.m64nNkK.f32.A.B d, descriptors of A and B, scale-d, signs{, transposed}.

    The form .s32.s8.s8 has no signs.
    """

    def __init__(self, op: Instruction) -> None:
        size, accum_type, *dtype_names = op.modifiers[3:7]
        n = int(size.removeprefix("m64n").partition("k")[0])
        is_integer = dtype_names == ["s8", "s8"]
        if (
            accum_type != ("s32" if is_integer else "f32")
            or len(dtype_names) != 2
            or not set(dtype_names) <= set(_DTYPES)
        ):
            raise op.unsupported()
        buffers, self._index_codes = zip(*(op.registers(index) for index in range(n // 2)), strict=True)
        registers: RegisterBuffer = buffers[0]
        if any(buffer is not registers for buffer in buffers):
            raise AnalysisError(f"{op} has accumulators in several register buffers, which is not supported")
        signs = [1, 1] if is_integer else [op.constant(index) for index in (n // 2 + 3, n // 2 + 4)]
        self._has_float8 = dtype_names[0] in _FLOAT8_DTYPES
        self._is_integer = is_integer
        mn_majors = [bool(op.constant(index)) for index in range(n // 2 + 5, op.num_operands)] or [False, False]
        self._op, self._state, self._registers, self._n = op, op.state, registers, n
        self._sign = np.float32(signs[0] * signs[1])
        self._k = K_BYTES // get_numpy_dtype(_DTYPES[dtype_names[0]]).itemsize
        self._operands = (
            _Operand(n // 2, TILE_M, dtype_names[0], mn_majors[0]),
            _Operand(n // 2 + 1, n, dtype_names[1], mn_majors[1]),
        )
        self._rows: dict[tuple[int, ...], NDArray[np.intp]] = {}  # accumulators that were found to be in bounds
        self._warpgroups: dict[bytes, NDArray[np.intp]] = {}  # by the mask
        if self._state.is_checked:
            self._accumulators = self._state.wgmma_groups.track_accumulators(registers)

    def note_accesses(self, mask: Mask) -> None:
        """Notify of the accesses without computing the result."""
        key = b"" if mask is None else mask.tobytes()
        if key not in self._warpgroups:
            self._warpgroups[key] = self._state.require_whole_warpgroups(mask)
        warpgroups = self._warpgroups[key]
        self._mark_accumulators(warpgroups.reshape(-1))
        if self._state.observes_async_proxy:
            for operand in self._operands:
                self._locate_operand(operand, mask, warpgroups)
        self._notify_arithmetic(warpgroups.reshape(-1))

    def execute(self, mask: Mask) -> None:
        """Compute the result, with checks for races."""
        op, state, data = self._op, self._state, self._registers.data
        warpgroups = state.require_whole_warpgroups(mask)
        lanes = warpgroups.reshape(-1)
        if self._accumulators.needs_fence[lanes // WARP_SIZE].any():
            raise RaceError(f"race: {op} into {self._accumulators.name} with no wgmma.fence after their last access")
        chunks, factors = zip(*(self._load_operand(each, mask, warpgroups) for each in self._operands), strict=True)
        keeps = state.select_lane_values(op.code(self._n // 2 + 2)(mask), lanes).astype(bool).reshape(warpgroups.shape)
        if (keeps != keeps[:, :1]).any():
            raise ExecutionError(f"{op} has a scale-d predicate that differs within a warpgroup")
        rows = self._mark_accumulators(lanes)
        previous = None
        if keeps.any():
            previous = np.where(
                keeps[:, :1, None], _collect_accumulators(data[rows[:, None], lanes]), data.dtype.type(0)
            )
        data[rows[:, None], lanes] = _distribute_accumulators(self._add_products(factors[0], factors[1], previous))
        state.wgmma_groups.issue(warpgroups[:, 0], np.concatenate(chunks, axis=1), (self._accumulators, rows))
        self._notify_arithmetic(lanes)

    def _add_products(self, a: NDArray[Any], b: NDArray[Any], previous: NDArray[Any] | None) -> NDArray[Any]:
        """Return the new accumulators."""
        if self._is_integer:
            return add_integer_products(a, b, previous)
        if self._has_float8:
            return add_float8_products(a * self._sign, b, previous)
        sums = np.matmul(a, b.transpose(0, 2, 1)) * self._sign
        return sums if previous is None else sums + previous

    def _load_operand(
        self, operand: _Operand, mask: Mask, warpgroups: NDArray[np.intp]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the chunks of an operand, and its elements, of shape (warpgroups, rows, k)."""
        addresses = self._locate_operand(operand, mask, warpgroups)
        blocks = warpgroups[:, 0] // self._state.threads.lanes_per_block
        chunks = self._state.shared.find_chunks(addresses.reshape(len(warpgroups), -1), blocks)
        loaded = self._state.shared.read_async(chunks, warpgroups, "wgmma")
        if not operand.is_mn_major:
            rows = loaded.reshape(len(warpgroups), operand.num_rows, K_BYTES)
            return chunks, _decode_elements(rows, operand.dtype_name)
        rows = loaded.reshape(len(warpgroups), operand.num_rows // 8 * self._k, CHUNK_BYTES)
        elements = _decode_elements(rows, operand.dtype_name).reshape(-1, operand.num_rows // 8, self._k, 8)
        return chunks, elements.transpose(0, 1, 3, 2).reshape(len(warpgroups), operand.num_rows, self._k)

    def _locate_operand(self, operand: _Operand, mask: Mask, warpgroups: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return the addresses of an operand's chunks."""
        op, state = self._op, self._state
        descriptors = op.values(operand.descriptor_index, mask).astype(np.uint64).reshape(warpgroups.shape)
        if (descriptors != descriptors[:, :1]).any():
            raise ExecutionError(f"{op} has descriptors that differ within a warpgroup")
        addresses, swizzle = _find_chunks(descriptors[:, 0], operand.num_rows, operand.is_mn_major, str(op))
        if state.observer is not None:
            itemsize = get_numpy_dtype(_DTYPES[operand.dtype_name]).itemsize
            flat = addresses.reshape(len(warpgroups), -1)
            name, lanes = state.find_buffer_name(int(flat[0, 0])), np.repeat(warpgroups[:, 0], flat.shape[1])
            access = lanes, flat.reshape(-1), itemsize
            event = MemoryAccess(state.site, "shared", "load", name, CHUNK_BYTES, *access, swizzle_bytes=swizzle)
            state.observer.on_async_proxy_access(event)
        return addresses

    def _mark_accumulators(self, lanes: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the elements of the register buffer that are written, and mark them."""
        key = tuple([require_uniform(index(None), lanes) for index in self._index_codes])
        if key not in self._rows:
            if min(key) < 0 or max(key) >= len(self._registers.data):
                raise ExecutionError(f"out of bounds: accumulators of {self._registers.name}")
            self._rows[key] = np.array(key)
        rows = self._rows[key]
        self._registers.is_written[rows[:, None], lanes] = True
        self._registers.depends_on_memory[rows] = True
        return rows

    def _notify_arithmetic(self, lanes: NDArray[np.intp]) -> None:
        if self._state.observer is not None:
            for name in ("Mul", "Add"):
                self._state.observer.on_operation(name, lanes, TILE_M * self._n * self._k // WARPGROUP_SIZE, 4)


@translates("wgmma_f16_ss", "wgmma_bf16_ss", "wgmma_tf32_ss", "wgmma_fp8_ss", "wgmma_int_ss", "wgmma_int_ss_wide")
def _translate_multiply(op: Instruction) -> StatementCode:
    multiply = _Multiply(op)
    return multiply.execute if op.state.is_checked else multiply.note_accesses


@executes("wgmma_fence")
def _fence(op: Instruction, mask: Mask) -> None:
    op.state.wgmma_groups.fence(op.state.require_whole_warpgroups(mask).reshape(-1))


@executes("wgmma_commit_group")
def _commit_group(op: Instruction, mask: Mask) -> None:
    op.state.wgmma_groups.commit_group(op.state.require_whole_warpgroups(mask)[:, 0])


@executes("wgmma_wait_group")
def _wait_group(op: Instruction, mask: Mask) -> None:
    op.state.wgmma_groups.wait_group(op.state.require_whole_warpgroups(mask)[:, 0], op.constant(0))
