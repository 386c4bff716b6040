"""`hopper` computes every convolution that TMA can copy, executed without a GPU, and takes of a GPU what it says."""

import functools
import itertools
import re
from unittest import mock

import emulate
import pytest
from cubins import check_spills, needs_nvrtc, space_of
from nasty import PATCHES
from pairs import in_pairs
from points import covering, features
from small_tiles import SMALL, all_legal, built, few_multiprocessors
from tvmconv.builtin.conv.tensor_cores.hopper import schedule
from tvmconv.builtin.conv.tensor_cores.hopper.workload import WGMMA_BYTES
from tvmconv.builtin.conv.tensor_cores.patches import in_short_steps, with_lines_as_channels

import tvmconv as tc
from tvmconv import gpu, library
from tvmconv.compiler import sass
from tvmconv.errors import KnobError, ScheduleError

LAYER = "conv2d:1x64x56x56,64x64x3x3,s1,p1,f16,nhwc"
WIDE = "conv2d:32x256x14x14,256x256x3x3,s1,p1"
DTYPES = ("f16", "bf16", "tf32")
EPILOGUES = (
    *("", "bias", "bias,relu", "add", "bias,add,relu", "silu", "gelu,bias", "add,bias,silu"),
    *("relu,add", "clamp", "bias,gelu,add", "add,relu,bias"),
)

# A few, of which many configs are tried: enough channels for wide rows and splits, and pixels for all warpgroups.
DEEP = (
    "conv2d:2x64x7x9,64x64x2x2,s1,p0",
    "conv2d:1x128x13x11,72x128x1x1,s1,p0",  # a plain product
    "conv2d:2x64x7x9,48x32x3x2,s2x1,p1x0x2x1,d1x2,g2",
    "conv3d:1x64x3x5x6,48x64x2x1x2,s1,p1x0x1",
    "conv2d:2x48x11x9,41x48x3x2,s2,p1",  # TMA cannot store these channels
)
NASTY = (
    "conv2d:1x8x1x1,8x8x1x1,s1,p0",  # a single pixel
    "conv2d:1x8x5x5,16x8x5x5,s1,p0",  # a single output pixel
    "conv2d:40x16x1x1,24x16x1x1,s1,p0",  # pixels from the batch alone
    "conv2d:33x8x2x2,8x8x3x3,s1,p1",  # images smaller than a tile, from which it goes on to others
    "conv2d:1x8x4x4,1x8x3x3,s1,p1",  # one channel
    "conv2d:2x16x5x7,33x16x3x3,s1,p1",  # odd channels
    "conv2d:1x24x9x10,30x24x3x3,s1,p1",  # rows of the output that are no whole chunks
    "conv2d:1x40x7x7,24x40x3x3,s1,p1",  # the last step has zeros behind the channels
    "conv2d:1x72x5x5,16x72x3x3,s1,p1",
    "conv2d:1x16x17x19,8x16x3x3,s1,p1",  # primes
    "conv2d:2x8x9x13,16x8x3x5,s2x1,p1x2x0x1,d1x2",  # everything at once
    "conv2d:3x64x10x14,48x32x2x4,s1x3,p0x1x2x3,g2",
    "conv2d:2x96x6x6,24x32x3x3,s2,p0,g3",  # 8 channels of each group, 3 groups
    "conv2d:1x64x7x7,42x32x1x1,s1,p0,g2",  # a plain product of each group; odd channels
    "conv2d:1x64x12x12,16x64x1x1,s5,p0",
    "conv2d:1x8x30x30,8x8x3x3,s1,p3,d7",
    "conv2d:1x8x25x25,16x8x11x11,s4,p2",
    "conv2d:1x8x9x9,8x8x3x3,s8,p1",  # TMA's largest step
    "conv2d:7x8x3x3,8x8x2x2,s1,p2",  # more padding than the filter needs
    "conv2d:1x8x3x3,8x8x15x15,s1,p7",  # a filter five times the image
    "conv2d:1x8x20x1,16x8x7x1,s1,p3x0",  # an image of width 1
    "conv2d:1x8x1x300,16x8x1x3,s1,p0x1",  # and of height 1
    "conv2d:1x8x6x5,8x8x1x1,s1,p1",  # padding without a filter to need it
    "conv2d:1x16x12x10,32x16x3x3,s3,p0x1x1x0,d2",
    "conv2d:1x16x140x3,8x16x2x2,s1,p10x0,d130x1",  # offsets beyond 7 bits
    "conv1d:1x8x1,8x8x1,s1,p0",
    "conv1d:3x16x40,24x16x1,s1,p0",
    "conv1d:1x16x331,24x16x3,s1,p1",
    "conv1d:2x8x300,16x8x9,s2,p4",
    "conv1d:1x8x257,8x8x31,s1,p15,d3",
    "conv1d:2x96x97,24x32x5,s3,p0x3,d2,g3",
    "conv1d:1x8x300,17x8x100,s7,p2x5",  # a large filter
    "conv3d:1x8x1x1x1,8x8x1x1x1,s1,p0",
    "conv3d:2x8x4x6x6,16x8x3x3x3,s2,p1",
    "conv3d:2x16x5x7x9,24x16x2x3x1,s1x2x1,p1x0x2x0x1x1,d2x1x1",
    "conv3d:2x24x3x4x4,24x24x1x1x1,s1,p0",
    "conv3d:1x8x9x8x7,9x8x3x2x3,s3x1x2,p1x0x0x0x1x1,d1x4x2",
    "conv3d:1x64x3x5x5,16x32x3x3x3,s1,p1,g2",
)


