"""`hopper` computes every convolution that TMA can copy, executed without a GPU, and takes of a GPU what it says."""

import itertools
import re

import numpy as np
import pytest
from cubins import needs_nvrtc, space_of
from nasty import PATCHES
from pairs import in_pairs
from small_tiles import SMALL, build_checked, built, few_multiprocessors
from tvmconv.builtin.conv.tensor_cores.hopper import starting_configs, tile_config
from tvmconv.builtin.conv.tensor_cores.hopper.knobs import declare_knobs
from tvmconv.builtin.conv.tensor_cores.hopper.tma_requirements import WGMMA_K_BYTES
from tvmconv.builtin.conv.tensor_cores.space_to_depth import fold_filter_row_into_channels, split_filter_height

import tvmconv as tc
from tvmconv import compat
from tvmconv.compiler import sass
from tvmconv.registry import find_schedule
from tvmconv.space import Knobs
from tvmconv.space.mutation import Mutator

WIDE = "conv2d:32x256x14x14,256x256x3x3,s1,p1"
DTYPES = ("f16", "bf16", "tf32")


@pytest.mark.parametrize("text", [*PATCHES, "conv2d:1x6x12x24,16x6x3x2,s1x2,p1x0,f16,nhwc"])
def test_patches_have_their_lines_as_channels(text):
    assert fold_filter_row_into_channels(tc.parse(text)) != tc.parse(text)


def test_patches_are_other_axes_of_the_same_arrays():
    """16×16 pixels of three channels: 48 channels of a line, of which a patch has 16 along an axis of its own."""
    w = tc.parse("conv2d:2x3x48x64,32x3x16x16,s16,p0,f16,nhwc,bias,add,relu")
    lines = fold_filter_row_into_channels(w)
    assert lines.text == "conv2d:2x48x48x4,32x48x16x1,s16x1,p0,f16,nhwc,bias,add,relu"
    assert split_filter_height(lines).text == "conv3d:2x48x3x16x4,32x48x1x16x1,s1,p0,f16,nhwc,bias,add,relu"


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
    assert fold_filter_row_into_channels(tc.parse(text)) == tc.parse(text)


# Ways for a tile to be shared and stored, and the channels that they need.
WAYS = {
    "in turn": (24, {}),
    "not by TMA": (41, {"warpgroups": 2, "block_n": 32}),
    "split": (24, {"split_k": 2, "warpgroups": 2, "block_k_bytes": 32, "stages": 2}),
    "split, not by TMA": (26, {"split_k": 3, "block_k_bytes": 32}),
    "weights shared": (48, {"cluster_m": 4, "block_n": 32}),
    "input shared": (40, {"cluster_n": 2, "warpgroups": 3}),
    "both shared": (48, {"cluster_m": 2, "cluster_n": 2}),
}
KINDS = ("", "bias", "silu", "relu,bias,add")  # of epilogues
PATHS = {
    "image": "conv2d:2x32x9x8,{}x32x2x3,s1,p1x1x0x1",
    "signal": "conv1d:2x48x150,{}x48x3,s2,p1",
    "volume": "conv3d:1x40x3x5x9,{}x40x1x2x2,s1,p0x1x1x0x0x0",
    "product": "conv2d:2x128x7x11,{}x128x1x1,s1,p0",
}


CHOICES = in_pairs(WAYS, PATHS, DTYPES, KINDS)
CHOICES = [pytest.param(*each, marks=[pytest.mark.slow] if number % 2 else []) for number, each in enumerate(CHOICES)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("way", "path", "dtype", "order"), CHOICES)
def test_tiles_are_stored_in_every_way(way, path, dtype, order):
    """What `usage` says of the kernel is so."""
    channels, config = WAYS[way]
    text = ",".join(filter(None, (PATHS[path].format(channels), dtype, "nhwc", order)))
    with few_multiprocessors():
        kernel = build_checked(text, {**SMALL, **config})
        space = space_of(kernel.workload, "hopper")
        used = space.compute_usage(space.point_from_config(kernel.config)[None])
        (step,) = kernel.kernels
        assert used.dynamic_shared_bytes[0] == step.dynamic_shared_bytes
        assert used.threads[0] == kernel.launch.threads_per_block
        assert used.blocks[0] == kernel.launch.num_blocks
        x, y, z = kernel.launch.cluster
        assert used.cluster[0] == x * y * z
        assert (x, z) == (config.get("cluster_m", 1) * config.get("cluster_n", 1), config.get("split_k", 1))


