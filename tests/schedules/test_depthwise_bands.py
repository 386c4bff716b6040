"""`depthwise_mma_sync` computes depthwise dgrads of large filters, executed without a GPU."""

import emulate
import pytest

import tvmconv as tc
from tvmconv import registry

GRADIENTS = [
    ("conv2d_dgrad:2x8x9x7,8x1x5x5,s1,p2,g8,f16,nhwc", {"images": 1, "mmas_y": 1, "mmas_x": 1}),
    ("conv2d_dgrad:3x16x20x19,16x1x7x7,s1,p3,g16,bf16,nhwc,add", {"images": 2, "mmas_y": 1, "mmas_x": 2}),
    ("conv2d_dgrad:2x8x28x28,8x1x31x31,s1,p15,g8,f16,nhwc", {"images": 2, "mmas_y": 2, "mmas_x": 4}),
    ("conv2d_dgrad:1x8x23x40,8x1x9x5,s1,p1x3x4x0,g8,f16,nhwc,drelu", {"images": 1, "mmas_y": 1, "mmas_x": 4}),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("text", "config"), GRADIENTS)
def test_band_matrices_compute_gradients(text, config):
    kernel = emulate.build_checked(text, "depthwise_mma_sync", config)
    space = registry.find_schedule(kernel.workload, "depthwise_mma_sync").space(kernel.workload)
    used = space.compute_usage(space.point_from_config(kernel.config)[None])
    assert used.dynamic_shared_bytes[0] == kernel.dynamic_shared_bytes


def test_searches_try_band_matrices_for_large_filters_alone():
    def is_searched(taps, stride=1):
        w = tc.parse(f"conv2d_dgrad:16x64x28x28,64x1x{taps}x{taps},s{stride},p{taps // 2},g64,f16,nhwc")
        return "depthwise_mma_sync" in [s.name for s in registry.schedules_to_tune(w, "cuda", "sm_90")]

    assert [is_searched(31), is_searched(7), is_searched(3), is_searched(7, 2)] == [True, True, False, False]
