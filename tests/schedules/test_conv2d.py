"""Every rung of the ladder computes every valid convolution, and is what its docstring says."""

import numpy as np
import pytest
from cubins import needs_nvrtc
from nasty import LARGE, NASTY

import tvmconv as tc
from tvmconv import registry
from tvmconv.analysis.memory.bank_conflicts import count_conflicts
from tvmconv.analysis.sass.interpreter.request_counts import count_launch_requests

LADDER = ("default", "tiling", "columns", "vthread", "conflict_free")
CHAPTER = tc.parse("conv2d:1x64x64x64,64x64x3x3,s1,p1")


def test_ladder_is_listed_from_the_baseline_up():
    tuned = ("direct", "implicit_gemm", "winograd", "winograd_fused")
    assert tuple(s.name for s in tc.schedules(CHAPTER)) == (*LADDER, *tuned)


@pytest.mark.parametrize(("dilation", "threads"), [(1, (32, 8, 1)), (48, (16, 8, 1)), (50, (8, 8, 1))])
def test_the_window_of_depthwise_defaults_fits(dilation, threads):
    kernel = tc.build(tc.parse(f"conv2d:1x4x160x160,4x1x3x3,s1,p{dilation},d{dilation},g4"), "depthwise", arch="sm_90")
    assert kernel.launch.block == threads


def test_defaults_are_the_chapters_factors_at_its_shape():
    """Factors and footprints as in the d2l-tvm chapter on GPU convolution."""
    tiling = tc.build(CHAPTER, "tiling", arch="sm_90")
    assert tiling.config["tile_c"][1:] == (4, 8)
    assert tiling.config["tile_h"][1:] == (2, 2)
    assert tiling.config["tile_w"][1:] == (16, 4)
    assert tiling.launch.threads_per_block == 128
    assert tiling.launch.grid == (1, 16, 2)
    vthread = tc.build(CHAPTER, "vthread", arch="sm_90")
    assert vthread.config["tile_w"][1:] == (2, 16, 2)
    assert vthread.config["tile_rh"][1:] == (1, 3)
    assert vthread.launch == tiling.launch


@pytest.mark.sample(10)
@pytest.mark.parametrize("text", [*NASTY[::2], *LARGE])
def test_conflict_free_has_no_bank_conflicts_on_any_workload(text):
    kernel = tc.build(tc.parse(text), "conflict_free", arch="sm_90")
    assert count_conflicts(kernel, "load") == 0
    assert count_conflicts(kernel, "store") == 0


def test_conflict_free_has_no_bank_conflicts_whatever_its_tiles():
    w = tc.parse("conv2d:2x24x15x15,40x24x3x3,s2,p1")
    for tile_c, tile_p in (((-1, 2, 3, 4), (-1, 3, 2)), ((-1, 1, 1, 5), (-1, 1, 3)), ((-1, 1, 8, 1), (-1, 5, 1))):
        kernel = tc.build(w, "conflict_free", arch="sm_90", config={"tile_c": tile_c, "tile_p": tile_p})
        assert count_conflicts(kernel, "load") == count_conflicts(kernel, "store") == 0


@pytest.mark.parametrize("tile_c", [(-1, 1, 7), (-1, 3, 16), (-1, 1, 64), (-1, 4, 1)])
def test_conflict_free_spreads_channels_over_a_warp_at_one_pixel(tile_c):
    w = tc.parse("conv2d:1x12x3x3,70x12x3x3,s1,p0")
    kernel = tc.build(w, "conflict_free", arch="sm_90", config={"tile_c": tile_c})
    assert kernel.launch.block == (tile_c[2], 1, 1)
    assert count_conflicts(kernel, "load") == count_conflicts(kernel, "store") == 0
    assert tc.build(w, "conflict_free", device="opencl:0", config={"tile_c": tile_c}).verify().ok


def test_rungs_below_have_bank_conflicts():
    """Without this, the test above could pass with an analysis that sees nothing."""
    w = tc.parse("conv2d:1x64x28x28,64x64x3x3,s1,p1")
    for rung in ("tiling", "columns", "vthread"):
        assert count_conflicts(tc.build(w, rung, arch="sm_90"), "load") > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("rung", LADDER[1:])
def test_configured_kernel_is_another_one_with_the_same_result(rung):
    w = tc.parse("conv2d:1x6x10x10,9x6x3x3,s1,p1")
    parts = len(tc.build(w, rung, arch="sm_90").config["tile_c"])
    config = {"tile_c": (-1, *(1,) * (parts - 3), 3, 1)}
    kernel = tc.build(w, rung, device="opencl:0", config=config)
    assert kernel.config["tile_c"] == config["tile_c"]
    assert kernel.launch != tc.build(w, rung, device="opencl:0").launch
    assert kernel.verify().ok


OVERHANGING = {"tile_f": (-1, 1, 8, 8), "tile_p": (-1, 1, 16, 4), "tile_rc": (-1, 16), "pipeline": "registers"}
OVERHANGING |= {"copy_order": "coalesced", "auto_unroll_max_step": 1500, "weight_layout": "ihwo"}


@pytest.mark.slow
@needs_nvrtc
def test_overhanging_products_read_no_more_than_others():
    """Tests of whether pixels are there, around products, keep the compiler from using again what it has read."""

    def requests(image):
        w = tc.parse(f"conv2d:1x32x{image},64x32x1x1,s1,p0")
        kernel = tc.build(w, "implicit_gemm", arch="sm_90", config=OVERHANGING)
        (step,) = kernel.executable.kernels
        code = kernel.listings[step.name]
        counts = count_launch_requests(step, code, "sm_90").instruction_counts
        return sum(each.num_requests for each, line in zip(counts, code, strict=True) if line.opcode == "LDS")

    assert requests("13x13") == requests("12x16")  # three tiles of 64 pixels each


def test_blocks_of_depthwise_have_at_most_64_threads_along_z():
    space = registry.find_schedule(w := tc.parse("conv2d:1x512x14x14,512x1x3x3,s1,p1,g512"), "depthwise").space(w)
    points = space.sample_legal(400, np.random.default_rng(0))
    assert max(space.config_from_point(point)["tile_f"][2] for point in points) == 64
