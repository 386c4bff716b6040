"""Rules of 8-bit workloads: types and saturation of results, errors of sums, and arguments of tests.

Operands of 8 bits are exact, and so are their products in float32 or int32. Errors come from the accumulators of tensor
cores and from the rounding of results.

For 8-bit floats, the tensor cores of sm_89 and sm_90 align the products of an instruction and the accumulator to the
largest exponent among them, and truncate them to `MANTISSA_BITS` bits of fraction. (Sources: issue 287 of
thu-ml/SageAttention; issue 50 of deepseek-ai/DeepGEMM; NVIDIA/cutlass, `fp8_accumulation.hpp`.) An instruction adds 32
products. Let n instructions add to the accumulator before it is added to a float32 register and starts anew, which is
called promotion. All products are positive, which is the worst case; they are alike, so that the accumulator grows
evenly from zero to A; and no product exceeds A / 8.

* The accumulator is i · A / n before the instruction i, counted from zero. An addend loses on average half of a unit,
  which is 2^-MANTISSA_BITS times the largest power of two up to the accumulator. Over an accumulator that grows evenly,
  these powers of two are at most 3/4 of it on average. The 32 products of all instructions lose
  32 · 2^-(MANTISSA_BITS + 1) · 3/4 · A · (0 + 1 + ... + (n - 1)) / n = 3 (n - 1) · 2^-12 · A.
* The first instruction has no accumulator, and aligns its products to the largest of them. They lose at most
  32 · 2^-(MANTISSA_BITS + 1) · A / 8 = 2^-12 · A.

The relative error of the sum is therefore at most (3 n - 2) · 2^-12 (`bound_accumulation_error`), which is 2^-8 for
n = 6. Products of random signs cancel, as do their errors, and the relative error is smaller. Measured on an H100 on
positive data, as absolute values of normally distributed numbers: 6.2e-4 for 128 products, 5.9e-3 for 512; the bounds
are 2.4e-3 and 1.1e-2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.errors import WorkloadError
from tvmconv.workloads import dtypes
from tvmconv.workloads.epilogue import QUANTIZE, STATS, ZERO_POINT
from tvmconv.workloads.text import quote

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm import tirx

MANTISSA_BITS = 13  # bits of fraction that tensor cores keep of sums of 8-bit floats
PRODUCTS_PER_INSTRUCTION = 32  # of 8 bits that `mma.sync` and wgmma add to a sum
# Relative error of sums of 8-bit floats that kernels may make unless the user allows more. It is the unit roundoff of
# bfloat16, which is the default type of results, and a sixteenth of the rounding of an E4M3 operand.
MAX_ACCUMULATION_ERROR = 2.0**-8
MAX_INT32_SUM = 2**31 - 1

OUT_PREFIX = "out-"  # of the option that names the type of the output
# Types of the output of 8-bit workloads, by the text of the option.
OUT_DTYPES = {
    f"{OUT_PREFIX}{text}": dtype
    for text, dtype in (
        ("f32", "float32"),
        ("f16", "float16"),
        ("bf16", "bfloat16"),
        ("i32", "int32"),
        *((dtypes.DTYPES[name].text, name) for name in dtypes.EIGHT_BIT_DTYPES),
    )
}
WEIGHT_PREFIX = "weight-"  # of the option that names the type of the weight
# Types of the weight of workloads of 8-bit floats, by the text of the option.
WEIGHT_DTYPES = {f"{WEIGHT_PREFIX}{dtypes.DTYPES[name].text}": name for name in dtypes.FLOAT8_DTYPES}
# Smallest and largest finite number of the 8-bit types; larger results saturate.
LIMITS = {"int8": (-128.0, 127.0), "float8_e4m3fn": (-448.0, 448.0), "float8_e5m2": (-57344.0, 57344.0)}
ROUNDING_SHIFT = 1.25 * 2.0**23  # float32 numbers near it are integers; OpenCL text has its 7 digits
MAX_ROUNDED = 1024.0  # size of rounded numbers, of which all larger ones saturate with any zero point
FLOAT8_FORMATS = {"float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15)}  # bits of the mantissa, and bias of the exponent
FLOAT32_MANTISSA_BITS, FLOAT32_BIAS = 23, 127
FLOAT32_NAN, FLOAT32_INFINITY, FLOAT32_SIZE = 0x7FC00000, 0x7F800000, 0x7FFFFFFF  # bits; the last has all but the sign


def bound_accumulation_error(num_products: int) -> float:
    """Return the bound of the relative error of a float32 sum of products of 8-bit floats on tensor cores.

    Args:
        num_products: Number of products that are added before a promotion.

    Example:
        >>> bound_accumulation_error(192) == MAX_ACCUMULATION_ERROR
        True
    """
    num_instructions = ceil_div(num_products, PRODUCTS_PER_INSTRUCTION)
    return min(1.0, (3 * num_instructions - 2) * 2.0 ** (1 - MANTISSA_BITS))


def select_output_dtype(dtype: str, epilogue: tuple[str, ...]) -> str:
    """Return the default type of the output: that of exact sums, of quantized results, or bfloat16.

    Args:
        dtype: Dtype of the operands, one of `dtypes.EIGHT_BIT_DTYPES`.
        epilogue: Names of the operations of the epilogue.
    """
    if QUANTIZE in epilogue:
        return dtype
    return "int32" if dtype == dtypes.INT8.name and not epilogue else "bfloat16"


def validate_weight(dtype: str, weight_dtype: str) -> None:
    """Raise WorkloadError for a weight of another type than that of the input, unless both are 8-bit floats."""
    if weight_dtype == dtype or {dtype, weight_dtype} <= {*dtypes.FLOAT8_DTYPES}:
        return
    accepted = " and ".join(dtypes.DTYPES[name].text for name in dtypes.FLOAT8_DTYPES)
    raise WorkloadError(f"weight_dtype={quote(weight_dtype)}: expected {accepted} for types that differ")


def validate_output(dtype: str, epilogue: tuple[str, ...], out_dtype: str, num_products: int) -> None:
    """Raise WorkloadError for an output that an 8-bit workload cannot have, or sums that int32 cannot hold."""
    options = {stored: text for text, stored in OUT_DTYPES.items()}
    if out_dtype not in options:
        raise WorkloadError(f"out_dtype={quote(out_dtype)}: expected one of {', '.join(options)}")
    text, is_integer = options[out_dtype], dtype == dtypes.INT8.name
    if out_dtype == "int32" and (not is_integer or epilogue):
        raise WorkloadError(f"{text}: expected operands of {dtypes.INT8.text} and no epilogue")
    if STATS in epilogue:
        raise WorkloadError(f"epilogue={quote(epilogue)}: {STATS} needs operands of 16 or 32 bits")
    last = (QUANTIZE, ZERO_POINT) if ZERO_POINT in epilogue else (QUANTIZE,)
    if {*last} & {*epilogue} and epilogue[-len(last) :] != last:
        plural = "s" * (len(last) - 1)
        raise WorkloadError(f"epilogue={quote(epilogue)}: expected {' and '.join(last)} as the last operation{plural}")
    if ZERO_POINT in epilogue and out_dtype != dtypes.INT8.name:
        raise WorkloadError(f"{text}: expected an output of {dtypes.INT8.text} after {ZERO_POINT}")
    if (QUANTIZE in epilogue) != (out_dtype in LIMITS):
        raise WorkloadError(f"{text}: expected the operation {QUANTIZE} before outputs of 8 bits, and only there")
    if is_integer and num_products * 2**14 > MAX_INT32_SUM:
        raise WorkloadError(f"{num_products} products of {dtypes.INT8.text} per output may exceed int32")


def get_tolerance(dtype: str, out_dtype: str) -> float:
    """Return the largest relative L2 error of a correct result: of the sums, and of its rounding.

    Sums of integers are exact, so that an output in int32 has no error. Results in float16 and bfloat16 are rounded as
    those of operands in these types. Results of 8 bits err by at most the unit roundoff, or half a step of integers.
    """
    if out_dtype == "int32":
        return 0.0
    sums = dtypes.SUM_TOLERANCE if dtype == dtypes.INT8.name else MAX_ACCUMULATION_ERROR
    if out_dtype == dtypes.INT8.name:
        return sums + 0.5 / INT8_RESULT_SIZE
    factor = 1 if out_dtype in LIMITS else 4
    return sums + factor * (dtypes.DTYPES[out_dtype].unit_roundoff)


INT8_RESULT_SIZE = 16.0  # least root mean square of the results of tests in int8


def limit_array(y: NDArray[np.float64], out_dtype: str) -> NDArray[np.float64]:
    """Return results limited to the finite numbers of the output's type; they are not rounded."""
    return np.clip(y, *LIMITS[out_dtype]) if out_dtype in LIMITS else y


