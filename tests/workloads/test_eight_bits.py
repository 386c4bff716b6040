"""Workloads with operands of 8 bits: texts, types of results, references and conversions."""

import numpy as np
import pytest

import tvmconv as tc
from tvmconv.errors import WorkloadError
from tvmconv.workloads import quantization
from tvmconv.workloads.dtypes import get_numpy_dtype

BASE = "conv2d:1x16x8x8,16x16x3x3,s1,p1"


@pytest.mark.parametrize(
    ("options", "canonical", "output"),
    [
        ("i8", "i8", "int32"),
        ("i8,out-i32", "i8", "int32"),
        ("i8,bias", "i8,bias", "bfloat16"),
        ("i8,out-f16,scale", "out-f16,i8,scale", "float16"),
        ("i8,scale,relu,quantize", "i8,scale,relu,quantize", "int8"),
        ("i8,scale,quantize,zero_point", "i8,scale,quantize,zero_point", "int8"),
        ("e4m3,nhwc", "e4m3,nhwc", "bfloat16"),
        ("e5m2,tensor_scale,out-f32", "out-f32,e5m2,tensor_scale", "float32"),
        ("e4m3,weight-e5m2,out-f16", "out-f16,weight-e5m2,e4m3", "float16"),
        ("e5m2,weight-e5m2", "e5m2", "bfloat16"),
        ("e5m2,out-e4m3,quantize", "out-e4m3,e5m2,quantize", "float8_e4m3fn"),
    ],
)
def test_texts_name_the_type_of_the_output(options, canonical, output):
    w = tc.parse(f"{BASE},{options}")
    assert w.text == f"{BASE},{canonical}"
    assert tc.parse(w.text) == w
    assert w.argument_dtypes[-1] == output
    assert [x.dtype.name for x in w.inputs(0)] == list(w.argument_dtypes[:-1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{BASE},i8,weight-e5m2", "weight_dtype='float8_e5m2': expected e4m3 and e5m2 for types that differ"),
        (f"{BASE},e4m3,weight-i8", "'weight-i8': expected one of weight-e4m3, weight-e5m2"),
        (f"{BASE},f16,out-f32", "out_dtype='float32': expected operands of e4m3, e5m2, i8, not f16"),
        (f"{BASE},quantize", "epilogue='quantize': expected operands of e4m3, e5m2, i8, not f32"),
        (f"{BASE},i8,out-i32,bias", "out-i32: expected operands of i8 and no epilogue"),
        (f"{BASE},i8,out-i8", "out-i8: expected the operation quantize before outputs of 8 bits, and only there"),
        (f"{BASE},i8,out-f16,quantize", "out-f16: expected the operation quantize before outputs of 8 bits"),
        (f"{BASE},i8,quantize,relu", "expected quantize as the last operation"),
        (f"{BASE},i8,zero_point,quantize", "expected quantize and zero_point as the last operations"),
        (f"{BASE},i8,scale,zero_point", "expected quantize and zero_point as the last operations"),
        (f"{BASE},e4m3,quantize,zero_point", "out-e4m3: expected an output of i8 after zero_point"),
        (f"{BASE},zero_point", "epilogue='zero_point': expected operands of e4m3, e5m2, i8, not f32"),
        (f"{BASE},e4m3,out-f8", "'out-f8': expected one of out-f32, out-f16, out-bf16, out-i32"),
        (f"{BASE},up2,e4m3", "e4m3: expected no options c and up"),
        (f"{BASE},e4m3,nhwc,stats", "stats needs operands of 16 or 32 bits"),
        ("conv2d:1x131072x1x1,1x131072x1x1,s1,p0,i8", "131072 products of i8 per output may exceed int32"),
        ("conv2d_transpose:1x16x8x8,16x16x3x3,s1,p1,zero_point", "conv2d_transpose does not support it"),
        ("conv2d_dgrad:1x16x8x8,16x16x3x3,s1,p1,i8", "dtype='int8': conv2d_dgrad does not support it"),
    ],
)
def test_contradictions_are_refused(text, message):
    with pytest.raises(WorkloadError, match=message.replace("(", r"\(")):
        tc.parse(text)


