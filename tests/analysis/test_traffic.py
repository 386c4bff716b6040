"""Memory operations and arithmetic are counted as executed: by thread, by warp, and only where conditions hold."""

from types import SimpleNamespace

import mapped
import pytest
from instructions import lowered, product, rows
from tvm.script import tirx as T  # noqa: N812

import tvmconv as tc
from tvmconv.analysis.memory.traffic import OperationCount, count_traffic
from tvmconv.analysis.tir.operations import (
    ADDITIONS,
    GLOBAL_LOADS,
    GLOBAL_STORES,
    MULTIPLICATIONS,
    SHARED_LOADS,
    SHARED_STORES,
    SHUFFLES,
    TEXTURE_FETCHES,
)
from tvmconv.builtin import tvm_script
from tvmconv.compiler.executable import LaunchConfig
from tvmconv.errors import AnalysisError

THREADS = 64
BLOCKS = 3
SIZE = THREADS * BLOCKS
LAUNCH = LaunchConfig((BLOCKS, 1, 1), (THREADS, 1, 1))


def counts(function, launch=LAUNCH, **spaces):
    """What the busiest block does, in a lowered function with arguments in these spaces."""
    return count_traffic(
        SimpleNamespace(kernels=[SimpleNamespace(function=function, launch=launch)], memory_scopes=spaces)
    )


def build(text, schedule, **config):
    return tc.build(tc.parse(text), schedule, arch="sm_90", config=config)


@pytest.fixture(scope="module")
def filter_of_three():
    """A filter of three taps at a sample a thread."""

    @tvm_script.prim_func(s_tir=True)
    def kernel(
        X_ptr: T.handle("float32", "global"), K_ptr: T.handle("float32", "global"), Y_ptr: T.handle("float32", "global")
    ):
        X = T.decl_buffer((SIZE,), data=X_ptr)
        K = T.decl_buffer((3,), data=K_ptr)
        Y = T.decl_buffer((SIZE,), data=Y_ptr)
        total = T.alloc_local((1,))
        block = T.launch_thread("blockIdx.x", BLOCKS)
        thread = T.launch_thread("threadIdx.x", THREADS)
        for tap in range(3):
            if tap == 0:
                total[0] = T.float32(0)
            total[0] = total[0] + K[tap] * T.if_then_else(
                T.And(block * THREADS + thread + tap >= 1, block * THREADS + thread + tap <= SIZE),
                X[block * THREADS + thread + tap - 1],
                T.float32(0),
            )
        Y[block * THREADS + thread] = T.max(total[0], T.float32(0))

    return kernel


def test_a_mask_in_constant_memory_doubles_a_filters_ratio(filter_of_three):
    """A multiplication and an addition for two loads, of the signal and of the mask."""
    assert counts(filter_of_three).flops_per_load == 1
    assert counts(filter_of_three, K="constant").flops_per_load == 2


def test_the_block_has_no_border_in_it_if_there_is_one_without(filter_of_three):
    """The first block reads a ghost cell less than the others."""
    assert counts(filter_of_three).counts[GLOBAL_LOADS].num_elements == 6 * THREADS
    alone = counts(filter_of_three, LaunchConfig((1, 1, 1), (THREADS, 1, 1)))
    assert alone.counts[GLOBAL_LOADS].num_elements == 6 * THREADS - 1


def test_a_block_without_border_is_found_beside_the_middle():
    """Of 10 x 10 blocks, fused, the one in the middle is the first of a row."""

    @tvm_script.prim_func(s_tir=True)
    def kernel(X_ptr: T.handle("float32", "global"), Y_ptr: T.handle("float32", "global")):
        X = T.decl_buffer((100 * THREADS,), data=X_ptr)
        Y = T.decl_buffer((100 * THREADS,), data=Y_ptr)
        block = T.launch_thread("blockIdx.x", 100)
        thread = T.launch_thread("threadIdx.x", THREADS)
        at = T.meta_var(block * THREADS + thread)
        Y[at] = T.if_then_else(block % 10 * THREADS + thread >= 1, X[at - 1], T.float32(0))

    found = counts(kernel, LaunchConfig((100, 1, 1), (THREADS, 1, 1)))
    assert found.counts[GLOBAL_LOADS].num_elements == THREADS


