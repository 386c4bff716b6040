"""Every rung of the ladder computes every valid convolution, and is what its docstring says."""

import pytest
from cubins import ARCHITECTURES, check_spills, needs_nvrtc
from hypothesis import HealthCheck, given, settings
from nasty import LARGE, NASTY, NASTY_2D
from strategies import convolutions

import tvmconv as tc
from tvmconv.analysis.memory.banks import conflicts

LADDER = ("default", "tiling", "columns", "vthread", "conflict_free")
CHAPTER = tc.parse("conv2d:1x64x64x64,64x64x3x3,s1,p1")


LAYERS = {
    f"{name}-{layer.name}": layer.workload for name in ("resnet50", "vgg16", "mobilenet") for layer in tc.suite(name)
}


@pytest.fixture(scope="module", params=LAYERS.values(), ids=LAYERS)
def layer_problem(request):
    """Inputs and reference of a network's layer, shared by all rungs."""
    return tc.Problem(request.param)


def test_the_ladder_is_listed_from_the_baseline_up_and_then_what_is_made_to_be_tuned():
    tuned = ("direct", "implicit_gemm", "winograd", "winograd_fused")
    assert tuple(s.name for s in tc.schedules(CHAPTER)) == (*LADDER, *tuned)


@pytest.mark.parametrize(("dilation", "threads"), [(1, (32, 8, 1)), (48, (16, 8, 1)), (50, (8, 8, 1))])
def test_the_window_of_depthwise_defaults_fits(dilation, threads):
    kernel = tc.build(tc.parse(f"conv2d:1x4x160x160,4x1x3x3,s1,p{dilation},d{dilation},g4"), "depthwise", arch="sm_90")
    assert kernel.launch.block == threads


def test_depthwise_is_listed_for_filters_of_one_channel_alone():
    depthwise = tc.parse("conv2d:1x8x9x13,16x1x3x3,p1,g8")
    assert tuple(s.name for s in tc.schedules(depthwise)) == (*LADDER, "direct", "implicit_gemm", "depthwise")
    assert "depthwise" not in [s.name for s in tc.schedules(tc.parse("conv2d:1x8x9x13,16x2x3x3,p1,g4"))]


@pytest.fixture(scope="module", params=[text for text in NASTY if text not in NASTY_2D])
def other_problem(request):
    """Likewise of those that not all schedules compute in test_combinations.py."""
    return tc.Problem(tc.parse(request.param))


@pytest.mark.parametrize("turn", range(2), ids=str)
def test_rungs_in_turn_compute_every_nasty_workload_in_the_shared_memory_of_any_gpu(turn, other_problem):
    """Every workload by two of the five; on a GPU, all compute all."""
    problem = other_problem
    rung = LADDER[(turn * 2 + len(problem.workload.text)) % len(LADDER)]
    kernel = tc.build(problem.workload, rung, device="opencl:0")
    assert kernel.verify(problem).error <= 1e-5
    assert kernel.shared_bytes <= 48 << 10


@pytest.mark.gpu
@pytest.mark.parametrize("rung", LADDER)
def test_every_rung_computes_every_nasty_workload_on_a_gpu(gpu, rung, problem):
    assert tc.build(problem.workload, rung, device=gpu).verify(problem).error <= 1e-5


@pytest.mark.parametrize("text", LARGE)
def test_conflict_free_computes_large_images_in_the_shared_memory_of_any_gpu(text):
    kernel = tc.build(tc.parse(text), "conflict_free", device="opencl:0")
    assert kernel.verify().error <= 1e-5
    assert kernel.shared_bytes <= 48 << 10


@pytest.mark.gpu
@pytest.mark.parametrize("text", LARGE)
def test_every_rung_computes_large_images_on_a_gpu(gpu, text):
    large = tc.Problem(tc.parse(text))
    for rung in LADDER:
        assert tc.build(large.workload, rung, device=gpu).verify(large).error <= 1e-5, rung


