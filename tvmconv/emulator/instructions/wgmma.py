"""Matrix multiplication by warpgroups: wgmma.

The result is in the registers at once, but they may not be accessed before a wait. Source: PTX ISA, "Asynchronous
Warpgroup Level Matrix Multiply-Accumulate Instructions", with its "Matrix Descriptor Format" and "Register Fragments
and Shared Memory Matrix Layouts".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.addresses import CHUNK_BYTES
from tvmconv.emulator.errors import ExecutionError, RaceError
from tvmconv.emulator.instructions.operands import PtxCall, require_uniform
from tvmconv.emulator.instructions.tma_boxes import swizzle_addresses
from tvmconv.emulator.lane_code import ExpressionCode, StatementCode, TirTranslator
from tvmconv.emulator.memory.registers import RegisterBuffer
from tvmconv.emulator.observers import MemoryAccess
from tvmconv.emulator.state import EmulatorState, Mask
from tvmconv.errors import AnalysisError
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE
from tvmconv.workloads.dtypes import get_numpy_dtype

TILE_M, K_BYTES = 64, 32
_DTYPES = {"f16": "float16", "bf16": "bfloat16", "tf32": "float32", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}
_ADDRESS_FIELD_MASK = 0x3FFF  # a descriptor has addresses and distances in units of 16 bytes


def _find_row_chunks(descriptor: NDArray[np.uint64], num_rows: int, description: str) -> tuple[NDArray[np.int64], int]:
    """Return the addresses of the two 16-byte chunks of each row of an operand.

    Args:
        descriptor: Descriptor of the K-major operand of each warpgroup.
        num_rows: Number of rows of the operand.
        description: Name of the instruction for messages.

    Returns:
        Addresses in shared memory, of shape (warpgroups, rows, 2), and the swizzle width in bytes.
    """

    def extract_field(shift: int, bits: int = _ADDRESS_FIELD_MASK) -> NDArray[np.int64]:
        return ((descriptor >> np.uint64(shift)) & np.uint64(bits)).astype(np.int64)

    fields = (extract_field(shift)[:, None, None] for shift in (0, 16, 32))
    start_addresses, leading_bytes, stride_bytes = (field * CHUNK_BYTES for field in fields)
    swizzle_modes = np.unique(extract_field(62, 3))
    if len(swizzle_modes) > 1 or extract_field(49, 7).any():
        raise AnalysisError(f"{description} has operands of several swizzles or with a base offset, not supported")
    swizzle = _SWIZZLES[int(swizzle_modes[0])]
    row, chunk = np.arange(num_rows)[:, None], np.arange(K_BYTES // CHUNK_BYTES)
    if swizzle == 0:  # core matrices of 8 rows of 16 bytes
        return start_addresses + row // 8 * stride_bytes + row % 8 * CHUNK_BYTES + chunk * leading_bytes, swizzle
    addresses = start_addresses + row // 8 * stride_bytes + row % 8 * swizzle + chunk * CHUNK_BYTES
    return swizzle_addresses(addresses, swizzle), swizzle


def _decode_elements(row_bytes: NDArray[np.uint8], dtype_name: str) -> NDArray[np.float32]:
    """Return the elements of rows as float32 as they are multiplied, of shape (warpgroups, rows, k)."""
    flat = np.ascontiguousarray(row_bytes).reshape(*row_bytes.shape[:2], -1)
    if dtype_name == "tf32":  # tensor cores read only 10 bits of the mantissa of float32
        return (flat.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return flat.view(get_numpy_dtype(_DTYPES[dtype_name])).astype(np.float32)


@dataclass(frozen=True)
class _AccumulatorOperands:
    """Accumulators of an instruction.

    Attributes:
        register_buffer: Buffer of the registers.
        indices: Code of the index of each register in the buffer.
    """

    register_buffer: RegisterBuffer
    indices: list[ExpressionCode]
    _row_cache: dict[tuple[int, ...], NDArray[np.intp]] = field(default_factory=dict)

    def find_rows(self, lanes: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the indices of the registers in the buffer."""
        key = tuple([require_uniform(index(None), lanes) for index in self.indices])
        if key not in self._row_cache:
            rows = np.array(key)
            if rows.min() < 0 or rows.max() >= len(self.register_buffer.data):
                raise ExecutionError(f"out of bounds: accumulators of {self.register_buffer.name}")
            self._row_cache[key] = rows
        return self._row_cache[key]


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


