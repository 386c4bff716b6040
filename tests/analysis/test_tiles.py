"""Output tiles of blocks, and the swizzles of tiles in shared memory that TMA copies and wgmma multiplies."""

import numpy as np
import pytest

import tvmconv as tc
from tvmconv.analysis.memory.output_tiles import map_output_tile
from tvmconv.analysis.memory.swizzles import SwizzledSmemTile, count_core_wavefronts, inspect_tiles
from tvmconv.emulator.instructions.tma import swizzle_addresses
from tvmconv.reports.explanation import format_tiles

LAYER = "conv2d:1x16x16x16,32x16x3x3,s1,p1"
HALF = "conv2d:2x64x16x16,64x64x3x3,s1,p1,f16,nhwc"
SMALL_HALF = "conv2d:1x64x16x16,64x64x3x3,s1,p1,f16,nhwc"


def build(text, schedule, **config):
    return tc.build(tc.parse(text), schedule, arch="sm_90", config=config)


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("conv2d:1x16x14x14,32x16x3x3,s1,p1", "tiling"),
        ("conv2d:1x16x14x14,32x16x3x3,s1,p1", "direct"),
        (HALF, "mma_sync"),
        (HALF, "hopper"),
        ("filter1d:4096,k5", "register"),
    ],
)
def test_a_block_stores_each_of_its_outputs_once(text, schedule):
    found = map_output_tile(build(text, schedule))
    assert len(np.unique(found.coordinates, axis=0)) == len(found.coordinates) > 0
    assert ((found.coordinates >= 0) & (found.coordinates < found.shape)).all()


def test_equal_blocks_cover_the_whole_output():
    kernel = build(LAYER, "tiling")
    assert len(map_output_tile(kernel).coordinates) * np.prod(kernel.launch.grid) == 32 * 16 * 16


@pytest.mark.parametrize(("nbytes", "plain"), [(32, 2), (64, 4), (128, 8)])
def test_a_swizzle_spreads_rows_over_the_banks(nbytes, plain):
    rows = 1024 + np.arange(8)[:, None] * nbytes + np.arange(2) * 16
    assert count_core_wavefronts(rows).tolist() == [plain] * 2
    assert count_core_wavefronts(swizzle_addresses(rows, nbytes)).tolist() == [1, 1]


@pytest.mark.parametrize("row_bytes", [32, 64, 128])
def test_hoppers_operands_have_wgmmas_swizzle(row_bytes):
    kernel = build(SMALL_HALF, "hopper", block_k_bytes=row_bytes, block_n=32, stages=2)
    loaded = {each.array: each for each in inspect_tiles(kernel, kernel.kernels[0]) if each.kind == "load"}
    assert set(loaded) == {"X", "K"}
    for tile in loaded.values():
        assert tile.wgmma_swizzles == {tile.tma_swizzle} == {row_bytes}
        assert tile.num_core_matrices == tile.num_wavefronts > 0


def test_a_tile_read_with_another_swizzle_is_reported():
    text = format_tiles([SwizzledSmemTile("X", "load", 64, {128}, 8, 16)])
    assert "128 bytes" in text
    assert text.endswith("2.00")


def test_long_loops_end_once_all_their_tiles_were_seen():
    """And the output's tile, which is stored behind them, is listed all the same."""
    found = {}
    for channels in (64, 2048):
        text = f"conv2d:1x{channels}x16x16,64x{channels}x3x3,s1,p1,f16,nhwc"
        kernel = build(text, "hopper", block_n=64, stages=3, split_k=1)
        found[channels] = [
            (each.array, each.kind, each.tma_swizzle, each.wgmma_swizzles)
            for each in inspect_tiles(kernel, kernel.kernels[0])
        ]
    assert found[2048] == found[64]
    assert ("Y", "store") in {each[:2] for each in found[64]}
