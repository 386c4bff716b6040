"""Matrix instructions of a warp: ldmatrix and stmatrix, and mma with 16 × 8 accumulators in float32.

Source: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.instructions.eight_bit_sums import add_float8_products, add_integer_products
from tvmconv.emulator.instructions.operands import Instruction, executes
from tvmconv.emulator.state import EmulatorState, Mask
from tvmconv.emulator.threads import Lanes
from tvmconv.errors import AnalysisError
from tvmconv.target import WARP_SIZE
from tvmconv.workloads.dtypes import get_numpy_dtype

# --- ldmatrix and stmatrix ---

_ROW_BYTES = 16  # bytes per row of an 8 × 8 matrix of 16-bit elements
_LANE = np.arange(WARP_SIZE)


def _select_row_addresses(
    state: EmulatorState, addresses: NDArray[np.int64], lanes: Lanes, num_matrices: int
) -> tuple[NDArray[np.int64], Lanes]:
    """Check the row addresses and return them by (warp, matrix, row), and the lanes that provide them.

    Lane 8 i + j of the warp provides the address of row j of matrix i.
    """
    address_lanes = lanes.reshape(-1, WARP_SIZE)[:, : 8 * num_matrices].reshape(-1)
    row_addresses = addresses.reshape(-1, WARP_SIZE)[:, : 8 * num_matrices].reshape(-1, num_matrices, 8)
    state.shared.find_units(row_addresses.reshape(-1), address_lanes, _ROW_BYTES)  # checks bounds and alignment
    return row_addresses, address_lanes


def _find_elements(row_addresses: NDArray[np.int64], is_transposed: bool) -> list[NDArray[np.int64]]:
    """Return the addresses of each lane's two elements of each matrix, or of the word that contains both.

    Lane l has elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, or of column l / 4 if transposed.
    """
    if not is_transposed:
        return [row_addresses[:, :, _LANE // 4] + _LANE % 4 * 4]
    return [row_addresses[:, :, 2 * (_LANE % 4) + half] + _LANE // 4 * 2 for half in range(2)]


def load_matrices(
    state: EmulatorState, name: str, row_starts: NDArray[np.int64], lanes: Lanes, num_matrices: int, is_transposed: bool
) -> NDArray[np.uint32]:
    """Return each lane's pair of elements of matrices of 16-bit elements, of shape (lanes, matrices)."""
    row_addresses, address_lanes = _select_row_addresses(state, row_starts, lanes, num_matrices)
    state.notify("shared", "load", name, address_lanes, row_addresses.reshape(-1), _ROW_BYTES, 2)
    if not state.is_checked:
        return np.zeros((len(lanes), num_matrices), np.uint32)
    parts = []
    for addresses in _find_elements(row_addresses, is_transposed):
        reading_lanes = np.broadcast_to(lanes.reshape(-1, 1, WARP_SIZE), addresses.shape).reshape(-1)
        units = state.shared.find_units(addresses.reshape(-1), reading_lanes, 2 if is_transposed else 4)
        loaded = np.ascontiguousarray(state.shared.read(units, reading_lanes, is_whole_warp=True))
        parts.append(loaded.view(np.uint16 if is_transposed else np.uint32).reshape(addresses.shape).astype(np.uint32))
    words = parts[0] | parts[1] << np.uint32(16) if is_transposed else parts[0]
    return np.ascontiguousarray(words.transpose(0, 2, 1).reshape(len(lanes), num_matrices))


@executes("ldmatrix")
def _ldmatrix(op: Instruction, mask: Mask) -> None:
    """ldmatrix.sync.aligned.m8n8.xN{.trans} d..., address."""
    state, num_matrices, is_transposed = op.state, int(op.modifiers[3][1:]), "trans" in op.modifiers
    lanes = state.require_whole_warps(mask)
    location = op.address(num_matrices, mask)

    def load() -> NDArray[np.uint32]:
        return load_matrices(state, location.name, location.byte_offsets, lanes, num_matrices, is_transposed)

    if state.is_checked:
        op.write(mask, load())
    else:
        op.mark_written(num_matrices, mask, state.defer_access(lambda reading_mask: load()))


@executes("stmatrix")
def _stmatrix(op: Instruction, mask: Mask) -> None:
    """stmatrix.sync.aligned.m8n8.xN{.trans} address, a..."""
    state, num_matrices, is_transposed = op.state, int(op.modifiers[3][1:]), "trans" in op.modifiers
    lanes, shared = state.require_whole_warps(mask), state.shared
    location = op.address(0, mask)
    row_addresses, address_lanes = _select_row_addresses(state, location.byte_offsets, lanes, num_matrices)
    state.notify("shared", "store", location.name, address_lanes, row_addresses.reshape(-1), _ROW_BYTES, 2)
    if not state.is_checked:
        return op.evaluate(1, num_matrices, mask)
    words = op.read(1, num_matrices, mask, 4).reshape(num_matrices, -1, WARP_SIZE).transpose(1, 0, 2)
    writing_lanes = np.broadcast_to(lanes.reshape(-1, 1, WARP_SIZE), words.shape).reshape(-1)
    for half, addresses in enumerate(_find_elements(row_addresses, is_transposed)):
        data = (words >> np.uint32(16 * half)).astype(np.uint16) if is_transposed else words
        units = shared.find_units(addresses.reshape(-1), writing_lanes, data.dtype.itemsize)
        shared.write(units, writing_lanes, np.ascontiguousarray(data.reshape(-1, 1)).view(f"u{shared.unit_bytes}"))


# --- mma ---


