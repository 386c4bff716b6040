"""Multiplication by a warp: mma of 16 × 8 sums in float32.

Source: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.compiled import Compiler, Run
from tvmconv.analysis.emulation.instructions.operands import Call, Destinations, Sources
from tvmconv.analysis.emulation.machine import Machine, Mask
from tvmconv.analysis.emulation.threads import Lanes
from tvmconv.errors import AnalysisError
from tvmconv.gpu import WARP
from tvmconv.workloads.dtypes import numpy_dtype


@dataclass(frozen=True)
class Shape:
    """An mma instruction: D = A · B + C by one warp.

    Attributes:
        k: the length of a sum; m is 16 and n is 8.
        dtype: of the operands, as they are multiplied.
        packed: how many of these are in a register.
    """

    k: int
    dtype: str
    packed: int

    @property
    def a(self) -> int:
        """Registers of A that a lane has."""
        return 16 * self.k // WARP // self.packed

    @property
    def b(self) -> int:
        """Registers of B that a lane has."""
        return self.k * 8 // WARP // self.packed


_OPERANDS = {"f16": ("float16", 2), "bf16": ("bfloat16", 2), "tf32": ("float32", 1)}
_SHAPES = {
    ("m16n8k16", "f16"),
    ("m16n8k8", "f16"),
    ("m16n8k16", "bf16"),
    ("m16n8k8", "bf16"),
    ("m16n8k8", "tf32"),
    ("m16n8k4", "tf32"),
}


def shape_of(text: str, kinds: set[str], what: str) -> Shape:
    """The instruction of a shape such as `m16n8k16`, of operands of one kind such as `f16`.

    Raises:
        AnalysisError: there is none; `what` says what was asked for.
    """
    if len(kinds) != 1 or (text, *kinds) not in _SHAPES:
        raise AnalysisError(f"{what}, which cannot be executed")
    return Shape(int(text.rpartition("k")[2]), *_OPERANDS[kinds.pop()])


def elements(shape: Shape, bits: NDArray[Any]) -> NDArray[np.float32]:
    """The elements in registers, of shape (registers × packed, lanes), as they are multiplied."""
    if shape.packed == 1:  # of float32 the tensor cores read 10 bits of mantissa, and no more
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    halves = np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)], axis=1).astype(np.uint16)
    return halves.reshape(-1, bits.shape[1]).view(numpy_dtype(shape.dtype)).astype(np.float32)


def multiplied(
    shape: Shape, a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]
) -> NDArray[np.float32]:
    """D of elements as lanes have them, each of shape (elements, lanes); sums in float32.

    With g = lane / 4 and t = lane % 4, a lane has of A the rows g and g + 8, of B the column g, of C and D the columns
    2 t and 2 t + 1 of these rows; along k the elements `packed` · t and on, and those half a step of 8 registers later.
    """
    p, half = shape.packed, shape.k // (4 * shape.packed)  # halves of k
    a = a.reshape(half, 2, p, -1, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(-1, 16, shape.k)
    b = b.reshape(half, p, -1, 8, 4).transpose(2, 0, 4, 1, 3).reshape(-1, shape.k, 8)
    c = c.reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)
    d = np.matmul(a, b) + c
    return d.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)


def tell(machine: Machine, shape: Shape, lanes: Lanes) -> None:
    """Tell who watches of the arithmetic of each of some lanes."""
    if machine.watch is not None:
        for name in ("Mul", "Add"):
            machine.watch.operation(name, lanes, 16 * 8 * shape.k // WARP, 4)


def _mma(call: Call, compiler: Compiler) -> Run:
    size, rows, columns, *kinds = call.modifiers[2:]
    if (rows, columns) != ("row", "col") or len(kinds) != 4 or kinds[0] != "f32" or kinds[3] != "f32":
        raise AnalysisError(f"{call}, which cannot be executed")
    shape = shape_of(size, set(kinds[1:3]), str(call))
    ends = np.cumsum([4, shape.a, shape.b, 4])
    d, a, b, c = (call.operands[end - n : end] for n, end in zip((4, shape.a, shape.b, 4), ends, strict=True))
    destinations = Destinations(d, compiler)
    left, right, sums = (Sources(each, compiler) for each in (a, b, c))
    machine = compiler.machine

    def multiply(mask: Mask) -> None:
        lanes = machine.warps(mask)
        tell(machine, shape, lanes)
        if not machine.checked:
            for operand in (left, right, sums):
                operand.touch(mask)
            return destinations.mark(mask, lanes)
        found = multiplied(
            shape,
            elements(shape, left.read(mask, lanes, 4)),
            elements(shape, right.read(mask, lanes, 4)),
            sums.read(mask, lanes, 4).view(np.float32),
        )
        destinations.write(mask, lanes, np.ascontiguousarray(found).view(np.uint32).T)

    return multiply


INSTRUCTIONS: dict[str, Callable[[Call, Compiler], Run]] = {"mma": _mma}
