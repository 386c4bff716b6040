"""`mma_sync` computes every convolution in NHWC, executed without a GPU, and takes of a GPU what its formulas say."""

import re

import emulate
import pytest
from cubins import space_of

import tvmconv as tc
from tvmconv.errors import DeviceError

LAYER = "conv2d:1x64x56x56,64x64x3x3,s1,p1,f16,nhwc"


def built(w, config=None, arch="sm_90"):
    return tc.build(w, "mma_sync", arch=arch, config=config)


@pytest.mark.sample(1)
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
    config = {**tile, "split_k_reduction": "workspace", "tiles_per_block": turns, "stages": stages}
    emulate.build_checked(f"conv2d:1x20x9x11,40x20x3x3,s1,p1,{choices}", "mma_sync", config)


@pytest.mark.parametrize("pixels", [3, 40])  # two tiles for one block; six for two
def test_all_blocks_may_have_fewer_tiles_than_turns(pixels):
    tile = {"block_m": 16, "block_n": 16, "block_k": 32, "warps_m": 1, "warps_n": 1, "warps_k": 1, "split_k": 1}
    config = {**tile, "split_k_reduction": "workspace", "tiles_per_block": 4, "stages": 2}
    kernel = emulate.build_checked(f"conv1d:1x32x{pixels},32x32x1,f16,nhwc,bias", "mma_sync", config)
    assert kernel.launch.grid[0] == (1 if pixels == 3 else 2)


@pytest.mark.sample(3)
@pytest.mark.parametrize("meet", ["workspace", "cluster"])
@pytest.mark.parametrize("epilogue", ["", ",bias,add,relu", ",relu,add"])
def test_sums_are_shared_among_blocks_and_warps(meet, epilogue):
    w = tc.parse(f"conv2d:1x128x5x5,40x128x3x3,s1,p1,f16,nhwc{epilogue}")
    config = {"block_m": 16, "block_n": 16, "block_k": 64, "warps_m": 1, "warps_n": 1, "warps_k": 2}
    kernel = built(w, {**config, "stages": 3, "split_k": 4, "split_k_reduction": meet})
    assert len(kernel.kernels) == (2 if meet == "workspace" else 1)
    assert kernel.launch.cluster == ((1, 1, 1) if meet == "workspace" else (1, 1, 4))
    assert emulate.error(kernel.lowered_module, w) <= w.tolerance


ORDERS = ("bias,relu", "relu,bias", "add,bias,relu", "relu,bias,add", "add,relu,bias", "bias,relu,add,clamp")
SHARED = {
    "alone": {"split_k": 1, "warps_k": 1, "tiles_per_block": 1},
    "in turn": {"split_k": 1, "warps_k": 1, "tiles_per_block": 2},
    "warps": {"split_k": 1, "warps_k": 2, "tiles_per_block": 1},
    "cluster": {"split_k": 2, "warps_k": 2, "tiles_per_block": 1, "split_k_reduction": "cluster"},
    "workspace": {"split_k": 2, "warps_k": 1, "tiles_per_block": 1, "split_k_reduction": "workspace"},
}
# Every order with one or two of the ways, and every way with two of the orders.
IN_TURN = [(order, how) for i, order in enumerate(ORDERS) for j, how in enumerate(SHARED) if (i + j) % 3 == 0]
SMALL = {
    "block_m": 32,
    "block_n": 32,
    "block_k": 64,
    "warps_m": 2,
    "warps_n": 1,
    "stages": 3,
    "split_k_reduction": "workspace",
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("order", "how"), IN_TURN)
def test_epilogue_keeps_its_order_however_sums_are_shared(order, how):
    """Channels are 40, 42 or 41: biases come in 16, 8 or 4 bytes. Shared memory is what `usage` says.

    Where a sum may begin with the residual, it does so for every other way and order.
    """
    number = ORDERS.index(order)
    w = tc.parse(f"conv2d:1x24x9x11,{(40, 42, 41)[number % 3]}x24x3x3,s1,p1,f16,nhwc,{order}")
    space = space_of(w, "mma_sync")
    begins = (number // 2 + list(SHARED).index(how)) % 2
    residual = {"residual_add": "accumulator_init" if begins else "epilogue"} if "residual_add" in space.knobs else {}
    kernel = built(w, {**SMALL, **SHARED[how], **residual})
    assert emulate.error(kernel.lowered_module, w) <= w.tolerance, residual
    used = space.compute_usage(space.point_from_config(kernel.config)[None]).dynamic_shared_bytes[0]
    assert used == kernel.executable.kernels[0].dynamic_shared_bytes


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


def test_default_leaves_room_for_what_the_epilogue_needs():
    """Tiles of 96 × 256 sums suit it best, and have no byte left of what every GPU since sm_80 has."""
    w = tc.parse("conv2d:1x512x66x96,512x512x3x3,s1,p1,f16,nhwc,bias,add,relu")
    (step,) = tc.build(w, "mma_sync", arch="sm_89").executable.kernels
    assert step.dynamic_shared_bytes <= 99 * 1024


def test_clusters_are_for_architectures_that_have_them():
    w = tc.parse("conv2d:1x512x7x7,512x512x3x3,s1,p1,f16,nhwc")
    with pytest.raises(DeviceError, match="sm_80 has clusters of at most 1"):
        built(w, {"split_k": 4, "split_k_reduction": "cluster"}, arch="sm_80")
    for arch, meetings in (("sm_80", {"workspace"}), ("sm_90", {"workspace", "cluster"})):
        space = space_of(w, "mma_sync", arch)
        assert {space.config_from_point(point)["split_k_reduction"] for point in space.enumerated_legal} == meetings