def test_integer_reference_is_exact_and_quantized_results_saturate():
    w = tc.parse(f"{BASE},i8")
    x, k = w.inputs(3)
    padded = np.pad(x.astype(np.int64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    assert np.array_equal(w.reference(x, k), np.einsum("nchwrs,ocrs->nohw", windows, k.astype(np.int64)))
    quantized = tc.parse(f"{BASE},i8,tensor_scale,quantize")
    y = quantized.reference(*quantized.inputs(3))
    assert y.max() == 127
    assert y.min() >= -128
    assert 16 < np.sqrt(np.mean(y**2)) < 64


@pytest.mark.parametrize(("text", "dtype"), [("e4m3", "float8_e4m3fn"), ("e5m2", "float8_e5m2")])
def test_conversions_of_8_bit_floats_are_those_of_ml_dtypes(text, dtype):
    """All 256 codes; and numbers halfway between neighbours, near them, and beyond the largest, which saturate."""
    element = get_numpy_dtype(dtype)
    codes = np.arange(256, dtype=np.uint8).view(element)
    one = np.ones((1, 1, 1), element)
    widen = tc.build(f"conv1d:1x1x256,1x1x1,s1,p0,{text},out-f32", "default", device="opencl:0")
    numbers = widen(codes.reshape(1, 1, 256), one).reshape(-1)
    np.testing.assert_array_equal(numbers, codes.astype(np.float32))

    finite = np.sort(numbers[np.isfinite(numbers)])
    values = np.concatenate([(finite[1:] + finite[:-1]) / 2, finite * 1.03, finite * 0.97, [1e9, -1e9]])
    values = values.astype(np.float32)
    round_values = tc.build(f"conv1d:1x1x1,{len(values)}x1x1,s1,p0,{text},scale,quantize", "default", device="opencl:0")
    rounded = round_values(one, np.repeat(one, len(values), axis=0), values, np.ones(1, np.float32)).reshape(-1)
    expected = np.clip(values, *quantization.LIMITS[dtype]).astype(element)
    np.testing.assert_array_equal(rounded.astype(np.float32), expected.astype(np.float32))


def test_integers_are_rounded_to_nearest_even_and_saturate():
    values = np.float32([0.5, 1.5, -0.5, -2.5, 126.5, 127.5, -128.5, 3e9, -3e9, 0.49999997, -77.499996])
    one = np.ones((1, 1, 1), np.int8)
    kernel = tc.build(f"conv1d:1x1x1,{len(values)}x1x1,s1,p0,i8,scale,quantize", "default", device="opencl:0")
    rounded = kernel(one, np.repeat(one, len(values), axis=0), values, np.ones(1, np.float32)).reshape(-1)
    assert rounded.tolist() == [0, 2, 0, -2, 126, 127, -128, 127, -128, 0, -77]
    kernel = tc.build(kernel.workload.text + ",zero_point", "default", device="opencl:0")
    ones = np.ones(1, np.float32)
    rounded = kernel(one, np.repeat(one, len(values), axis=0), values, ones, -27 * ones).reshape(-1)
    assert rounded.tolist() == [-27, -25, -27, -29, 99, 101, -128, 127, -128, -27, -104]


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("conv2d:1x4x7x5,8x4x3x3,s1,p1,i8,nhwc,scale,bias,relu,quantize,zero_point", "vthread"),
        ("conv2d:2x12x9x7,10x12x3x3,s2,p1,i8,nhwc,scale,bias,add,relu,quantize", "tiling"),
        ("conv2d:1x6x7x8,10x3x3x2,s1,p1,g2,i8", "implicit_gemm"),
        ("conv2d:1x8x7x7,8x1x3x3,s1,p1,g8,i8,nhwc,scale,out-f32", "depthwise"),
        ("conv2d:2x24x9x8,24x1x5x5,s2,p2,g24,i8,nhwc", "depthwise_nhwc"),
        ("conv2d:2x17x9x8,17x1x3x3,s1,p1,g17,i8,nhwc,scale,bias,add,relu,quantize,zero_point", "depthwise_nhwc"),
        ("conv3d:1x6x3x6x6,4x6x2x3x3,s1,p1,e5m2,add,quantize", "conflict_free"),
    ],
)
def test_textbook_schedules_compute_8_bits_on_every_device(text, schedule):
    verification = tc.build(text, schedule, device="opencl:0").verify()
    assert verification.ok, verification.fault