def with_choices(texts):
    """Each with a dtype and an epilogue in turn, so that each dtype meets each epilogue."""
    choices = itertools.cycle((dtype, order) for order in EPILOGUES for dtype in DTYPES)
    return [
        ",".join(filter(None, (text, dtype, "nhwc", order)))
        for text, (dtype, order) in zip(texts, choices, strict=False)
    ]


CASES = with_choices(NASTY)
DEEP_CASES = [
    f"{text},{choices}"
    for text, choices in zip(
        DEEP,
        ("f16,nhwc,bias,add,relu", "bf16,nhwc,bias", "tf32,nhwc,add", "bf16,nhwc,relu,add", "tf32,nhwc,bias"),
        strict=True,
    )
]


def check(text, config=None):
    w = tc.parse(text)
    kernel = built(w, config)
    assert emulate.error(kernel.module, w) <= w.tolerance, config
    return kernel


@pytest.mark.parametrize("text", PATCHES)
def test_patches(text):
    check(text)


def test_patches_are_other_axes_of_the_same_arrays():
    """16×16 pixels of three channels: 48 channels of a line, of which a patch has 16 along an axis of its own."""
    w = tc.parse("conv2d:2x3x48x64,32x3x16x16,s16,p0,f16,nhwc,bias,add,relu")
    lines = with_lines_as_channels(w)
    assert lines.text == "conv2d:2x48x48x4,32x48x16x1,s16x1,p0,f16,nhwc,bias,add,relu"
    assert in_short_steps(lines).text == "conv3d:2x48x3x16x4,32x48x1x16x1,s1,p0,f16,nhwc,bias,add,relu"


@pytest.mark.parametrize(
    "text",
    [
        "conv2d:2x3x48x64,32x3x16x16,s16,p0,f16",  # channels first
        "conv2d:2x3x48x68,32x3x16x16,s16,p0,f16,nhwc",  # a rest of a patch
        "conv2d:2x3x48x64,32x3x16x16,s16,p0x0x0x16,f16,nhwc",
        "conv2d:2x3x48x64,32x3x16x16,s16x8,p0,f16,nhwc",
        "conv2d:2x3x48x64,32x3x16x8,s16x16,p0,f16,nhwc",
        "conv2d:2x3x48x64,32x3x16x8,s16x8,p0,d1x2,f16,nhwc",
        "conv2d:2x4x48x64,32x2x16x16,s16,p0,g2,f16,nhwc",
        "conv2d:2x64x8x8,32x64x2x2,s2,p0,f16,nhwc",  # wide enough
    ],
)
def test_what_is_no_patches_stays_as_it_is(text):
    assert with_lines_as_channels(tc.parse(text)) == tc.parse(text)


# --- what it computes ---


@pytest.mark.parametrize("text", CASES)
def test_the_default_computes_every_workload(text):
    check(text)


