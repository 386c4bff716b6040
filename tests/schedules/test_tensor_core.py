"""`tensor_core` computes every convolution in every dtype that it has, executed without a GPU, and is what it says."""

import re

import numpy as np
import pytest
from cubins import space_of

import tvmconv as tc
from tvmconv.analysis.memory.bank_conflicts import count_conflicts

LAYER = "conv2d:1x64x56x56,64x64x3x3,s1,p1"


def built(w, config=None, arch="sm_80"):
    return tc.build(w, "tensor_core", arch=arch, config=config)


def test_tile_beyond_the_shared_memory_is_refused_not_searched():
    w = tc.parse(f"{LAYER},f16,nhwc")
    config = {"block_m": 128, "block_n": 128, "block_k": 64, "stages": 4}  # 147,456 bytes
    with pytest.raises(tc.DeviceError, match=r"sm_86 has 101376 bytes of shared memory a block, static and dynamic"):
        built(w, config, arch="sm_86")
    assert built(w, config).dynamic_shared_bytes == 147456
    full = {**built(w).config, **config, "fragment_prefetch": 0}
    spaces = [space_of(w, "tensor_core", arch) for arch in ("sm_80", "sm_86")]
    assert [bool(space.is_legal(space.point_from_config(full)[None])[0]) for space in spaces] == [True, False]


@pytest.mark.parametrize(
    ("dtype", "product"),
    [
        ("f16", "m16n8k16.row.col.f32.f16.f16.f32"),
        ("bf16", "m16n8k16.row.col.f32.bf16.bf16.f32"),
        ("tf32", "m16n8k8.row.col.f32.tf32.tf32.f32"),
    ],
)
def test_it_multiplies_by_mma_what_ldmatrix_and_cp_async_bring(dtype, product):
    source = built(tc.parse(f"{LAYER},{dtype},nhwc")).format_ir_level("source")
    assert f"mma.sync.aligned.{product}" in source
    assert "ldmatrix.sync.aligned.m8n8.x4" in source
    copies = re.findall(r"ptx_cp_async_legacy\w*\(", source)
    assert copies
    assert all("_cg_16_" in copy for copy in copies)


@pytest.mark.parametrize(
    ("choices", "asynchronous"),
    [("f16", False), ("bf16", False), ("tf32", True), ("f16,nhwc", True)],
)
def test_copies_of_two_bytes_are_not_asynchronous(choices, asynchronous):
    source = built(tc.parse(f"{LAYER},{choices}")).format_ir_level("source")
    assert ("ptx_cp_async" in source) == asynchronous


@pytest.mark.sample(5)
@pytest.mark.parametrize("block_k", [16, 32, 64])
@pytest.mark.parametrize("dtype", ["f16", "tf32"])
def test_reads_have_no_bank_conflicts_where_channels_are_last(dtype, block_k):
    """Asynchronous copies take a wavefront for each line that they come from, wherever they go."""
    w = tc.parse(f"conv2d:1x128x6x8,64x128x1x1,{dtype},nhwc")
    kernel = built(w, {"block_k": block_k, "fragment_prefetch": 0})
    assert count_conflicts(kernel, "load") == 0


@pytest.mark.parametrize(
    ("text", "tile"),
    [
        ("conv2d:32x128x28x28,128x128x3x3,s1,p1", (128, 128, 1)),
        ("conv2d:1x64x64x64,64x64x3x3,s1,p1", (64, 32, 1)),
        ("conv2d:1x512x7x7,512x512x3x3,s1,p1", (64, 64, 8)),
        ("conv2d:32x64x28x28,16x64x3x3,s1,p1", (128, 16, 1)),
        ("conv2d:1x16x3x3,8x16x3x3,s1,p1", (16, 16, 1)),
    ],
)
def test_the_defaults_follow_the_shape(text, tile):
    """Large tiles where they make enough blocks, then smaller ones, then a split reduction; no more than there is."""
    config = space_of(tc.parse(f"{text},f16,nhwc"), "tensor_core", "sm_80").default
    assert tuple(config[knob] for knob in ("block_m", "block_n", "split_k")) == tile


@pytest.mark.parametrize("channels", [3, 8])
def test_reductions_shorter_than_a_k_tile_are_searched(channels):
    space = space_of(tc.parse(f"conv1d:2x{channels}x16,40x{channels}x1,s3,p0,bf16,nhwc"), "tensor_core", "sm_80")
    assert len(space.sample_legal(1, np.random.default_rng(0)))
