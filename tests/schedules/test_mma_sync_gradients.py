"""`mma_sync` computes gradients, executed without a GPU."""

import emulate
import pytest

SMALL = {"block_m": 16, "block_n": 16, "block_k": 64, "warps_m": 1, "warps_n": 1, "warps_k": 1, "stages": 3}
WGRADS = [
    ("conv2d_wgrad:2x24x11x9,80x24x3x3,s1,p1,f16,nhwc", {"block_m": 32, "block_n": 64, "warps_n": 2, "warps_m": 2}),
    ("conv2d_wgrad:3x24x11x9,40x24x3x3,s2,p2x1x0x1,d2,tf32,nhwc", {"block_n": 32, "block_k": 32, "warps_k": 2}),
    ("conv2d_wgrad:2x3x20x21,24x3x7x7,s2,p3,bf16,nhwc,out-f32", {"block_m": 32, "block_n": 128, "warps_n": 4}),
    ("conv2d_wgrad:2x40x7x9,48x20x3x3,s1,p1,g2,f16,add", {"block_m": 32, "warps_m": 2, "block_n": 32}),
    ("conv1d_wgrad:2x18x70,40x18x5,s3,p2,tf32,add", {"block_n": 128, "warps_n": 4, "block_k": 16}),
]

DGRADS = [
    ("conv2d_dgrad:2x24x9x8,40x24x3x2,s1,p1,f16,nhwc,add", {"split_k": 2, "block_k": 32}),
    ("conv2d_dgrad:2x20x9x8,36x10x3x3,s1,p1,g2,tf32,drelu", {"block_k": 32, "warps_k": 2}),
    ("conv2d_transpose:2x18x9x8,18x14x3x3,s1,p1,d2,bf16,bias,relu", {"block_n": 32, "warps_n": 2}),
]


@pytest.mark.parametrize(("text", "config"), WGRADS)
def test_gradients_of_weights_are_computed(text, config):
    emulate.build_checked(text, "mma_sync", {**SMALL, "split_k": 2, **config}, "sm_80")


@pytest.mark.parametrize(("text", "config"), DGRADS)
def test_gradients_of_inputs_are_computed(text, config):
    emulate.build_checked(text, "mma_sync", {**SMALL, "split_k": 1, **config}, "sm_80")