@pytest.mark.sample(3)
@pytest.mark.parametrize("tiles", [2, 3, 5])
@pytest.mark.parametrize("epilogue", ["", ",add,bias"])
def test_blocks_take_tiles_in_turn(tiles, epilogue):
    """As many each, or one more for some; a ring and slabs that begin anywhere at a tile, and in either parity."""
    with few_multiprocessors():
        kernel = build_checked(
            f"conv1d:1x64x{tiles * 64 - 7},16x64x3,s1,p1,f16,nhwc{epilogue}", {**SMALL, "block_k_bytes": 32}
        )
    assert kernel.launch.grid == (2, 1, 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("share", [{"cluster_m": 2}, {"cluster_m": 4, "cluster_n": 2, "block_n": 32}])
def test_clusters_have_tiles_that_are_not_there(share):
    """Tiles are of whole clusters: of what is beyond the pixels and channels, nothing is stored."""
    build_checked("conv2d:1x32x9x9,16x32x3x3,s1,p1,bf16,nhwc,bias,add", {**SMALL, **share})


MULTIPLIERS = re.compile(r"HGMMA|WARPGROUP\.\w+")


@pytest.mark.sample(1)
@needs_nvrtc
@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        ("f16", {"warpgroups": 2, "wgmma_m_tiles": 1, "block_n": 128, "block_k_bytes": 128}),
        ("bf16", {"warpgroups": 2, "wgmma_m_tiles": 2, "block_n": 64, "block_k_bytes": 64}),
        ("tf32", {"warpgroups": 1, "wgmma_m_tiles": 1, "block_n": 256, "block_k_bytes": 256, "split_k": 2}),
        ("f16", {"warpgroups": 3, "wgmma_m_tiles": 1, "block_n": 96, "block_k_bytes": 32}),
    ],
)
def test_the_wgmmas_of_a_step_follow_one_another(dtype, config):
    """Where ptxas cannot keep sums in registers meanwhile, it waits behind each: "wgmma ... are serialized"."""
    kernel = built(tc.parse(f"{WIDE},{dtype},nhwc,bias,relu"), {**SMALL, "stages": 2, **config})
    order = [match[0] for match in MULTIPLIERS.finditer(sass.disassemble(kernel.cubin.image))]
    groups = [list(each) for is_wgmma, each in itertools.groupby(order, lambda name: name == "HGMMA") if is_wgmma]
    of_step = kernel.config["wgmma_m_tiles"] * kernel.config["block_k_bytes"] // WGMMA_K_BYTES
    assert groups
    assert all(len(group) % of_step == 0 for group in groups), order
    assert sum("DEPBAR" in name for name in order) <= 2 * len(groups)


LARGE = "conv2d:32x256x80x80,128x256x1x1,s1,p0,f16,nhwc"


def test_large_outputs_start_a_search_in_each_kernel_schedule():
    w = tc.parse(LARGE)
    space, configs = space_of(w, "hopper"), find_schedule(w, "hopper").list_starting_configs(w)
    whole = [
        c["kernel_schedule"]
        for c in configs
        if (c["decomposition"], c.get("output_eviction"), c.get("filters")) == ("data_parallel", None, None)
    ]
    assert whole == list(starting_configs.STARTING_KERNEL_SCHEDULES)
    assert space.is_legal(np.stack([space.project(config) for config in configs])).all()
    assert len({space.project(config).tobytes() for config in configs}) == len(configs)
    just_beyond_whole_waves = tc.parse("conv2d:32x256x40x40,128x256x3x3,s1,p1,f16,nhwc")
    configs = find_schedule(just_beyond_whole_waves, "hopper").list_starting_configs(just_beyond_whole_waves)
    decompositions = {config["decomposition"] for config in configs}
    assert decompositions == {"data_parallel", "split_last_wave", "narrow_last_wave"}
    small = tc.parse("conv2d:1x64x56x56,64x64x3x3,s1,p1,f16,nhwc")
    assert find_schedule(small, "hopper").list_starting_configs(small) == []


def test_ping_pong_is_a_default_and_never_the_value_of_older_configs():
    w = tc.parse(LARGE)
    space = space_of(w, "hopper")
    assert space.default["kernel_schedule"] == "pingpong"
    assert space.is_legal(space.point_from_config(space.default)[None]).all()
    older = {name: value for name, value in space.default.items() if name not in compat.ADDED_KNOBS["hopper"]}
    older["stages"] = 3  # which fit where warpgroups share a tile
    schedule = find_schedule(w, "hopper")
    for config, expected in (({}, "pingpong"), ({"stages": 3}, "cooperative"), (older, "cooperative")):
        k = Knobs(config)
        assert declare_knobs(w, k).kernel_schedule == k.config["kernel_schedule"] == expected
        assert space.config_from_point(space.point_from_config(config))["kernel_schedule"] == expected
        assert space.config_from_point(space.project(config))["kernel_schedule"] == expected
    for kernel_schedule in tile_config.KERNEL_SCHEDULES:  # the other knobs have defaults that suit it
        assert schedule.apply(w, {"kernel_schedule": kernel_schedule})[1].config["kernel_schedule"] == kernel_schedule


def test_mutations_lead_from_each_kernel_schedule_to_another():
    w = tc.parse(LARGE)
    space = space_of(w, "hopper")
    position = list(space.knobs).index("kernel_schedule")
    reached = set()
    for config in find_schedule(w, "hopper").list_starting_configs(w):
        point = space.project(config)
        mutated = Mutator(space).mutate(np.repeat(point[None], 4000, axis=0), np.random.default_rng(0))
        options = mutated[space.is_legal(mutated)][:, position]
        reached |= {(config["kernel_schedule"], other) for other in set(options.tolist()) - {int(point[position])}}
    assert {start for start, _ in reached} == set(tile_config.KERNEL_SCHEDULES)
