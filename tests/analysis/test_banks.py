"""Bank conflicts are counted as the hardware counts them: distinct words of a bank, one warp at a time."""

import dataclasses

import numpy as np
import pytest
import steps
from instructions import lowered, product, rows

import tvmconv as tc
from tvmconv.analysis.memory.bank_conflicts import (
    count_copy_wavefronts,
    count_shared_accesses,
    count_wavefronts,
    count_wavefronts_by_request,
)
from tvmconv.analysis.memory.traffic import count_traffic
from tvmconv.analysis.tir.operations import SHARED_STORES
from tvmconv.analysis.tir.scopes import group_by_warp


def bank_wavefronts(words, active):
    """Requests and wavefronts of shared accesses of a word."""
    active = group_by_warp(active)
    return int(active.any(axis=1).sum()), int(count_wavefronts_by_request(4 * group_by_warp(words), active, 4)[0].sum())


def wavefronts(words):
    words = np.asarray(words).reshape(1, -1)
    return bank_wavefronts(words, np.ones(words.shape, bool))[1]


@pytest.mark.parametrize(
    ("stride", "ways"), [(1, 1), (2, 2), (3, 1), (4, 4), (8, 8), (16, 16), (32, 32), (33, 1), (0, 1)]
)
def test_a_stride_conflicts_by_its_common_factor_with_the_banks(stride, ways):
    assert wavefronts(np.arange(32) * stride) == ways


@pytest.mark.parametrize(
    ("words", "active", "expected"),
    [
        (np.arange(32) // 16 * 32, np.ones(32, bool), (1, 2)),  # two words of one bank, each read by 16 threads
        (np.arange(32) // 16, np.ones(32, bool), (1, 1)),  # two words of two banks
        (np.arange(32) * 32, np.arange(32) < 2, (1, 2)),  # threads that take no part cost nothing
        (np.arange(32) * 32, np.zeros(32, bool), (0, 0)),
        (np.arange(40), np.ones(40, bool), (2, 2)),  # a last warp that is not full is a warp
    ],
)
def test_active_threads_of_one_word_are_served_together(words, active, expected):
    assert bank_wavefronts(words[None], active[None]) == expected


@pytest.mark.parametrize(
    ("nbytes", "stride", "expected"),
    [
        (4, 4, (1, 1, 1)),
        (4, 8, (1, 2, 1)),
        (8, 8, (1, 2, 2)),
        (8, 16, (1, 4, 2)),
        (16, 16, (1, 4, 4)),
        (16, 32, (1, 8, 4)),  # two rows of 16 bytes lie in the same banks
        (16, 128, (1, 32, 4)),  # all do
        (16, 144, (1, 4, 4)),
        (2, 2, (1, 1, 1)),
    ],
)
def test_wide_accesses_are_served_by_parts_of_a_warp(nbytes, stride, expected):
    assert count_wavefronts((np.arange(32) * stride)[None], np.ones((1, 32), bool), nbytes) == expected


def test_the_rows_that_ldmatrix_reads_meet_in_the_banks():
    """Rows of 32 bytes: of 8 rows, the first 16 bytes of two lie in the same banks; eight rows have four of them."""
    copied, of_k, a, b = count_shared_accesses(lowered(product()))
    assert (copied.kind, copied.num_requests, copied.wavefronts, copied.min_wavefronts, copied.nbytes) == (
        "store",
        1,
        4,
        4,
        16,
    )
    assert (of_k.kind, of_k.num_requests, of_k.wavefronts) == ("store", 1, 2)
    assert (a.kind, a.num_requests, a.wavefronts, a.num_conflicts) == ("load", 1, 8, 4)
    assert (b.kind, b.num_requests, b.wavefronts, b.num_conflicts) == ("load", 1, 4, 2)


@pytest.mark.parametrize(("swizzled", "conflicts"), [(False, 3 * 4 * 7), (True, 0)])
def test_a_swizzle_of_a_ring_of_stages_is_followed(swizzled, conflicts):
    """Rows of 128 bytes: the same 16 bytes of 8 rows lie in the same banks, unless the row's number moves them."""
    accesses = count_shared_accesses(lowered(rows(swizzled=swizzled)))
    assert sum(each.num_conflicts for each in accesses if each.kind == "load") == conflicts
    assert sum(each.num_conflicts for each in accesses if each.kind == "store") == 0


@pytest.mark.parametrize("config", [{"pipeline": "async3"}, {}])
def test_the_text_and_an_execution_count_the_same(config, monkeypatch):
    kernel = tc.build(tc.parse("conv2d:1x16x8x8,16x16x3x3,s1,p1"), "implicit_gemm", arch="sm_90", config=config)
    from_text = count_shared_accesses(kernel)
    monkeypatch.setattr("tvmconv.analysis.tir.accesses.needs_execution", lambda function: True)

    def merged(accesses):  # what is not accessed at all is not seen by an execution
        return sorted(
            dataclasses.astuple(each)[:1] + dataclasses.astuple(each)[2:] for each in accesses if each.num_requests
        )

    assert merged(count_shared_accesses(kernel)) == merged(from_text)


def test_dynamic_shared_memory_is_shared_memory():
    kernel = tc.build(steps.WORKLOAD, steps.DYNAMIC, arch="sm_90")
    accesses = count_shared_accesses(kernel)
    stored = sum(access.num_requests for access in accesses if access.kind == "store")
    assert 32 * stored == steps.DYNAMIC_BYTES // 4
    assert sum(access.num_requests for access in accesses if access.kind == "load") == 4 * 2  # four sums of two warps
    assert all(access.num_conflicts == 0 for access in accesses)
    assert count_traffic(kernel).counts[SHARED_STORES].num_elements == steps.DYNAMIC_BYTES // 4


ALIGNED = 16 * np.arange(32)


@pytest.mark.parametrize(
    ("to", "source", "wavefronts"),
    [
        (ALIGNED, ALIGNED, 4),
        (ALIGNED + 96, ALIGNED, 8),  # each line goes to two rows
        (ALIGNED, np.full(32, -1), 4),  # zeros alone
        (ALIGNED, np.where(ALIGNED < 128, -1, ALIGNED), 7),  # a quarter of zeros, and lines for the others
        (ALIGNED, np.where(ALIGNED < 256, -1, ALIGNED), 6),
    ],
)
def test_copies_take_a_wavefront_for_each_line_and_row(to, source, wavefronts):
    active = np.ones((1, 32), bool)
    assert count_copy_wavefronts(to[None], active, source[None], source[None] >= 0) == (1, wavefronts, 4)
