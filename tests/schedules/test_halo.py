"""Channels-first convolutions whose filter taps share tiles of halo rows, emulated with checks for races."""

import emulate
import numpy as np
import pytest
import tvm
from cubins import needs_nvrtc
from small_tiles import SMALL, built, few_multiprocessors
from tvmconv.builtin.conv.tensor_cores.gemm.halo_boxes import choose_pixel_boxes
from tvmconv.builtin.conv.tensor_cores.gemm.halo_image import HaloImage
from tvmconv.builtin.conv.tensor_cores.hopper import knobs
from tvmconv.builtin.conv.tensor_cores.hopper.schedule import view_for_tma

import tvmconv as tc
from tvmconv.analysis.memory.bank_conflicts import count_conflicts
from tvmconv.analysis.races import find_races
from tvmconv.registry import find_schedule

HALO, HALO_SMEM = ({**SMALL, "input_loader": loader} for loader in ("halo", "halo_smem"))
WORKLOADS = (
    ("conv2d:1x64x16x16,32x64x3x3,s1,p1,f16", {}),
    ("conv2d:2x64x7x7,40x64x3x3,s1,p1,f16,bias,add,relu", {"warpgroups": 2, "wgmma_m_tiles": 2, "block_k_bytes": 128}),
    ("conv2d:2x32x14x14,24x32x3x3,s1,p1,bf16,add,silu", {"block_n": 32}),
    ("conv2d:1x40x10x12,72x40x3x3,s1,p1,tf32,add", {"block_k_bytes": 128}),
    ("conv2d:2x64x9x8,64x32x3x3,s1,p1,g2,f16,bias", {"block_n": 64}),
    ("conv2d:1x32x9x10,40x32x3x2,s1x2,p1x0x2x1,d2,f16,bias", {}),
    ("conv2d:2x24x17x16,32x24x3x3,s2,p1,f16,bias,relu", {"block_k_bytes": 32}),
    ("conv2d:2x32x9x11,16x32x1x1,s2,p0,tf32", {}),
    ("conv2d:2x48x7x7,32x48x1x1,s1,p0,f16,bias", {"producer_warpgroups": 2}),  # all pixels are one line
    ("conv2d:2x96x6x9,24x96x1x1,s1,p0,f16", {"split_k": 3, "block_n": 48}),  # of three blocks of channels
    ("conv2d:3x48x6x9,16x48x1x1,s1,p0,tf32,bias", {}),
    ("conv1d:2x32x37,32x32x5,s1,p2,bf16,bias", {}),
    ("conv3d:1x16x4x5x6,24x16x3x3x3,s1,p1,f16", {"block_k_bytes": 32}),
    ("conv2d:1x96x9x9,40x96x3x3,s1,p1,f16,bias,add", {"block_n": 48, "split_k": 3}),
    ("conv2d:2x64x7x7,13x64x3x3,s1,p1,f16,bias,add,relu", {}),  # odd numbers of channels, which TMA cannot store
    ("conv2d:2x64x9x8,22x32x3x3,s1,p1,g2,bf16,add", {}),
    ("conv2d:1x64x7x8,32x64x3x3,s1,p1,tf32,relu", {"block_n": 32, "split_k": 2, "block_k_bytes": 128}),
)


