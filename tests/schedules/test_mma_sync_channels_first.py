"""Channels-first convolutions that `mma_sync` reads as they lie, emulated with checks for races."""

import emulate
import numpy as np
import pytest
from cubins import needs_nvrtc, space_of

import tvmconv as tc
from tvmconv.analysis.memory.bank_conflicts import count_shared_accesses
from tvmconv.analysis.races import find_races
from tvmconv.errors import KnobError
from tvmconv.registry import find_schedule

SMALL = {"block_m": 32, "block_n": 32, "block_k": 32, "warps_m": 2, "warps_n": 1, "warps_k": 1, "stages": 3}
SMALL |= {"split_k": 1, "tiles_per_block": 1, "split_k_reduction": "workspace"}
HALO, CP_ASYNC = {**SMALL, "input_loader": "halo"}, {**SMALL, "input_loader": "cp_async"}
WORKLOADS = (
    ("conv2d:1x64x16x16,32x64x3x3,s1,p1,f16", HALO | {"block_k": 64}),
    ("conv2d:2x64x7x7,40x64x3x3,s1,p1,f16,bias,add,relu", HALO | {"stages": 6}),  # planes of an odd number of pixels
    ("conv2d:2x24x17x16,32x24x3x3,s2,p1,f16,bias,relu", HALO),
    ("conv2d:1x40x10x12,72x40x3x3,s1,p1,tf32,add", HALO),
    ("conv2d:2x64x9x8,64x32x3x3,s1,p1,g2,f16,bias", HALO | {"stages": 4}),
    ("conv2d:1x32x9x10,40x32x3x2,s1x2,p1x0x2x1,d2,f16,bias", HALO | {"warps_m": 1, "warps_n": 2}),
    ("conv2d:1x96x9x8,13x96x3x3,s1,p1,f16,add", HALO | {"split_k": 2}),  # of three blocks of channels
    ("conv2d:1x96x9x8,13x96x3x3,s1,p1,f16,relu,add", HALO | {"split_k": 2, "split_k_reduction": "cluster"}),
    ("conv1d:2x40x38,32x40x5,s1,p2,bf16,bias", HALO | {"stages": 6}),
    ("conv1d:2x36x37,24x36x3,s2,p1,tf32,bias", HALO),  # pixels of 32 bits are copied one by one
    ("conv3d:1x16x4x5x6,24x16x3x3x3,s1,p1,f16", HALO),
    ("conv2d:2x160x14x14,40x160x1x1,s1,p0,f16,bias", HALO | {"block_k": 64, "warps_k": 2, "stages": 4}),
    ("conv2d:3x48x7x7,40x48x1x1,s1,p0,bf16,add", HALO),
    ("conv2d:2x64x14x14,40x64x1x1,s1,p0,f16,bias,add,relu", CP_ASYNC),  # vectors of four pixels
    ("conv2d:3x40x6x6,24x40x1x1,s1,p0,bf16,bias", CP_ASYNC | {"tiles_per_block": 2}),
    ("conv2d:1x72x5x6,40x72x1x1,s1,p0,tf32,relu", CP_ASYNC | {"split_k": 2}),  # of two
    ("conv2d:2x128x4x6,64x64x1x1,s1,p0,g2,f16", CP_ASYNC | {"block_k": 64, "warps_k": 2}),  # of eight
)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("text", "config"), WORKLOADS)
def test_pixels_are_loaded_without_a_conversion(text, config):
    w = tc.parse(text)
    arch = "sm_90" if config["split_k_reduction"] == "cluster" else "sm_80"
    kernel = tc.build(w, "mma_sync", arch=arch, config=config)
    assert emulate.error(kernel.lowered_module, w) <= w.tolerance
    assert find_races(kernel) == []
    uses_workspace = config["split_k"] > 1 and config["split_k_reduction"] == "workspace"
    assert len(kernel.kernels) == 1 + uses_workspace + (max(w.kernel) > 1)  # the weight is converted once
    space = space_of(w, "mma_sync", arch)
    used = space.compute_usage(space.point_from_config(kernel.config)[None]).dynamic_shared_bytes[0]
    assert used == kernel.executable.kernels[-1 - uses_workspace].dynamic_shared_bytes