def test_tiling_loads_its_local_tiles_from_shared_memory():
    """At the chapter's shape, each step: 2 rows of 4 + 2 columns, and 8 channels of a filter's row."""
    found = count_traffic(build("conv2d:1x64x64x64,64x64x3x3,s1,p1", "tiling"))
    threads, steps = 128, 64 * 3
    loads = threads * steps * (2 * 6 + 8 * 3)
    assert found.counts[SHARED_LOADS] == OperationCount(loads, loads // 32, 4 * loads)
    assert found.count_per_output(GLOBAL_STORES) == 1
    assert found.count_per_output(MULTIPLICATIONS) == found.count_per_output(ADDITIONS) == 64 * 9


def test_an_asynchronous_copy_is_a_load_and_a_store():
    text = "conv2d:1x8x16x16,16x8x3x3,p1"
    plain, copied = (count_traffic(build(text, "direct", pipeline=name)) for name in ("none", "async2"))
    assert copied.counts == plain.counts


def test_a_branch_that_is_not_taken_is_not_counted():
    @tvm_script.prim_func(s_tir=True)
    def kernel(X_ptr: T.handle("float32", "global"), Y_ptr: T.handle("float32", "global")):
        X = T.decl_buffer((SIZE,), data=X_ptr)
        Y = T.decl_buffer((SIZE,), data=Y_ptr)
        thread = T.launch_thread("threadIdx.x", THREADS)
        for step in range(4):
            if thread < 8 * step:
                Y[thread] = X[thread]
            else:
                Y[thread] = T.Select(thread < 40, X[thread], T.float32(0))

    found = counts(kernel).counts
    taken = [0, 8, 16, 24]
    assert found[GLOBAL_STORES].num_elements == 4 * THREADS
    assert found[GLOBAL_LOADS].num_elements == sum(taken) + sum(40 - n for n in taken)
    assert found[GLOBAL_LOADS].num_requests == 3 + 4 * 2  # the second warp is never in the first branch


def test_textures_and_shuffles_are_counted():
    @tvm_script.prim_func(s_tir=True)
    def kernel(X_ptr: T.handle("float32", "global"), Y_ptr: T.handle("float32", "global")):
        X = T.decl_buffer((SIZE,), data=X_ptr)
        Y = T.decl_buffer((SIZE,), data=Y_ptr)
        thread = T.launch_thread("threadIdx.x", THREADS)
        texel: T.let[T.float32] = T.call_pure_extern(
            "float32", "tex2D<float>", T.address_of(X[0]), T.Cast("float32", thread) + T.float32(0.5), T.float32(0)
        )
        Y[thread] = T.cuda.__shfl_down_sync(T.uint32(0xFFFFFFFF), texel, 1, 32)

    found = counts(kernel, X="texture")
    assert found.counts[TEXTURE_FETCHES] == found.counts[SHUFFLES] == OperationCount(THREADS, 2, 4 * THREADS)
    assert found.counts[GLOBAL_LOADS] == OperationCount()
    assert found.flops == 0


def test_a_condition_on_memory_is_refused():
    @tvm_script.prim_func(s_tir=True)
    def kernel(X_ptr: T.handle("float32", "global"), Y_ptr: T.handle("float32", "global")):
        X = T.decl_buffer((SIZE,), data=X_ptr)
        Y = T.decl_buffer((SIZE,), data=Y_ptr)
        thread = T.launch_thread("threadIdx.x", THREADS)
        if X[thread] < T.float32(1):
            Y[thread] = T.float32(0)

    with pytest.raises(AnalysisError, match=r"index arithmetic.*TensorLoad"):
        counts(kernel)


@pytest.mark.parametrize(
    ("text", "num_loads"),
    [("conv2d:1x8x4x4,8x8x1x1,drelu", 17), ("conv2d:1x8x4x4,8x8x1x1,e4m3", 16), ("conv2d:1x8x4x4,8x8x1x1,e5m2", 16)],
)
def test_both_values_of_a_selection_by_data_are_counted(text, num_loads):
    traffic = count_traffic(build(text, "default"))
    assert traffic.counts[GLOBAL_LOADS].num_elements == num_loads * traffic.counts[GLOBAL_STORES].num_elements


def test_a_condition_on_too_many_iterations_is_looked_at_in_some():
    @tvm_script.prim_func(s_tir=True)
    def kernel(Y_ptr: T.handle("float32", "global")):
        Y = T.decl_buffer((SIZE,), data=Y_ptr)
        thread = T.launch_thread("threadIdx.x", THREADS)
        for step in range(1 << 20):
            if step % 3 == 0:
                Y[thread] = T.float32(0)

    assert counts(kernel).counts["global stores"].num_elements == pytest.approx(THREADS * 2**20 / 3, rel=0.01)


def test_elements_of_too_many_iterations_are_refused():
    """How many different ones are stored to cannot be told from some."""

    @tvm_script.prim_func(s_tir=True)
    def kernel(Y_ptr: T.handle("float32", "global")):
        Y = T.decl_buffer((1 << 20,), data=Y_ptr)
        thread = T.launch_thread("threadIdx.x", THREADS)
        for step in range(1 << 20):
            if thread == 0:
                Y[step] = T.float32(0)

    with pytest.raises(AnalysisError, match=r"depends on 1,048,576 iterations"):
        counts(kernel)


def test_an_mma_and_what_goes_to_it_count_as_they_are():
    """Of one warp: a tile of 16 × 16 and one of 8 × 16, in 2 bytes each, and 16 × 8 sums."""
    found = count_traffic(lowered(product())).counts
    assert found[MULTIPLICATIONS] == found[ADDITIONS] == OperationCount(16 * 8 * 16, 1, 4 * 16 * 8 * 16)
    assert found[GLOBAL_LOADS] == found[SHARED_STORES] == OperationCount(16 * 16 + 8 * 16, 2, 2 * (16 * 16 + 8 * 16))
    assert found[SHARED_LOADS] == OperationCount(16 * 16 + 8 * 16, 2, 2 * (16 * 16 + 8 * 16))
    assert found[GLOBAL_STORES] == OperationCount(16 * 8, 2, 4 * 16 * 8)
    assert count_traffic(lowered(product())).num_outputs == 16 * 8


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("conv2d:1x128x8x8,32x128x3x3,s1,p1,f16,nhwc", "tensor_core"),
        ("conv2d:1x128x8x8,32x128x3x3,s1,p1,bf16,nhwc", "mma_sync"),
        ("conv2d:1x128x8x8,32x128x3x3,s1,p1,tf32,nhwc", "mma_sync"),
    ],
)
def test_a_convolution_on_tensor_cores_multiplies_what_it_has_to(text, schedule):
    kernel = build(text, schedule, split_k=1)
    found = count_traffic(kernel)
    assert found.counts[MULTIPLICATIONS].num_elements * kernel.launch.num_blocks * 2 == kernel.workload.flops
    assert found.num_outputs * kernel.launch.num_blocks == 32 * 8 * 8


