"""Conversions between floating-point types: cvt.

Source: PTX ISA, "Data Movement and Conversion Instructions: cvt".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.compiled import Compiler, Run
from tvmconv.analysis.emulation.instructions.operands import Call, Destinations, Sources
from tvmconv.analysis.emulation.machine import Mask
from tvmconv.errors import AnalysisError
from tvmconv.workloads.dtypes import numpy_dtype

_SCALARS = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


def _convert(call: Call, compiler: Compiler) -> Run:
    """Conversion between floating-point types of one element, rounded to the nearest."""
    kinds = [each for each in call.modifiers if each != "rn"]
    if len(kinds) != 2 or not set(kinds) <= set(_SCALARS):
        raise AnalysisError(f"{call}, which cannot be executed")
    to, source = (numpy_dtype(_SCALARS[each]) for each in kinds)
    destinations, sources = Destinations(call.operands[:1], compiler), Sources(call.operands[1:2], compiler)
    machine = compiler.machine

    def convert(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        (bits,) = sources.read(mask, lanes, source.itemsize)
        destinations.write(mask, lanes, bits.view(source).astype(to).view(f"u{to.itemsize}")[:, None])

    return convert


def _convert_two(call: Call, compiler: Compiler) -> Run:
    """cvt.rn{.relu}.{f16x2,bf16x2}.f32 d, a, b: a goes to the upper half of d, b to the lower."""
    if set(call.modifiers) - {"rn", "relu", "f16x2", "bf16x2", "f32"}:
        raise AnalysisError(f"{call}, which cannot be executed")
    kind = numpy_dtype("float16" if "f16x2" in call.modifiers else "bfloat16")
    destinations, sources = Destinations(call.operands[:1], compiler), Sources(call.operands[1:3], compiler)
    machine = compiler.machine

    def convert(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        if not machine.checked:
            sources.touch(mask)
            return destinations.mark(mask, lanes)
        exact = sources.read(mask, lanes, 4).view(np.float32)
        rounded = (np.maximum(exact, 0) if "relu" in call.modifiers else exact).astype(kind)
        upper, lower = rounded.view(np.uint16).astype(np.uint32)
        destinations.write(mask, lanes, (upper << np.uint32(16) | lower)[:, None])

    return convert


def to_tf32(bits: NDArray[np.uint32], rounding: str) -> NDArray[np.uint32]:
    """The bits of float32, rounded to TF32: `rna` to the nearest, ties away from zero, `rn` ties to even, `rz` cut."""
    cut = np.uint32(0xFFFFE000)
    if rounding == "rz":
        return bits & cut
    add = np.uint32(0x1000) if rounding == "rna" else np.uint32(0x0FFF) + (bits >> np.uint32(13) & np.uint32(1))
    special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)  # infinite or no number
    return np.where(special, bits, (bits + add) & cut)


def _convert_tf32(call: Call, compiler: Compiler) -> Run:
    rounding, *others = call.modifiers
    if others != ["tf32", "f32"]:
        raise AnalysisError(f"{call}, which cannot be executed")
    destinations, sources = Destinations(call.operands[:1], compiler), Sources(call.operands[1:2], compiler)
    machine = compiler.machine

    def convert(mask: Mask) -> None:
        lanes = machine.lanes(mask)
        destinations.write(mask, lanes, to_tf32(sources.read(mask, lanes, 4), rounding).T)

    return convert


INSTRUCTIONS: dict[str, Callable[[Call, Compiler], Run]] = {
    "cvt": _convert,
    "cvt_f16x2_f32": _convert_two,
    "cvt_bf16x2_f32": _convert_two,
    "cvt_tf32_f32": _convert_tf32,
}
