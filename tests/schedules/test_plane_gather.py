"""Channels-first convolutions of one tap whose pixels are an MN-major operand, emulated with checks for races."""

import emulate
import pytest
from cubins import needs_nvrtc
from small_tiles import SMALL, built, few_multiprocessors
from tvmconv.builtin.conv.tensor_cores.hopper import knobs

import tvmconv as tc
from tvmconv.analysis.races import find_races
from tvmconv.errors import KnobError

CP_ASYNC = {**SMALL, "input_loader": "cp_async"}
WORKLOADS = (
    ("conv2d:2x64x14x14,40x64x1x1,s1,p0,f16,bias,add,relu", {}),  # vectors of four pixels
    ("conv2d:3x40x6x6,24x40x1x1,s1,p0,bf16,bias", {"warpgroups": 2, "stages": 3}),
    ("conv1d:3x72x22,48x72x1,s1,p0,f16,silu", {"split_k": 2}),  # of two pixels
    ("conv2d:2x128x4x6,64x64x1x1,s1,p0,g2,f16", {"stages": 8, "wgmma_m_tiles": 2}),  # of eight pixels
    ("conv2d:3x72x4x12,40x72x1x1,s1,p0,bf16,bias", {}),  # TMA could copy boxes of 16 pixels
    ("conv2d:3x40x6x6,24x40x1x1,s1,p0,f16,nchw-nhwc,bias,relu", {}),
    ("conv2d:3x40x10x12,24x40x1x1,s1,p0,f16,bias,add", {"input_loader": "tma"}),  # TMA copies zeros behind a plane
    ("conv2d:2x96x12x12,40x96x1x1,s1,p0,bf16,bias", {"input_loader": "tma", "split_k": 3}),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("text", "config"), WORKLOADS)
def test_pixels_are_read_as_they_lie(text, config):
    w = tc.parse(text)
    kernel = built(w, CP_ASYNC | config)
    assert emulate.error(kernel.lowered_module, w) <= w.tolerance
    assert find_races(kernel) == []
    assert len(kernel.kernels) == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "config", [{"kernel_schedule": "pingpong", "warpgroups": 2}, {"kernel_schedule": "cooperative", "cluster_m": 2}]
)
def test_persistent_ctas_copy_pixels_of_several_tiles(config, monkeypatch):
    monkeypatch.setattr(knobs, "MIN_OUTPUTS_PER_SM", 0)
    w = tc.parse("conv2d:3x72x6x6,72x72x1x1,s1,p0,f16,bias")
    with few_multiprocessors():
        kernel = built(w, CP_ASYNC | config | {"stages": 3})
    assert emulate.error(kernel.lowered_module, w) <= w.tolerance
    assert find_races(kernel) == []


def test_ctas_that_share_pixels_are_refused():
    with pytest.raises(KnobError, match="CTAs of a cluster share only filters"):
        built(tc.parse("conv2d:8x64x14x14,256x64x1x1,s1,p0,f16"), CP_ASYNC | {"cluster_n": 2})


@pytest.mark.slow
@needs_nvrtc
def test_wgmmas_are_not_serialized_and_producers_use_few_registers():
    config = CP_ASYNC | {"kernel_schedule": "pingpong", "warpgroups": 2, "wgmma_m_tiles": 2, "block_n": 128}
    kernel = built(tc.parse("conv2d:32x256x14x14,1024x256x1x1,s1,p0,f16,bias,add,relu"), config)
    assert kernel.resources.spills == 0
    assert "LDGSTS" in kernel.sass
    assert 0 < kernel.sass.count("WARPGROUP.DEPBAR") < kernel.sass.count("HGMMA")