@functools.cache
def searched():
    """Legal configs of the deep workloads that together try as much as possible: (space, configs) by text."""
    seen = set()
    spaces = {text: all_legal(tc.parse(text)) for text in DEEP_CASES}
    return {text: (space, covering(space, 3, 0, seen)) for text, space in spaces.items()}


@pytest.mark.parametrize("text", DEEP_CASES)
def test_any_tiles_compute_the_convolution(text):
    with few_multiprocessors():
        for config in searched()[text][1]:
            check(text, config)


def test_the_tiles_above_try_every_value_of_every_knob():
    tried = {feature for space, configs in searched().values() for each in configs for feature in features(space, each)}
    space = next(iter(searched().values()))[0]
    assert {f"{name}={option}" for name, knob in space.knobs.items() for option in knob.options} <= tried


# Ways for a tile to be shared and stored, and the channels that they need.
WAYS = {
    "in turn": (24, {}),
    "not by TMA": (41, {"warpgroups": 2, "block_n": 32}),
    "split": (24, {"split_k": 2, "warpgroups": 2, "row_bytes": 32, "stages": 2}),
    "split, not by TMA": (26, {"split_k": 3, "row_bytes": 32}),
    "weights shared": (48, {"sharers_m": 4, "block_n": 32}),
    "input shared": (40, {"sharers_n": 2, "warpgroups": 3}),
    "both shared": (48, {"sharers_m": 2, "sharers_n": 2}),
}
KINDS = ("", "bias", "silu", "relu,bias,add")  # of epilogues
PATHS = {
    "image": "conv2d:2x32x9x8,{}x32x2x3,s1,p1x1x0x1",
    "signal": "conv1d:2x48x150,{}x48x3,s2,p1",
    "volume": "conv3d:1x40x3x5x9,{}x40x1x2x2,s1,p0x1x1x0x0x0",
    "product": "conv2d:2x128x7x11,{}x128x1x1,s1,p0",
}


@pytest.mark.parametrize(("way", "path", "dtype", "order"), in_pairs(WAYS, PATHS, DTYPES, KINDS))
def test_tiles_are_stored_in_every_way(way, path, dtype, order):
    """What `usage` says of the kernel is so."""
    channels, config = WAYS[way]
    text = ",".join(filter(None, (PATHS[path].format(channels), dtype, "nhwc", order)))
    with few_multiprocessors():
        kernel = check(text, {**SMALL, **config})
        space = space_of(kernel.workload, "hopper")
        used = space.usage(space.point(kernel.config)[None])
        (step,) = kernel.steps
        assert used.dynamic_shared_bytes[0] == step.dynamic_shared_bytes
        assert used.threads[0] == kernel.launch.threads
        assert used.blocks[0] == kernel.launch.blocks
        x, y, z = kernel.launch.cluster
        assert used.cluster[0] == x * y * z
        assert (x, z) == (config.get("sharers_m", 1) * config.get("sharers_n", 1), config.get("split_k", 1))


@pytest.mark.parametrize("tiles", [2, 3, 5, 8])
@pytest.mark.parametrize("epilogue", ["", ",add,bias"])
def test_blocks_take_tiles_in_turn(tiles, epilogue):
    """As many each, or one more for some; a ring and slabs that begin anywhere at a tile, and in either parity."""
    with few_multiprocessors():
        kernel = check(f"conv1d:1x64x{tiles * 64 - 7},16x64x3,s1,p1,f16,nhwc{epilogue}", {**SMALL, "row_bytes": 32})
    assert kernel.launch.grid == (2, 1, 1)


@pytest.mark.parametrize("share", [{"sharers_m": 2}, {"sharers_m": 4, "sharers_n": 2, "block_n": 32}])
def test_clusters_have_tiles_that_are_not_there(share):
    """Tiles are of whole clusters: of what is beyond the pixels and channels, nothing is stored."""
    check("conv2d:1x32x9x9,16x32x3x3,s1,p1,bf16,nhwc,bias,add", {**SMALL, **share})


