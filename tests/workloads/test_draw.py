"""Random inputs are the same for a seed, however they are drawn."""

import ml_dtypes
import numpy as np
import pytest

from tvmconv.workloads import dtypes, parse, random_inputs


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "tf32"])
def test_large_inputs_are_normal_and_those_of_their_seed(dtype):
    arrays = [((3, 700_001), dtype), ((5,), dtype)]
    drawn, small = random_inputs.draw_normal(7, arrays, large_elements=1000)
    again, _ = random_inputs.draw_normal(7, arrays, large_elements=1000)
    other, _ = random_inputs.draw_normal(8, arrays, large_elements=1000)
    assert drawn.shape == (3, 700_001)
    assert small.dtype == drawn.dtype == dtypes.get_numpy_dtype(dtypes.DTYPES[dtype].storage)
    assert drawn.tobytes() == again.tobytes() != other.tobytes()
    exact = dtypes.widen_to_float64(drawn)
    assert abs(exact.mean()) < 0.01
    assert abs(exact.std() - 1) < 0.01
    assert abs(np.corrcoef(exact.reshape(-1)[: 1 << 20], exact.reshape(-1)[1 << 20 :][: 1 << 20])[0, 1]) < 0.01


def test_inputs_of_small_problems_are_those_of_one_stream():
    w = parse("conv2d:1x4x6x6,8x4x3x3,p1,bf16,bias,add")
    rng = np.random.default_rng(3)
    kinds = [np.dtype(ml_dtypes.bfloat16)] * 2 + [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]
    for array, shape, kind in zip(w.inputs(3), w.argument_shapes, kinds, strict=False):
        assert array.dtype == kind
        assert array.tobytes() == rng.standard_normal(shape, np.float32).astype(kind).tobytes()


def test_bfloat16_is_rounded_as_ml_dtypes_rounds_it():
    bits = np.random.default_rng(0).integers(0, 0x7F7F0000, 100_000, np.uint32)
    ties = (bits & 0xFFFF0000) | 0x8000
    for number in (bits, ties, ties | 0x80000000):
        exact = number.view(np.float32)
        rounded = dtypes.round_operand("bfloat16", exact)
        assert rounded.tobytes() == exact.astype(ml_dtypes.bfloat16).tobytes()
        assert (dtypes.widen_to_float64(rounded) == rounded.astype(np.float64)).all()
