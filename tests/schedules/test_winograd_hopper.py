"""`winograd_hopper` computes what it is for, executed without a GPU, and takes of a GPU what it says."""

import math

import emulate
import numpy as np
import pytest
from cubins import needs_nvrtc, space_of
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tvmconv.builtin.conv.tensor_cores.hopper.estimate import preferred_estimate
from tvmconv.builtin.conv.winograd.hopper import choice

import tvmconv as tc
from tvmconv import library
from tvmconv.analysis.bounds import LAUNCH, bounds
from tvmconv.analysis.races import races
from tvmconv.knowledge.features import LAUNCH_SECONDS
from tvmconv.knowledge.model import known_for

NAME = "winograd_hopper"
LAYER = "conv2d:2x640x32x32,640x640x3x3,s1,p1,f16,nhwc"
DTYPES = ("f16", "bf16", "tf32")
SMALL = ("conv2d:2x32x9x7,48x32x3x3,s1,p1,f16,nhwc,bias,relu", "conv2d:1x32x9x8,40x32x3x3,s1,p1,tf32,nhwc,add")


def check(workload, config=None):
    kernel = tc.build(workload, NAME, arch="sm_90", config=config)
    assert emulate.error(kernel.module, workload) <= workload.tolerance, config
    return kernel


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
