"""Races are found by execution, also where shared memory is accessed by address."""

import re

import bulk
import mapped
import pytest
from instructions import lowered
from tvm.script import tirx as T  # noqa: N812

import tvmconv as tc
from tvmconv.analysis.races import find_races
from tvmconv.builtin import tvm_script
from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.instructions import dispatch

PLAIN = "conv2d:1x32x8x8,32x32x3x3,s1,p1"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("text", "schedule", "config"),
    [
        (PLAIN, "tiling", {}),
        (PLAIN, "implicit_gemm", {"pipeline": "async3"}),
        (f"{PLAIN},f16,nhwc", "tensor_core", {}),
        (f"{PLAIN},f16,nhwc", "mma_sync", {}),
        (f"{PLAIN},tf32,nhwc", "mma_sync", {"split_k": 2}),
    ],
)
def test_schedules_do_not_race(text, schedule, config):
    kernel = tc.build(tc.parse(text), schedule, arch="sm_90", config=config)
    assert find_races(kernel) == []


TILE = {"block_m": 32, "block_n": 32, "block_k": 32, "warps_m": 2, "warps_n": 1, "warps_k": 1, "stages": 3}
CLUSTERS = {**TILE, "split_k": 2, "split_k_reduction": "cluster"}
MEETING = {"warpgroups": 1, "wgmma_m_tiles": 1, "block_n": 16, "block_k_bytes": 64, "stages": 2, "split_k": 2}
BARRIERS = ("tirx.cuda.cta_sync", "tirx.cuda.cluster_sync", "tirx.tvm_storage_sync")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("text", "schedule", "config"),
    [
        (f"{PLAIN},f16,nhwc", "tensor_core", {}),
        (
            "conv2d:1x64x8x8,32x64x3x3,s1,p1,f16,nhwc",
            "mma_sync",
            CLUSTERS,
        ),  # its last step is in the ring's first stage
        (PLAIN, "implicit_gemm", {"pipeline": "async3"}),
        ("conv2d:1x96x8x8,32x96x1x1,s1,p0,f16,nhwc", "hopper", MEETING),
    ],
)
def test_any_barrier_that_is_left_out_is_missed(text, schedule, config, monkeypatch):
    kernel = tc.build(tc.parse(text), schedule, arch="sm_90", config=config)
    whole, seen = dispatch.translate_statement, []

    def without(left_out):
        def statement(node, compiler):
            if str(node.op.name) not in BARRIERS:
                return whole(node, compiler)
            if not seen or seen[-1] is not compiler:  # those who wait for each other are executed apart: begun again
                seen.clear()
            seen.append(compiler)
            return (lambda mask: None) if len(seen) == left_out else whole(node, compiler)

        seen.clear()
        monkeypatch.setattr(dispatch, "translate_statement", statement)
        return find_races(kernel, [(0, 0, 0)])

    assert without(None) == []
    count = len(seen)
    assert count >= 3
    for i in range(1, count + 1):
        assert without(i), f"barrier {i} of {count}"


def rows(*, synchronised, extent=64, itself=False):
    """A kernel of two warps of which each thread reads what another, or it itself, has stored; of 64 elements."""

    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer((64,), "float32"), Y: T.Buffer((64,), "float32")):
        for thread in T.thread_binding(extent, thread="threadIdx.x"):
            shared = T.sblock_alloc_buffer((64,), "float32", scope="shared.dyn")
            at = T.sblock_alloc_buffer((1,), "uint32", scope="local")
            value = T.sblock_alloc_buffer((1,), "float32", scope="local")
            at[0] = T.cuda.cvta_generic_to_shared(shared.access_ptr("rw"))
            T.ptx["st.shared.b32"](at[0] + T.uint32(thread * 4), X[thread])
            if synchronised:
                T.cuda.cta_sync()
            T.ptx["ld.shared.b32"](value[0], at[0] + T.uint32((thread if itself else 63 - thread) * 4))
            Y[thread] = value[0]

    return lowered(main)


def test_kernels_of_tensor_maps_do_not_race_or_else_it_is_told():
    assert find_races(tc.build(mapped.WORKLOAD, mapped.SCHEDULE, arch="sm_90")) == []
    (race,) = find_races(bulk.stored(fence=False))
    assert "no fence.proxy.async" in race


def test_a_race_of_ptx_accesses_is_told():
    (race,) = find_races(rows(synchronised=False))
    assert re.fullmatch(
        r"race: thread 0 of block \(0, 0, 0\) reads byte 252 of shared memory, "
        r"which thread 63 of block \(0, 0, 0\) has written with no barrier between",
        race,
    )


def test_a_barrier_or_a_place_of_its_own_is_no_race():
    assert find_races(rows(synchronised=True)) == []
    assert find_races(rows(synchronised=False, itself=True)) == []


def test_what_is_no_race_is_an_error_of_its_own():
    with pytest.raises(ExecutionError, match=r"out of bounds: .* X"):
        find_races(rows(synchronised=True, extent=96, itself=True))