def _translate_multiply(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """wgmma.mma_async.sync.aligned.m64nNkK.f32.A.B d, descriptors of A and B, scale-d, signs{, transposed}."""
    size, accum_type, *dtype_names = call.modifiers[3:6] + call.modifiers[6:7]
    n = int(size.removeprefix("m64n").partition("k")[0])
    if accum_type != "f32" or len(dtype_names) != 2 or not set(dtype_names) <= set(_DTYPES):
        raise AnalysisError(f"{call} is not supported by the emulator")
    register_operands = [translator.resolve_registers(operand) for operand in call.operands[: n // 2]]
    if len({id(registers) for registers, _ in register_operands}) != 1:
        raise AnalysisError(f"{call} has accumulators in several register buffers, which is not supported")
    state = translator.state
    accumulators = _AccumulatorOperands(register_operands[0][0], [index for _, index in register_operands])
    a_descriptor, b_descriptor, keep_code = (
        translator.translate_expression(operand) for operand in call.operands[n // 2 : n // 2 + 3]
    )
    signs = [int(operand) for operand in call.operands[n // 2 + 3 : n // 2 + 5]]
    if any(int(operand) for operand in call.operands[n // 2 + 5 :]):
        raise AnalysisError(f"{call} has operands that are not K-major, which is not supported")
    k = K_BYTES // get_numpy_dtype(_DTYPES[dtype_names[0]]).itemsize
    operands = ((a_descriptor, TILE_M, dtype_names[0]), (b_descriptor, n, dtype_names[1]))

    def notify_arithmetic(lanes: NDArray[np.intp]) -> None:
        if state.observer is not None:
            for name in ("Mul", "Add"):
                state.observer.on_operation(name, lanes, TILE_M * n * k // WARPGROUP_SIZE, 4)

    def locate_operand(
        code: ExpressionCode, count: int, kind: str, mask: Mask, warpgroups: NDArray[np.intp]
    ) -> NDArray[np.int64]:
        descriptors = _read_descriptors(state, state.evaluate_data_independent(code, mask), warpgroups, call)
        addresses, swizzle = _find_row_chunks(descriptors, count, str(call))
        _notify_access(state, addresses, warpgroups, kind, swizzle)
        return addresses

    warpgroup_cache: dict[bytes, NDArray[np.intp]] = {}

    def find_warpgroups(mask: Mask) -> NDArray[np.intp]:
        key = b"" if mask is None else mask.tobytes()
        if key not in warpgroup_cache:
            warpgroup_cache[key] = state.require_whole_warpgroups(mask)
        return warpgroup_cache[key]

    def note_multiply(mask: Mask) -> None:
        """Notify of the accesses without computing the result."""
        warpgroups = find_warpgroups(mask)
        lanes = warpgroups.reshape(-1)
        accumulator_rows = accumulators.find_rows(lanes)
        accumulators.register_buffer.is_written[accumulator_rows[:, None], lanes] = True
        accumulators.register_buffer.depends_on_memory[accumulator_rows] = True
        if state.observes_async_proxy:
            for operand in operands:
                locate_operand(*operand, mask, warpgroups)
        notify_arithmetic(lanes)

    if not state.is_checked:
        return note_multiply
    sign = np.float32(signs[0] * signs[1])
    accumulator_state = state.wgmma_groups.track_accumulators(accumulators.register_buffer)
    data = accumulators.register_buffer.data

    def multiply(mask: Mask) -> None:
        warpgroups = state.require_whole_warpgroups(mask)
        lanes = warpgroups.reshape(-1)
        accumulator_rows = accumulators.find_rows(lanes)
        if accumulator_state.needs_fence[lanes // WARP_SIZE].any():
            raise RaceError(f"race: {call} into {accumulator_state.name} with no wgmma.fence after their last access")
        blocks = warpgroups[:, 0] // state.threads.lanes_per_block
        chunks, operand_values = [], []
        for code, count, kind in operands:
            addresses = locate_operand(code, count, kind, mask, warpgroups)
            chunk_indices = state.shared.find_chunks(addresses.reshape(len(warpgroups), -1), blocks)
            loaded = state.shared.read_async(chunk_indices, warpgroups, "wgmma")
            operand_values.append(_decode_elements(loaded.reshape(len(warpgroups), count, K_BYTES), kind))
            chunks.append(chunk_indices)
        sums = np.matmul(operand_values[0], operand_values[1].transpose(0, 2, 1)) * sign
        keeps_accumulator = state.select_lane_values(keep_code(mask), lanes).astype(bool).reshape(warpgroups.shape)
        if (keeps_accumulator != keeps_accumulator[:, :1]).any():
            raise ExecutionError(f"{call} has a scale-d predicate that differs within a warpgroup")
        if keeps_accumulator.any():
            previous = _collect_accumulators(data[accumulator_rows[:, None], lanes])
            sums = sums + np.where(keeps_accumulator[:, :1, None], previous, np.float32(0))
        data[accumulator_rows[:, None], lanes] = _distribute_accumulators(sums)
        accumulators.register_buffer.is_written[accumulator_rows[:, None], lanes] = True
        accumulators.register_buffer.depends_on_memory[accumulator_rows] = True
        state.wgmma_groups.issue(warpgroups, np.concatenate(chunks, axis=1), accumulator_state, accumulator_rows)
        notify_arithmetic(lanes)

    return multiply


def _read_descriptors(
    state: EmulatorState, value: Any, warpgroups: NDArray[np.intp], call: PtxCall
) -> NDArray[np.uint64]:
    """Return the descriptor of each warpgroup."""
    descriptors = state.select_lane_values(value, warpgroups.reshape(-1)).astype(np.uint64).reshape(warpgroups.shape)
    if (descriptors != descriptors[:, :1]).any():
        raise ExecutionError(f"{call} has descriptors that differ within a warpgroup")
    return descriptors[:, 0]


def _notify_access(
    state: EmulatorState, addresses: NDArray[np.int64], warpgroups: NDArray[np.intp], kind: str, swizzle: int
) -> None:
    if state.observer is not None:
        itemsize = get_numpy_dtype(_DTYPES[kind]).itemsize
        flat = addresses.reshape(len(warpgroups), -1)
        lanes, byte_addresses = np.repeat(warpgroups[:, 0], flat.shape[1]), flat.reshape(-1)
        name = state.find_buffer_name(int(flat[0, 0]))
        event = MemoryAccess(
            state.site, "shared", "load", name, CHUNK_BYTES, lanes, byte_addresses, itemsize, swizzle_bytes=swizzle
        )
        state.observer.on_async_proxy_access(event)


def _translate_fence(call: PtxCall, translator: TirTranslator) -> StatementCode:
    state = translator.state
    return lambda mask: state.wgmma_groups.fence(state.require_whole_warpgroups(mask).reshape(-1))


def _translate_commit_group(call: PtxCall, translator: TirTranslator) -> StatementCode:
    state = translator.state
    return lambda mask: state.wgmma_groups.commit_group(state.require_whole_warpgroups(mask))


def _translate_wait_group(call: PtxCall, translator: TirTranslator) -> StatementCode:
    state, max_pending_groups = translator.state, int(call.operands[0])
    return lambda mask: state.wgmma_groups.wait_group(state.require_whole_warpgroups(mask), max_pending_groups)


INSTRUCTIONS: dict[str, Callable[[PtxCall, TirTranslator], StatementCode]] = {
    "wgmma_f16_ss": _translate_multiply,
    "wgmma_bf16_ss": _translate_multiply,
    "wgmma_tf32_ss": _translate_multiply,
    "wgmma_fp8_ss": _translate_multiply,
    "wgmma_fence": _translate_fence,
    "wgmma_commit_group": _translate_commit_group,
    "wgmma_wait_group": _translate_wait_group,
}
