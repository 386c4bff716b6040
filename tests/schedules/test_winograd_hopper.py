"""`winograd_hopper` computes what it is for, executed without a GPU, and takes of a GPU what it says."""

import functools
import itertools
import math

import emulate
import numpy as np
import pytest
from cubins import needs_nvrtc, space_of
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from points import covering
from tvmconv.builtin.conv.tensor_cores.hopper.estimate import preferred_estimate
from tvmconv.builtin.conv.winograd.hopper import choice

import tvmconv as tc
from tvmconv import library
from tvmconv.analysis.bounds import LAUNCH, bounds
from tvmconv.analysis.races import races
from tvmconv.errors import KnobError
from tvmconv.knowledge.features import LAUNCH_SECONDS
from tvmconv.knowledge.model import known_for

NAME = "winograd_hopper"
LAYER = "conv2d:2x640x32x32,640x640x3x3,s1,p1,f16,nhwc"
DTYPES = ("f16", "bf16", "tf32")
EPILOGUES = ("", "bias", "bias,relu", "add", "bias,add,silu", "gelu,bias", "add,bias,relu")
NASTY = (
    "conv2d:1x16x1x1,8x16x3x3,s1,p1",  # a single pixel
    "conv2d:1x16x3x3,16x16x3x3,s1,p0",  # a single output pixel
    "conv2d:1x16x4x4,16x16x3x3,s1,p0",  # a single tile of 2
    "conv2d:3x16x5x5,24x16x3x3,s1,p2",  # more padding than the filter needs
    "conv2d:7x32x3x3,16x32x3x3,s1,p2",
    "conv2d:1x16x3x40,8x16x3x3,s1,p1",
    "conv2d:1x16x40x3,16x16x3x3,s1,p1",
    "conv2d:1x32x17x19,24x32x3x3,s1,p1",  # primes
    "conv2d:1x64x6x6,8x64x3x3,s1,p1",
    "conv2d:1x16x6x6,72x16x3x3,s1,p1",
    "conv2d:2x32x9x8,33x32x3x3,s1,p1",  # odd channels, which TMA cannot store
    "conv2d:1x32x8x7,2x32x3x3,s1,p1",
    "conv2d:2x16x16x13,16x16x3x3,s1,p1x0x2x1",  # padding that differs on all sides
    "conv2d:1x16x12x16,8x16x3x3,s1,p0x3",
    "conv2d:1x48x10x10,40x48x3x3,s1,p1",
    "conv2d:5x16x8x8,16x16x3x3,s1,p1",
    "conv2d:1x96x7x7,32x96x3x3,s1,p1",
    "conv2d:1x16x2x130,16x16x3x3,s1,p1",  # many tiles in a row
    "conv2d:9x16x2x2,8x16x3x3,s1,p1",
)
LARGER_FILTERS = ("conv2d:1x16x9x11,24x16x4x4,s1,p2x1x1x2", "conv2d:2x16x11x8,16x16x5x5,s1,p2")  # in TF32
SMALL = ("conv2d:2x32x9x7,48x32x3x3,s1,p1,f16,nhwc,bias,relu", "conv2d:1x32x9x8,40x32x3x3,s1,p1,tf32,nhwc,add")
TRIED = 5  # configs of each


def cases():
    """Each with a dtype and an epilogue in turn, so that each dtype meets each epilogue."""
    choices = itertools.cycle((dtype, order) for order in EPILOGUES for dtype in DTYPES)
    texts = [",".join(filter(None, (text, t, "nhwc", e))) for text, (t, e) in zip(NASTY, choices, strict=False)]
    return [*texts, *(f"{text},tf32,nhwc,bias" for text in LARGER_FILTERS)]


def check(workload, config=None):
    kernel = tc.build(workload, NAME, arch="sm_90", config=config)
    assert emulate.error(kernel.module, workload) <= workload.tolerance, config
    return kernel


@pytest.mark.parametrize("text", cases())
def test_it_computes_any_workload_by_tiles_of_every_size(text):
    workload = tc.parse(text)
    for m in choice.tile_sizes(workload):
        check(workload, {"tile_m": m})


