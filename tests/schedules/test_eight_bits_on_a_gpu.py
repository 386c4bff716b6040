"""Convolutions of 8-bit operands on a GPU: integers are bit-exact, and 8-bit floats are within their bound.

    pytest -m gpu tests/schedules/test_eight_bits_on_a_gpu.py

All kernels are built at once by all processors before the first test, and take some seconds.
"""

import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from parallel_builds import build_all

import tvmconv as tc
from tvmconv.verification import Problem
from tvmconv.workloads.quantization import LIMITS, bound_accumulation_error

pytestmark = pytest.mark.gpu

FLOATS = ("e4m3", "e5m2")
DENSE = {  # ragged shapes with dilation, groups, strides, and padding of one side
    "hopper": (
        "conv2d:3x64x19x17,80x64x3x3,s1,p1",
        "conv2d:2x48x13x15,96x48x1x1,s1,p0",
        "conv2d:2x64x15x14,48x32x2x3,s2,p1x0x0x1,g2",
        "conv1d:2x128x101,50x128x3,s1,p2,d2",
        "conv3d:1x64x5x9x10,32x64x3x2x3,s1,p1x0x1",
    ),
    "window_hopper": ("conv2d:3x64x19x18,48x64x3x3,s1,p1", "conv2d:2x64x12x14,48x64x3x3,s2,p1"),
    "mma_sync": ("conv2d:2x34x19x17,30x34x3x3,s1,p1x1x0x1", "conv1d:3x128x45,48x64x3,s2,p1,g2"),
    "direct": ("conv2d:2x3x37x33,32x3x7x7,s2,p3",),  # a first layer
    "implicit_gemm": ("conv2d:2x5x17x19,12x5x3x3,s1,p1",),
}
DOT_PRODUCTS = ("conv2d:2x4x37x33,32x4x7x7,s2,p3", "conv2d:3x24x9x11,14x12x2x3,s2x1,p1x0x0x1,d1x2,g2")
DEPTHWISE = ("conv2d:2x72x15x17,72x1x5x5,s2,p2,g72", "conv2d:3x64x14x13,64x1x3x3,s1,p1,g64")
MIXED = {"e4m3": "weight-e5m2", "e5m2": "weight-e4m3"}  # weights of another type than the activations
EPILOGUES = {
    "i8": ("", "out-f16,scale,bias,relu", "scale,bias,add,relu,quantize", "scale,bias,relu,quantize,zero_point"),
    "e4m3": ("out-f32", "out-f16,scale,bias,add,silu", "scale,bias,add,relu,quantize"),
    "e5m2": ("", "tensor_scale,bias,silu,quantize", "scale,add,relu,quantize"),
}


def list_cases():
    for name, shapes in DENSE.items():
        for shape, (dtype, epilogues) in itertools.product(shapes, EPILOGUES.items()):
            schedule = "mma_sync_fp8" if name == "mma_sync" and dtype in FLOATS else name
            for options in epilogues:
                yield schedule, _join(shape, dtype, options)
    for name, (dtype, weight) in itertools.product(
        ("hopper", "window_hopper", "mma_sync", "implicit_gemm"), MIXED.items()
    ):
        schedule = "mma_sync_fp8" if name == "mma_sync" else name
        for options in EPILOGUES[dtype][-2:]:
            yield schedule, _join(f"{DENSE[name][0]},{weight}", dtype, options)
    for name, shapes in (("depthwise_nhwc", DEPTHWISE), ("dp4a", DOT_PRODUCTS)):
        for shape, options in itertools.product(shapes, EPILOGUES["i8"]):
            yield name, _join(shape, "i8", options)


def _join(shape, dtype, options):
    storage, _, rest = options.partition(",") if options.startswith("out-") else ("", "", options)
    return tc.parse(",".join(filter(None, (shape, storage, dtype, "nhwc", rest)))).text


def get_output_dtype(text):
    return tc.parse(text).argument_dtypes[-1]


CASES = list(dict.fromkeys(list_cases()))
NOT_FINITE = [
    (schedule, f"conv2d:1x64x7x9,32x64x1x1,s1,p0,{dtype},nhwc,scale,bias,quantize")
    for schedule, dtype in (
        *itertools.product(("hopper", "mma_sync_fp8"), FLOATS),
        ("hopper", "i8"),
        ("mma_sync", "i8"),
    )
]
POSITIVE = "conv2d:1x1280x16x16,128x1280x3x3,s1,p1,e4m3,nhwc,out-f32"
INTERVALS = {
    (interval, buffers, "simultaneous"): ("hopper", POSITIVE, tuple(config.items()))
    for interval, buffers, block_k_bytes in ((192, 1, 64), (192, 2, 128), (256, 1, 64), (512, 1, 64), (1024, 1, 64))
    for config in [{"block_k_bytes": block_k_bytes, "promotion_interval": interval, "promotion_buffers": buffers}]
}
TURNS = {"warpgroups": 2, "wgmma_m_tiles": 1, "block_n": 64, "split_k": 1, "cluster_m": 1, "cluster_n": 1}
INTERVALS |= {
    (interval, 1, "alternating"): ("hopper", POSITIVE, tuple(config.items()))
    for interval, block_k_bytes, stages in ((192, 128, 6), (128, 64, 8))
    for config in [
        {**TURNS, "block_k_bytes": block_k_bytes, "stages": stages}
        | {"promotion_interval": interval, "promotion_buffers": 1, "promotion_order": "alternating"}
    ]
}
ROUNDED = [case for case in CASES if get_output_dtype(case[1]) in LIMITS and "silu" not in case[1]]


