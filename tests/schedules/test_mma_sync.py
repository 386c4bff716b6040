"""`mma_sync` computes every convolution in NHWC, executed without a GPU, and takes of a GPU what its formulas say."""

import functools
import re

import emulate
import pytest
from combinations import EPILOGUES
from cubins import ARCHITECTURES, DTYPES, check_spills, needs_nvrtc, space_of
from nasty import NASTY_1D, NASTY_2D, NASTY_3D, PATCHES
from points import covering, features
from tvmconv.builtin.conv.tensor_cores.patches import with_lines_as_channels

import tvmconv as tc
from tvmconv import gpu, library
from tvmconv.errors import DeviceError, KnobError

LAYER = "conv2d:1x64x56x56,64x64x3x3,s1,p1,f16,nhwc"
WIDE = "conv2d:32x128x28x28,256x128x3x3,s1,p1"

# Beside the nasty ones: channels that fill chunks, and several steps, tiles and blocks that share a sum.
DEEP = (
    "conv2d:1x64x8x8,64x64x3x3,s1,p1",
    "conv2d:2x32x7x9,40x32x3x3,s2,p1",
    "conv2d:1x40x7x7,24x40x3x3,s1,p1",
    "conv2d:1x128x5x5,32x128x1x1,s1,p0",
    "conv2d:3x32x9x11,48x16x3x3,s2x1,p1x0x2x1,d1x2,g2",
    "conv2d:1x20x9x9,20x20x3x3,s1,p1,d2",
)
REST_READS = ("relu,add", "relu,bias,add")  # what a sum cannot begin with
CASES = [
    ",".join(filter(None, (text, DTYPES[number % 3], "nhwc", (*EPILOGUES, *REST_READS)[number % 8])))
    for number, text in enumerate((*DEEP, *NASTY_2D, *NASTY_1D, *NASTY_3D))
]


def built(w, config=None, arch="sm_90"):
    return tc.build(w, "mma_sync", arch=arch, config=config)


def check(text, config=None):
    w = tc.parse(text)
    assert emulate.error(built(w, config).module, w) <= w.tolerance, config


@pytest.mark.parametrize("text", [*PATCHES, "conv2d:1x6x12x24,16x6x3x2,s1x2,p1x0,f16,nhwc"])
def test_patches_have_their_lines_as_channels(text):
    assert with_lines_as_channels(tc.parse(text)) != tc.parse(text)
    check(text)


@functools.cache
def searched():
    """Legal configs of the deep workloads that together try as much as possible: (space, configs) by text."""
    seen = set()
    spaces = {text: space_of(tc.parse(text), "mma_sync") for text in CASES[: len(DEEP)]}
    return {text: (space, covering(space, 3, 0, seen)) for text, space in spaces.items()}


@pytest.mark.parametrize("text", [*CASES[: len(DEEP)], *CASES[len(DEEP) :: 2]])  # on a GPU, all of them
def test_the_default_computes_deep_and_nasty_workloads(text):
    check(text)


@pytest.mark.parametrize("text", CASES[: len(DEEP)])
def test_searched_tiles_compute_the_convolution(text):
    for config in searched()[text][1]:
        check(text, config)


def test_the_searched_tiles_above_try_what_they_are_meant_to():
    """Without this, they could pass with nothing but the simplest kernels."""
    tried = {
        feature for space, configs in searched().values() for config in configs for feature in features(space, config)
    }
    for knob, values in {
        "block_m": (16, 32, 48, 64, 96, 128),
        "block_n": (16, 32, 64),
        "block_k": (16, 32, 64, 128),
        **dict.fromkeys(("warps_m", "warps_n", "warps_k"), (1, 2, 4)),
        "stages": (2, 3, 4, 6),
        "split_k": (1, 2, 4, 8),
        "meet": ("scratch", "cluster"),
    }.items():
        assert {f"{knob}={value}" for value in values} <= tried


@pytest.mark.parametrize(
    ("choices", "turns", "stages"),
    [
        ("f16,nhwc", 2, 6),
        ("bf16,nhwc,bias,add,relu", 4, 2),
        ("tf32,nhwc,relu,add", 2, 3),
        ("f16,nhwc,relu,bias,add", 4, 4),
    ],
)
def test_blocks_compute_several_tiles_in_turn(choices, turns, stages):
    """The last blocks have fewer than the others. A search tries that where blocks are many more."""
    tile = {"block_m": 32, "block_n": 32, "block_k": 32, "warps_m": 2, "warps_n": 1, "warps_k": 1, "split_k": 1}
    config = {**tile, "meet": "scratch", "tiles_per_block": turns, "stages": stages}
    check(f"conv2d:1x20x9x11,40x20x3x3,s1,p1,{choices}", config)


