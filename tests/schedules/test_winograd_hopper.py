"""`winograd_hopper` computes what it is for, executed without a GPU, and takes of a GPU what it says."""

import emulate
import pytest
from cubins import needs_nvrtc
from tvmconv.builtin.conv.winograd.hopper import knobs

import tvmconv as tc
from tvmconv import registry
from tvmconv.analysis.races import find_races
from tvmconv.analysis.speed_of_light import LAUNCH, compute_unit_times
from tvmconv.cost_model.model import cost_model_for
from tvmconv.target import LAUNCH_SECONDS

NAME = "winograd_hopper"
LAYER = "conv2d:2x640x32x32,640x640x3x3,s1,p1,f16,nhwc"
DTYPES = ("f16", "bf16", "tf32")
SMALL = ("conv2d:2x32x9x7,48x32x3x3,s1,p1,f16,nhwc,bias,relu", "conv2d:1x32x9x8,40x32x3x3,s1,p1,tf32,nhwc,add")


def test_no_array_takes_the_place_of_one_that_tma_reads():
    """TVM let the products take the place of the filters, which a prepared step has made once: they are as large."""
    kernel = tc.build(tc.parse("conv2d:1x64x16x16,128x64x3x3,s1,p1,f16,nhwc"), NAME, arch="sm_90")
    places, tiles = 16, 64
    sizes = (places * 128 * 64, places * 64 * tiles, places * 128 * tiles)  # U, V and M
    assert [array.shape for array in kernel.lowered_module.workspace] == [(size,) for size in sizes]
    x, k, y, u, v, m = range(6)
    assert [set(step.arguments) for step in kernel.kernels] == [{k, u}, {x, v}, {u, v, m}, {m, y}]
    assert kernel.lowered_module.num_prepack_kernels == 1


def test_what_waits_for_the_step_before_it_may_begin_early():
    """The filters' transform does not wait: nobody may launch it so."""
    program = tc.build(tc.parse(LAYER), NAME, arch="sm_90").executable
    assert [step.uses_pdl for step in program.kernels] == [False, True, True, True]


def test_products_of_tile_sizes_may_have_different_rules():
    """Lines of 784 tiles may be padded to a multiple of 64, and those of 3,136 need no padding."""
    workload = tc.parse("conv2d:16x128x28x28,128x128x3x3,s1,p1,tf32,nhwc")
    lengths = {len(knobs.isa_constraints(product)) for product in knobs.make_family(workload).products.values()}
    assert len(lengths) == 2
    assert tc.build(workload, NAME, arch="sm_90").config["output_tile"] in (2, 4)


@pytest.mark.slow
@needs_nvrtc
def test_steps_that_begin_early_cost_no_launch():
    kernel, machine = tc.build(tc.parse(LAYER), NAME, arch="sm_90"), cost_model_for("sm_90").device_spec
    (launch,) = [bound for bound in compute_unit_times(kernel, machine) if bound.unit == LAUNCH]
    assert (launch.amount, launch.seconds) == ("1", LAUNCH_SECONDS)
    whole = tc.build(tc.parse("conv2d:1x64x14x14,64x64x3x3,s1,p1"), "winograd", arch="sm_90")
    assert [bound.amount for bound in compute_unit_times(whole, machine) if bound.unit == LAUNCH] == ["3"]


def test_nothing_races():
    assert find_races(tc.build(tc.parse(SMALL[0]), NAME, arch="sm_90")) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize(("text", "m"), [(SMALL[0], 2), (SMALL[1], 2), (SMALL[1], 4)])
def test_the_error_that_is_expected_is_the_one_there_is(text, m):
    workload = tc.parse(text.replace(",bias,relu", "").replace(",add", ""))
    kernel = tc.build(workload, NAME, arch="sm_90", config={"output_tile": m})
    assert emulate.error(kernel.lowered_module, workload) == pytest.approx(
        knobs.estimate_relative_error(m, 3, workload.dtype), rel=0.15
    )


def test_tiles_whose_error_is_too_large_are_none_to_choose():
    sizes = {dtype: knobs.list_output_tile_sizes(tc.parse(LAYER.replace("f16", dtype))) for dtype in DTYPES}
    assert sizes == {"f16": (2,), "bf16": (2,), "tf32": (2, 4)}


def test_it_is_searched_where_it_is_estimated_not_to_be_slower():
    """By what was measured it wins the first two, of the U-Net, and loses the others: few channels, and few pixels."""
    texts = (
        LAYER,
        "conv2d:2x2560x16x16,1280x2560x3x3,s1,p1,f16,nhwc",
        "conv2d:32x128x40x40,128x128x3x3,s1,p1,f16,nhwc",
        "conv2d:2x1280x8x8,1280x1280x3x3,s1,p1,f16,nhwc",
    )
    searched = [[s.name for s in registry.schedules_to_tune(tc.parse(text), "cuda", "sm_90")] for text in texts]
    assert [NAME in names for names in searched] == [True, True, False, False]
    assert all("hopper" in names for names in searched)


@pytest.mark.sample(1)
@needs_nvrtc
@pytest.mark.parametrize(("dtype", "vector"), [("f16", 2), ("bf16", 8), ("tf32", 4)])
def test_transforms_stay_in_registers(dtype, vector):
    workload = tc.parse(f"conv2d:2x64x28x28,64x64x3x3,s1,p1,{dtype},nhwc,bias,add,silu")
    m = knobs.list_output_tile_sizes(workload)[-1]
    kernel = tc.build(workload, NAME, arch="sm_90", config={"output_tile": m, "vector": vector})
    assert {(found.spills, found.stack_bytes) for found in kernel.cubin.kernels.values()} == {(0, 0)}
