"""How tiles lie in shared memory that TMA copies and wgmma multiplies."""

import numpy as np
import pytest

import tvmconv as tc
from tvmconv.analysis.memory.swizzles import SwizzledSmemTile, count_core_wavefronts, inspect_tiles
from tvmconv.emulator.instructions.tma_boxes import swizzle_addresses
from tvmconv.reports.swizzles import format_tiles

ROWS = np.arange(8)[:, None]


@pytest.mark.parametrize(("nbytes", "plain"), [(32, 2), (64, 4), (128, 8)])
def test_a_swizzle_of_a_row_spreads_rows_over_the_banks(nbytes, plain):
    rows = 1024 + ROWS * nbytes + np.arange(2) * 16
    assert count_core_wavefronts(rows).tolist() == [plain] * 2
    assert count_core_wavefronts(swizzle_addresses(rows, nbytes)).tolist() == [1, 1]


@pytest.mark.parametrize("row_bytes", [32, 64, 128])
def test_hoppers_operands_have_wgmmas_swizzle_and_no_conflict(row_bytes):
    w = tc.parse("conv2d:1x64x16x16,64x64x3x3,s1,p1,f16,nhwc")
    kernel = tc.build(w, "hopper", arch="sm_90", config={"block_k_bytes": row_bytes, "block_n": 32, "stages": 2})
    loaded = {each.array: each for each in inspect_tiles(kernel, kernel.kernels[0]) if each.kind == "load"}
    assert set(loaded) == {"X", "K"}
    for tile in loaded.values():
        assert tile.wgmma_swizzles == {tile.tma_swizzle} == {row_bytes}
        assert tile.num_core_matrices == tile.num_wavefronts > 0


def test_a_tile_that_is_read_with_another_swizzle_is_told_of():
    text = format_tiles([SwizzledSmemTile("X", "load", 64, {128}, 8, 16)])
    assert "128 bytes" in text
    assert text.endswith("2.00")


def test_long_loops_are_left_when_all_that_they_access_was_seen():
    """And the output's tile, which is stored behind them, is told all the same."""
    found = {}
    for channels in (64, 2048):
        w = tc.parse(f"conv2d:1x{channels}x16x16,64x{channels}x3x3,s1,p1,f16,nhwc")
        kernel = tc.build(w, "hopper", arch="sm_90", config={"block_n": 64, "stages": 3, "split_k": 1})
        found[channels] = [
            (each.array, each.kind, each.tma_swizzle, each.wgmma_swizzles)
            for each in inspect_tiles(kernel, kernel.kernels[0])
        ]
    assert found[2048] == found[64]
    assert ("Y", "store") in {each[:2] for each in found[64]}
