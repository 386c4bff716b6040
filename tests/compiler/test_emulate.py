"""Lowered kernels are executed as GPUs execute them, and what they must not do is found."""

import emulate
import numpy as np
import pytest
import steps
from instructions import MMA, M, N, lowered, product
from tvm.script import tirx as T  # noqa: N812

import tvmconv as tc
from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.instructions.conversions import round_to_tf32
from tvmconv.workloads.dtypes import get_numpy_dtype


def operands(dtype):
    rng = np.random.default_rng(0)
    k = 32 // get_numpy_dtype(dtype).itemsize
    return tuple(rng.standard_normal((rows, k)).astype(get_numpy_dtype(dtype)) for rows in (M, N))


def products(x, k):
    return x.astype(np.float64) @ k.astype(np.float64).T


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-6), ("bfloat16", 1e-6), ("float32", 2e-3)])
def test_tile_of_ldmatrix_and_mma_is_the_product_of_matrices(dtype, tolerance):
    x, k = operands(dtype)
    (found,) = emulate.run(lowered(product(dtype)), [x, k])
    np.testing.assert_allclose(found, products(x, k), atol=tolerance * np.abs(products(x, k)).max())


def test_tf32_operands_are_cut_unless_they_are_rounded():
    x, k = operands("float32")
    cut, rounded = (emulate.run(lowered(product("float32", rna=rna)), [x, k])[0] for rna in (False, True))

    def as_tf32(values, rounding):
        return round_to_tf32(values.view(np.uint32), rounding).view(np.float32)

    np.testing.assert_allclose(cut, products(as_tf32(x, "rz"), as_tf32(k, "rz")), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(rounded, products(as_tf32(x, "rna"), as_tf32(k, "rna")), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("bits", "rounding", "expected"),
    [
        (0x3F801000, "rna", 0x3F802000),  # a tie
        (0x3F801000, "rn", 0x3F800000),
        (0x3F803000, "rn", 0x3F804000),
        (0x3F801FFF, "rz", 0x3F800000),
        (0x7FFFFFFF, "rna", 0x7FFFFFFF),  # no number
    ],
)
def test_rounding_to_tf32(bits, rounding, expected):
    assert round_to_tf32(np.array([bits], np.uint32), rounding)[0] == expected


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


def transposed(*, store):
    """A kernel that transposes 8 × 8 matrices, a warp four of them: as it loads them, or as it stores them."""
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16" if store else "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
    stored = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16" if store else "stmatrix.sync.aligned.m8n8.x4.shared.b16"

    @T.prim_func(s_tir=True)
    def main(X: T.Buffer((32, 8), "float16"), K: T.Buffer((1,), "float16"), Y: T.Buffer((32, 8), "float16")):
        for _ in T.thread_binding(1, thread="blockIdx.x"):
            for thread in T.thread_binding(32, thread="threadIdx.x"):
                shared = T.sblock_alloc_buffer((128,), "uint32", scope="shared.dyn")
                r = T.sblock_alloc_buffer((4,), "uint32", scope="local")
                at = T.sblock_alloc_buffer((1,), "uint32", scope="local")
                at[0] = T.cuda.cvta_generic_to_shared(shared.access_ptr("rw")) + T.uint32(thread * 16)
                T.ptx["ld.global.nc.v4.b32"](r[0], r[1], r[2], r[3], X.access_ptr("r", offset=thread * 8))
                T.ptx["st.shared.v4.b32"](at[0], r[0], r[1], r[2], r[3])
                T.cuda.warp_sync()
                T.ptx[load](r[0], r[1], r[2], r[3], at[0])
                T.cuda.warp_sync()
                T.ptx[stored](at[0], r[0], r[1], r[2], r[3])
                T.cuda.warp_sync()
                T.ptx["ld.shared.v4.b32"](r[0], r[1], r[2], r[3], at[0])
                T.ptx["st.global.v4.b32"](Y.access_ptr("w", offset=thread * 8), r[0], r[1], r[2], r[3])

    return main


@pytest.mark.parametrize("store", [False, True])
def test_ldmatrix_and_stmatrix_transpose(store):
    x = np.arange(256).reshape(32, 8).astype(np.float16)
    found = emulate.run(lowered(transposed(store=store)), [x, np.zeros(1, np.float16)])
    np.testing.assert_array_equal(found.reshape(4, 8, 8), x.reshape(4, 8, 8).transpose(0, 2, 1))


def neighbour(*, before=True, behind=True):
    """A kernel of clusters of two blocks, each of which reads what the other has stored in its shared memory."""

    @T.prim_func(s_tir=True)
    def main(X: T.Buffer((4, 32), "float32"), K: T.Buffer((1,), "float32"), Y: T.Buffer((4, 32), "float32")):
        for block in T.thread_binding(4, thread="blockIdx.z"):
            for rank in T.thread_binding(2, thread="clusterCtaIdx.z"):
                for thread in T.thread_binding(32, thread="threadIdx.x"):
                    shared = T.sblock_alloc_buffer((32,), "float32", scope="shared.dyn")
                    at = T.sblock_alloc_buffer((2,), "uint32", scope="local")
                    value = T.sblock_alloc_buffer((1,), "float32", scope="local")
                    at[0] = T.cuda.cvta_generic_to_shared(shared.access_ptr("rw")) + T.uint32(thread * 4)
                    T.ptx["st.shared.b32"](at[0], X[block, thread])
                    if before:
                        T.cuda.cluster_sync()
                    else:
                        T.cuda.cta_sync()
                    T.ptx["mapa.shared::cluster.u32"](at[1], at[0], T.Cast("uint32", 1 - rank))
                    T.ptx["ld.shared::cluster.b32"](value[0], at[1])
                    Y[block, thread] = value[0]
                    if behind:
                        T.cuda.cluster_sync()

    return main


def test_the_blocks_of_a_cluster_read_each_others_memory():
    x = np.arange(128, dtype=np.float32).reshape(4, 32)
    found = emulate.run(lowered(neighbour()), [x, np.zeros(1, np.float32)])
    np.testing.assert_array_equal(found, x[[1, 0, 3, 2]])


@pytest.mark.parametrize(
    ("missing", "message"),
    [(dict(before=False), "race: .* has written with no barrier"), (dict(behind=False), r"block \(.* may exit")],
)
def test_a_missing_barrier_of_the_cluster_is_found(missing, message):
    x = np.zeros((4, 32), np.float32)
    with pytest.raises(ExecutionError, match=message):
        emulate.run(lowered(neighbour(**missing)), [x, np.zeros(1, np.float32)])


def staged(reaching, *, warp=False):
    """A kernel whose threads each read what the next has staged; so many reach the barrier, or those of each warp."""

    @T.prim_func(s_tir=True)
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
    assert (emulate.run(lowered(steps.row_sums), [x, k]) == steps.COLUMNS).all()
    assert np.isnan(emulate.run(lowered(steps.row_sums_unwritten), [x, k])).all()


def handed(*, before=True, behind=True):
    """A kernel of clusters of two blocks, each of which stores into the memory of the other, which was cleared."""

    @T.prim_func(s_tir=True)
    def main(X: T.Buffer((4, 32), "float32"), K: T.Buffer((1,), "float32"), Y: T.Buffer((4, 32), "float32")):
        for block in T.thread_binding(4, thread="blockIdx.z"):
            for rank in T.thread_binding(2, thread="clusterCtaIdx.z"):
                for thread in T.thread_binding(32, thread="threadIdx.x"):
                    shared = T.sblock_alloc_buffer((32,), "float32", scope="shared.dyn")
                    at = T.sblock_alloc_buffer((2,), "uint32", scope="local")
                    value = T.sblock_alloc_buffer((1,), "float32", scope="local")
                    at[0] = T.cuda.cvta_generic_to_shared(shared.access_ptr("rw")) + T.uint32(thread * 4)
                    T.ptx["st.shared.b32"](at[0], T.float32(0))
                    if before:
                        T.cuda.cluster_sync()
                    T.ptx["mapa.shared::cluster.u32"](at[1], at[0], T.Cast("uint32", 1 - rank))
                    T.ptx["st.shared::cluster.b32"](at[1], X[block, thread])
                    if behind:
                        T.cuda.cluster_sync()
                    T.ptx["ld.shared.b32"](value[0], at[0])
                    Y[block, thread] = value[0]

    return main


def test_the_blocks_of_a_cluster_store_to_each_others_memory():
    x = np.arange(128, dtype=np.float32).reshape(4, 32)
    found = emulate.run(lowered(handed()), [x, np.zeros(1, np.float32)])
    np.testing.assert_array_equal(found, x[[1, 0, 3, 2]])


@pytest.mark.parametrize("missing", ["before", "behind"])
def test_a_store_to_another_block_without_a_barrier_is_a_race(missing):
    with pytest.raises(ExecutionError, match=r"race: .* has written with no barrier"):
        emulate.run(lowered(handed(**{missing: False})), [np.zeros((4, 32), np.float32), np.zeros(1, np.float32)])