@dataclass(frozen=True)
class MmaShape:
    """Shape of an mma instruction, which computes D = A · B + C with one warp; m is 16 and n is 8."""

    k: int  # length of the reduction
    dtypes: tuple[str, str]  # types of A and B in the multiplication
    elements_per_register: int  # number of operand elements per 32-bit register

    @property
    def num_a_registers(self) -> int:
        """Number of registers of A per lane."""
        return 16 * self.k // WARP_SIZE // self.elements_per_register

    @property
    def num_b_registers(self) -> int:
        """Number of registers of B per lane."""
        return self.k * 8 // WARP_SIZE // self.elements_per_register


_OPERANDS = {"f16": ("float16", 2), "bf16": ("bfloat16", 2), "tf32": ("float32", 1)}
_EIGHT_BIT_OPERANDS = {"e4m3": ("float8_e4m3fn", 4), "e5m2": ("float8_e5m2", 4), "s8": ("int8", 4)}
_OPERANDS |= _EIGHT_BIT_OPERANDS
_SHAPES = {
    *(("m16n8k16", "f16"), ("m16n8k8", "f16"), ("m16n8k16", "bf16")),
    *(("m16n8k8", "bf16"), ("m16n8k8", "tf32"), ("m16n8k4", "tf32")),
    *(("m16n8k32", name) for name in _EIGHT_BIT_OPERANDS),
}


_FLOAT8_OPERANDS = {name for name in _EIGHT_BIT_OPERANDS if name != "s8"}  # A and B may have different types


def find_shape(text: str, dtype_names: Sequence[str], description: str) -> MmaShape:
    """Return the instruction of a shape such as `m16n8k16` whose operands A and B have types such as `f16`."""
    has_fitting_types = len({*dtype_names}) == 1 or {*dtype_names} <= _FLOAT8_OPERANDS
    if not has_fitting_types or (text, dtype_names[0]) not in _SHAPES:
        raise AnalysisError(f"{description} is not supported by the emulator")
    a_dtype, b_dtype = (_OPERANDS[name][0] for name in dtype_names)
    return MmaShape(int(text.rpartition("k")[2]), (a_dtype, b_dtype), _OPERANDS[dtype_names[0]][1])


def decode_elements(shape: MmaShape, bits: NDArray[Any], operand: int) -> NDArray[np.float32]:
    """Return the elements in registers, of shape (elements, lanes), as float32 as they are multiplied.

    Args:
        shape: The instruction.
        bits: The registers.
        operand: 0 for elements of A, and 1 for those of B.
    """
    dtype = shape.dtypes[operand]
    if shape.elements_per_register == 1:  # tensor cores read only 10 bits of the mantissa of float32
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    if shape.elements_per_register == 4:
        quarters = np.stack([bits >> np.uint32(8 * e) & np.uint32(0xFF) for e in range(4)], axis=1).astype(np.uint8)
        return quarters.reshape(-1, bits.shape[1]).view(get_numpy_dtype(dtype)).astype(np.float32)
    halves = np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)], axis=1).astype(np.uint16)
    return halves.reshape(-1, bits.shape[1]).view(get_numpy_dtype(dtype)).astype(np.float32)


def multiply_fragments(
    shape: MmaShape, a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[Any]
) -> NDArray[np.uint32]:
    """Return the bits of D from the elements of each lane, each of shape (elements, lanes), with sums in float32.

    Let g = lane / 4 and t = lane % 4. A lane has rows g and g + 8 of A, column g of B, and of C and D the columns 2 t
    and 2 t + 1 of these rows. Along k it has the elements from `elements_per_register` · t on in each half of k.
    """
    packed, num_k_groups = shape.elements_per_register, shape.k // (4 * shape.elements_per_register)
    a = a.reshape(num_k_groups, 2, packed, -1, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(-1, 16, shape.k)
    b = b.reshape(num_k_groups, packed, -1, 8, 4).transpose(2, 0, 4, 1, 3).reshape(-1, shape.k, 8)
    c = c.reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)
    d: NDArray[Any]
    if shape.dtypes[0] == "int8":
        d = add_integer_products(a, b.transpose(0, 2, 1), c.view(np.uint32))
    elif shape.elements_per_register == 4:
        d = add_float8_products(a, b.transpose(0, 2, 1), c)
    else:
        d = np.matmul(a, b) + c
    return np.ascontiguousarray(d.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)).view(np.uint32)


def notify_arithmetic(state: EmulatorState, shape: MmaShape, lanes: Lanes) -> None:
    """Notify the observer of the arithmetic of some lanes."""
    if state.observer is not None:
        for name in ("Mul", "Add"):
            state.observer.on_operation(name, lanes, 16 * 8 * shape.k // WARP_SIZE, 4)


@executes("mma", "mma_int")
def _mma(op: Instruction, mask: Mask) -> None:
    """mma.sync.aligned.SHAPE.row.col.f32.A.B.f32 d, a, b, c, or with s32 and s8."""
    size, a_layout, b_layout, *dtype_names = op.modifiers[2:]
    sums = "s32" if "s8" in dtype_names else "f32"
    if (a_layout, b_layout) != ("row", "col") or len(dtype_names) != 4 or dtype_names[::3] != [sums, sums]:
        raise op.unsupported()
    shape = find_shape(size, dtype_names[1:3], str(op))
    num_a, num_b = shape.num_a_registers, shape.num_b_registers
    lanes = op.state.require_whole_warps(mask)
    notify_arithmetic(op.state, shape, lanes)
    if not op.state.is_checked:
        op.evaluate(4, num_a + num_b + 4, mask)
        return op.mark_written(4, mask)
    parts = enumerate(((4, num_a), (4 + num_a, num_b)))
    a, b = (decode_elements(shape, op.read(*part, mask, 4), operand) for operand, part in parts)
    c = op.read(4 + num_a + num_b, 4, mask, 4).view(np.float32)
    op.write(mask, multiply_fragments(shape, a, b, c).T)