@pytest.mark.parametrize("meet", ["scratch", "cluster"])
@pytest.mark.parametrize("epilogue", ["", ",bias,add,relu", ",relu,add"])
def test_sums_are_shared_among_blocks_and_warps(meet, epilogue):
    w = tc.parse(f"conv2d:1x128x5x5,40x128x3x3,s1,p1,f16,nhwc{epilogue}")
    config = {"block_m": 16, "block_n": 16, "block_k": 64, "warps_m": 1, "warps_n": 1, "warps_k": 2}
    kernel = built(w, {**config, "stages": 3, "split_k": 4, "meet": meet})
    assert len(kernel.steps) == (2 if meet == "scratch" else 1)
    assert kernel.launch.cluster == ((1, 1, 1) if meet == "scratch" else (1, 1, 4))
    assert emulate.error(kernel.module, w) <= w.tolerance


ORDERS = ("bias,relu", "relu,bias", "add,bias,relu", "relu,bias,add", "add,relu,bias", "bias,relu,add,clamp")
SHARED = {
    "alone": {"split_k": 1, "warps_k": 1, "tiles_per_block": 1},
    "in turn": {"split_k": 1, "warps_k": 1, "tiles_per_block": 2},
    "warps": {"split_k": 1, "warps_k": 2, "tiles_per_block": 1},
    "cluster": {"split_k": 2, "warps_k": 2, "tiles_per_block": 1, "meet": "cluster"},
    "scratch": {"split_k": 2, "warps_k": 1, "tiles_per_block": 1, "meet": "scratch"},
}
# Every order with one or two of the ways, and every way with two of the orders.
IN_TURN = [(order, how) for i, order in enumerate(ORDERS) for j, how in enumerate(SHARED) if (i + j) % 3 == 0]
SMALL = {"block_m": 32, "block_n": 32, "block_k": 64, "warps_m": 2, "warps_n": 1, "stages": 3, "meet": "scratch"}


