"""Conversions between floating-point types: cvt.

Source: PTX ISA, "Data Movement and Conversion Instructions: cvt".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.instructions.operands import DestinationOperands, PtxCall, SourceOperands
from tvmconv.emulator.lane_code import StatementCode, TirTranslator
from tvmconv.emulator.state import Mask
from tvmconv.errors import AnalysisError
from tvmconv.workloads.dtypes import get_numpy_dtype

_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


def _translate_cvt(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """cvt{.rn}.D.S d, a: converts one floating-point element with rounding to the nearest."""
    dtype_names = [modifier for modifier in call.modifiers if modifier != "rn"]
    if len(dtype_names) != 2 or not set(dtype_names) <= set(_DTYPES):
        raise AnalysisError(f"{call} is not supported by the emulator")
    target_dtype, source_dtype = (get_numpy_dtype(_DTYPES[modifier]) for modifier in dtype_names)
    destinations = DestinationOperands(call.operands[:1], translator)
    sources = SourceOperands(call.operands[1:2], translator)
    state = translator.state

    def convert(mask: Mask) -> None:
        lanes = state.find_lanes(mask)
        (bits,) = sources.read(mask, lanes, source_dtype.itemsize)
        converted = bits.view(source_dtype).astype(target_dtype)
        destinations.write(mask, lanes, converted.view(f"u{target_dtype.itemsize}")[:, None])

    return convert


def _translate_cvt_pair(call: PtxCall, translator: TirTranslator) -> StatementCode:
    """cvt.rn{.relu}.{f16x2,bf16x2}.f32 d, a, b: a goes to the upper half of d, b to the lower."""
    if set(call.modifiers) - {"rn", "relu", "f16x2", "bf16x2", "f32"}:
        raise AnalysisError(f"{call} is not supported by the emulator")
    target_dtype = get_numpy_dtype("float16" if "f16x2" in call.modifiers else "bfloat16")
    destinations = DestinationOperands(call.operands[:1], translator)
    sources = SourceOperands(call.operands[1:3], translator)
    state = translator.state

    def convert(mask: Mask) -> None:
        lanes = state.find_lanes(mask)
        if not state.is_checked:
            sources.evaluate(mask)
            return destinations.mark_written(mask, lanes)
        values = sources.read(mask, lanes, 4).view(np.float32)
        packed_values = (np.maximum(values, 0) if "relu" in call.modifiers else values).astype(target_dtype)
        upper, lower = packed_values.view(np.uint16).astype(np.uint32)
        destinations.write(mask, lanes, (upper << np.uint32(16) | lower)[:, None])

    return convert


def round_to_tf32(bits: NDArray[np.uint32], rounding: str) -> NDArray[np.uint32]:
    """Round float32 bits to TF32: `rna` to nearest with ties away from zero, `rn` ties to even, `rz` toward zero."""
    kept_bits = np.uint32(0xFFFFE000)
    if rounding == "rz":
        return bits & kept_bits
    increment = np.uint32(0x1000) if rounding == "rna" else np.uint32(0x0FFF) + (bits >> np.uint32(13) & np.uint32(1))
    is_special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)  # infinity or NaN
    return np.where(is_special, bits, (bits + increment) & kept_bits)


def _translate_cvt_tf32(call: PtxCall, translator: TirTranslator) -> StatementCode:
    rounding, *remaining_modifiers = call.modifiers
    if remaining_modifiers != ["tf32", "f32"]:
        raise AnalysisError(f"{call} is not supported by the emulator")
    destinations = DestinationOperands(call.operands[:1], translator)
    sources = SourceOperands(call.operands[1:2], translator)
    state = translator.state

    def convert(mask: Mask) -> None:
        lanes = state.find_lanes(mask)
        destinations.write(mask, lanes, round_to_tf32(sources.read(mask, lanes, 4), rounding).T)

    return convert


INSTRUCTIONS: dict[str, Callable[[PtxCall, TirTranslator], StatementCode]] = {
    "cvt": _translate_cvt,
    "cvt_f16x2_f32": _translate_cvt_pair,
    "cvt_bf16x2_f32": _translate_cvt_pair,
    "cvt_tf32_f32": _translate_cvt_tf32,
}
