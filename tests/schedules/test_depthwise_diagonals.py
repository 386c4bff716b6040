"""`depthwise_diagonal`: depthwise layers and dgrads as products of octets of channels with diagonal matrices."""

import dataclasses
from unittest import mock

import emulate
import numpy as np
import pytest
from tvmconv.builtin.conv import persistent_tiles

import tvmconv as tc
from tvmconv import registry
from tvmconv.errors import ScheduleError
from tvmconv.target import H200

SMALL = {"octets": 2, "rows": 4, "columns": 16, "mma_columns": 16, "warps": 1, "stages": 2}
TWO_ROWS = {**SMALL, "mma_columns": 8, "warps": 2}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d:2x16x9x17,16x1x3x3,s1,p1,g16,f16,nhwc", SMALL),  # tiles overhang both axes
        ("conv2d:2x16x19x35,16x1x5x5,s2,p2,g16,f16,nhwc,bias,relu", {**SMALL, "columns": 32, "warps": 2}),
        ("conv2d:1x72x9x11,72x1x5x5,s1,p2x1x3x0,d2,g72,f16,nhwc,bias,silu,add", {**SMALL, "octets": 4, "stages": 3}),
        ("conv2d:2x64x30x18,64x1x3x3,s3x2,p1,g64,bf16,nhwc", {**SMALL, "octets": 4, "rows": 8}),
        ("conv2d:3x64x14x14,64x1x3x3,s1,p1,g64,f16,nhwc", None),
        ("conv2d_dgrad:2x24x13x10,24x1x5x4,s1,p2x1,g24,bf16,nhwc,add", {**SMALL, "octets": 3}),  # an even filter
        ("conv2d_dgrad:2x40x9x21,40x1x7x7,s1,p3,g40,f16,nhwc,drelu", {**SMALL, "octets": 5, "rows": 7, "columns": 32}),
        ("conv2d_dgrad:1x24x20x20,24x1x2x6,s1,p1x2,d1x2,g24,bf16,nhwc", {**SMALL, "octets": 1}),
        ("conv2d_dgrad:1x24x4x70,24x1x1x9,s1,p0x4,g24,f16,nhwc", {**SMALL, "octets": 2, "columns": 64, "warps": 4}),
        ("conv2d:2x40x9x23,40x1x3x5,s2x1,p1x2,g40,f16,nhwc,bias,add", {**TWO_ROWS, "octets": 4, "columns": 24}),
        ("conv2d:1x24x13x15,24x1x5x3,s1x2,p1,d2x1,g24,bf16,nhwc", {**TWO_ROWS, "octets": 3}),
        (
            "conv2d_dgrad:2x64x7x7,64x1x7x7,s1,p3,g64,f16,nhwc",
            {**TWO_ROWS, "octets": 8, "columns": 8, "rows": 8, "warps": 1},
        ),
        ("conv2d_dgrad:2x24x17x21,24x1x3x3,s2,p1,g24,f16,nhwc,add", {**SMALL, "octets": 3}),  # residue classes
        (
            "conv2d_dgrad:1x40x20x23,40x1x5x4,s2x3,p2x0,d1x2,g40,bf16,nhwc",
            {**TWO_ROWS, "octets": 4, "columns": 8, "warps": 1},
        ),
        ("conv2d_dgrad:2x24x9x12,24x1x2x1,s3x2,p0,g24,f16,nhwc,drelu", SMALL),  # outputs that no tap reaches
        ("conv2d_transpose:2x24x7x9,24x1x4x4,s2,p1,g24,f16,nhwc,bias,relu", {**TWO_ROWS, "octets": 3, "columns": 16}),
        ("conv2d_transpose:1x16x6x5,16x1x3x3,s2,p1,op1,g16,bf16,nhwc,bias", None),
        (
            "conv1d:2x24x70,24x1x31,s1,p15,g24,f16,nhwc,bias,silu",
            {**SMALL, "octets": 3, "rows": 1, "columns": 48, "warps": 2},
        ),
        ("conv1d_dgrad:2x16x45,16x1x5,s2,p2,g16,bf16,nhwc", {**SMALL, "rows": 1}),
        ("conv2d_dgrad:40x24x6x6,24x1x3x1,s1,p1x0,g24,f16,nhwc", None),
    ],
)
def test_octets_are_multiplied_by_diagonal_matrices(text, config):
    kernel = emulate.build_checked(text, "depthwise_diagonal", config)
    space = registry.find_schedule(kernel.workload, "depthwise_diagonal").space(kernel.workload)
    used, launch = space.compute_usage(space.point_from_config(kernel.config)[None]), kernel.kernels[0].launch
    assert (used.threads[0], used.blocks[0]) == (launch.threads_per_block, launch.num_blocks)


def test_persistent_ctas_compute_several_tiles():
    w = tc.parse("conv2d_dgrad:12x64x3x3,64x1x3x3,s1,p1,g64,f16,nhwc")
    with mock.patch.object(persistent_tiles, "H200", dataclasses.replace(H200, multiprocessors=1)):
        kernel = tc.build(w, "depthwise_diagonal", arch="sm_90", config={**SMALL, "octets": 8, "stages": 4})
    assert kernel.launch.num_blocks <= 12 / 5  # so that each of the four stages has a second tile
    assert emulate.error(kernel.lowered_module, w) <= w.tolerance


def test_random_configs_have_the_resources_that_are_counted():
    w = tc.parse("conv2d_dgrad:1x24x9x21,24x1x5x5,s1,p2,g24,f16,nhwc")
    space = registry.find_schedule(w, "depthwise_diagonal").space(w)
    for point in space.sample_legal(4, np.random.default_rng(2)):
        kernel = tc.build(w, "depthwise_diagonal", arch="sm_90", config=space.config_from_point(point))
        used = space.compute_usage(point[None])
        assert used.dynamic_shared_bytes[0] == kernel.dynamic_shared_bytes
        assert emulate.error(kernel.lowered_module, w) <= w.tolerance, kernel.config


@pytest.mark.parametrize(
    "text",
    [
        "conv2d:1x12x16x16,12x1x3x3,s1,p1,g12,f16,nhwc",  # half an octet
        "conv2d:1x16x16x16,32x1x3x3,s1,p1,g16,f16,nhwc",
        "conv2d:1x16x64x64,16x1x11x11,s1,p5,g16,f16,nhwc",
        "conv2d_dgrad:1x16x16x16,32x1x3x3,s2,p1,g16,f16,nhwc",
        "conv3d_dgrad:1x16x4x6x6,16x1x3x3x3,s1,p1,g16,f16,nhwc",
    ],
)
def test_other_layers_are_refused(text):
    with pytest.raises(ScheduleError):
        tc.build(text, "depthwise_diagonal", arch="sm_90")


def test_layers_of_large_batches_are_searched():
    layers = {"32x240x28x28": True, "1x240x28x28": False}
    for shape, is_searched in layers.items():
        for operator in ("conv2d", "conv2d_dgrad"):
            w = tc.parse(f"{operator}:{shape},240x1x5x5,s1,p2,g240,f16,nhwc")
            names = [each.name for each in registry.schedules_to_tune(w, "cuda", "sm_90")]
            assert ("depthwise_diagonal" in names) == is_searched