# --- what it refuses ---


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("conv2d:1x64x8x8,64x64x3x3,s1,p1,f16", "channels first"),
        ("conv2d:1x64x8x8,64x64x3x3,s1,p1,nhwc", "float32"),
        ("conv2d:1x12x8x8,16x12x3x3,s1,p1,f16,nhwc", "channels of 24 bytes"),
        ("conv2d:1x6x8x8,16x6x3x3,s1,p1,tf32,nhwc", "channels of 24 bytes"),
        ("conv2d:1x16x8x8,16x8x3x3,s1,p1,g2,bf16,nhwc", "groups of 16 bytes, half a wgmma"),
        ("conv2d:1x8x99x99,16x8x1x1,s9,p0,f16,nhwc", "a step beyond 8"),
        ("conv2d:1x8x300x3,16x8x2x1,s1,p128x0,d256x1,f16,nhwc", "an offset beyond 8 bits"),
        ("conv3d:1x8x9x70x9,16x8x1x3x1,s1,p0x16x0,d1x16x1,f16,nhwc", "an offset beyond 5 bits"),
        ("conv2d:1x8x9x9,16x8x3x3,s1,p129,f16,nhwc", "a corner beyond 8 bits"),
        ("conv3d:1x8x9x9x9,16x8x3x3x3,s1,p17,f16,nhwc", "a corner beyond 5 bits"),
    ],
)
def test_what_tma_cannot_copy_is_refused_in_one_line(text, reason):
    w = tc.parse(text)
    assert "hopper" not in [s.name for s in tc.schedules(w)], reason
    with pytest.raises(ScheduleError, match="hopper computes conv") as refused:
        built(w)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "conv2d:1x64x8x8,64x64x3x3,s1,p1,f16,nhwc",
        "conv2d:1x4x8x8,16x4x3x3,s1,p1,tf32,nhwc",
        "conv2d:1x32x8x8,32x16x3x3,s1,p1,g2,bf16,nhwc",
        "conv2d:1x8x99x99,16x8x1x1,s8,p0,f16,nhwc",
        "conv2d:1x8x300x3,16x8x2x1,s1,p128x0,d255x1,f16,nhwc",
        "conv2d:1x8x9x9,16x8x3x3,s1,p128,f16,nhwc",
    ],
)
def test_what_tma_can_just_copy_is_not(text):
    assert "hopper" in [s.name for s in tc.schedules(tc.parse(text))]


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100", "sm_120"])
def test_it_is_for_sm_90_alone(arch):
    with pytest.raises(ScheduleError, match=f"^schedule hopper needs sm_90, and is not for {arch}$"):
        built(tc.parse(LAYER), arch=arch)
    assert "hopper" not in [s.name for s in library.to_tune(tc.parse(LAYER), "cuda", arch)]


