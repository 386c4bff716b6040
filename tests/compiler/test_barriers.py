"""Missing barriers are found where threads share an element of shared memory, and nowhere else."""

import pytest
from tvm import te
from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812

from tvmconv import devices
from tvmconv.builtin import tvm_script
from tvmconv.compiler.barriers import find_missing_barriers
from tvmconv.compiler.device_lowering import lower_module
from tvmconv.errors import AnalysisError, CompileError

COLUMNS = 30


def staged(*, rows=2, rounds=1, before=False, between=False, own=False):
    """A kernel whose first row of threads stores what all rows load, in rounds, with barriers where asked for.

    Args:
        rows: of threads.
        rounds: of the loop around both accesses.
        before: a barrier before the store.
        between: a barrier between store and load.
        own: each row stores and loads elements of its own.
    """
    stride = COLUMNS if own else 0

    @tvm_script.prim_func(s_tir=True)
    def kernel(X_ptr: T.handle("float32", "global"), Y_ptr: T.handle("float32", "global")):
        X = T.decl_buffer((COLUMNS,), data=X_ptr)
        Y = T.decl_buffer((rows * COLUMNS,), data=Y_ptr)
        shared = T.alloc_shared((rows * COLUMNS,))
        y = T.launch_thread("threadIdx.y", rows)
        x = T.launch_thread("threadIdx.x", COLUMNS)
        for _ in range(rounds):
            if before:
                T.tvm_storage_sync("shared")
            if y < 1:
                shared[y * stride + x] = X[x]
            if between:
                T.tvm_storage_sync("shared")
            Y[y * COLUMNS + x] = shared[y * stride + x]

    return kernel


def test_a_load_behind_a_store_needs_a_barrier():
    (race,) = find_missing_barriers(staged())
    assert (race.buffer, race.thread_axes) == ("shared", ("threadIdx.y",))
    assert find_missing_barriers(staged(between=True)) == []


def test_a_store_in_the_next_round_needs_a_barrier_too():
    assert find_missing_barriers(staged(rounds=2, between=True))
    assert find_missing_barriers(staged(rounds=2, before=True))
    assert find_missing_barriers(staged(rounds=2, before=True, between=True)) == []


def test_threads_with_elements_of_their_own_need_no_barrier():
    assert find_missing_barriers(staged(rounds=2, own=True)) == []


def repeated(*, shared=True, between=True):
    """A kernel whose first row of threads stores in a while loop what all rows load in it, with a barrier between."""
    scope = "shared" if shared else "local"

    @tvm_script.prim_func(s_tir=True)
    def kernel(X_ptr: T.handle("float32", "global"), Y_ptr: T.handle("float32", "global")):
        X = T.decl_buffer((COLUMNS,), data=X_ptr)
        Y = T.decl_buffer((2 * COLUMNS,), data=Y_ptr)
        staged = T.alloc_buffer((COLUMNS,), scope=scope)
        y = T.launch_thread("threadIdx.y", 2)
        x = T.launch_thread("threadIdx.x", COLUMNS)
        while X[0] > T.float32(0):
            if y < 1:
                staged[x] = X[x]
            if between:
                T.tvm_storage_sync("shared")
            Y[y * COLUMNS + x] = staged[x]

    return kernel


def test_a_race_through_a_while_loop_is_not_called_safe():
    """The load of one round and the store of the next have no barrier between them."""
    (race,) = find_missing_barriers(repeated())
    assert (race.buffer, race.thread_axes) == ("staged", ("threadIdx.y",))


def test_barrier_in_a_while_loop_separates_nothing_around_it():
    @tvm_script.prim_func(s_tir=True)
    def kernel(X_ptr: T.handle("float32", "global"), Y_ptr: T.handle("float32", "global")):
        X = T.decl_buffer((COLUMNS,), data=X_ptr)
        Y = T.decl_buffer((2 * COLUMNS,), data=Y_ptr)
        shared = T.alloc_shared((COLUMNS,))
        y = T.launch_thread("threadIdx.y", 2)
        x = T.launch_thread("threadIdx.x", COLUMNS)
        if y < 1:
            shared[x] = X[x]
        while X[0] > T.float32(0):
            T.tvm_storage_sync("shared")
        Y[y * COLUMNS + x] = shared[x]

    assert find_missing_barriers(kernel)


def unknown(scope):
    """A kernel with a statement that the check does not know."""

    @tvm_script.prim_func(s_tir=True)
    def kernel(Y_ptr: T.handle("float32", "global")):
        Y = T.decl_buffer((COLUMNS,), data=Y_ptr)
        staged = T.alloc_buffer((COLUMNS,), scope=scope)
        x = T.launch_thread("threadIdx.x", COLUMNS)
        assert x < COLUMNS, ("ValueError", ["no such column"])
        staged[x] = T.float32(1)
        Y[x] = staged[x]

    return kernel


@pytest.mark.parametrize("scope", ["shared", "shared.dyn"])
def test_unknown_statement_is_an_analysis_error(scope):
    with pytest.raises(AnalysisError, match="shared memory and a statement of the kind AssertStmt"):
        find_missing_barriers(unknown(scope))


def test_a_kernel_of_which_it_cannot_be_told_is_refused(monkeypatch):
    def cannot_tell(function):
        raise AnalysisError("a statement of the kind Strange")

    monkeypatch.setattr("tvmconv.compiler.barriers.find_missing_barriers", cannot_tell)
    with pytest.raises(CompileError, match="cannot determine whether the kernel lacks a barrier: a statement"):
        row_of_sums(innermost="y")


def row_of_sums(innermost):
    """A lowered kernel in which all threads y read the columns that threads x stage, scheduled as convolutions are."""
    terms = te.placeholder((4, COLUMNS), name="terms")
    step = te.reduce_axis((0, 4), name="step")
    sums = te.compute((2, COLUMNS), lambda _row, column: te.sum(terms[step, column], axis=step), name="sums")
    s = Schedule(te.create_prim_func([terms, sums]))
    block = s.get_sblock("sums")
    row, column, step = s.get_loops(block)
    s.reorder(*((row, column) if innermost == "x" else (column, row)), step)
    s.bind(row, "threadIdx.y")
    s.bind(column, "threadIdx.x")
    copy = s.cache_read(block, 0, "shared")
    s.compute_at(copy, step)
    _each, y, x = s.split(s.get_loops(copy)[-1], [None, 2, COLUMNS])
    s.bind(y, "threadIdx.y")
    s.bind(x, "threadIdx.x")
    s.decompose_reduction(block, step)
    return lower_module(s.mod, devices.find_device("sm_75").make_target()).kernels[0].function


def test_a_kernel_that_tvm_leaves_a_barrier_out_of_is_refused():
    """If this fails, TVM's rule has changed, and schedules may nest their thread loops as they like."""
    with pytest.raises(CompileError, match=r"barrier: threads along threadIdx.y share terms_shared\[threadIdx_x\]"):
        row_of_sums(innermost="x")


def test_tvm_needs_no_barrier_if_the_missing_axis_is_innermost():
    assert find_missing_barriers(row_of_sums(innermost="y")) == []