def test_what_tma_copies_and_wgmma_reads_is_counted():
    kernel = tc.build(mapped.WORKLOAD, mapped.SCHEDULE, arch="sm_90")
    counts = count_traffic(kernel).counts
    inside, tile = (3 * 8 - 2) ** 2 * 64, 64 * 64  # of the pixels under 9 taps those in the image; elements
    assert counts[GLOBAL_LOADS].num_elements == inside + 9 * tile
    assert counts[GLOBAL_LOADS].num_bytes == 2 * counts[GLOBAL_LOADS].num_elements
    assert counts[SHARED_STORES].num_elements == counts[SHARED_LOADS].num_elements == 9 * 2 * tile
    assert counts[MULTIPLICATIONS].num_elements == mapped.WORKLOAD.flops / 2


@pytest.mark.parametrize(
    ("text", "schedule", "config"),
    [
        ("conv2d:1x8x9x9,8x8x3x3,s1,p1,gelu", "tiling", {}),
        ("conv2d:1x8x16x16,16x8x3x3,p1,relu", "direct", {"pipeline": "async2"}),
        ("filter1d:4096,k5", "shuffle", {}),
    ],
)
def test_the_text_and_an_execution_count_the_same(text, schedule, config, monkeypatch):
    kernel = build(text, schedule, **config)
    from_text = count_traffic(kernel)
    monkeypatch.setattr("tvmconv.analysis.memory.traffic.needs_execution", lambda function: True)
    assert count_traffic(kernel) == from_text


def test_what_depends_on_the_data_is_not_counted():
    assert count_traffic(lowered(rows(swizzled=True))).counts[SHARED_LOADS].num_elements == 3 * 32 * 4
    with pytest.raises(AnalysisError, match="depends on the data"):
        count_traffic(lowered(rows(swizzled=True, branches=True)))
