"""`stem` computes gradients of first layers, executed without a GPU."""

import emulate
import pytest

WGRADS = [
    ("conv2d_wgrad:3x3x33x41,40x3x7x7,s2,p3,f16,nhwc,add", {"block_m": 32, "warps_n": 4, "warps_k": 2}),
    ("conv2d_wgrad:2x1x20x23,24x1x5x5,s1x2,p2x1x0x3,d2x1,tf32,nhwc", {"block_p": 2, "warps_n": 2}),
    ("conv2d_wgrad:2x7x20x19,19x7x3x5,s4,p1,bf16,out-f32,add", {"stages": 3, "warps_n": 4}),
    ("conv3d_wgrad:2x3x5x9x11,20x3x3x3x4,s1x2x2,p1,f16,nhwc,add", {"block_m": 32, "warps_n": 4, "block_p": 2}),
    ("conv3d_wgrad:1x1x6x9x11,9x1x2x3x3,s2x1x1,p1x0x2x0x1x1,d2x1x1,tf32", {"warps_n": 2}),
    ("conv1d_wgrad:3x2x101,24x2x7,s3,p3,bf16,out-f32", {}),
]

DGRADS = [
    ("conv2d_dgrad:2x3x33x41,24x3x7x7,s2,p3,f16,nhwc,add", {"rows_per_warp": 2, "warps_y": 2}),
    ("conv2d_dgrad:2x1x20x23,24x1x5x5,s3x2,p2x1x0x3,d2x1,tf32,nhwc", {"rows_per_warp": 4}),
    ("conv2d_dgrad:2x7x20x19,19x7x1x1,s2,p0,bf16,nhwc,drelu", {"max_ctas": 132}),
    ("conv2d_transpose:2x40x9x10,40x2x6x5,s4x2,p1,op1,tf32,nhwc,bias,tanh", {"warps_y": 4}),
    ("conv3d_dgrad:2x3x5x9x11,20x3x3x3x4,s1x2x2,p1,f16,nhwc,add", {"rows_per_warp": 2, "max_ctas": 132, "stages": 2}),
    ("conv3d_dgrad:1x1x6x9x11,9x1x2x3x3,s2x1x1,p1x0x2x0x1x1,d2x1x1,tf32", {"warps_y": 2, "stages": 1}),
    ("conv3d_transpose:1x24x3x4x5,24x2x3x3x3,s2x1x3,p1x1x0,op1x0x1,f16,nhwc,bias,relu", {"stages": 2}),
    ("conv1d_dgrad:3x2x101,24x2x7,s3,p3,bf16", {}),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("text", "config"), WGRADS)
def test_gradients_of_weights_are_computed(text, config):
    small = {"block_m": 16, "block_p": 1, "block_q": 16, "warps_n": 1, "warps_k": 1, "stages": 2, "parts": 4}
    emulate.build_checked(text, "stem", {**small, **config}, "sm_80")


@pytest.mark.sample(2)
@pytest.mark.parametrize(("text", "config"), DGRADS)
def test_gradients_of_inputs_are_computed(text, config):
    small = {"rows_per_warp": 1, "warps_x": 1, "warps_y": 1, "max_ctas": 0}
    emulate.build_checked(text, "stem", {**small, **config}, "sm_80")