@functools.cache
def searched():
    """Legal configs of the small workloads, that together try as much as possible."""
    seen = set()
    return [(text, config) for text in SMALL for config in covering(space_of(tc.parse(text), NAME), TRIED, 0, seen)]


@pytest.mark.parametrize("number", range(2 * TRIED))
def test_searched_configs_compute_the_convolution(number):
    text, config = searched()[number]
    check(tc.parse(text), config)


def test_the_searched_configs_above_try_what_they_are_meant_to():
    tried = {f"{knob}={value}" for _, config in searched() for knob, value in config.items()}
    assert tried >= {"tile_m=2", "tile_m=4", "vector=1", "vector=2", "vector=4"}


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (3, 3, 12, 12, 40))),
    padding=st.tuples(*[st.integers(0, 3)] * 4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_searched_config_computes_any_workload(sizes, padding, dtype, seed):
    n, c, h, w, o = sizes
    assume(min(h + padding[0] + padding[2], w + padding[1] + padding[3]) >= 3)
    names = dict(zip(DTYPES, choice.DTYPES, strict=True))
    workload = tc.Conv2d(n, 16 * c, h, w, o, 3, 3, padding=padding, dtype=names[dtype], layout="nhwc")
    assume(math.prod(workload.output_shape) >= 32)  # of few sums what is left may be much less than what was added up
    space = space_of(workload, NAME)
    sample = list(map(space.config, space.sample(1, np.random.default_rng(seed))))
    assume(sample)
    check(workload, sample[0])


@pytest.mark.gpu
@pytest.mark.parametrize("text", [*cases(), LAYER, LAYER.replace("f16", "tf32")])
def test_it_computes_any_workload_on_a_gpu(gpu, text):
    workload = tc.parse(text)
    for m in choice.tile_sizes(workload):
        found = tc.build(workload, NAME, device=gpu, config={"tile_m": m}).verify()
        assert found.ok, (m, found)


@pytest.mark.gpu
def test_searched_configs_compute_the_convolution_on_a_gpu(gpu):
    workload = tc.parse(LAYER)
    for config in covering(space_of(workload, NAME), 24):
        assert tc.build(workload, NAME, device=gpu, config=config).verify().ok, config


def test_no_array_takes_the_place_of_one_that_tma_reads():
    """TVM let the products take the place of the filters, which a prepared step has made once: they are as large."""
    kernel = tc.build(tc.parse("conv2d:1x64x16x16,128x64x3x3,s1,p1,f16,nhwc"), NAME, arch="sm_90")
    places, tiles = 16, 64
    sizes = (places * 128 * 64, places * 64 * tiles, places * 128 * tiles)  # U, V and M
    assert [array.shape for array in kernel.module.scratch] == [(size,) for size in sizes]
    x, k, y, u, v, m = range(6)
    assert [set(step.arguments) for step in kernel.steps] == [{k, u}, {x, v}, {u, v, m}, {m, y}]
    assert kernel.module.prepared == 1


def test_what_waits_for_the_step_before_it_may_begin_early():
    """The filters' transform does not wait: nobody may launch it so."""
    program = tc.build(tc.parse(LAYER), NAME, arch="sm_90").program
    assert [step.overlaps for step in program.steps] == [False, True, True, True]


@needs_nvrtc
def test_steps_that_begin_early_cost_no_launch():
    kernel, machine = tc.build(tc.parse(LAYER), NAME, arch="sm_90"), known_for("sm_90").machine
    (launch,) = [bound for bound in bounds(kernel, machine) if bound.unit == LAUNCH]
    assert (launch.amount, launch.seconds) == ("1", LAUNCH_SECONDS)
    whole = tc.build(tc.parse("conv2d:1x64x14x14,64x64x3x3,s1,p1"), "winograd", arch="sm_90")
    assert [bound.amount for bound in bounds(whole, machine) if bound.unit == LAUNCH] == ["3"]


def test_nothing_races():
    assert races(tc.build(tc.parse(SMALL[0]), NAME, arch="sm_90")) == []


@pytest.mark.parametrize(("text", "m"), [(SMALL[0], 2), (SMALL[1], 2), (SMALL[1], 4)])
def test_the_error_that_is_expected_is_the_one_there_is(text, m):
    workload = tc.parse(text.replace(",bias,relu", "").replace(",add", ""))
    kernel = tc.build(workload, NAME, arch="sm_90", config={"tile_m": m})
    assert emulate.error(kernel.module, workload) == pytest.approx(
        choice.expected_error(m, 3, workload.dtype), rel=0.15
    )


def test_tiles_whose_error_is_too_large_are_none_to_choose():
    sizes = {dtype: choice.tile_sizes(tc.parse(LAYER.replace("f16", dtype))) for dtype in DTYPES}
    assert sizes == {"f16": (2,), "bf16": (2,), "tf32": (2, 4)}
    with pytest.raises(KnobError, match="knob tile_m takes one of 2, not 4"):
        tc.build(tc.parse(LAYER), NAME, arch="sm_90", config={"tile_m": 4})


@pytest.mark.parametrize(
    "text",
    [
        "conv2d:1x64x9x9,64x64x3x3,s2,p1,f16,nhwc",
        "conv2d:1x64x9x9,64x32x3x3,s1,p1,g2,f16,nhwc",
        "conv2d:1x64x9x9,64x64x3x3,s1,p1,d2,f16,nhwc",
        "conv2d:1x64x9x9,64x64x3x1,s1,p1,f16,nhwc",
        "conv2d:1x64x9x9,64x64x1x1,s1,p0,f16,nhwc",
        "conv2d:1x64x9x9,64x64x5x5,s1,p2,f16,nhwc",  # its error is too large
        "conv2d:1x40x9x9,64x40x3x3,s1,p1,f16,nhwc",  # channels that are no whole wgmmas
        "conv2d:1x64x9x9,64x64x3x3,s1,p1,f16",  # channels first
        "conv2d:1x64x9x9,64x64x3x3,s1,p1",
    ],
)
def test_it_is_for_square_filters_at_each_pixel_of_whole_wgmmas(text):
    assert NAME not in [s.name for s in tc.schedules(tc.parse(text))]


def test_it_is_searched_where_it_is_estimated_not_to_be_slower():
    """By what was measured it wins the first two, of the U-Net, and loses the others: few channels, and few pixels."""
    texts = (
        LAYER,
        "conv2d:2x2560x16x16,1280x2560x3x3,s1,p1,f16,nhwc",
        "conv2d:32x128x40x40,128x128x3x3,s1,p1,f16,nhwc",
        "conv2d:2x1280x8x8,1280x1280x3x3,s1,p1,f16,nhwc",
    )
    searched = [[s.name for s in library.to_tune(tc.parse(text), "cuda", "sm_90")] for text in texts]
    assert [NAME in names for names in searched] == [True, True, False, False]
    assert all("hopper" in names for names in searched)


def test_an_estimate_is_that_of_the_product_and_the_transforms():
    workload = tc.parse(LAYER.replace("f16", "tf32"))
    space = space_of(workload, NAME)
    points = space.sample(50, np.random.default_rng(0))
    estimates = space.usage(points).columns()["estimate"]
    for m in choice.tile_sizes(workload):
        own = estimates[[space.config(point)["tile_m"] == m for point in points]]
        assert len(own)
        assert own.min() > preferred_estimate(choice.product(workload, m))


@needs_nvrtc
@pytest.mark.parametrize(("dtype", "vector"), [("f16", 2), ("bf16", 8), ("tf32", 4)])
def test_transforms_stay_in_registers(dtype, vector):
    workload = tc.parse(f"conv2d:2x64x28x28,64x64x3x3,s1,p1,{dtype},nhwc,bias,add,silu")
    m = choice.tile_sizes(workload)[-1]
    kernel = tc.build(workload, NAME, arch="sm_90", config={"tile_m": m, "vector": vector})
    assert {(found.spills, found.stack_bytes) for found in kernel.cubin.kernels.values()} == {(0, 0)}