@pytest.mark.gpu
@pytest.mark.parametrize("rung", LADDER)
def test_every_rung_computes_every_layer_of_the_networks_on_a_gpu(gpu, rung, layer_problem):
    assert tc.build(layer_problem.workload, rung, device=gpu).verify(layer_problem).error <= 1e-5


@pytest.mark.parametrize("rung", LADDER)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workload=convolutions(max_flops=2_000_000))
def test_every_rung_computes_any_workload(rung, workload):
    assert tc.build(workload, rung, device="opencl:0").verify().error <= 1e-5


SIZES = tuple(
    tc.parse(f"conv2d:{n}x{c}x{size}x{size},{o}x{c}x{filter_}x{filter_},s1,p{filter_ // 2}")
    for n, c, o, size in ((1, 3, 64, 512), (16, 64, 64, 224), (4, 16, 16, 400), (2, 7, 9, 999))
    for filter_ in (1, 3, 5, 7, 9)
)
STAGING = LADDER[1:]  # in shared memory
# A rung for each layer and size, in turn: on a GPU, which has no more than that, all compute all layers.
FITTING = [(w, STAGING[i % 4]) for of in (LAYERS.values(), SIZES) for i, w in enumerate(of)]


@pytest.mark.parametrize(("workload", "rung"), FITTING, ids=str)
def test_every_rung_fits_the_shared_memory_of_any_gpu_on_layers_and_large_images(workload, rung):
    assert tc.build(workload, rung, arch="sm_75").shared_bytes <= 48 << 10


@pytest.mark.parametrize("rung", LADDER)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workload=convolutions(max_flops=10**9))
def test_every_rung_fits_the_shared_memory_of_any_gpu_whatever_the_workload(rung, workload):
    assert tc.build(workload, rung, arch="sm_75").shared_bytes <= 48 << 10


ALL_ARCHITECTURES = ("sm_75", *ARCHITECTURES)
IN_TURN = [(rung, ALL_ARCHITECTURES[(i * 2 + j) % 7]) for i, rung in enumerate(LADDER) for j in (0, 3)]


@needs_nvrtc
@pytest.mark.parametrize(("rung", "arch"), IN_TURN)
def test_every_rung_compiles_without_spills_at_the_chapters_shape(rung, arch):
    check_spills(CHAPTER, rung, arch)


@pytest.mark.gpu
@needs_nvrtc
@pytest.mark.parametrize("arch", ALL_ARCHITECTURES)
@pytest.mark.parametrize("rung", LADDER)
def test_every_rung_compiles_without_spills_for_every_architecture(rung, arch):
    """Takes no GPU: it is run where the GPU's long tests are."""
    check_spills(CHAPTER, rung, arch)


def test_the_defaults_are_the_chapters_factors_at_the_chapters_shape():
    """Factors and footprints as in the d2l-tvm chapter on GPU convolution."""
    tiling = tc.build(CHAPTER, "tiling", arch="sm_90")
    assert tiling.config["tile_c"][1:] == (4, 8)
    assert tiling.config["tile_h"][1:] == (2, 2)
    assert tiling.config["tile_w"][1:] == (16, 4)
    assert tiling.launch.threads == 128
    assert tiling.launch.grid == (1, 16, 2)
    vthread = tc.build(CHAPTER, "vthread", arch="sm_90")
    assert vthread.config["tile_w"][1:] == (2, 16, 2)
    assert vthread.config["tile_rh"][1:] == (1, 3)
    assert vthread.launch == tiling.launch


def test_default_is_a_block_for_each_row_and_a_thread_for_each_column():
    launch = tc.build(CHAPTER, "default", arch="sm_90").launch
    assert (launch.grid, launch.block) == ((64, 1, 1), (64, 1, 1))