def _round_small(value: tirx.Expr) -> tirx.Expr:
    """Return a float32 number below 2^21 as int32, rounded to nearest even, by an addition that all devices have."""
    from tvm import tirx

    shift_bits = int(np.float32(ROUNDING_SHIFT).view(np.int32))
    bits = tirx.reinterpret("int32", value + tirx.const(ROUNDING_SHIFT, "float32"))
    return bits - tirx.const(shift_bits, "int32")


def round_to_integer(value: tirx.Expr) -> tirx.Expr:
    """Return a float32 number as int32, rounded to nearest even and limited to `MAX_ROUNDED`."""
    from tvm import te, tirx

    low, high = (tirx.const(limit, "float32") for limit in (-MAX_ROUNDED, MAX_ROUNDED))
    return _round_small(te.max(te.min(value, high), low))


def convert_expression(value: tirx.Expr, dtype: str) -> tirx.Expr:
    """Return a float32 value in the output's type; results of 8 bits saturate and are rounded to nearest even.

    8-bit floats are returned as bits (`dtypes.get_tir_dtype`), in an expression that may occur only once.
    """
    from tvm import tirx

    if dtype not in LIMITS:
        return value.astype(dtype)
    if dtype in FLOAT8_FORMATS:
        return _name_value(tirx.reinterpret("int32", value), lambda bits: _encode_float8(bits, dtype)).astype("uint8")
    return _round_small(_limit_expression(value, dtype)).astype(dtype)


