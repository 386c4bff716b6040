"""Bank conflicts are counted as the hardware counts them: distinct words of a bank, one warp at a time."""

import numpy as np
import pytest
import steps
from tvm.ir import IRModule
from tvm.script import tirx as T  # noqa: N812

import tvmconv as tc
from tvmconv.analysis.banks import bank_wavefronts, shared_accesses
from tvmconv.analysis.traffic import ADDITIONS, MULTIPLICATIONS, SHARED_STORES, traffic
from tvmconv.compiler.lower import lower
from tvmconv.devices import find


def wavefronts(words):
    words = np.asarray(words).reshape(1, -1)
    return bank_wavefronts(words, np.ones(words.shape, bool))[1]


@pytest.mark.parametrize(
    ("stride", "ways"), [(1, 1), (2, 2), (3, 1), (4, 4), (8, 8), (16, 16), (32, 32), (33, 1), (0, 1)]
)
def test_a_stride_takes_as_many_wavefronts_as_it_shares_factors_with_the_banks(stride, ways):
    assert wavefronts(np.arange(32) * stride) == ways


def test_threads_that_read_one_word_are_served_together():
    assert wavefronts(np.arange(32) // 16 * 32) == 2  # two words of one bank
    assert wavefronts(np.arange(32) // 16) == 1  # two words of two banks


def test_each_warp_is_counted_by_itself():
    words = np.arange(64)[None, :]
    assert bank_wavefronts(words, np.ones(words.shape, bool)) == (2, 2)


def test_threads_that_take_no_part_cost_nothing():
    words = np.arange(32)[None, :] * 32
    active = (np.arange(32) < 2)[None, :]
    assert bank_wavefronts(words, active) == (1, 2)
    assert bank_wavefronts(words, np.zeros(words.shape, bool)) == (0, 0)


def test_a_last_warp_that_is_not_full_is_a_warp():
    words = np.arange(40)[None, :]
    assert bank_wavefronts(words, np.ones(words.shape, bool)) == (2, 2)


@pytest.mark.parametrize(
    ("lanes", "stride", "requests", "ways"),
    [
        (2, 2, 1, 1),  # a word a thread
        (4, 4, 2, 1),  # 8 bytes a thread: half a warp fills the banks
        (8, 8, 4, 1),  # 16 bytes: a quarter
        (8, 0, 4, 1),  # all read the same
        (8, 16, 4, 2),  # every other 16 bytes
        (8, 72, 4, 1),  # rows of 9 times 16 bytes
    ],
)
def test_a_vector_is_served_by_parts_of_a_warp(lanes, stride, requests, ways):
    @T.prim_func(s_tir=True)
    def main(Y: T.Buffer((32 * lanes,), "float16")):  # type: ignore[valid-type]
        staged = T.sblock_alloc_buffer((31 * stride + lanes,), "float16", scope="shared")
        for thread in T.thread_binding(32, thread="threadIdx.x"):
            for lane in T.vectorized(lanes):
                staged[thread * stride + lane] = T.float16(0)
            for lane in T.vectorized(lanes):
                Y[thread * lanes + lane] = staged[thread * stride + lane]

    lowered = lower(IRModule({"main": main}), find("sm_90").target())
    (load,) = (access for access in shared_accesses(lowered) if access.kind == "load")
    assert (load.requests, load.wavefronts) == (requests, requests * ways)


def test_a_kernels_shared_loads_are_all_found():
    """Of `tiling` at the chapter's shape, by hand: 64 channels x 3 rows of the filter, each read for 3 columns."""
    kernel = tc.build(tc.parse("conv2d:1x64x64x64,64x64x3x3,s1,p1"), "tiling", arch="sm_90")
    loads = {a.buffer: a for a in shared_accesses(kernel) if a.kind == "load"}
    warps, steps = 4, 64 * 3
    assert loads["padded_shared"].requests == warps * steps * 2 * 6  # a local tile of 2 rows and 4 + 2 columns
    assert loads["weight_shared"].requests == warps * steps * 8 * 3
    assert loads["weight_shared"].conflicts == 0  # a warp has one row of channels: a broadcast
    assert loads["padded_shared"].wavefronts >= 4 * loads["padded_shared"].requests  # columns 4 words apart


def test_dynamic_shared_memory_is_shared_memory():
    kernel = tc.build(steps.WORKLOAD, steps.DYNAMIC, arch="sm_90")
    accesses = shared_accesses(kernel)
    stored = sum(access.requests for access in accesses if access.kind == "store")
    assert 32 * stored == steps.DYNAMIC_BYTES // 4
    assert sum(access.requests for access in accesses if access.kind == "load") == 4 * 2  # four sums of two warps
    assert all(access.conflicts == 0 for access in accesses)
    assert traffic(kernel).counts[SHARED_STORES].elements == steps.DYNAMIC_BYTES // 4


def test_each_step_has_its_own_traffic():
    kernel = tc.build(steps.WORKLOAD, steps.SCHEDULE, arch="sm_90")
    products, sums = (traffic(kernel, step) for step in kernel.steps)
    assert (products.counts[MULTIPLICATIONS].elements, products.counts[ADDITIONS].elements) == (64, 0)
    assert (sums.counts[MULTIPLICATIONS].elements, sums.counts[ADDITIONS].elements) == (0, 3 * 64)