def test_configs_without_the_knob_convert_the_input():
    w = tc.parse("conv2d:1x64x16x16,32x64x3x3,s1,p1,f16")
    assert tc.build(w, "mma_sync", arch="sm_80", config=SMALL).config["input_loader"] == "converted"


@pytest.mark.parametrize(
    ("text", "loaders"),
    [
        ("conv2d:2x64x14x14,64x64x3x3,s1,p1,f16", {"converted", "halo"}),
        ("conv2d:2x64x14x14,64x64x1x1,s1,p0,f16", {"converted", "halo", "cp_async"}),
        ("conv2d:2x64x7x7,64x64x1x1,s1,p0,f16", {"converted", "halo"}),
        ("conv2d:2x64x14x14,64x64x3x3,s1,p1,f16,nchw-nhwc", None),
        ("conv2d:2x60x15x15,64x60x3x3,s1,p1,f16", None),  # pixels of two bytes, and chunks of several channels
    ],
)
def test_loaders_of_a_workload(text, loaders):
    space = space_of(tc.parse(text), "mma_sync", "sm_80")
    knob = space.knobs.get("input_loader")
    assert (set(knob.options) if knob else None) == loaders


def test_a_search_starts_with_each_loader():
    w = tc.parse("conv2d:2x128x14x14,40x128x1x1,s1,p0,f16")
    schedule = find_schedule(w, "mma_sync")
    configs = [space_of(w, "mma_sync", "sm_80").default, *schedule.list_starting_configs(w)]
    assert {config["input_loader"] for config in configs} == {"converted", "halo", "cp_async"}
    assert schedule.list_starting_configs(tc.parse(w.text + ",nhwc")) == []


def test_halo_rows_of_several_tiles_are_refused():
    w = tc.parse("conv2d:1x64x16x16,32x64x3x3,s1,p1,f16")
    with pytest.raises(KnobError, match="a block with halo rows computes one tile"):
        tc.build(w, "mma_sync", arch="sm_80", config=HALO | {"tiles_per_block": 2})


def test_warps_access_each_bank_of_halo_rows_once():
    w = tc.parse("conv2d:1x64x16x16,32x64x3x3,s1,p1,f16")
    kernel = tc.build(w, "mma_sync", arch="sm_80", config=HALO | {"block_k": 64})
    accesses = count_shared_accesses(kernel, kernel.kernels[-1])
    moves = [access for access in accesses if (access.kind, access.nbytes) in (("load", 16), ("store", 4))]
    assert len({access.kind for access in moves}) == 2
    assert sum(access.num_conflicts for access in moves) == 0


def test_halo_rows_are_estimated_to_copy_less():
    space = space_of(tc.parse("conv2d:32x64x56x56,64x64x3x3,s1,p1,f16"), "mma_sync", "sm_80")
    tile = space.default | {"block_m": 128, "block_n": 64, "block_k": 64, "warps_m": 2, "warps_n": 2, "stages": 3}
    points = np.stack([space.point_from_config(tile | {"input_loader": name}) for name in ("halo", "converted")])
    usage = space.compute_usage(points)
    assert usage.estimate[0] < usage.estimate[1]
    assert usage.layout_seconds[0] < usage.layout_seconds[1]


@pytest.mark.slow
@needs_nvrtc
def test_halo_rows_of_common_layers_do_not_spill():
    config = HALO | {"block_m": 128, "block_n": 64, "block_k": 64, "warps_m": 2, "warps_n": 2}
    for text in ("conv2d:32x64x56x56,64x64x3x3,s1,p1,f16,bias,add,relu", "conv2d:32x256x14x14,256x256x3x3,s1,p1,f16"):
        assert tc.build(tc.parse(text), "mma_sync", arch="sm_80", config=config).resources.spills == 0
