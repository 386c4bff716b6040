"""Kernels of several steps, with scratch memory between them; and programs with a step changed."""

import dataclasses

import tvm
from tvm import te
from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812

from tvmconv.compiler.lower import lower

ROWS, COLUMNS = 8, 40


def with_step(program, **changes):
    """A program of one step with that step changed."""
    (step,) = program.steps
    return dataclasses.replace(program, steps=(dataclasses.replace(step, **changes),))


@T.prim_func(s_tir=True)
def row_sums(X: T.Buffer((ROWS, COLUMNS), "float32"), K: T.Buffer((ROWS,), "float32"), Y: T.Buffer((ROWS,), "float32")):
    """Y[i] = K[i] · ΣX[i]: products to scratch memory, then their sums."""
    with T.sblock("root"):
        P = T.alloc_buffer((ROWS, COLUMNS), "float32")
        for block in T.thread_binding(ROWS, thread="blockIdx.x"):
            for thread in T.thread_binding(COLUMNS, thread="threadIdx.x"):
                with T.sblock("P"):
                    i, j = T.axis.remap("SS", [block, thread])
                    P[i, j] = X[i, j] * K[i]
        for thread in T.thread_binding(ROWS, thread="threadIdx.x"):
            for column in range(COLUMNS):
                with T.sblock("Y"):
                    i, j = T.axis.remap("SR", [thread, column])
                    with T.init():
                        Y[i] = T.float32(0)
                    Y[i] = Y[i] + P[i, j]


@T.prim_func(s_tir=True)
def row_sums_unwritten(
    X: T.Buffer((ROWS, COLUMNS), "float32"), K: T.Buffer((ROWS,), "float32"), Y: T.Buffer((ROWS,), "float32")
):
    """As `row_sums`, but the last column of the scratch memory is read and never written."""
    with T.sblock("root"):
        P = T.alloc_buffer((ROWS, COLUMNS), "float32")
        for block in T.thread_binding(ROWS, thread="blockIdx.x"):
            for thread in T.thread_binding(COLUMNS - 1, thread="threadIdx.x"):
                with T.sblock("P"):
                    i, j = T.axis.remap("SS", [block, thread])
                    P[i, j] = X[i, j] * K[i]
        for thread in T.thread_binding(ROWS, thread="threadIdx.x"):
            for column in range(COLUMNS):
                with T.sblock("Y"):
                    i, j = T.axis.remap("SR", [thread, column])
                    with T.init():
                        Y[i] = T.float32(0)
                    Y[i] = Y[i] + P[i, j]


def split_sums(parts=4, dtype="float32"):
    """ΣX[i] by `rfactor`: sums of `parts` to scratch memory, then their sum; as split reductions are scheduled."""
    X = te.placeholder((ROWS, COLUMNS), dtype, name="X")
    j = te.reduce_axis((0, COLUMNS), name="j")
    s = Schedule(te.create_prim_func([X, te.compute((ROWS,), lambda i: te.sum(X[i, j], axis=j), name="Y")]))
    total = s.get_sblock("Y")
    _, column = s.get_loops(total)
    part, _ = s.split(column, [parts, None])
    partial = s.rfactor(part, 0)
    part, row, _ = s.get_loops(partial)
    s.bind(part, "blockIdx.x")
    s.bind(row, "threadIdx.x")
    s.bind(s.get_loops(total)[0], "threadIdx.x")
    return s.mod


def lower_function(function, device):
    """Lower a PrimFunc."""
    return lower(tvm.IRModule({"main": function}), device.target())


def dynamic_sums(words, threads=256):
    """Y = X backwards, through `words` floats of dynamic shared memory, all of which is written and read."""

    @T.prim_func(s_tir=True)
    def main(X: T.Buffer((words,), "float32"), Y: T.Buffer((words,), "float32")):
        with T.sblock("root"):
            for _block in T.thread_binding(1, thread="blockIdx.x"):
                S = T.alloc_buffer((words,), "float32", scope="shared.dyn")
                for thread in T.thread_binding(threads, thread="threadIdx.x"):
                    for i in range(words // threads):
                        S[i * threads + thread] = X[i * threads + thread]
                for thread in T.thread_binding(threads, thread="threadIdx.x"):
                    for i in range(words // threads):
                        Y[i * threads + thread] = S[words - 1 - i * threads - thread]

    return main
