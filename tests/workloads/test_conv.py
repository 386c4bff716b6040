"""Convolutions of any rank, dtype, layout and groups: their definition, their declaration, their numbers."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from nasty_workloads import CONVOLUTIONS
from strategies import any_convolutions

from tvmconv.errors import WorkloadError
from tvmconv.workloads import Conv1d, Conv2d, Conv3d, parse
from tvmconv.workloads.dtypes import DTYPES, get_numpy_dtype
from tvmconv.workloads.layout import move_channels_second, to_storage_layout


def taps(w):
    """Every multiplication as (index of Y, index of X, index of K), straight from the definition."""
    channels, filters = w.C // w.groups, w.O // w.groups
    for n, o, c in itertools.product(range(w.N), range(w.O), range(channels)):
        for place in itertools.product(*map(range, w.output_size)):
            for tap in itertools.product(*map(range, w.kernel)):
                axes = zip(place, w.stride, tap, w.dilation, w.pad_low, strict=True)
                at = tuple(p * s + r * d - before for p, s, r, d, before in axes)
                yield (n, o, *place), (n, o // filters * channels + c, *at), (o, c, *tap)


def inside(w, x_index):
    return all(0 <= i < size for i, size in zip(x_index[2:], w.input_size, strict=True))


def convolve_by_loops(w, x, k):
    """Y before its epilogue, from and to arrays as they lie in memory."""
    x, k = (move_channels_second(w.input_layout, array) for array in (x, k))
    y = np.zeros(w.output_shape)
    for y_index, x_index, k_index in taps(w):
        if inside(w, x_index):
            y[y_index] += float(x[x_index]) * float(k[k_index])
    return to_storage_layout(w.output_layout, y)


def plain(w):
    """The workload without its epilogue."""
    return type(w)(**{**vars(w), "epilogue": ()})


@given(any_convolutions(max_flops=5_000))
@settings(max_examples=25)
def test_reference_equals_the_definition(workload):
    workload = plain(workload)
    x, k = workload.inputs(seed=0)
    np.testing.assert_allclose(workload.reference(x, k), convolve_by_loops(workload, x, k), rtol=1e-12, atol=1e-12)


@pytest.mark.sample(19)
@pytest.mark.parametrize("text", CONVOLUTIONS)
def test_reference_in_chunks_equals_the_definition(text, monkeypatch):
    workload = parse(text)
    columns = 3  # of a chunk
    monkeypatch.setattr(
        "tvmconv.workloads.conv_reference.CHUNK_BYTES", 8 * workload.C * math.prod(workload.kernel) * columns
    )
    x, k = workload.inputs(seed=0)
    np.testing.assert_allclose(workload.reference(x, k), convolve_by_loops(workload, x, k), rtol=1e-12, atol=1e-12)


def test_the_layout_moves_memory_and_changes_no_value():
    first, last = (parse(f"conv3d:2x4x3x5x4,6x2x2x3x1,p1x0x0,g2{layout},bias,add") for layout in ("", ",nhwc"))
    inputs = first.inputs(seed=0)
    moved = [to_storage_layout("nhwc", array) if array.ndim > 1 else array for array in inputs]
    assert tuple(array.shape for array in moved) == last.argument_shapes[:-1]
    np.testing.assert_array_equal(move_channels_second("nhwc", last.reference(*moved)), first.reference(*inputs))


def test_a_tolerance_is_a_few_roundings_of_what_is_stored():
    tolerances = {name: parse(f"conv1d:1x4x8,4x4x3,{dtype.text}").tolerance for name, dtype in DTYPES.items()}
    expected = {"float32": 1e-5, "tf32": 2**-9, "float16": 2**-9, "bfloat16": 2**-6}
    expected |= {"float8_e4m3fn": 2**-8 + 2**-6, "float8_e5m2": 2**-8 + 2**-6, "int8": 0.0}  # stored in bf16 and int32
    assert tolerances == pytest.approx(expected, rel=1e-2)


def test_inputs_are_the_same_for_the_same_seed():
    workload = parse("conv2d:2x6x8x7,9x2x3x3,g3")
    np.testing.assert_equal(workload.inputs(seed=1), workload.inputs(seed=1))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (
            "conv1d:2x6x8,9x2x3,g3",
            {"X": ((2, 6, 8), "float32"), "K": ((9, 2, 3), "float32"), "Y": ((2, 9, 6), "float32")},
        ),
        (
            "conv2d:2x6x8x7,9x2x3x5,g3,bf16,nhwc,add,bias,relu",
            {
                "X": ((2, 8, 7, 6), "bfloat16"),
                "K": ((9, 3, 5, 2), "bfloat16"),
                "add": ((2, 6, 3, 9), "bfloat16"),
                "bias": ((9,), "float32"),
                "Y": ((2, 6, 3, 9), "bfloat16"),
            },
        ),
        (
            "conv3d:2x4x3x5x4,6x4x2x3x1,tf32,nhwc",
            {"X": ((2, 3, 5, 4, 4), "float32"), "K": ((6, 2, 3, 1, 4), "float32"), "Y": ((2, 2, 3, 4, 6), "float32")},
        ),
    ],
)
def test_arguments_are_in_order_and_as_they_lie_in_memory(text, arguments):
    w = parse(text)
    described = zip(w.argument_shapes, w.argument_dtypes, strict=True)
    assert list(zip(w.argument_names, described, strict=True)) == list(arguments.items())


@given(any_convolutions(max_flops=5_000))
@settings(max_examples=30)
def test_flops_count_a_multiplication_and_an_addition_a_tap(workload):
    assert workload.flops == 2 * sum(1 for _ in taps(workload))


@given(any_convolutions(max_flops=5_000))
@settings(max_examples=50)
def test_min_bytes_count_only_elements_that_are_used(workload):
    used = [(x_index, k_index) for _, x_index, k_index in taps(workload) if inside(workload, x_index)]
    elements = [len({x for x, _ in used}), len({k for _, k in used}), *map(math.prod, workload.argument_shapes[2:])]
    sizes = [get_numpy_dtype(dtype).itemsize for dtype in workload.argument_dtypes]
    assert workload.min_bytes == sum(n * size for n, size in zip(elements, sizes, strict=True))


@pytest.mark.parametrize(
    ("text", "depthwise"),
    [
        ("conv2d:1x8x4x4,8x1x3x3,g8", True),
        ("conv2d:1x8x4x4,16x1x3x3,g8", False),
        ("conv2d:1x8x4x4,8x2x3x3,g4", False),
        ("conv2d:1x8x4x4,8x8x3x3", False),
        ("conv1d:1x8x4,8x1x3,g8", True),
    ],
)
def test_depthwise_is_one_channel_in_and_out_of_each_group(text, depthwise):
    assert parse(text).is_depthwise is depthwise


def test_sizes_have_the_fields_letters():
    sound, video = parse("conv1d:1x4x16,6x4x5"), parse("conv3d:1x4x7x9x16,6x4x2x3x5")
    assert (sound.W, sound.S, sound.Q) == (16, 5, 12)
    assert (video.D, video.H, video.W, video.T, video.R, video.S) == (7, 9, 16, 2, 3, 5)
    assert (video.Z, video.P, video.Q) == (6, 7, 12)


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
        ({"dtype": "float64"}, "dtype='float64': expected one of float32, tf32, float16, bfloat16"),
        ({"dtype": ["float32"]}, "dtype=['float32']: expected one of float32"),
        ({"layout": "chwn"}, "layout='chwn': expected one of nchw, nhwc"),
        ({"epilogue": 3}, "epilogue=3: expected a list of"),
        ({"epilogue": ("bias", "swish9")}, "epilogue=('bias', 'swish9'): expected operations of"),
        ({"epilogue": ("relu", "relu")}, "epilogue=('relu', 'relu'): expected relu at most once"),
        ({"R": 9}, "the kernel, 9x3 with its dilation, is larger than the padded image, 8x8"),
        ({"dilation": 4}, "the kernel, 9x9 with its dilation, is larger than the padded image, 8x8"),
        ({"N": 10**9}, "the padded X has 64000000000 pixels: expected at most 2147418112"),
        ({"C": 2 * 10**6, "H": 10**3, "W": 10**3}, "X of 1x2000000x1000x1000 has 2000000000000 elements"),
        ({"O": 2 * 10**8}, "K of 200000000x4x3x3 has 7200000000 elements"),
        ({"padding": 30_000}, "the padded X has 3600960064 pixels"),
        ({"upsample": 0}, "upsample=0: expected at least 1"),
        ({"W": 10**5000}, "W is out of range: expected at most 2147483647"),
        ({"W": -(10**5000)}, "W is out of range: expected at most 2147483647"),
    ],
)
def test_contradicting_numbers_are_refused_with_what_is_accepted(changes, expected):
    valid = {"N": 1, "C": 4, "H": 8, "W": 8, "O": 4, "R": 3, "S": 3}
    with pytest.raises(WorkloadError) as error:
        Conv2d(**{**valid, **changes})
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("workload", "fields", "expected"),
    [
        (Conv1d, (1, 4, 8, 4, 3, (1, 2)), "stride=(1, 2): expected 1 integer"),
        (Conv1d, (1, 4, 8, 4, 9), "the kernel, 9 with its dilation, is larger than the padded image, 8"),
        (Conv3d, (1, 4, 8, 8, 8, 4, 3, 3, 3, (1, 2)), "stride=(1, 2): expected 1 or 3 integers"),
        (Conv3d, (1, 4, 8, 8, 8, 4, 3, 3, 3, 1, (1, 2)), "padding=(1, 2): expected 1 or 3 or 6 integers"),
        (Conv3d, (1, 4, 2, 8, 8, 4, 3, 3, 3), "the kernel, 3x3x3 with its dilation, is larger than the padded"),
    ],
)
def test_each_rank_takes_as_many_numbers_as_it_has_axes(workload, fields, expected):
    with pytest.raises(WorkloadError) as error:
        workload(*fields)
    assert expected in str(error.value)
