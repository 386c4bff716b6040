"""Matrix multiplication by a warp: mma with 16 × 8 accumulators in float32.

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
from tvmconv.target import WARP_SIZE
from tvmconv.workloads.dtypes import get_numpy_dtype


@dataclass(frozen=True)
class MmaShape:
    """Shape of an mma instruction, which computes D = A · B + C with one warp.

    Attributes:
        k: Length of the reduction; m is 16 and n is 8.
        dtype: Type of the operands in the multiplication.
        elements_per_register: Number of operand elements per 32-bit register.
    """

    k: int
    dtype: str
    elements_per_register: int

    @property
    def num_a_registers(self) -> int:
        """Number of registers of A per lane."""
        return 16 * self.k // WARP_SIZE // self.elements_per_register

    @property
    def num_b_registers(self) -> int:
        """Number of registers of B per lane."""
        return self.k * 8 // WARP_SIZE // self.elements_per_register


_OPERANDS = {"f16": ("float16", 2), "bf16": ("bfloat16", 2), "tf32": ("float32", 1)}
_SHAPES = {
    *(("m16n8k16", "f16"), ("m16n8k8", "f16"), ("m16n8k16", "bf16")),
    *(("m16n8k8", "bf16"), ("m16n8k8", "tf32"), ("m16n8k4", "tf32")),
}


def find_shape(text: str, dtype_names: set[str], description: str) -> MmaShape:
    """Return the instruction of a shape such as `m16n8k16` whose operands have one type such as `f16`.

    Raises:
        AnalysisError: There is no such instruction; the message begins with `description`.
    """
    if len(dtype_names) != 1 or (text, *dtype_names) not in _SHAPES:
        raise AnalysisError(f"{description} is not supported by the emulator")
    return MmaShape(int(text.rpartition("k")[2]), *_OPERANDS[dtype_names.pop()])


def decode_elements(shape: MmaShape, bits: NDArray[Any]) -> NDArray[np.float32]:
    """Return the elements in registers, of shape (elements, lanes), as float32 as they are multiplied."""
    if shape.elements_per_register == 1:  # tensor cores read only 10 bits of the mantissa of float32
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    halves = np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)], axis=1).astype(np.uint16)
    return halves.reshape(-1, bits.shape[1]).view(get_numpy_dtype(shape.dtype)).astype(np.float32)


def multiply_fragments(
    shape: MmaShape, a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return D from the elements of each lane, each of shape (elements, lanes), with sums in float32.

    Let g = lane / 4 and t = lane % 4. A lane has rows g and g + 8 of A, column g of B, and of C and D the columns 2 t
    and 2 t + 1 of these rows. Along k it has the elements from `elements_per_register` · t on in each half of k.
    """
    packed, num_k_groups = shape.elements_per_register, shape.k // (4 * shape.elements_per_register)
    a = a.reshape(num_k_groups, 2, packed, -1, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(-1, 16, shape.k)
    b = b.reshape(num_k_groups, packed, -1, 8, 4).transpose(2, 0, 4, 1, 3).reshape(-1, shape.k, 8)
    c = c.reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)
    d = np.matmul(a, b) + c
    return d.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)


def notify_arithmetic(state: EmulatorState, shape: MmaShape, lanes: Lanes) -> None:
    """Notify the observer of the arithmetic of some lanes."""
    if state.observer is not None:
        for name in ("Mul", "Add"):
            state.observer.on_operation(name, lanes, 16 * 8 * shape.k // WARP_SIZE, 4)


def _translate_mma(call: PtxCall, translator: TirTranslator) -> StatementCode:
    size, a_layout, b_layout, *dtype_names = call.modifiers[2:]
    if (a_layout, b_layout) != ("row", "col") or len(dtype_names) != 4 or dtype_names[::3] != ["f32", "f32"]:
        raise AnalysisError(f"{call} is not supported by the emulator")
    shape = find_shape(size, set(dtype_names[1:3]), str(call))
    counts = (4, shape.num_a_registers, shape.num_b_registers, 4)
    ends = np.cumsum(counts).tolist()
    d, a, b, c = (call.operands[end - count : end] for count, end in zip(counts, ends, strict=True))
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