def test_a_grid_with_too_many_channel_tiles_folds_into_its_first_axis():
    wide = tc.parse("conv2d:70000x1x2x2,1x1x1x1,s1,p0")
    kernel = tc.build(wide, "tiling", device="opencl:0")
    assert kernel.launch.grid == (70000, 1, 1)
    assert kernel.verify().ok


@pytest.mark.parametrize("text", [*NASTY, *LARGE])
def test_conflict_free_has_no_bank_conflicts_on_any_workload(text):
    kernel = tc.build(tc.parse(text), "conflict_free", arch="sm_90")
    assert conflicts(kernel, "load") == 0
    assert conflicts(kernel, "store") == 0


def test_conflict_free_has_no_bank_conflicts_whatever_its_tiles():
    w = tc.parse("conv2d:2x24x15x15,40x24x3x3,s2,p1")
    for tile_c, tile_p in (((-1, 2, 3, 4), (-1, 3, 2)), ((-1, 1, 1, 5), (-1, 1, 3)), ((-1, 1, 8, 1), (-1, 5, 1))):
        kernel = tc.build(w, "conflict_free", arch="sm_90", config={"tile_c": tile_c, "tile_p": tile_p})
        assert conflicts(kernel, "load") == conflicts(kernel, "store") == 0


@pytest.mark.parametrize("tile_c", [(-1, 1, 7), (-1, 3, 16), (-1, 1, 64), (-1, 4, 1)])
def test_conflict_free_spreads_channels_over_a_warp_where_there_is_one_pixel(tile_c):
    w = tc.parse("conv2d:1x12x3x3,70x12x3x3,s1,p0")
    kernel = tc.build(w, "conflict_free", arch="sm_90", config={"tile_c": tile_c})
    assert kernel.launch.block == (tile_c[2], 1, 1)
    assert conflicts(kernel, "load") == conflicts(kernel, "store") == 0
    assert tc.build(w, "conflict_free", device="opencl:0", config={"tile_c": tile_c}).verify().ok


def test_the_rungs_below_have_bank_conflicts_where_the_chapters_factors_do_not_fit():
    """Without this, the test above could pass with an analysis that sees nothing."""
    w = tc.parse("conv2d:1x64x28x28,64x64x3x3,s1,p1")
    for rung in ("tiling", "columns", "vthread"):
        assert conflicts(tc.build(w, rung, arch="sm_90"), "load") > 0


@pytest.mark.parametrize("rung", LADDER[1:])
def test_a_configured_kernel_is_another_kernel_with_the_same_result(rung):
    w = tc.parse("conv2d:1x6x10x10,9x6x3x3,s1,p1")
    parts = len(tc.build(w, rung, arch="sm_90").config["tile_c"])
    config = {"tile_c": (-1, *(1,) * (parts - 3), 3, 1)}
    kernel = tc.build(w, rung, device="opencl:0", config=config)
    assert kernel.config["tile_c"] == config["tile_c"]
    assert kernel.launch != tc.build(w, rung, device="opencl:0").launch
    assert kernel.verify().ok


@pytest.mark.gpu
def test_a_reduction_tile_may_overhang(gpu):
    """Four taps for three channels; on a GPU, as PoCL 3.0's vectorizer makes the fourth, which is guarded, count."""
    w = tc.parse("conv2d:1x3x5x5,4x3x5x5,s1,p0")
    kernel = tc.build(w, "columns", device=gpu, config={"tile_rc": (-1, 1, 4)})
    assert all(kernel.verify().ok for _ in range(3))


def test_a_dtype_that_a_schedule_does_not_compute_is_refused_by_name(registry):
    def single(s, w, k):
        """Compute in float32 alone."""

    tc.schedule("conv2d", dtypes=("float32",))(single)
    with pytest.raises(tc.ScheduleError, match="single computes conv2d in float32; this workload has tf32"):
        tc.build(tc.parse("conv2d:1x8x8x8,8x8x3x3,s1,p1,tf32"), "single", arch="sm_90")