TRANSPOSED = (  # planes are multiples of eight pixels, which TMA copies, or of four or two
    ("conv2d:2x64x12x10,40x64x3x3,s1,p1,f16,bias,add,relu", {"warpgroups": 2, "wgmma_m_tiles": 2, "stages": 2}),
    ("conv2d:1x40x16x16,24x40x3x3,s1,p1,bf16,silu", {"block_k_bytes": 128}),
    ("conv2d:2x24x16x17,32x24x3x3,s2,p1,f16,bias", {"block_k_bytes": 32, "producer_warpgroups": 2}),
    ("conv2d:2x64x9x8,64x32x3x3,s1,p1,g2,f16,bias", {"block_n": 64}),
    ("conv2d:1x32x9x8,40x32x3x2,s1x2,p1x0x2x1,d2,f16", {}),
    ("conv1d:2x32x40,32x32x5,s1,p2,bf16,bias", {}),
    ("conv3d:1x16x4x5x6,24x16x3x3x3,s1,p1,f16", {"block_k_bytes": 32}),
    ("conv2d:1x96x9x8,13x96x3x3,s1,p1,f16,add", {"block_n": 48, "split_k": 3}),
    ("conv2d:2x160x14x14,40x160x1x1,s1,p0,f16,bias", {"block_k_bytes": 128, "producer_warpgroups": 2}),  # planes
    ("conv2d:1x32x18x18,24x32x3x3,s1,p1,f16", {"warpgroups": 2}),
    ("conv3d:2x40x2x7x7,24x40x3x3x3,s1,p1,bf16", {}),
    ("conv2d:2x48x3x6,24x48x1x2,s2x1,p1,d2,bf16", {"block_k_bytes": 128}),  # fewer channels than a block
    ("conv2d:3x64x7x7,40x64x3x3,s1,p1,f16,bias", {"warpgroups": 2}),  # planes of an odd number of pixels
    ("conv2d:5x144x7x7,24x144x1x1,s1,p0,bf16,add", {"block_k_bytes": 128, "producer_warpgroups": 2}),
    ("conv2d:2x64x9x5,24x32x3x3,s2,p1,g2,f16", {"block_n": 48}),
    ("conv2d:1x40x10x12,72x40x3x3,s1,p1,tf32,add", {"block_k_bytes": 128}),  # elements of 32 bits
    ("conv2d:2x32x9x11,16x32x1x1,s2,p0,tf32", {"producer_warpgroups": 2}),
    ("conv2d:3x48x6x9,16x48x1x1,s1,p0,tf32,bias", {"warpgroups": 2}),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("text", "config"),
    [(text, HALO | config) for text, config in WORKLOADS] + [(text, HALO_SMEM | config) for text, config in TRANSPOSED],
)
def test_taps_share_halo_rows(text, config):
    w = tc.parse(text)
    kernel = built(w, config)
    assert emulate.error(kernel.lowered_module, w) <= w.tolerance
    assert find_races(kernel) == []
    assert len(kernel.kernels) == 1 + (max(w.kernel) > 1)  # the weight is converted once


def test_1x1_filters_of_all_channel_blocks_are_multiplied():
    for loader in (HALO, HALO_SMEM):
        w = tc.parse("conv2d:1x48x5x5,16x48x1x1,s1,p0,f16")
        assert emulate.error(built(w, loader | {"block_k_bytes": 32}).lowered_module, w) <= w.tolerance


def test_a_search_starts_with_each_loader_that_serves_the_workload():
    for text, loaders in (
        ("conv2d:2x64x12x10,40x64x3x3,s1,p1,f16", ["converted", "halo", "halo_smem"]),
        ("conv2d:2x128x14x14,40x128x1x1,s1,p0,f16", ["converted", "halo", "halo_smem", "cp_async"]),
    ):
        configs = find_schedule(tc.parse(text), "hopper").list_starting_configs(tc.parse(text))
        assert [config["input_loader"] for config in configs[: len(loaders)]] == loaders
        assert {config.get("input_loader", loaders[0]) for config in configs} == set(loaders)
    w = tc.parse("conv2d:32x512x7x7,2048x512x1x1,s1,p0,f16")  # many single pixels to store: few accumulators
    assert 128 in [config["block_n"] for config in find_schedule(w, "hopper").list_starting_configs(w)[:4]]


def test_estimates_order_loaders_of_a_strided_filter_as_an_h100_does():
    space = find_schedule(w := tc.parse("conv2d:32x256x56x56,512x256x1x1,s2,p0,f16"), "hopper").space(w)
    own = space.default | {"block_n": 256, "block_k_bytes": 128, "stages": 4, "warpgroups": 2, "wgmma_m_tiles": 1}
    boxes = {"input_loader": "halo_smem", "block_n": 192, "block_k_bytes": 64, "stages": 8, "producer_warpgroups": 2}
    configs = [own | {"input_loader": "halo"}, own | boxes, own | {"input_loader": "converted"}]
    points = np.stack([space.point_from_config(config) for config in configs])
    halo_us, boxes_us, converted_us = space.compute_usage(points).estimate
    assert halo_us < boxes_us  # 48 and 73 µs
    assert converted_us < 0.8 * 53  # 53 µs, before the conversion left out the pixels that the stride skips