@pytest.fixture(scope="module")
def load(gpu, request):
    built = build_all(list_selected(request.session.items), gpu.arch)

    def load(*case):
        executable = built[case]
        if isinstance(executable, str):
            if "needs sm_" in executable:
                pytest.skip(executable)
            pytest.fail(executable)
        return gpu.load(executable)

    return load


def list_selected(items):
    """Return the kernels of the selected tests of this file."""
    values = [
        item.callspec.params for item in items if item.path.name == Path(__file__).name if hasattr(item, "callspec")
    ]
    cases = [(each["schedule"], each["text"]) for each in values if "text" in each]
    cases += [INTERVALS[each["interval"], each["buffers"], each["order"]] for each in values if "order" in each]
    return list(dict.fromkeys(cases))


def test_many_combinations_are_tested():
    assert len(CASES) >= 80
    assert len({tc.parse(text).epilogue for _, text in CASES}) >= 7


@pytest.mark.parametrize(("schedule", "text"), CASES)
def test_results_are_within_the_tolerance(load, schedule, text):
    """The tolerance of sums of integers is zero; that of 8-bit floats has the bound of their accumulation."""
    problem = Problem(tc.parse(text), seed=0)
    found = problem.check(load(schedule, text).run(problem.inputs))
    assert found.ok, found.fault


@pytest.mark.parametrize(("schedule", "text"), ROUNDED)
def test_results_of_8_bits_are_bit_exact(load, schedule, text):
    """With small integers, all sums are exact, so that rounding and saturation are the only steps that change them."""
    w = tc.parse(text)
    inputs = make_exact_inputs(w)
    found = load(schedule, text).run(inputs)
    zero_point = dict(zip(w.argument_names, inputs, strict=False)).get("zero_point", 0)
    expected = round_as_stored(w.reference(*inputs), w.argument_dtypes[-1], zero_point)
    low, high = LIMITS[w.argument_dtypes[-1]]
    assert {low, high} & {*np.unique(expected.astype(np.float32))}  # some results saturate
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32).reshape(found.shape))


def make_exact_inputs(w):
    """Return arguments with which float32 is exact: integers, powers of two, and biases in units of the scale."""
    rng, arguments = np.random.default_rng(0), dict(zip(w.argument_names, w.inputs(0), strict=False))
    largest = 127 if w.dtype == "int8" else 2
    for name, array in arguments.items():
        if name in ("X", "K"):
            values = rng.integers(-largest, largest, array.shape, endpoint=True)
        elif name in ("scale", "tensor_scale"):
            values = 2.0 ** rng.integers(-1, 2, array.shape)
        elif name == "bias":
            values = rng.integers(-4 * largest, 4 * largest, array.shape) / 2
        elif name == "quantize":
            values = np.full(array.shape, _choose_factor(w, largest))
        else:
            values = np.rint(array.astype(np.float32))
        arguments[name] = values.astype(array.dtype)
    return tuple(arguments.values())


def _choose_factor(w, largest):
    """Return a power of two that multiplies results, so that a few of them saturate."""
    variance = largest * (largest + 1) / 3  # of each operand
    deviation = variance * np.prod(w.weight_shape[1:]) ** 0.5
    return 2.0 ** np.rint(np.log2(LIMITS[w.argument_dtypes[-1]][1] / (2 * deviation)))


def round_as_stored(y, out_dtype, zero_point):
    """Round float64 results, which are saturated, to nearest even; `ml_dtypes` rounds as PyTorch does.

    A zero point is added to rounded numbers, which matters halfway between two integers.
    """
    if out_dtype == "int8":
        return (np.rint(y - zero_point) + zero_point).astype(np.int8)
    return y.astype(np.float32).astype(getattr(ml_dtypes, out_dtype))


@pytest.mark.parametrize(("schedule", "text"), NOT_FINITE)
def test_nan_stays_in_floats_and_infinity_saturates(load, schedule, text):
    w = tc.parse(text)
    x, k, scale, bias, factor = w.inputs(0)
    bias[:3] = np.nan, np.inf, -np.inf
    found = load(schedule, text).run([x, k, scale, bias, factor]).astype(np.float32)
    low, high = LIMITS[w.argument_dtypes[-1]]
    assert (np.isnan(found[..., 0]) if w.dtype != "int8" else found[..., 0] == low).all()  # integers have no NaN
    assert (found[..., 1] == high).all()
    assert (found[..., 2] == low).all()
    assert np.isfinite(found[..., 3:]).all()


@pytest.fixture(scope="module")
def positive():
    w = tc.parse(POSITIVE)
    inputs = [np.abs(array.astype(np.float32)).astype(array.dtype) for array in w.inputs(0)]
    return inputs, w.reference(*inputs)


@pytest.mark.parametrize(("interval", "buffers", "order"), INTERVALS)
def test_sums_of_positive_numbers_are_within_their_bound(load, positive, interval, buffers, order):
    inputs, expected = positive
    found = load(*INTERVALS[interval, buffers, order]).run(inputs).astype(np.float64).reshape(expected.shape)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    print(f"promotion every {interval} products, {buffers} sets, {order}: error {error:.2e}")
    assert error <= bound_accumulation_error(interval)
