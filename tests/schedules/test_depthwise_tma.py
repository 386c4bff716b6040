"""`depthwise_tma`: depthwise convolutions whose windows TMA copies ahead of the threads that compute."""

import dataclasses
from unittest import mock

import emulate
import pytest
from tvmconv.builtin.conv import persistent_tiles
from tvmconv.builtin.conv.nhwc_direct import depthwise_tma_config

import tvmconv as tc
from tvmconv import registry
from tvmconv.errors import ScheduleError

SMALL = {"vector": 2, "channels": 16, "rows": 4, "columns": 8, "strip": 4, "stages": 2}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d:2x56x5x13,56x1x3x3,s1,p1,g56,f16,nhwc", {**SMALL, "channels": 32}),  # tiles overhang all axes
        ("conv2d:2x16x9x16,16x1x3x3,s2,p1,g16,bf16,nhwc,bias,relu", {**SMALL, "strip": 2, "input_eviction": "first"}),
        ("conv2d:1x24x20x8,24x1x3x3,s1,p1,g24,f16,nhwc,bias", {**SMALL, "channels": 24, "rows": 14, "lines": 3}),
        ("conv2d:1x8x30x8,8x1x5x5,s1,p2,g8,nhwc,add", {**SMALL, "vector": 1, "channels": 8, "rows": 28, "lines": 10}),
        (
            "conv2d:1x16x31x16,16x1x3x3,s2,p1,g16,bf16,nhwc",
            {**SMALL, "rows": 14, "lines": 4, "input_eviction": "first"},
        ),
        ("conv2d:1x16x14x14,16x1x5x5,s1,p2,g16,nhwc", {**SMALL, "vector": 1, "columns": 14, "strip": 7, "rows": 14}),
        ("conv2d:1x16x27x8,16x1x5x5,s1,p2,g16,f16,nhwc,add", {**SMALL, "rows": 27, "lines": 5}),
        ("conv2d:1x16x27x17,16x1x3x3,s2,p1,g16,f16,nhwc", {**SMALL, "rows": 14, "lines": 4}),
        ("conv2d:1x16x12x8,16x1x3x3,s1,p2,g16,f16,nhwc", {**SMALL, "rows": 14}),  # as much padding as there can be
        ("conv2d:2x32x9x16,32x1x3x3,s1,p1,g32,f16,nhwc,bias", {**SMALL, "stages": 0}),
        ("conv2d:2x16x16x16,16x1x5x5,s1,p2,g16,f16,nhwc", {**SMALL, "rows": 16, "lines": 5, "stages": 0}),
        ("conv2d:1x16x20x9,16x1x3x3,s1,p2,d2,g16,f16,nhwc", {**SMALL, "rows": 14, "lines": 5}),
        ("conv2d:2x16x9x8,16x1x5x5,s1,p2,g16,f16,nhwc,bias,silu,add", {**SMALL, "stages": 3}),
        ("conv2d:1x12x9x17,12x1x3x3,s1,p1,g12,nhwc", {**SMALL, "channels": 12, "vector": 4}),
        ("conv2d:1x16x9x9,16x1x3x2,s1,p1x0x2x1,d2,g16,f16,nhwc", {**SMALL, "vector": 8, "strip": 2}),
        ("conv2d:1x32x14x14,32x1x3x3,s1,p1,g32,f16,nhwc", None),
        ("conv2d:1x8x12x9,8x1x1x3,s1x2,p0x1,g8,tf32,nhwc", None),
        ("conv2d_dgrad:2x24x13x10,24x1x5x4,s1,p2x1,g24,bf16,nhwc,add", None),
        ("conv2d_dgrad:1x40x14x9,40x1x3x3,s1,p2,d2,g40,f16,nhwc,drelu", {**SMALL, "channels": 40}),
    ],
)
def test_windows_are_copied_ahead(text, config):
    emulate.build_checked(text, "depthwise_tma", config)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("conv2d:1x8x2x16,8x1x3x3,s1,p2x3x5x3,d3,g8,f16,nhwc,bias", 3),  # the filter reaches over the image
        ("conv2d:1x8x4x8,8x1x3x3,s1,p1x1x5x1,g8,bf16,nhwc,bias", 8),  # output rows below the image
        ("conv2d_dgrad:1x8x3x16,8x1x3x3,s1,p4x3x1x3,d3,g8,f16,nhwc", 3),
    ],
)
def test_output_rows_without_inputs_are_stored(text, rows):
    emulate.build_checked(text, "depthwise_tma", {**SMALL, "channels": 8, "rows": rows})


@pytest.mark.sample(1)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_cta_computes_several_tiles(stages):
    text, config = "conv2d:8x16x9x16,16x1x3x3,s1,p1,g16,f16,nhwc,bias", {**SMALL, "stages": stages}
    small = dataclasses.replace(persistent_tiles.H200, multiprocessors=1)
    depthwise_tma_config.DepthwiseTmaConfig.list_legal.cache_clear()
    with mock.patch.object(persistent_tiles, "H200", small):
        tile = depthwise_tma_config.DepthwiseTmaConfig(tc.parse(text), **config)
        assert int(tile.tiles_per_cta) > 1
        emulate.build_checked(text, "depthwise_tma", config)


@pytest.mark.parametrize(
    "text",
    [
        "conv2d:1x12x16x16,12x1x3x3,s1,p1,g12,f16,nhwc",  # pixels of 24 bytes
        "conv2d:1x16x16x16,32x1x3x3,s1,p1,g16,f16,nhwc",
        "conv2d:1x16x64x64,16x1x11x11,s1,p5,g16,f16,nhwc",
        "conv2d_dgrad:1x16x16x16,16x1x3x3,s2,p1,g16,f16,nhwc",
    ],
)
def test_other_convolutions_are_refused(text):
    with pytest.raises(ScheduleError, match="depthwise images"):
        tc.build(text, "depthwise_tma", arch="sm_90")


def test_layers_of_large_batches_are_searched():
    layers = {"32x144x56x56": True, "1x144x56x56": False}
    for shape, is_searched in layers.items():
        w = tc.parse(f"conv2d:{shape},144x1x3x3,s1,p1,g144,f16,nhwc")
        names = [each.name for each in registry.schedules_to_tune(w, "cuda", "sm_90")]
        assert ("depthwise_tma" in names) == is_searched
