"""`depthwise_planes`: depthwise convolutions, channels first, whose planes are copied whole."""

import dataclasses
from unittest import mock

import emulate
import pytest
from tvmconv.builtin.conv import persistent_tiles
from tvmconv.builtin.conv.nchw_direct import depthwise_planes_config

import tvmconv as tc
from tvmconv import registry
from tvmconv.errors import ScheduleError

SMALL = {"channels": 4, "strip": 4, "rows": 8, "stages": 2}
WHOLE_ROWS = {"channels": 4, "strip": 14, "rows": 7, "stages": 2, "output": "staged"}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d:2x8x8x12,8x1x5x5,s1,p2,g8,bias,silu", {**SMALL, "rows": 4, "input_eviction": "first"}),
        ("conv2d:2x8x8x14,8x1x3x3,s1,p1,g8,f16,bias,relu,add", SMALL),  # the last strip overhangs
        ("conv2d:3x16x7x7,16x1x5x5,s1,p2,g16,bf16,add", {"channels": 8, "strip": 7, "rows": 7, "stages": 3}),
        ("conv2d:2x8x16x16,8x1x3x3,s2,p1,g8,f16", SMALL),
        ("conv2d:2x8x15x18,8x1x5x5,s2,p2,g8", {**SMALL, "strip": 2, "rows": 4}),
        ("conv2d:1x8x12x16,8x1x3x3,s1,p2,d2,g8,tf32", {**SMALL, "rows": 12}),
        ("conv2d:1x8x12x16,8x1x3x3,s1,p2,g8,f16", {**SMALL, "rows": 7}),  # as much padding as there can be
        ("conv2d:1x8x11x16,8x1x3x2,s1,p1x0x2x1,g8,f16", {**SMALL, "rows": 3}),
        ("conv2d:1x4x60x8,4x1x5x5,s1,p2,g4", {**SMALL, "strip": 8, "rows": 60}),  # a loop over rows
        ("conv2d:1x4x120x8,4x1x3x3,s2,p1,g4,bias", {**SMALL, "strip": 4, "rows": 60}),
        ("conv2d:3x16x7x7,16x1x5x5,s1,p2,g16,f16,bias", {"channels": 8, "strip": 7, "rows": 7, "stages": 0}),
        ("conv2d:3x16x7x7,16x1x5x5,s1,p2,g16,f16,bias,add", {**WHOLE_ROWS, "channels": 8, "strip": 7, "rows": 7}),
        ("conv2d:2x8x14x14,8x1x5x5,s1,p2,g8,relu", {**WHOLE_ROWS, "rows": 7}),
        ("conv2d:2x8x14x13,8x1x3x3,s1,p2x0x1x1,g8,bf16", {**WHOLE_ROWS, "rows": 5, "stages": 0}),
        ("conv2d:2x8x28x28,8x1x3x3,s2,p1,g8,f16", {**WHOLE_ROWS, "stages": 0, "rows": 14}),
        ("conv2d:2x8x12x12,8x1x3x3,s1,p2,d2,g8", {**WHOLE_ROWS, "strip": 4, "rows": 12}),
        ("conv2d:1x8x14x14,8x1x1x1,s1,p0,g8", None),
        ("conv2d:2x16x14x14,16x1x3x3,s1,p1,g16,f16", None),
    ],
)
def test_planes_are_copied_whole(text, config):
    emulate.build_checked(text, "depthwise_planes", config)


@pytest.mark.parametrize("output", ["direct", "staged"])
def test_output_rows_without_inputs_are_stored(output):
    text = "conv2d:1x8x2x16,8x1x3x3,s1,p2x3x5x3,d3,g8,f16,bias"  # the filter reaches over the image
    emulate.build_checked(text, "depthwise_planes", {**SMALL, "channels": 8, "rows": 3, "output": output})


@pytest.mark.sample(1)
@pytest.mark.parametrize(("stages", "output"), [(1, "direct"), (2, "direct"), (2, "staged")])
def test_a_cta_computes_several_tiles(stages, output):
    text, config = "conv2d:48x8x8x8,8x1x3x3,s1,p1,g8,f16,bias", {**SMALL, "stages": stages, "output": output}
    small = dataclasses.replace(persistent_tiles.H200, multiprocessors=1)
    depthwise_planes_config.DepthwisePlanesConfig.list_legal.cache_clear()
    with mock.patch.object(persistent_tiles, "H200", small):
        tile = depthwise_planes_config.DepthwisePlanesConfig(tc.parse(text), **config)
        assert int(tile.tiles_per_cta) > 1
        emulate.build_checked(text, "depthwise_planes", config)


@pytest.mark.parametrize(
    "text",
    [
        "conv2d:1x16x16x16,32x1x3x3,s1,p1,g16,f16",
        "conv2d:1x16x16x16,16x1x3x3,s1,p3,g16,f16",  # rows of zeros alone
        "conv2d:1x16x512x512,16x1x3x3,s1,p1,g16",
    ],
)
def test_other_convolutions_are_refused(text):
    with pytest.raises(ScheduleError, match="depthwise images"):
        tc.build(text, "depthwise_planes", arch="sm_90")


def test_space_may_have_no_config_that_is_worth_a_search():
    w = tc.parse("conv2d:3x8x22x9,8x1x3x3,s2,p1,g8,bf16")
    assert not [*registry.find_schedule(w, "depthwise_planes").space(w)]


def test_layers_of_large_batches_are_searched():
    layers = {"32x144x56x56": True, "1x144x56x56": False}
    for shape, is_searched in layers.items():
        w = tc.parse(f"conv2d:{shape},144x1x3x3,s1,p1,g144")
        names = [each.name for each in registry.schedules_to_tune(w, "cuda", "sm_90")]
        assert ("depthwise_planes" in names) == is_searched