def _limit_expression(value: tirx.Expr, dtype: str) -> tirx.Expr:
    """Return a value limited to the numbers of a type."""
    from tvm import te, tirx

    low, high = (tirx.const(limit, "float32") for limit in LIMITS[dtype])
    return te.max(te.min(value, high), low)


def _name_value(value: tirx.Expr, make_result: Callable[[tirx.Expr], tirx.Expr]) -> tirx.Expr:
    """Return a result in which an int32 value occurs many times, and is computed once.

    As the result defines a variable, it may occur only once in a function.
    """
    from tvm import tirx

    variable = tirx.Var("bits", "int32")
    return tirx.Let(variable, value, make_result(variable))


def _encode_float8(bits: tirx.Expr, dtype: str) -> tirx.Expr:
    """Return the bits of an 8-bit float from those of a float32, as int32.

    Bits of positive floats are ordered like integers. A number below the normal ones is rounded to a multiple of the
    smallest.
    """
    from tvm import te, tirx

    mantissa, bias = FLOAT8_FORMATS[dtype]
    shift = FLOAT32_MANTISSA_BITS - mantissa
    largest = int(np.float32(LIMITS[dtype][1]).view(np.int32))
    size = te.min(bits & FLOAT32_SIZE, tirx.const(largest, "int32"))
    rounded = (size + ((1 << (shift - 1)) - 1) + ((size >> shift) & 1)) >> shift
    normal = rounded - ((FLOAT32_BIAS - bias) << mantissa)
    scaled = tirx.reinterpret("float32", size) * tirx.const(2.0 ** (bias - 1 + mantissa), "float32")
    subnormal = _round_small(te.min(scaled, tirx.const(2.0**mantissa, "float32")))
    code = tirx.Select(size >= ((FLOAT32_BIAS + 1 - bias) << FLOAT32_MANTISSA_BITS), normal, subnormal)
    return tirx.Select((bits & FLOAT32_SIZE) > FLOAT32_INFINITY, 127, code) | ((bits >> 24) & 128)


def widen_expression(element: tirx.Expr, dtype: str) -> tirx.Expr:
    """Return an element of a storage dtype in float32; those of 8-bit floats are bits (`dtypes.get_tir_dtype`)."""
    return _decode_float8(element.astype("int32"), dtype) if dtype in FLOAT8_FORMATS else element.astype("float32")


def widen_operand(element: tirx.Expr, dtype: str) -> tirx.Expr:
    """Return what `widen_expression` does, in an expression that may occur only once."""
    if dtype not in FLOAT8_FORMATS:
        return element.astype("float32")
    return _name_value(element.astype("int32"), lambda code: _decode_float8(code, dtype))


def _decode_float8(code: tirx.Expr, dtype: str) -> tirx.Expr:
    """Return an 8-bit float in float32 from its bits in int32."""
    from tvm import tirx

    mantissa, bias = FLOAT8_FORMATS[dtype]
    size = code & 127
    aligned = size << (FLOAT32_MANTISSA_BITS - mantissa)
    smallest = 1 - bias - mantissa  # exponent of the smallest number, of which subnormal ones are multiples
    subnormal = size.astype("float32")
    for exponent in (smallest // 2, smallest - smallest // 2):  # the texts of these factors in OpenCL are exact
        subnormal = subnormal * tirx.const(2.0**exponent, "float32")
    normal = aligned + ((FLOAT32_BIAS - bias) << FLOAT32_MANTISSA_BITS)
    bits = tirx.Select(size < (1 << mantissa), tirx.reinterpret("int32", subnormal), normal)
    # E4M3 has one NaN. The largest exponent of E5M2 is that of infinity and NaN, as in float32.
    has_infinity = dtype == dtypes.FLOAT8_E5M2.name
    special = aligned | (FLOAT32_INFINITY if has_infinity else FLOAT32_NAN)
    bits = tirx.Select(size >= (124 if has_infinity else 127), special, bits)
    return tirx.reinterpret("float32", bits | ((code & 128) << 24))


def get_sum_size(dtype: str, num_products: int) -> float:
    """Return the typical size of a sum of products of random operands, as `round_operand` rounds them."""
    operand = dtypes.INT8_DEVIATION if dtype == dtypes.INT8.name else 1.0
    return operand**2 * math.sqrt(num_products)


def fit_result_size(dtype: str) -> float:
    """Return the size to which tests quantize results, of which the largest saturate."""
    return {"int8": 64.0, "float8_e4m3fn": 160.0, "float8_e5m2": 20000.0}[dtype]


def reduce_operand(array: NDArray[Any], out_dtype: str, *, is_scaled: bool) -> NDArray[Any]:
    """Return random integers small enough for sums that are stored in float16 without a scale."""
    if array.dtype != np.int8 or out_dtype != "float16" or is_scaled:
        return array
    return (array // 16).astype(np.int8)
