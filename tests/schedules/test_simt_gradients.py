"""`simt` computes float32 gradients, executed without a GPU."""

import emulate
import pytest
from cubins import needs_nvrtc

import tvmconv as tc

WGRADS = [
    ("conv2d_wgrad:2x12x9x8,20x12x3x3,s1,p1,nhwc", {}),
    ("conv2d_wgrad:2x24x7x8,40x24x1x1,s1,p0", {"parts": 2}),
    ("conv2d_wgrad:3x36x9x8,52x18x3x2,s2,p1x0,g2,nhwc,add", {"parts": 3, "warps_m": 1, "warps_n": 4, "block_n": 64}),
    ("conv1d_wgrad:1x17x90,33x17x3,s1,p1,nhwc", {"parts": 2, "block_k": 8}),
    ("conv3d_wgrad:1x8x3x5x7,16x8x3x2x2,s1,p1x0x0,nhwc", {"stages": 4}),
]

DGRADS = [
    ("conv2d_dgrad:2x12x9x8,20x12x3x3,s1,p1,nhwc", {}),
    ("conv2d_dgrad:2x24x7x8,40x24x1x1,s1,p0,add", {"block_m": 32, "warps_m": 2, "warps_k": 2, "block_k": 32}),
    ("conv2d_dgrad:3x36x9x8,52x18x3x2,s2,p1x0,g2,nhwc,drelu", {"block_n": 32}),
    ("conv2d_transpose:2x16x5x6,16x12x2x2,s2,p0,bias,relu", {}),
    ("conv3d_transpose:1x16x2x3x5,16x9x2x2x2,s2,p0,op1x0x1,nhwc", {}),
    ("conv1d_dgrad:1x17x90,33x17x3,s1,p1", {}),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("text", "config"), [*WGRADS, *DGRADS])
def test_gradients_are_computed(text, config):
    emulate.build_checked(text, "simt", config)


def test_search_takes_float32_gradients_of_many_channels_only():
    def names(text):
        return [schedule.name for schedule in tc.registry.schedules_to_tune(tc.parse(text), "cuda", "sm_90")]

    assert names("conv2d_wgrad:32x64x56x56,64x64x3x3,s2,p1") == ["simt"]
    assert names("conv2d_wgrad:32x64x56x56,64x64x3x3,s1,p1") == ["simt", "winograd"]
    assert names("conv2d_transpose:8x512x28x28,512x256x2x2,s2,p0") == ["simt"]
    assert "simt" in names("conv2d_dgrad:32x64x56x56,64x64x3x3,s1,p1")
    assert "simt" not in names("conv2d_dgrad:32x3x224x224,64x3x7x7,s2,p3")
    assert "simt" not in names("conv2d_wgrad:32x3x224x224,64x3x7x7,s2,p3")
    assert "simt" not in names("conv2d_wgrad:32x64x56x56,64x64x3x3,s1,p1,f16,nhwc")


@pytest.mark.slow
@needs_nvrtc
def test_inner_loop_is_mostly_multiply_adds():
    kernel = tc.build("conv2d_wgrad:32x128x28x28,128x128x3x3,s1,p1,nhwc", "simt", arch="sm_90")
    assert kernel.sass.count("FFMA") > 6 * kernel.sass.count("LDS")
