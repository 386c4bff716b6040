"""`depthwise_mma_sync` computes depthwise layers of large filters and their dgrads, executed without a GPU."""

import emulate
import pytest

import tvmconv as tc
from tvmconv import registry

LAYERS = [
    ("conv2d:2x8x9x7,8x1x5x5,s1,p2,g8,f16,nhwc", {"octets": 1, "images": 1, "mmas_y": 1, "mmas_x": 1}),
    (
        "conv2d:3x16x20x19,16x1x7x7,s1,p3,g16,bf16,nhwc,bias,add",
        {"octets": 2, "images": 1, "mmas_y": 1, "mmas_x": 2},
    ),
    ("conv2d:2x8x20x28,8x1x9x5,s1,p1x3x4x0,g8,f16", {"octets": 1, "images": 2, "mmas_y": 1, "mmas_x": 1}),
    ("conv2d:2x16x17x15,16x1x7x7,s1,p3,g16,bf16,bias,add,relu", {"octets": 2, "images": 1, "mmas_y": 1, "mmas_x": 1}),
    ("conv2d:3x8x14x14,8x1x5x5,s1,p2,g8,f16,bias,relu", {"octets": 1, "images": 2, "mmas_y": 1, "mmas_x": 2}),
    ("conv2d:1x8x18x56,8x1x7x7,s1,p0,g8,f16", {"octets": 1, "images": 1, "mmas_y": 2, "mmas_x": 4}),
    ("conv2d:17x24x14x14,24x1x5x5,s1,p2,g24,f16,bias", {"octets": 2, "images": 16, "mmas_y": 1, "mmas_x": 2}),
    ("conv2d:18x8x20x19,8x1x7x7,s1,p3,g8,bf16,nhwc,bias", {"octets": 1, "images": 16, "mmas_y": 1, "mmas_x": 1}),
    ("conv2d:16x8x17x12,8x1x3x5,s1,p0x2x1x1,g8,f16", {"octets": 1, "images": 16, "mmas_y": 1, "mmas_x": 1}),
    ("conv2d_dgrad:16x8x14x14,8x1x5x5,s1,p2,g8,f16,nhwc", {"octets": 1, "images": 16, "mmas_y": 1, "mmas_x": 2}),
    ("conv2d_dgrad:2x8x9x7,8x1x5x5,s1,p2,g8,f16,nhwc", {"images": 1, "mmas_y": 1, "mmas_x": 1}),
    (
        "conv2d_dgrad:3x16x20x19,16x1x7x7,s1,p3,g16,bf16,nhwc,add",
        {"octets": 2, "images": 2, "mmas_y": 1, "mmas_x": 2},
    ),
    ("conv2d_dgrad:2x8x28x28,8x1x31x31,s1,p15,g8,f16,nhwc", {"images": 2, "mmas_y": 2, "mmas_x": 4}),
    ("conv2d_dgrad:1x8x23x40,8x1x9x5,s1,p1x3x4x0,g8,f16,nhwc,drelu", {"images": 1, "mmas_y": 1, "mmas_x": 4}),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("text", "config"), LAYERS)
def test_band_matrices_compute_layers_and_gradients(text, config):
    kernel = emulate.build_checked(text, "depthwise_mma_sync", config)
    space = registry.find_schedule(kernel.workload, "depthwise_mma_sync").space(kernel.workload)
    used = space.compute_usage(space.point_from_config(kernel.config)[None])
    assert used.dynamic_shared_bytes[0] == kernel.dynamic_shared_bytes


def test_searches_try_band_matrices_for_large_filters_alone():
    def is_searched(operator, taps, stride=1):
        w = tc.parse(f"{operator}:16x64x28x28,64x1x{taps}x{taps},s{stride},p{taps // 2},g64,f16,nhwc")
        return "depthwise_mma_sync" in [s.name for s in registry.schedules_to_tune(w, "cuda", "sm_90")]

    for operator in ("conv2d", "conv2d_dgrad"):
        cases = (31, 1), (7, 1), (3, 1), (7, 2)
        assert [is_searched(operator, *case) for case in cases] == [True, True, False, False]
