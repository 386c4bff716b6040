"""Conversions between floating-point types: cvt.

Source: PTX ISA, "Data Movement and Conversion Instructions: cvt".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.instructions.operands import Instruction, executes
from tvmconv.emulator.state import Mask
from tvmconv.workloads.dtypes import get_numpy_dtype


def _convert_bits(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the bits of values in a type; hardware sets those of NaN to ones, unless it only appends to a bfloat16."""
    bits = values.astype(dtype).view(f"u{dtype.itemsize}")
    if values.dtype != get_numpy_dtype("bfloat16"):
        bits[np.isnan(values)] = (1 << 8 * dtype.itemsize - 1) - 1
    return bits


_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


@executes("cvt")
def _convert(op: Instruction, mask: Mask) -> None:
    """cvt{.rn}.D.S d, a: converts one floating-point element with rounding to the nearest."""
    names = [modifier for modifier in op.modifiers if modifier != "rn"]
    if len(names) != 2 or not set(names) <= set(_DTYPES):
        raise op.unsupported()
    target_dtype, source_dtype = (get_numpy_dtype(_DTYPES[name]) for name in names)
    (bits,) = op.read(1, 1, mask, source_dtype.itemsize)
    op.write(mask, _convert_bits(bits.view(source_dtype), target_dtype)[:, None])


@executes("cvt_f16x2_f32", "cvt_bf16x2_f32")
def _convert_pair(op: Instruction, mask: Mask) -> None:
    """cvt.rn{.relu}.{f16x2,bf16x2}.f32 d, a, b: a goes to the upper half of d, b to the lower."""
    if set(op.modifiers) - {"rn", "relu", "f16x2", "bf16x2", "f32"}:
        raise op.unsupported()
    if not op.state.is_checked:
        op.evaluate(1, 2, mask)
        return op.mark_written(1, mask)
    values = op.read(1, 2, mask, 4).view(np.float32)
    values = np.maximum(values, 0) if "relu" in op.modifiers else values
    dtype = get_numpy_dtype("float16" if "f16x2" in op.modifiers else "bfloat16")
    upper, lower = _convert_bits(values, dtype).astype(np.uint32)
    op.write(mask, (upper << np.uint32(16) | lower)[:, None])


def round_to_tf32(bits: NDArray[np.uint32], rounding: str) -> NDArray[np.uint32]:
    """Round float32 bits to TF32: `rna` to nearest with ties away from zero, `rn` ties to even, `rz` toward zero."""
    kept_bits, infinity = np.uint32(0xFFFFE000), np.uint32(0x7F800000)
    increments = {"rna": np.uint32(0x1000), "rn": np.uint32(0x0FFF) + (bits >> np.uint32(13) & np.uint32(1))}
    rounded = (bits + increments.get(rounding, np.uint32(0))) & kept_bits
    is_nan = bits & np.uint32(0x7FFFFFFF) > infinity
    special = bits if rounding == "rna" else np.where(is_nan, np.uint32(0x7FFFE000), bits)
    return np.where(bits & infinity == infinity, special, rounded)


@executes("cvt_tf32_f32")
def _convert_to_tf32(op: Instruction, mask: Mask) -> None:
    rounding, *remaining_modifiers = op.modifiers
    if remaining_modifiers != ["tf32", "f32"]:
        raise op.unsupported()
    op.write(mask, round_to_tf32(op.read(1, 1, mask, 4), rounding).T)