@pytest.mark.parametrize(("order", "how"), IN_TURN)
def test_an_epilogue_is_applied_in_its_order_however_sums_are_shared(order, how):
    """Channels are 40, 42 or 41: biases come in 16, 8 or 4 bytes. Shared memory is what `usage` says.

    Where a sum may begin with the residual, it does so for every other way and order.
    """
    number = ORDERS.index(order)
    w = tc.parse(f"conv2d:1x24x9x11,{(40, 42, 41)[number % 3]}x24x3x3,s1,p1,f16,nhwc,{order}")
    space = space_of(w, "mma_sync")
    begins = (number // 2 + list(SHARED).index(how)) % 2
    residual = {"residual": "begin" if begins else "end"} if "residual" in space.knobs else {}
    kernel = built(w, {**SMALL, **SHARED[how], **residual})
    assert emulate.error(kernel.module, w) <= w.tolerance, residual
    used = space.usage(space.point(kernel.config)[None]).dynamic_shared_bytes[0]
    assert used == kernel.program.steps[0].dynamic_shared_bytes


def test_a_bias_leaves_the_steps_of_a_tile_as_they_are():
    """It is asked for before them and added behind them, and no thread waits for memory for it."""
    text = "conv2d:32x256x14x14,256x256x3x3,s1,p1,f16,nhwc"
    bare, biased = (built(tc.parse(text + epilogue)).source.splitlines() for epilogue in ("", ",bias,relu"))
    steps = [[line for line in lines if "_mma_sync_" in line or "_ldmatrix_" in line] for lines in (bare, biased)]
    assert [re.sub(r"cse_v\d+", "", line) for line in steps[0]] == [re.sub(r"cse_v\d+", "", line) for line in steps[1]]
    assert not [line for line in biased if "ld_global" in line]


@pytest.mark.parametrize("epilogue", ["relu", "bias,relu", "bias,add,relu"])
def test_a_relu_at_the_end_is_part_of_the_rounding(epilogue):
    source = built(tc.parse(f"{LAYER},{epilogue}")).source
    assert "cvt.rn.relu.f16x2.f32" in source
    assert "max(" not in source.rpartition("__global__")[2]


@pytest.mark.parametrize("where", ["begin", "end"])
@pytest.mark.parametrize(
    ("dtype", "epilogue"), [("f16", "bias,add,relu"), ("bf16", "add,bias"), ("tf32", "bias,add,silu")]
)
def test_a_residual_is_added_where_its_knob_says(where, dtype, epilogue):
    check(f"conv2d:2x40x7x9,36x40x1x1,s1,p0,{dtype},nhwc,{epilogue}", {"residual": where})


def test_there_is_a_choice_only_where_a_sum_may_begin_with_a_residual():
    texts = {"add": True, "bias,add,relu": True, "relu,add": False, "bias": False}
    for epilogue, expected in texts.items():
        assert ("residual" in space_of(tc.parse(f"{LAYER},{epilogue}"), "mma_sync").knobs) is expected


@needs_nvrtc
@pytest.mark.parametrize(("arch", "dtype"), list(zip(ARCHITECTURES, DTYPES * 2, strict=True)))
def test_the_default_compiles_without_spills(arch, dtype):
    check_spills(tc.parse(f"{WIDE},{dtype},nhwc,bias,relu"), "mma_sync", arch)


@needs_nvrtc
def test_registers_are_not_spilled_for_a_block_that_shared_memory_has_no_room_for():
    """ptxas left to itself takes 96 registers of the 116 that this kernel needs, for a fifth block beside two."""
    check_spills(tc.parse("conv2d:1x256x14x14,256x256x3x3,s1,p1,f16,nhwc"), "mma_sync", "sm_90")


@pytest.mark.gpu
@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_default_compiles_without_spills_in_every_dtype(arch):
    """Takes no GPU: it is run where the GPU's long tests are."""
    for dtype in DTYPES:
        check_spills(tc.parse(f"{WIDE},{dtype},nhwc,bias,relu"), "mma_sync", arch)


@needs_nvrtc
def test_the_layers_of_networks_do_not_spill_by_default():
    for layer in tc.suite("resnet50", 32)[2::7]:
        check_spills(tc.parse(f"{layer.workload},f16,nhwc"), "mma_sync", "sm_90")


def test_the_default_leaves_room_for_what_the_epilogue_has_of_each_channel():
    """Tiles of 96 × 256 sums suit it best, and have no byte left of what every GPU since sm_80 has."""
    w = tc.parse("conv2d:1x512x66x96,512x512x3x3,s1,p1,f16,nhwc,bias,add,relu")
    (step,) = tc.build(w, "mma_sync", arch="sm_89").program.steps
    assert step.dynamic_shared_bytes <= 99 * 1024


def test_clusters_are_for_architectures_that_have_them():
    w = tc.parse("conv2d:1x512x7x7,512x512x3x3,s1,p1,f16,nhwc")
    with pytest.raises(DeviceError, match="sm_80 has clusters of at most 1"):
        built(w, {"split_k": 4, "meet": "cluster"}, arch="sm_80")
    for arch, meetings in (("sm_80", {"scratch"}), ("sm_90", {"scratch", "cluster"})):
        space = space_of(w, "mma_sync", arch)
        assert {space.config(point)["meet"] for point in space.listed} == meetings


def test_searched_tiles_fit_the_shared_memory_of_the_device():
    w = tc.parse("conv2d:32x256x56x56,256x256x3x3,s1,p1,f16,nhwc")
    for arch in ("sm_86", "sm_80", "sm_90"):
        space = space_of(w, "mma_sync", arch)
        assert space.usage(space.listed).dynamic_shared_bytes.max() <= gpu.limits(arch).all_shared_bytes


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"warps_m": 4, "block_m": 32}, "a warp has whole mmas"),
        ({"block_k": 32, "warps_k": 2}, "even number of mmas"),
        ({"split_k": 8, "block_k": 128}, "has a step"),
        ({"block_m": 40}, "block_m takes one of 16, 32"),
    ],
)
def test_what_does_not_go_together_is_refused_in_words(config, complaint):
    with pytest.raises(KnobError, match=complaint):
        built(tc.parse(LAYER), config)


def test_it_is_for_channels_last_on_nvidia_gpus_since_sm_80():
    assert "mma_sync" in [s.name for s in tc.schedules(tc.parse(LAYER))]
    assert "mma_sync" not in [s.name for s in tc.schedules(tc.parse(LAYER.replace(",nhwc", "")))]
    assert "mma_sync" not in [s.name for s in tc.schedules(tc.parse(LAYER.replace(",f16", "")))]
    with pytest.raises(tc.Error, match="sm_80"):
        built(tc.parse(LAYER), arch="sm_75")


@pytest.mark.gpu
@pytest.mark.parametrize("text", CASES)
def test_it_computes_every_workload_on_a_gpu(gpu, text):
    w = tc.parse(text)
    problem = tc.Problem(w)
    for config in [None, *covering(library.find(w, "mma_sync").space(w, gpu.limits), 3, seed=1)]:
        assert tc.build(w, "mma_sync", device=gpu, config=config).verify(problem).ok, config
