"""Lowered kernels are executed as GPUs execute them, and what they must not do is found."""

import emulate
import golden_barriers
import numpy as np
import pytest
import steps
from instructions import MMA, M, N, lowered, product
from tvm.script import tirx as T  # noqa: N812

import tvmconv as tc
from tvmconv.builtin import tvm_script
from tvmconv.emulator.errors import ExecutionError
from tvmconv.workloads.dtypes import get_numpy_dtype


def operands(dtype):
    rng = np.random.default_rng(0)
    k = 32 // get_numpy_dtype(dtype).itemsize
    return tuple(rng.standard_normal((rows, k)).astype(get_numpy_dtype(dtype)) for rows in (M, N))


def products(x, k):
    return x.astype(np.float64) @ k.astype(np.float64).T


def test_two_warps_may_read_what_one_has_copied_behind_a_barrier():
    x, k = operands("float16")
    found = emulate.run(lowered(product(warps=2)), [x, k])
    np.testing.assert_allclose(found, [products(x, k)] * 2, atol=1e-5)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (dict(wait=False), "an asynchronous copy is pending"),
        (dict(wait=False, warps=2), "an asynchronous copy is pending"),
        (dict(barrier=False), r"race: .* which thread 0 of block \(0, 0, 0\) has written with no barrier"),
        (dict(barrier=False, warps=2), "race: .* has written with no barrier"),
        (dict(overwriting=32, warps=2), "race: .* has read with no barrier"),
        (dict(overwriting=32), "race: .* has read with no barrier"),
        (dict(slack=8), "out of bounds: 16 bytes at byte 512 of X"),
        (dict(slack=1), "misaligned: 16 bytes at byte 2 of X"),
        (dict(shift=1024), "out of bounds: .* of shared memory"),
        (dict(shift=4), "misaligned"),
    ],
)
def test_what_a_kernel_must_not_do_is_found(faults, message):
    with pytest.raises(ExecutionError, match=message):
        emulate.run(lowered(product(**faults)), operands("float16"))


@pytest.mark.parametrize("dtype", MMA)
def test_what_nobody_has_written_shows(dtype):
    (found,) = emulate.run(lowered(product(dtype, copied=M - 2)), operands(dtype))
    assert np.isnan(found[M - 2 :]).all()
    assert np.isfinite(found[: M - 2]).all()


@pytest.mark.parametrize(
    ("direction", "missing", "message"),
    [
        ("load", "before", "race: .* has written with no barrier"),
        ("load", "behind", r"block \(.* may exit"),
        ("store", "before", "race: .* has written with no barrier"),
        ("store", "behind", "race: .* has written with no barrier"),
    ],
)
def test_a_missing_barrier_of_the_cluster_is_found(direction, missing, message):
    kernel = golden_barriers.cluster_exchange(2, direction, **{missing: False})
    with pytest.raises(ExecutionError, match=message):
        emulate.run(kernel.lower(), kernel.inputs)


def staged(reaching, *, warp=False):
    """A kernel whose threads each read what the next has staged; so many reach the barrier, or those of each warp."""

    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer((96,), "float32"), K: T.Buffer((1,), "float32"), Y: T.Buffer((96,), "float32")):
        for thread in T.thread_binding(96, thread="threadIdx.x"):
            shared = T.sblock_alloc_buffer((96,), "float32", scope="shared.dyn")
            at = T.sblock_alloc_buffer((1,), "uint32", scope="local")
            value = T.sblock_alloc_buffer((1,), "float32", scope="local")
            at[0] = T.cuda.cvta_generic_to_shared(shared.access_ptr("rw"))
            T.ptx["st.shared.b32"](at[0] + T.uint32(thread * 4), X[thread])
            if warp:
                T.cuda.warp_sync()
            if thread < reaching:
                T.cuda.cta_sync()
            T.ptx["ld.shared.b32"](value[0], at[0] + T.uint32((thread + 1) % 96 * 4))
            Y[thread] = value[0]

    return main


def test_a_barrier_orders_what_threads_of_all_warps_do():
    x = np.arange(96, dtype=np.float32)
    np.testing.assert_array_equal(emulate.run(lowered(staged(96)), [x, x[:1]]), np.roll(x, -1))


@pytest.mark.parametrize(
    ("reaching", "warp", "message"),
    [(0, False, "race"), (0, True, "race: thread 31 .* thread 32"), (64, False, "a barrier of the block that not all")],
)
def test_a_barrier_that_is_not_of_all_threads_orders_nothing(reaching, warp, message):
    x = np.arange(96, dtype=np.float32)
    with pytest.raises(ExecutionError, match=message):
        emulate.run(lowered(staged(reaching, warp=warp)), [x, x[:1]])


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("text", "schedule", "config"),
    [
        ("conv2d:1x8x8x8,8x8x3x3,s1,p1,silu", "tiling", {}),
        ("conv2d:1x8x9x9,8x8x3x3,s2,p1,gelu", "vthread", {}),
        ("conv2d:1x8x9x9,8x8x3x3,s2,p1,relu,f16", "conflict_free", {}),
        ("conv2d:1x16x8x8,16x16x3x3,s1,p1,bias,add,clamp,bf16,nhwc", "implicit_gemm", {}),
        ("conv2d:1x16x8x8,16x16x3x3,s1,p1", "implicit_gemm", {"pipeline": "async3"}),
        ("conv2d:1x16x7x7,32x16x3x3,s1,p1", "implicit_gemm", {"split_k": 2}),
        ("filter1d:4096,k5", "shuffle", {}),
    ],
)
def test_schedules_of_the_library_compute_what_they_should(text, schedule, config):
    workload = tc.parse(text)
    kernel = tc.build(workload, schedule, arch="sm_80", config=config)
    assert emulate.error(kernel.lowered_module, workload) <= workload.tolerance


def test_scratch_memory_that_nobody_has_written_shows():
    x, k = np.ones((steps.ROWS, steps.COLUMNS), np.float32), np.ones(steps.ROWS, np.float32)
    assert (emulate.run(lowered(steps.make_row_sums()), [x, k]) == steps.COLUMNS).all()
    assert np.isnan(emulate.run(lowered(steps.make_row_sums(steps.COLUMNS - 1)), [x, k])).all()
