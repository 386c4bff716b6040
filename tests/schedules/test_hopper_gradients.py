"""`hopper` computes gradients and transposed convolutions, executed without a GPU."""

import emulate
import numpy as np
import pytest
from cubins import check_spills, needs_nvrtc, space_of
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

WGRADS = [
    ("conv2d_wgrad:2x32x9x8,64x32x3x3,s1,p1,f16,nhwc", {"block_n": 32}),
    ("conv2d_wgrad:4x64x9x8,72x64x3x3,s1,p1,f16,nhwc", {"parts": 3}),
    ("conv2d_wgrad:4x64x9x8,72x64x3x3,s2,p1,f16,nhwc,add", {"block_n": 128, "block_k_bytes": 128}),
    ("conv2d_wgrad:4x40x9x8,136x40x3x2,s1,p1x0,bf16,nhwc", {"block_n": 80, "cluster_m": 2, "warpgroups": 2}),
    ("conv2d_wgrad:2x72x9x8,128x72x3x3,s1,p1,f16,nhwc", {"block_n": 96, "cluster_n": 2, "cluster_m": 2}),
    ("conv2d_wgrad:2x128x7x11,64x128x1x1,s1,p0,f16,nhwc", {"block_n": 128, "block_k_bytes": 128}),
    ("conv2d_wgrad:2x32x9x8,48x32x3x3,s1,p2,d2,f16,nhwc", {"block_n": 32, "block_k_bytes": 256, "stages": 2}),
    ("conv2d_wgrad:2x64x8x8,48x64x1x1,s2,p0,f16,nhwc", {}),
    ("conv1d_wgrad:1x48x400,32x48x3,s1,p1,f16,nhwc", {"parts": 4}),
    ("conv3d_wgrad:1x40x3x5x9,32x40x1x2x2,s1,p0x1x1x0x0x0,f16,nhwc", {"block_n": 48}),
]
SMALL_WGRAD = {name: value for name, value in SMALL.items() if name != "split_k"} | {"block_n": 64}


def check(text, config=None):
    w = tc.parse(text)
    kernel = built(w, config)
    assert emulate.error(kernel.lowered_module, w) <= w.tolerance, config
    return kernel


@pytest.mark.parametrize(("text", "config"), DGRADS)
def test_gradients_of_inputs_are_computed(text, config):
    with few_multiprocessors():
        check(text, {**SMALL, **config})


@pytest.mark.parametrize(("text", "config"), WGRADS)
def test_gradients_of_weights_are_computed(text, config):
    check(text, {**SMALL_WGRAD, **config})


@pytest.mark.parametrize("text", [DGRADS[0][0], DGRADS[3][0], DGRADS[8][0], WGRADS[0][0], WGRADS[4][0], WGRADS[8][0]])
def test_defaults_and_random_configs_are_right(text):
    check(text)
    space = space_of(tc.parse(text), "hopper")
    for point in space.sample_legal(4, np.random.default_rng(1)):
        check(text, space.config_from_point(point))


@needs_nvrtc
@pytest.mark.parametrize(
    "text",
    ["conv2d_wgrad:32x128x28x28,128x128x3x3,s1,p1,f16,nhwc", "conv2d_dgrad:32x64x56x56,64x64x3x3,s1,p1,f16,nhwc"],
)
def test_defaults_compile_without_spills(text):
    check_spills(tc.parse(text), "hopper", "sm_90")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("conv2d_dgrad:1x64x8x8,64x64x3x3,s1,p1,f16", "with layout nhwc; this workload has nchw"),
        ("conv2d_dgrad:1x64x8x8,64x64x3x3,s1,p1,tf32,nhwc", "in float16, bfloat16; this workload has tf32"),
        ("conv2d_dgrad:1x60x8x8,64x60x3x3,s1,p1,f16,nhwc", "fill 16-byte chunks"),
        ("conv2d_dgrad:1x64x8x8,64x64x1x1,s1,p1,f16,nhwc", "padding is below the window"),
        ("conv2d_dgrad:1x64x8x8,64x64x3x3,s2,p1,f16,nhwc", "with stride 1; this workload has stride 2x2"),
        ("conv2d_wgrad:1x64x8x8,64x32x3x3,s2,p1,g2,f16,nhwc", "with one group; this workload has 2 groups"),
        ("conv2d_wgrad:1x60x8x8,64x60x3x3,s2,p1,f16,nhwc", "fill 16-byte chunks"),
    ],
)
def test_other_gradients_are_refused_in_one_line(text, message):
    with pytest.raises(ScheduleError, match=message):
        built(tc.parse(text))


def test_descriptors_of_mn_major_operands_leave_out_the_rank():
    """In a cluster, upper bits of an address have the rank of its CTA; on an H100 they changed the leading offset."""
    text, config = DGRADS[2]
    mask = str((1 << 18) - 1)
    assert mask in built(tc.parse(text), {**SMALL, **config}).source
    assert mask not in built(tc.parse("conv2d:2x40x9x8,72x40x3x2,s1,p1x0,bf16,nhwc"), SMALL).source