@pytest.mark.slow
def test_persistent_ctas_load_halo_rows_of_several_tiles(monkeypatch):
    monkeypatch.setattr(knobs, "MIN_OUTPUTS_PER_SM", 0)
    w = tc.parse("conv2d:2x64x11x12,40x64x3x3,s1,p1,f16,bias")
    for order in ("n", "m"):
        with few_multiprocessors():
            kernel = built(w, HALO | {"raster_order": order, "kernel_schedule": "cooperative"})
        assert emulate.error(kernel.lowered_module, w) <= w.tolerance


def test_loading_warps_access_each_bank_once():
    kernel = built(tc.parse("conv2d:1x64x16x16,32x64x3x3,s1,p1,f16"), HALO | {"block_k_bytes": 128})
    assert count_conflicts(kernel, "store") == count_conflicts(kernel, "load") == 0


@pytest.mark.parametrize(("stride", "max_conflicts"), [("s1", 8), ("s2", 32)])
def test_transposing_warps_access_each_bank_once_within_lines(stride, max_conflicts):
    w = tc.parse(f"conv2d:1x64x16x16,32x64x3x3,{stride},p1,f16")
    kernel = built(w, HALO_SMEM | {"block_k_bytes": 128, "producer_warpgroups": 2})
    assert count_conflicts(kernel, "load") == 0
    # The pixels of a matrix are neighbours, except at ends of lines, and alternate between planes of a stride.
    assert count_conflicts(kernel, "store") < max_conflicts


@pytest.mark.parametrize(
    ("text", "extents", "vectors"),
    [
        ("conv2d:2x64x56x56,64x64x3x3,s1,p1,f16", (57, 60), (8, 4)),
        ("conv2d:2x64x28x28,64x64x3x3,s1,p1,f16", (29, 30), (4, 2)),
        ("conv2d:2x64x7x7,64x64x3x3,s1,p1,f16", (8, 8), (1, 1)),
        ("conv2d:2x64x64x64,64x64x3x3,s1,p1,tf32", (65, 68), (4, 4)),
        ("conv2d:2x64x56x56,64x64x3x3,s2,p1,f16", (29, 30), (8, 2)),
    ],
)
def test_lines_of_an_image_share_zeros(text, extents, vectors):
    image = HaloImage(view_for_tma(tc.parse(text)))
    assert image.extents == extents
    assert (image.input_vector, image.output_vector) == vectors


@pytest.mark.parametrize(
    "text",
    ["conv2d:3x8x11x8,8x8x3x3,s2,p1,f16", "conv3d:2x8x3x5x8,8x8x1x3x2,s1,p0x2x1,f16", "conv1d:2x8x96,8x8x9,s1,p4,f16"],
)
def test_boxes_contain_the_pixels_of_each_tile(text):
    w, block_m = tc.parse(text).to_channels_last(), 64
    image, boxes = HaloImage(w), choose_pixel_boxes(w, block_m, 16)
    positions = np.stack(np.meshgrid(*(np.arange(size) for size in (w.N, *w.input_size)), indexing="ij")).reshape(
        w.spatial_ndim + 1, -1
    )
    rows = positions[0]
    for position, extent, pad, stride in zip(positions[1:], image.extents, w.pad_low, w.stride, strict=True):
        rows = rows * extent + (position + pad) // stride
    box = positions[0] * boxes.per_plane + np.arange(rows.size) % boxes.pixels // boxes.box_pixels
    for first_row in range(0, image.num_rows, block_m):
        needed = box[(rows >= first_row) & (rows < first_row + image.rows_per_plane(block_m))]
        first_box = int(tvm.sym.Analyzer().simplify(boxes.first_box(tvm.tirx.const(first_row, "int32"))))
        assert not needed.size or (first_box <= needed.min() and needed.max() < first_box + boxes.count)


@pytest.mark.slow
@pytest.mark.sample(1)
@needs_nvrtc
@pytest.mark.parametrize("loader", ["halo", "halo_smem"])
def test_wgmmas_of_taps_are_not_serialized(loader):
    config = HALO | {"input_loader": loader, "warpgroups": 2, "wgmma_m_tiles": 2, "block_n": 128, "block_k_bytes": 128}
    kernel = built(tc.parse("conv2d:2x128x28x28,128x128x3x3,s1,p1,f16,bias,add,relu"), config)
    assert kernel.resources.spills == 0
    assert 0 < kernel.sass.count("WARPGROUP.DEPBAR") < kernel.sass.count("HGMMA")
