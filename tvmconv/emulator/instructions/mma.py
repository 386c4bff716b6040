"""Multiplication by a warp: mma of 16 × 8 sums in float32.

Source: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.instructions.operands import DestinationOperands, PtxCall, SourceOperands
from tvmconv.emulator.lane_code import StatementCode, TirTranslator
from tvmconv.emulator.state import EmulatorState, Mask
from tvmconv.emulator.threads import Lanes
from tvmconv.errors import AnalysisError
from tvmconv.gpu_specs import WARP_SIZE
from tvmconv.workloads.dtypes import get_numpy_dtype


@dataclass(frozen=True)
class MmaShape:
    """An mma instruction: D = A · B + C by one warp.

    Attributes:
        k: the length of a sum; m is 16 and n is 8.
        dtype: of the operands, as they are multiplied.
        elements_per_register: how many of these are in a register.
    """

    k: int
    dtype: str
    elements_per_register: int

    @property
    def num_a_registers(self) -> int:
        """Registers of A that a lane has."""
        return 16 * self.k // WARP_SIZE // self.elements_per_register

    @property
    def num_b_registers(self) -> int:
        """Registers of B that a lane has."""
        return self.k * 8 // WARP_SIZE // self.elements_per_register


_OPERANDS = {"f16": ("float16", 2), "bf16": ("bfloat16", 2), "tf32": ("float32", 1)}
_SHAPES = {
    ("m16n8k16", "f16"),
    ("m16n8k8", "f16"),
    ("m16n8k16", "bf16"),
    ("m16n8k8", "bf16"),
    ("m16n8k8", "tf32"),
    ("m16n8k4", "tf32"),
}


def find_shape(text: str, dtype_names: set[str], description: str) -> MmaShape:
    """The instruction of a shape such as `m16n8k16`, of operands of one kind such as `f16`.

    Raises:
        AnalysisError: there is none; `description` says what was asked for.
    """
    if len(dtype_names) != 1 or (text, *dtype_names) not in _SHAPES:
        raise AnalysisError(f"{description}, which cannot be executed")
    return MmaShape(int(text.rpartition("k")[2]), *_OPERANDS[dtype_names.pop()])


def decode_elements(shape: MmaShape, bits: NDArray[Any]) -> NDArray[np.float32]:
    """The elements in registers, of shape (registers × packed, lanes), as they are multiplied."""
    if shape.elements_per_register == 1:  # of float32 the tensor cores read 10 bits of mantissa, and no more
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    halves = np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)], axis=1).astype(np.uint16)
    return halves.reshape(-1, bits.shape[1]).view(get_numpy_dtype(shape.dtype)).astype(np.float32)


def multiply_fragments(
    shape: MmaShape, a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]
) -> NDArray[np.float32]:
    """D of elements as lanes have them, each of shape (elements, lanes); sums in float32.

    With g = lane / 4 and t = lane % 4, a lane has of A the rows g and g + 8, of B the column g, of C and D the columns
    2 t and 2 t + 1 of these rows; along k the elements `packed` · t and on, and those half a step of 8 registers later.
    """
    elements_per_register, num_k_groups = (
        shape.elements_per_register,
        shape.k // (4 * shape.elements_per_register),
    )  # halves of k
    a = a.reshape(num_k_groups, 2, elements_per_register, -1, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(-1, 16, shape.k)
    b = b.reshape(num_k_groups, elements_per_register, -1, 8, 4).transpose(2, 0, 4, 1, 3).reshape(-1, shape.k, 8)
    c = c.reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)
    d = np.matmul(a, b) + c
    return d.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)


def notify_arithmetic(state: EmulatorState, shape: MmaShape, lanes: Lanes) -> None:
    """Tell who watches of the arithmetic of each of some lanes."""
    if state.observer is not None:
        for name in ("Mul", "Add"):
            state.observer.on_operation(name, lanes, 16 * 8 * shape.k // WARP_SIZE, 4)


def _translate_mma(call: PtxCall, translator: TirTranslator) -> StatementCode:
    size, a_layout, b_layout, *dtype_names = call.modifiers[2:]
    if (
        (a_layout, b_layout) != ("row", "col")
        or len(dtype_names) != 4
        or dtype_names[0] != "f32"
        or dtype_names[3] != "f32"
    ):
        raise AnalysisError(f"{call}, which cannot be executed")
    shape = find_shape(size, set(dtype_names[1:3]), str(call))
    operand_ends = np.cumsum([4, shape.num_a_registers, shape.num_b_registers, 4])
    d, a, b, c = (
        call.operands[operand_end - num_registers : operand_end]
        for num_registers, operand_end in zip(
            (4, shape.num_a_registers, shape.num_b_registers, 4), operand_ends, strict=True
        )
    )
    destinations = DestinationOperands(d, translator)
    a_sources, b_sources, accum_sources = (SourceOperands(operands, translator) for operands in (a, b, c))
    state = translator.state

    def multiply(mask: Mask) -> None:
        lanes = state.require_whole_warps(mask)
        notify_arithmetic(state, shape, lanes)
        if not state.is_checked:
            for operand in (a_sources, b_sources, accum_sources):
                operand.evaluate(mask)
            return destinations.mark_written(mask, lanes)
        products = multiply_fragments(
            shape,
            decode_elements(shape, a_sources.read(mask, lanes, 4)),
            decode_elements(shape, b_sources.read(mask, lanes, 4)),
            accum_sources.read(mask, lanes, 4).view(np.float32),
        )
        destinations.write(mask, lanes, np.ascontiguousarray(products).view(np.uint32).T)

    return multiply


INSTRUCTIONS: dict[str, Callable[[PtxCall, TirTranslator], StatementCode]] = {"mma": _translate_mma}
