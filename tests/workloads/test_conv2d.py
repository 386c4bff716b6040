import itertools
import math

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from strategies import workloads

from tvmconv.errors import WorkloadError
from tvmconv.workloads import Conv2d, parse

NASTY = [
    "conv2d:1x1x1x1,1x1x1x1",
    "conv2d:2x3x7x11,5x3x3x3,p1",
    "conv2d:1x3x9x8,4x3x2x5,s2x3,p1x2x0x3",
    "conv2d:1x2x13x12,3x2x3x2,p2,d2x3",
    "conv2d:1x4x5x6,2x4x1x1,s2",
    "conv2d:2x6x8x7,9x2x3x3,s2x1,p1x0,g3",
    "conv2d:3x7x6x6,7x1x3x3,p1,g7",
    "conv2d:1x2x5x5,6x1x3x3,s3,p3x0x1x2,d2,g2",
    "conv2d:1x4x6x6,4x4x3x3,p1,f16",
    "conv2d:1x4x6x6,4x2x3x3,p1,g2,f16",
]


def taps(w):
    """Every multiplication as (index of Y, index of X, index of K), straight from the definition."""
    top, left, _, _ = w.padding
    channels, filters = w.C // w.groups, w.O // w.groups
    extents = (w.N, w.O, w.P, w.Q, channels, w.R, w.S)
    for n, o, p, q, c, r, s in itertools.product(*map(range, extents)):
        h = p * w.stride[0] + r * w.dilation[0] - top
        v = q * w.stride[1] + s * w.dilation[1] - left
        yield (n, o, p, q), (n, o // filters * channels + c, h, v), (o, c, r, s)


def inside(w, x_index):
    return 0 <= x_index[2] < w.H and 0 <= x_index[3] < w.W


def convolve_by_loops(w, x, k):
    y = np.zeros(w.output_shape)
    for y_index, x_index, k_index in taps(w):
        if inside(w, x_index):
            y[y_index] += float(x[x_index]) * float(k[k_index])
    return y


@given(workloads(max_flops=5_000))
@settings(deadline=None, max_examples=50)
def test_reference_equals_the_definition(workload):
    x, k = workload.inputs(seed=0)
    np.testing.assert_allclose(workload.reference(x, k), convolve_by_loops(workload, x, k), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("text", NASTY)
def test_reference_in_chunks_equals_the_definition(text, monkeypatch):
    workload = parse(text)
    monkeypatch.setattr("tvmconv.workloads.conv2d.REFERENCE_CHUNK_BYTES", 8 * workload.C * workload.R * workload.S * 3)
    x, k = workload.inputs(seed=0)
    np.testing.assert_allclose(workload.reference(x, k), convolve_by_loops(workload, x, k), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("text", NASTY)
def test_declaration_computes_the_reference(text):
    workload = parse(text)
    x, k = workload.inputs(seed=0)
    arguments = [tvm.runtime.tensor(array) for array in (x, k, np.full(workload.output_shape, np.nan, workload.dtype))]
    tvm.compile(workload.prim_func(), target="llvm")["main"](*arguments)
    reference = workload.reference(x, k)
    error = np.linalg.norm(arguments[-1].numpy() - reference) / np.linalg.norm(reference)
    assert error < {"float32": 1e-6, "float16": 1e-3}[workload.dtype]


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("conv2d:2x3x7x11,5x3x3x3", ["padded", "Y"]),
        ("conv2d:2x3x7x11,5x3x3x3,f16", ["padded", "conv", "Y"]),
        ("conv2d:2x6x8x7,9x2x3x3,p1,g3", ["padded", "weight", "conv", "Y"]),
        ("conv2d:2x6x8x7,6x1x3x3,p1,g6", ["padded", "weight", "conv", "Y"]),
    ],
)
def test_declaration_has_its_documented_stages(text, stages):
    schedule = tvm.s_tir.Schedule(parse(text).prim_func())
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    assert [schedule.get(block).name_hint for block in blocks] == stages


@pytest.mark.parametrize("text", [text for text in NASTY if ",g" in text or "f16" in text])
def test_all_stages_but_the_sum_can_be_inlined(text):
    schedule = tvm.s_tir.Schedule(parse(text).prim_func())
    conv = schedule.get_sblock("conv")
    schedule.cache_write(conv, 0, "local")
    schedule.reverse_compute_inline(schedule.get_sblock("Y"))
    for stage in ["padded", "weight"] if ",g" in text else ["padded"]:
        schedule.compute_inline(schedule.get_sblock(stage))
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    assert [schedule.get(block).name_hint for block in blocks] == ["conv", "conv_local"]


def test_inputs_are_the_same_for_the_same_seed():
    workload = parse("conv2d:2x6x8x7,9x2x3x3,g3")
    np.testing.assert_equal(workload.inputs(seed=1), workload.inputs(seed=1))


def test_inputs_differ_between_seeds():
    workload = parse("conv2d:2x6x8x7,9x2x3x3,g3")
    assert not np.array_equal(workload.inputs(seed=1)[0], workload.inputs(seed=2)[0])


@pytest.mark.parametrize("text", NASTY)
def test_inputs_have_the_declared_shapes_and_dtype(text):
    workload = parse(text)
    described = [(array.shape, array.dtype.name, array.flags.c_contiguous) for array in workload.inputs(seed=0)]
    assert described == [(shape, workload.dtype, True) for shape in workload.argument_shapes[:-1]]


@given(workloads(max_flops=5_000))
@settings(deadline=None, max_examples=30)
def test_flops_count_a_multiplication_and_an_addition_a_tap(workload):
    assert workload.flops == 2 * sum(1 for _ in taps(workload))


@given(workloads(max_flops=5_000, dtypes=("float32", "float16")))
@settings(deadline=None, max_examples=50)
def test_min_bytes_count_only_elements_that_are_used(workload):
    used = [(x_index, k_index) for _, x_index, k_index in taps(workload) if inside(workload, x_index)]
    elements = len({x for x, _ in used}) + len({k for _, k in used}) + math.prod(workload.output_shape)
    assert workload.min_bytes == elements * np.dtype(workload.dtype).itemsize


def test_arithmetic_intensity_is_flops_over_bytes():
    # A 1×1 convolution of one pixel: 2·4·4 operations on 4 + 16 + 4 floats.
    assert parse("conv2d:1x4x1x1,4x4x1x1").arithmetic_intensity == 32 / (24 * 4)


@pytest.mark.parametrize(
    ("text", "depthwise"),
    [
        ("conv2d:1x8x4x4,8x1x3x3,g8", True),
        ("conv2d:1x8x4x4,16x1x3x3,g8", False),
        ("conv2d:1x8x4x4,8x2x3x3,g4", False),
        ("conv2d:1x8x4x4,8x8x3x3", False),
    ],
)
def test_depthwise_is_one_channel_in_and_out_of_each_group(text, depthwise):
    assert parse(text).depthwise is depthwise


def test_numpy_integers_are_accepted():
    assert Conv2d(*np.array([1, 4, 8, 8, 4, 3, 3]), stride=np.int64(2)) == parse("conv2d:1x4x8x8,4x4x3x3,s2")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"H": 0}, "H=0: expected at least 1"),
        ({"O": -3}, "O=-3: expected at least 1"),
        ({"N": 1.0}, "N=1.0: expected 1 integer"),
        ({"N": True}, "N=True: expected 1 integer"),
        ({"stride": 0}, "stride=0: expected at least 1"),
        ({"stride": (1, 2, 3)}, "stride=(1, 2, 3): expected 1 or 2 integers"),
        ({"dilation": (1, 0)}, "dilation=(1, 0): expected at least 1"),
        ({"padding": -1}, "padding=-1: expected at least 0"),
        ({"padding": "1"}, "padding='1': expected 1 or 2 or 4 integers"),
        ({"groups": 0}, "groups=0: expected at least 1"),
        ({"groups": 3}, "groups=3 must divide both the 4 input and the 4 output channels"),
        ({"dtype": "float64"}, "dtype='float64': expected one of float32, float16"),
        ({"R": 9}, "the kernel, 9x3 with its dilation, is larger than the padded image, 8x8"),
        ({"dilation": 4}, "the kernel, 9x9 with its dilation, is larger than the padded image, 8x8"),
        ({"N": 10**9}, "X of 1000000000x4x8x8 has 256000000000 elements: expected at most 2147483647"),
        ({"O": 2 * 10**8}, "K of 200000000x4x3x3 has 7200000000 elements"),
        ({"padding": 30_000}, "Y of 1x4x60006x60006 has"),
        ({"padding": 30_000, "stride": 9}, "the padded X of 1x4x60008x60008 has"),
        ({"W": 10**5000}, "W is past 2147483647"),
        ({"W": -(10**5000)}, "W is past 2147483647"),
    ],
)
def test_contradicting_numbers_are_refused_with_what_would_be_right(changes, expected):
    valid = {"N": 1, "C": 4, "H": 8, "W": 8, "O": 4, "R": 3, "S": 3}
    with pytest.raises(WorkloadError) as error:
        Conv2d(**{**valid, **changes})
    assert expected in str(error.value)
