"""Rounding to int8 in an epilogue, alone in a small kernel that the emulator executes, beside exact arithmetic."""

from types import SimpleNamespace

import emulate
import numpy as np
import pytest
from instructions import lowered
from tvmconv.builtin.conv.tensor_cores.gemm.epilogue_ops import EpilogueOps
from tvmconv.builtin.tir_builder import allocate, build_schedule, store_global, thread_axis

from tvmconv.workloads import epilogue

WORD = 4  # results of a register


def round_by_kernel(values, factor, zero_point, *, has_relu, width=WORD):
    """Return values that threads round, `width` each."""
    names = (*(["relu"] if has_relu else []), "quantize", *(["zero_point"] if zero_point is not None else []))
    numbers = {"quantize": factor, **({} if zero_point is None else {"zero_point": zero_point})}
    signature = SimpleNamespace(
        argument_names=("V", *numbers, "Y"),
        argument_shapes=((len(values),), *((1,) for _ in numbers), (len(values),)),
        argument_dtypes=("float32", *("float32" for _ in numbers), "int8"),
    )

    def emit(buffers):
        with thread_axis(len(values) // width, "threadIdx.x") as thread:
            ops = EpilogueOps(tuple(epilogue.get_ops(names)), "int8").bind_tensor_args(buffers, uses_registers=True)
            packed = allocate("packed", 1, "uint32")
            kept = [ops.apply(buffers["V"][thread * width + e], lambda name: None) for e in range(width)]
            ops.pack(packed, 0, kept)
            store_global(buffers["Y"], thread * width, packed, width)

    inputs = [values, *(np.float32([number]) for number in numbers.values())]
    return emulate.run(lowered(build_schedule(signature, emit).mod["main"]), inputs)


def round_exactly(values, factor, zero_point, *, has_relu):
    """Return the same of exact products, which float64 holds; NaN becomes the least integer."""
    products = values.astype(np.float64) * np.float64(np.float32(factor))
    rounded = np.nan_to_num(np.rint(products), nan=-np.inf)
    rounded = np.maximum(rounded, 0) if has_relu else rounded
    return np.clip(rounded + (zero_point or 0), -128, 127).astype(np.int8)


def make_values(factor):
    """Return numbers whose products are near and at halves, small, huge, and not finite."""
    rng = np.random.default_rng(0)
    halves = np.float32((np.arange(-140, 140) + 0.5) / np.float32(factor))
    neighbours = [np.nextafter(halves, np.float32(direction)) for direction in (-np.inf, np.inf)]
    special = [
        0,
        -0.0,
        np.nan,
        np.inf,
        -np.inf,
        3e38,
        -3e38,
        1e-45,
        2**22,
        -(2**22),
        2**24 + 2,
        -(2**25),
        2**31,
        -(2**31),
    ]
    values = np.concatenate([halves, *neighbours, rng.normal(0, 60 / factor, 340), special]).astype(np.float32)
    return np.resize(values, -(-len(values) // 256) * 256)


@pytest.mark.parametrize("has_relu", [False, True])
@pytest.mark.parametrize("zero_point", [None, 0, -128, 37])
@pytest.mark.parametrize("factor", [1.0, 0.0371, 911.7])
def test_results_are_products_rounded_once_to_even(factor, zero_point, has_relu):
    values = make_values(factor)
    found = np.concatenate(
        [round_by_kernel(part, factor, zero_point, has_relu=has_relu) for part in np.split(values, len(values) // 256)]
    )
    np.testing.assert_array_equal(found, round_exactly(values, factor, zero_point, has_relu=has_relu))


def test_words_of_two_results_are_rounded_alike():
    values = make_values(1.0)[:128]
    found = round_by_kernel(values, 1.0, None, has_relu=False, width=2)
    np.testing.assert_array_equal(found, round_exactly(values, 1.0, None, has_relu=False))
