"""Channels-first convolutions whose filter taps share tiles of halo rows, emulated with checks for races."""

import emulate
import pytest
from cubins import needs_nvrtc
from small_tiles import SMALL, built, few_multiprocessors
from tvmconv.builtin.conv.tensor_cores.gemm.halo_image import HaloImage
from tvmconv.builtin.conv.tensor_cores.hopper import knobs
from tvmconv.builtin.conv.tensor_cores.hopper.schedule import view_for_tma

import tvmconv as tc
from tvmconv.analysis.memory.bank_conflicts import count_conflicts
from tvmconv.analysis.races import find_races

HALO = {**SMALL, "input_loader": "halo"}
WORKLOADS = (
    ("conv2d:1x64x16x16,32x64x3x3,s1,p1,f16", {}),
    ("conv2d:2x64x7x7,40x64x3x3,s1,p1,f16,bias,add,relu", {"warpgroups": 2, "wgmma_m_tiles": 2, "block_k_bytes": 128}),
    ("conv2d:2x32x14x14,24x32x3x3,s1,p1,bf16,add,silu", {"block_n": 32}),
    ("conv2d:1x40x10x12,72x40x3x3,s1,p1,tf32,add", {"block_k_bytes": 128}),
    ("conv2d:2x64x9x8,64x32x3x3,s1,p1,g2,f16,bias", {"block_n": 64}),
    ("conv2d:1x32x9x10,40x32x3x2,s1x2,p1x0x2x1,d2,f16,bias", {}),
    ("conv2d:2x24x17x16,32x24x3x3,s2,p1,f16,bias,relu", {"block_k_bytes": 32}),
    ("conv2d:2x32x9x11,16x32x1x1,s2,p0,tf32", {}),
    ("conv2d:2x48x7x7,32x48x1x1,s1,p0,f16,bias", {}),  # all pixels are one line
    ("conv1d:2x32x37,32x32x5,s1,p2,bf16,bias", {}),
    ("conv3d:1x16x4x5x6,24x16x3x3x3,s1,p1,f16", {"block_k_bytes": 32}),
    ("conv2d:1x96x9x9,40x96x3x3,s1,p1,f16,bias,add", {"block_n": 48, "split_k": 3}),
    ("conv2d:2x64x7x7,13x64x3x3,s1,p1,f16,bias,add,relu", {}),  # odd numbers of channels, which TMA cannot store
    ("conv2d:2x64x9x8,22x32x3x3,s1,p1,g2,bf16,add", {}),
    ("conv2d:1x64x7x8,32x64x3x3,s1,p1,tf32,relu", {"block_n": 32, "split_k": 2, "block_k_bytes": 128}),
)


@pytest.mark.parametrize(("text", "config"), WORKLOADS)
def test_taps_share_halo_rows(text, config):
    w = tc.parse(text)
    kernel = built(w, HALO | config)
    assert emulate.error(kernel.lowered_module, w) <= w.tolerance
    assert find_races(kernel) == []
    assert len(kernel.kernels) == 1 + (max(w.kernel) > 1)  # the weight is converted once


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


@needs_nvrtc
def test_wgmmas_of_taps_are_not_serialized():
    config = HALO | {"warpgroups": 2, "wgmma_m_tiles": 2, "block_n": 128, "block_k_bytes": 128}
    kernel = built(tc.parse("conv2d:2x128x28x28,128x128x3x3,s1,p1,f16,bias,add,relu"), config)
    assert kernel.resources.spills == 0
    assert 0 < kernel.sass.count("WARPGROUP.DEPBAR") < kernel.sass.count("HGMMA")
