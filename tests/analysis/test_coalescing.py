"""Sectors of global memory: distinct ones of a request of a warp, counted by hand and in kernels."""

import numpy as np
import pytest

import tvmconv as tc
from tvmconv.analysis.memory.coalescing import count_global_accesses, count_sectors


def of_a_warp(addresses, nbytes=4, active=True):
    addresses = np.asarray(addresses).reshape(1, -1)
    return count_sectors(addresses, np.broadcast_to(active, addresses.shape), nbytes)


LANES = np.arange(32)


@pytest.mark.parametrize(
    ("addresses", "nbytes", "expected"),
    [
        (LANES * 4, 4, (1, 4, 4, 1)),
        (LANES[::-1] * 4, 4, (1, 4, 4, 1)),
        (LANES * 4 + 4, 4, (1, 5, 4, 2)),  # one element late
        (LANES * 8, 4, (1, 8, 4, 2)),
        (LANES * 32, 4, (1, 32, 4, 8)),
        (LANES * 4096, 4, (1, 32, 4, 32)),
        (LANES * 0, 4, (1, 1, 1, 1)),
        (LANES * 2, 2, (1, 2, 2, 1)),
        (LANES * 16, 16, (1, 16, 16, 4)),
        (LANES * 64, 16, (1, 32, 16, 16)),
        (LANES // 8 * 128, 4, (1, 4, 1, 4)),
        (LANES * 16 + 24, 16, (1, 17, 16, 5)),  # every other one lies across a border
    ],
)
def test_a_request_takes_the_sectors_and_lines_that_it_touches(addresses, nbytes, expected):
    assert of_a_warp(addresses, nbytes) == expected


def test_threads_that_take_no_part_touch_nothing():
    assert of_a_warp(LANES * 32, active=LANES < 3) == (1, 3, 1, 1)
    assert of_a_warp(LANES * 32, active=LANES < 0) == (0, 0, 0, 0)


def by_array(kernel, kind="load"):
    return {each.array: each for each in count_global_accesses(kernel) if each.kind == kind}


def test_the_default_schedule_reads_neighbouring_columns():
    """A thread a column of the output: inputs and outputs are neighbours, and of the filter all read one number."""
    kernel = tc.build(tc.parse("conv2d:1x4x64x64,4x4x3x3,s1,p1"), "default", arch="sm_90")
    loads = by_array(kernel)
    assert loads["K"].sectors == loads["K"].num_requests
    assert loads["K"].efficiency == 1.0
    store = by_array(kernel, "store")["Y"]
    assert store.sectors == store.min_sectors


def test_sectors_count_again_in_each_quarter_of_a_warp():
    lanes = np.arange(32)
    active = np.ones((1, 32), bool)
    again = (lanes % 16 * 16)[None, :]  # two rows of 256 bytes that are the same
    assert count_sectors(again, active, 16)[1] == 16
    shifted = (lanes * 16 + 16)[None, :]  # a sector lies over the end of each quarter
    assert count_sectors(shifted, active, 16)[1] == 17


def test_a_quarter_that_repeats_the_one_before_it_is_free():
    """As `grouped_nhwc` loads filters of 8 channels a group: eight lanes read what the eight before them read."""
    lanes, active = np.arange(32), np.ones((1, 32), bool)
    assert count_sectors((lanes % 4 * 576)[None, :], active, 16)[1] == 4
    assert count_sectors((lanes % 8 // 4 * 576 + lanes // 16 * 2048)[None, :], active, 16)[1] == 4
    active[0, 9] = False  # then the second quarter is another one, and the third again
    assert count_sectors((lanes % 4 * 576)[None, :], active, 16)[1] == 12


def test_of_asynchronous_copies_every_quarter_asks():
    """As `mma_sync` copies: Nsight Compute tells so."""
    lanes, active = np.arange(32), np.ones((1, 32), bool)
    assert count_sectors((lanes % 4 * 576)[None, :], active, 16, is_copy=True)[1] == 16