def test_a_search_on_sm_90_tries_it_and_leaves_the_simpler_ones_out():
    assert {s.name for s in library.to_tune(tc.parse(LAYER), "cuda", "sm_90")} == {"mma_sync", "hopper"}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"rows": 2, "block_n": 256}, "a thread has room for the sums"),
        ({"warpgroups": 3, "rows": 2, "block_n": 128}, "all threads' registers fit"),
        ({"stages": 8, "row_bytes": 256, "block_n": 256}, "bytes of shared memory"),
        ({"split_k": 2, "sharers_m": 2}, "a split reduction shares no operands"),
        ({"split_k": 8, "row_bytes": 256}, "each block of a split reduction has a step"),
        ({"sharers_m": 4, "block_n": 48}, "whole swizzles"),
        ({"block_n": 40}, "block_n takes one of 16, 32"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_built(config, complaint):
    building = mock.Mock(side_effect=AssertionError("it is built"))
    with mock.patch.object(schedule, "write", building), pytest.raises(KnobError, match=complaint) as refused:
        built(tc.parse(LAYER), {**SMALL, **config})
    assert "\n" not in str(refused.value)


def test_operands_are_shared_only_where_tma_stores():
    with pytest.raises(KnobError, match="blocks share operands where TMA stores"):
        built(tc.parse("conv2d:1x64x8x8,41x64x3x3,s1,p1,f16,nhwc"), {**SMALL, "sharers_m": 2})


def test_channels_of_a_group_that_do_not_fill_the_steps_are_refused():
    with pytest.raises(KnobError, match="channels of a group fill the steps"):
        built(tc.parse("conv2d:1x96x8x8,32x48x3x3,s1,p1,g2,f16,nhwc"), SMALL)


@pytest.mark.parametrize("text", DEEP_CASES)
def test_searched_configs_have_room_on_the_gpu(text):
    space = space_of(tc.parse(text), "hopper")
    used, limits = space.usage(space.listed), gpu.limits("sm_90")
    assert len(space.listed) > 10
    assert used.dynamic_shared_bytes.max() <= limits.all_shared_bytes
    assert used.threads.max() <= limits.max_threads
    assert used.cluster.max() <= limits.max_cluster


# --- what it is compiled to ---

LAYERS = {
    "resnet 56": "conv2d:1x64x56x56,64x64x3x3,s1,p1,f16,nhwc,bias,relu",
    "resnet 56, 32 images": "conv2d:32x64x56x56,64x64x3x3,s1,p1,f16,nhwc,bias,relu",
    "resnet 14, 32 images": f"{WIDE},f16,nhwc,bias,relu",
    "resnet 14, tf32": f"{WIDE},tf32,nhwc,bias,relu",
    "resnet 7": "conv2d:1x512x7x7,512x512x3x3,s1,p1,bf16,nhwc,bias,relu",
    "resnet 1x1 with a residual": "conv2d:32x64x56x56,256x64x1x1,s1,p0,f16,nhwc,bias,add,relu",
    "resnet downsampling": "conv2d:32x512x28x28,1024x512x1x1,s2,p0,bf16,nhwc,bias",
    "yolo": "conv2d:1x64x80x80,128x64x3x3,s2,p1,f16,nhwc,bias,silu",
    "stable diffusion": "conv2d:2x320x64x64,320x320x3x3,s1,p1,f16,nhwc,bias,silu",
    "convnext": "conv2d:1x96x56x56,192x96x2x2,s2,p0,f16,nhwc,bias,gelu",
    "classes": "conv2d:1x256x40x40,255x256x1x1,s1,p0,f16,nhwc,bias",
    "speech": "conv1d:8x512x1500,512x512x3,s2,p1,bf16,nhwc,bias,gelu",
    "video": "conv3d:1x64x8x56x56,64x64x3x3x3,s1,p1,tf32,nhwc,bias,add,relu",
}
DEEPEST = "stable diffusion"


@needs_nvrtc
@pytest.mark.parametrize("layer", LAYERS)
def test_the_default_of_a_layer_compiles_without_spills(layer):
    check_spills(tc.parse(LAYERS[layer]), "hopper", "sm_90")


MULTIPLIERS = re.compile(r"HGMMA|WARPGROUP\.\w+")


@needs_nvrtc
@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        ("f16", {"warpgroups": 2, "rows": 1, "block_n": 128, "row_bytes": 128}),
        ("bf16", {"warpgroups": 2, "rows": 2, "block_n": 64, "row_bytes": 64}),
        ("tf32", {"warpgroups": 1, "rows": 1, "block_n": 256, "row_bytes": 256, "split_k": 2}),
        ("f16", {"warpgroups": 3, "rows": 1, "block_n": 96, "row_bytes": 32}),
    ],
)
def test_the_wgmmas_of_a_step_follow_one_another(dtype, config):
    """Where ptxas cannot keep sums in registers meanwhile, it waits behind each: "wgmma ... are serialized"."""
    kernel = built(tc.parse(f"{WIDE},{dtype},nhwc,bias,relu"), {**SMALL, "stages": 2, **config})
    order = [match[0] for match in MULTIPLIERS.finditer(sass.disassemble(kernel.cubin.image))]
    groups = [list(each) for is_wgmma, each in itertools.groupby(order, lambda name: name == "HGMMA") if is_wgmma]
    of_step = kernel.config["rows"] * kernel.config["row_bytes"] // WGMMA_BYTES
    assert groups
    assert all(len(group) % of_step == 0 for group in groups), order
    assert sum("DEPBAR" in name for name in order) <= 2 * len(groups)


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("text", [*CASES, *DEEP_CASES])
def test_it_computes_every_workload_on_a_gpu(gpu, text):
    w = tc.parse(text)
    if not library.find(w, "hopper").runs_on("cuda", gpu.arch):
        pytest.skip("hopper is for sm_90")
    problem = tc.Problem(w)
    for config in [None, *covering(all_legal(w), 3, seed=1)]:
        assert tc.build(w, "hopper", device=gpu, config=config).verify(problem).ok, config
