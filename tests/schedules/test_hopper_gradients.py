"""`hopper` computes gradients and transposed convolutions, executed without a GPU."""

import emulate
import pytest
from cubins import check_spills, needs_nvrtc
from small_tiles import SMALL, built, few_multiprocessors

import tvmconv as tc
from tvmconv.errors import ScheduleError

DGRADS = [
    ("conv2d_dgrad:2x32x9x8,48x32x3x3,s1,p1,f16,nhwc", {}),
    ("conv2d_dgrad:2x32x9x8,48x32x3x3,s1,p1,f16,nhwc", {"block_n": 32, "cluster_m": 2}),
    ("conv2d_dgrad:2x40x9x8,72x40x3x2,s1,p1x0,bf16,nhwc,add", {"block_n": 96, "cluster_m": 4}),
    ("conv2d_dgrad:2x64x9x8,64x32x3x3,s1,p1,g2,f16,nhwc", {"block_n": 32}),
    ("conv2d_dgrad:1x64x4x64,32x64x3x3,s1,p1,f16,nhwc", {"block_n": 64, "taps_per_copy": 3, "cluster_m": 2}),
    ("conv2d_dgrad:2x128x7x11,64x128x1x1,s1,p0,f16,nhwc", {"block_n": 128, "block_k_bytes": 128, "warpgroups": 2}),
    ("conv2d_dgrad:2x32x9x8,48x32x3x3,s1,p1,d2,f16,nhwc", {"block_n": 32, "block_k_bytes": 256, "stages": 2}),
    ("conv1d_dgrad:1x48x150,32x48x3,s1,p1,f16,nhwc", {"split_k": 2}),
    ("conv3d_dgrad:1x40x3x5x9,32x40x1x2x2,s1,p0x1x1x0x0x0,f16,nhwc", {"block_n": 48, "cluster_n": 2}),
    ("conv2d_transpose:2x32x9x8,32x24x3x3,s1,p1,f16,nhwc,bias,relu", {}),
]


def check(text, config=None):
    w = tc.parse(text)
    kernel = built(w, config)
    assert emulate.error(kernel.lowered_module, w) <= w.tolerance, config
    return kernel


@pytest.mark.parametrize(("text", "config"), DGRADS)
def test_gradients_of_inputs_are_computed(text, config):
    with few_multiprocessors():
        check(text, {**SMALL, **config})


@needs_nvrtc
@pytest.mark.parametrize("text", ["conv2d_dgrad:32x64x56x56,64x64x3x3,s1,p1,f16,nhwc"])
def test_defaults_compile_without_spills(text):
    check_spills(tc.parse(text), "hopper", "sm_90")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("conv2d_dgrad:1x64x8x8,64x64x3x3,s1,p1,f16", "with layout nhwc; this workload has nchw"),
        ("conv2d_dgrad:1x64x8x8,64x64x3x3,s1,p1,tf32,nhwc", "in float16, bfloat16; this workload has tf32"),
        ("conv2d_dgrad:1x60x8x8,64x60x3x3,s1,p1,f16,nhwc", "fill 16-byte chunks"),
        ("conv2d_dgrad:1x64x8x8,64x64x1x1,s1,p1,f16,nhwc", "padding is below the window"),
    ],
)
def test_other_gradients_are_refused_in_one_line(text, message):
    with pytest.raises(ScheduleError, match=message):
        built(tc.parse(text))
