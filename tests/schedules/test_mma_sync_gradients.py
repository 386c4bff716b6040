"""`mma_sync` computes gradients, executed without a GPU."""

import emulate
import numpy as np
import pytest
from cubins import check_spills, needs_nvrtc, space_of

import tvmconv as tc
from tvmconv.devices import Arch
from tvmconv.registry import find_schedule

SMALL = {"block_m": 16, "block_n": 16, "block_k": 64, "warps_m": 1, "warps_n": 1, "warps_k": 1, "stages": 3}
WGRADS = [
    ("conv2d_wgrad:2x24x11x9,80x24x3x3,s1,p1,f16,nhwc", {"block_m": 32, "block_n": 64, "warps_n": 2, "warps_m": 2}),
    ("conv2d_wgrad:3x24x11x9,40x24x3x3,s2,p2x1x0x1,d2,tf32,nhwc", {"block_n": 32, "block_k": 32, "warps_k": 2}),
    ("conv2d_wgrad:2x3x20x21,24x3x7x7,s2,p3,bf16,nhwc,out-f32", {"block_m": 32, "block_n": 128, "warps_n": 4}),
    ("conv2d_wgrad:2x40x7x9,48x20x3x3,s1,p1,g2,f16,add", {"block_m": 32, "warps_m": 2, "block_n": 32}),
    ("conv2d_wgrad:3x20x7x9,40x20x1x1,s1,p0,tf32,nhwc", {"block_m": 64, "block_n": 32, "block_k": 16, "warps_m": 2}),
    ("conv1d_wgrad:2x18x70,40x18x5,s3,p2,tf32,add", {"block_n": 128, "warps_n": 4, "block_k": 16}),
]

DGRADS = [
    ("conv2d_dgrad:2x24x9x8,40x24x3x2,s1,p1,f16,nhwc,add", {"split_k": 2, "block_k": 32}),
    ("conv2d_dgrad:2x20x9x8,36x10x3x3,s1,p1,g2,tf32,drelu", {"block_k": 32, "warps_k": 2}),
    # elements of 2 bytes, which cp.async cannot copy; the others are tiles that the threads do not copy by whole rows
    ("conv2d_dgrad:2x15x9x8,36x15x3x2,s1,p1x0,f16,nhwc", {"block_k": 32}),
    ("conv1d_transpose:2x2x5,2x48x5,s1,p2,f16,nhwc,bias", {"block_n": 64, "block_k": 32}),
    ("conv2d_dgrad:1x40x7x5,32x40x3x1,s1,p0,bf16,nhwc", {"block_n": 96, "warps_n": 2}),
    ("conv2d_transpose:2x18x9x8,18x14x3x3,s1,p1,d2,bf16,bias,relu", {"block_n": 32, "warps_n": 2}),
]
STRIDED = [
    ("conv2d_dgrad:2x24x9x8,40x24x3x2,s2x3,p1x0,f16,nhwc,add", {"block_n": 32, "warps_n": 2, "block_k": 64}),
    ("conv2d_dgrad:2x20x9x11,36x10x3x3,s2,p1,g2,tf32,drelu", {"warps_k": 2}),
    ("conv2d_dgrad:2x32x12x10,48x32x1x1,s2,p0,f16,nhwc,add,drelu", {"block_n": 32, "block_m": 32, "warps_n": 2}),
    ("conv2d_dgrad:1x64x13x11,64x64x5x4,s4,p1x2x3x0,d2,f16,nhwc", {"block_n": 64, "stages": 2}),
    ("conv2d_dgrad:1x32x8x8,32x32x1x1,s1,p1,f16,nhwc,add", {}),
    ("conv2d_transpose:2x18x9x8,18x14x4x4,s2,p1,bf16,bias,relu", {"block_n": 32, "warps_m": 2, "block_m": 64}),
    ("conv1d_transpose:1x32x50,32x32x16,s8,p4,op1,tf32,nhwc,bias", {"block_n": 32, "warps_n": 2}),
    ("conv3d_dgrad:2x24x5x4x5,32x24x3x3x3,s2,p1,bf16,nhwc", {}),
]


