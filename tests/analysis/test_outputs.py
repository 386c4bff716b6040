"""Tiles as they come out: which outputs the threads of a block store."""

import numpy as np
import pytest

import tvmconv as tc
from tvmconv.analysis.memory.output_tiles import map_output_tile

LAYER = "conv2d:1x16x14x14,32x16x3x3,s1,p1"
HALF = "conv2d:2x64x16x16,64x64x3x3,s1,p1,f16,nhwc"


def of(text, schedule, **config):
    return map_output_tile(tc.build(tc.parse(text), schedule, arch="sm_90", config=config))


@pytest.mark.parametrize(
    ("text", "schedule"),
    [(LAYER, "tiling"), (LAYER, "direct"), (HALF, "mma_sync"), (HALF, "hopper"), ("filter1d:4096,k5", "register")],
)
def test_a_block_stores_each_of_its_outputs_once(text, schedule):
    found = of(text, schedule)
    assert len(found.coordinates)
    assert len(np.unique(found.coordinates, axis=0)) == len(found.coordinates)
    assert (found.coordinates >= 0).all()
    assert (found.coordinates < found.shape).all()


def test_all_blocks_alike_compute_the_whole_output():
    kernel = tc.build(tc.parse("conv2d:1x16x16x16,32x16x3x3,s1,p1"), "tiling", arch="sm_90")
    assert len(map_output_tile(kernel).coordinates) * np.prod(kernel.launch.grid) == 32 * 16 * 16