SMALL_HALO = {"block_m": 16, "block_c": 16, "taps_y": 1, "warps_m": 1, "warps_n": 1, "warps_k": 1, "block_p": 1}
HALO_WGRADS = [
    ("conv2d_wgrad:2x20x9x11,24x20x3x3,s1,p1,tf32,nhwc", {"taps_y": 3, "warps_n": 3, "block_q": 8}),
    (
        "conv2d_wgrad:3x24x11x9,40x24x3x3,s2,p2x1x0x1,d2,tf32,nhwc",
        {"block_m": 32, "block_p": 2, "warps_m": 2, "warps_k": 2, "block_q": 4},
    ),
    (
        "conv2d_wgrad:2x40x7x9,48x20x3x2,s1,p1,g2,f16,add",
        {"block_m": 32, "block_c": 32, "taps_y": 3, "warps_n": 2, "block_q": 10},
    ),
    ("conv2d_wgrad:2x18x7x19,18x18x5x3,s1x2,p1,bf16,nhwc,out-f32", {"block_p": 4, "warps_n": 4, "stages": 3}),
    ("conv2d_wgrad:2x34x8x14,68x17x3x3,s1,p1,g2,tf32,nhwc,add", {"taps_y": 3, "warps_n": 4, "block_q": 14}),
    ("conv3d_wgrad:1x16x5x7x6,24x16x3x2x3,s2x1x2,p1x0x1,d1x2x1,bf16,nhwc,add", {"taps_y": 2, "block_q": 3}),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("text", "config"), WGRADS)
def test_gradients_of_weights_are_computed(text, config):
    emulate.build_checked(text, "mma_sync", {**SMALL, "split_k": 2, **config}, "sm_80")


@pytest.mark.sample(2)
@pytest.mark.parametrize(("text", "config"), DGRADS)
def test_gradients_of_inputs_are_computed(text, config):
    emulate.build_checked(text, "mma_sync", {**SMALL, "split_k": 1, **config}, "sm_80")


@pytest.mark.sample(2)
@pytest.mark.parametrize(("text", "config"), STRIDED)
def test_strided_gradients_of_inputs_are_computed(text, config):
    emulate.build_checked(text, "mma_sync", {**SMALL, "block_k": 32, **config}, "sm_80")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("text", "config"), HALO_WGRADS)
def test_windows_with_halos_give_gradients_of_weights(text, config):
    emulate.build_checked(
        text, "halo_mma_sync", {**SMALL_HALO, "block_q": 8, "stages": 2, "parts": 4, **config}, "sm_80"
    )


ATOMIC_WGRADS = [
    ("conv2d_wgrad:2x20x9x11,24x20x3x3,s1,p1,tf32,nhwc", "halo_mma_sync"),
    ("conv2d_wgrad:2x20x9x11,24x10x3x3,s1,p1,g2,bf16,nhwc,add", "halo_mma_sync"),
    ("conv2d_wgrad:2x24x11x9,40x24x3x3,s1,p1,f16,nhwc,out-f32", "mma_sync"),
    ("conv2d_wgrad:2x24x11x9,40x24x3x3,s1,p1,f16,nhwc", "mma_sync"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("text", "schedule"), ATOMIC_WGRADS)
def test_atomics_add_partial_sums_where_the_workload_permits_them(text, schedule):
    w = tc.parse(f"{text},atomics")
    split = {"split_k": 2} if schedule == "mma_sync" else {"parts": 4}
    config = {"atomics": 1, **split}
    kernel = emulate.build_checked(str(w), schedule, config, "sm_80")
    assert "red.global.add.f32" in kernel.source
    space = space_of(w, schedule)
    assert set(space.sample_legal(20, np.random.default_rng(0))[:, list(space.knobs).index("atomics")]) == {0, 1}
    default = tc.build(w, schedule, arch="sm_80")
    assert default.config["atomics"] == 0
    assert "red.global.add.f32" not in default.source
    with pytest.raises(tc.KnobError, match="atomics"):
        tc.build(text, schedule, arch="sm_80", config=config)


@pytest.mark.sample(1)
@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_of_inputs_compile_without_spills(arch, stride):
    check_spills(tc.parse(f"conv2d_dgrad:32x128x28x28,128x128x3x3,s{stride},p1,f16,nhwc"), "mma_sync", arch)


@needs_nvrtc
def test_halo_wgrad_compiles_without_spills():
    check_spills(tc.parse("conv2d_wgrad:32x64x56x56,64x64x3x3,s1,p1,tf32,nhwc"), "halo_mma_sync", "sm_90")


@pytest.mark.parametrize("text", ["32x256x14x14,1024x256x1x1,s1,p0,tf32", "32x24x56x56,72x24x1x1,s1,p0,f16"])
def test_a_search_of_a_wgrad_starts_with_several_tiles(text):
    w = tc.parse(f"conv2d_wgrad:{text},nhwc")
    schedule = find_schedule(w, "mma_sync")
    space, configs = schedule.space(w, Arch("sm_90").limits), schedule.list_starting_configs(w)
    assert space.is_legal(np.stack([space.point_from_config(config) for config in configs])).all()
    tiles = [(config["block_m"], config["block_n"]) for config in (space.default, *configs)]
    assert len(set(tiles)) == len(tiles) == 5
