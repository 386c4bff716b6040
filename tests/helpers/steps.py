"""Kernels of several steps, with scratch memory between them; and programs with a step changed."""

import dataclasses
import functools

import tvm
from tvm import te
from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812

from tvmconv import registry
from tvmconv.builtin import tvm_script
from tvmconv.compiler.device_lowering import lower_module
from tvmconv.space import Knobs
from tvmconv.workloads import parse

ROWS, COLUMNS = 8, 40


def with_step(program, **changes):
    """A program of one step with that step changed."""
    (step,) = program.kernels
    return dataclasses.replace(program, kernels=(dataclasses.replace(step, **changes),))


@functools.cache  # the parser of TVM's scripts takes a tenth of a second, which no import of this module should cost
def make_row_sums(written_columns=COLUMNS):
    """Y[i] = K[i] · ΣX[i]: products of the first columns to scratch memory, then the sums of all columns there."""

    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer((ROWS, COLUMNS), "float32"), K: T.Buffer((ROWS,), "float32"), Y: T.Buffer((ROWS,), "float32")):
        with T.sblock("root"):
            P = T.alloc_buffer((ROWS, COLUMNS), "float32")
            for block in T.thread_binding(ROWS, thread="blockIdx.x"):
                for thread in T.thread_binding(written_columns, thread="threadIdx.x"):
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

    return main


def lower_function(function, device):
    """Lower a PrimFunc."""
    return lower_module(tvm.IRModule({"main": function}), device.make_target())


def dynamic_sums(words, threads=256):
    """Y = X backwards, through `words` floats of dynamic shared memory, all of which is written and read."""

    @tvm_script.prim_func(s_tir=True)
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


def _doubled(before, number):
    two, added = te.const(2, "float32"), te.const(number, "float32")
    return te.compute((ROWS,), lambda i: before[i] * two + added, name=f"T{number}")


def chain(length):
    """X through `length` steps, each of which doubles what the one before it left and adds its number."""
    stages = [te.placeholder((ROWS,), "float32", name="X")]
    for number in range(length):
        stages.append(_doubled(stages[-1], number))
    s = Schedule(te.create_prim_func([stages[0], stages[-1]]))
    for stage in stages[1:]:
        s.bind(s.get_loops(s.get_sblock(stage.op.name))[0], "threadIdx.x")
    return s.mod


WORKLOAD = parse("conv2d:1x4x8x8,1x4x1x1,s1,p0")
DYNAMIC_BYTES = 60 << 10
IMAGES, WEIGHTS, OUTPUTS = WORKLOAD.argument_shapes


def products_then_sums(written):
    """Products of so many of the four channels to scratch memory, a block for each, then the sums of all four."""

    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer(IMAGES, "float32"), K: T.Buffer(WEIGHTS, "float32"), Y: T.Buffer(OUTPUTS, "float32")):
        with T.sblock("root"):
            P = T.alloc_buffer((4, 64), "float32")
            for block in T.thread_binding(written, thread="blockIdx.x"):
                for thread in T.thread_binding(64, thread="threadIdx.x"):
                    with T.sblock("P"):
                        c, i = T.axis.remap("SS", [block, thread])
                        P[c, i] = X[0, c, i // 8, i % 8] * K[0, c, 0, 0]
            for thread in T.thread_binding(64, thread="threadIdx.x"):
                with T.sblock("Y"):
                    i = T.axis.spatial(64, thread)
                    Y[0, 0, i // 8, i % 8] = P[0, i] + P[1, i] + P[2, i] + P[3, i]

    return main


class TwoSteps(registry.Schedule):
    """Products of each channel to scratch memory, then their sums; or of all channels but one."""

    def apply(self, w, config=None):
        knobs = Knobs(config)
        written = knobs.choice("written", (4, 3), default=4)
        return Schedule(tvm.IRModule({"main": products_then_sums(written)})), knobs


@functools.cache
def make_sums_in_dynamic_memory():
    """The workload, through more dynamic shared memory than a kernel has without asking for it."""

    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer(IMAGES, "float32"), K: T.Buffer(WEIGHTS, "float32"), Y: T.Buffer(OUTPUTS, "float32")):
        with T.sblock("root"):
            for _block in T.thread_binding(1, thread="blockIdx.x"):
                S = T.alloc_buffer((DYNAMIC_BYTES // 4,), "float32", scope="shared.dyn")
                for thread in T.thread_binding(64, thread="threadIdx.x"):
                    for i in range(DYNAMIC_BYTES // 4 // 64):
                        S[i * 64 + thread] = X[0, i % 4, thread // 8, thread % 8] * K[0, i % 4, 0, 0]
                for thread in T.thread_binding(64, thread="threadIdx.x"):
                    Y[0, 0, thread // 8, thread % 8] = (
                        S[DYNAMIC_BYTES // 4 - 256 + thread]
                        + S[DYNAMIC_BYTES // 4 - 192 + thread]
                        + S[DYNAMIC_BYTES // 4 - 128 + thread]
                        + S[thread + 192]
                    )

    return main


@functools.cache
def make_sums_in_bfloat16():
    """The workload in bfloat16."""

    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer(IMAGES, "bfloat16"), K: T.Buffer(WEIGHTS, "bfloat16"), Y: T.Buffer(OUTPUTS, "bfloat16")):
        for thread in T.thread_binding(64, thread="threadIdx.x"):
            with T.sblock("Y"):
                i = T.axis.spatial(64, thread)
                Y[0, 0, i // 8, i % 8] = T.Cast(
                    "bfloat16",
                    T.Cast("float32", X[0, 0, i // 8, i % 8]) * T.Cast("float32", K[0, 0, 0, 0])
                    + T.Cast("float32", X[0, 1, i // 8, i % 8]) * T.Cast("float32", K[0, 1, 0, 0])
                    + T.Cast("float32", X[0, 2, i // 8, i % 8]) * T.Cast("float32", K[0, 2, 0, 0])
                    + T.Cast("float32", X[0, 3, i // 8, i % 8]) * T.Cast("float32", K[0, 3, 0, 0]),
                )

    return main


class Written(registry.Schedule):
    """A schedule without knobs that is a function of its own, by its name."""

    def apply(self, w, config=None):
        return Schedule(tvm.IRModule({"main": WRITTEN[self.name]()})), Knobs(config)


def function(s, w, k):
    """`TwoSteps` and `Written` need none."""


WRITTEN = {"dynamic": make_sums_in_dynamic_memory, "bfloat16": make_sums_in_bfloat16}
DYNAMIC = Written("dynamic", "conv2d", function, ("float32",), 0)
BFLOAT16 = Written("bfloat16", "conv2d", function, ("float32",), 0)


SCHEDULE = TwoSteps("two_steps", "conv2d", function, ("float32",), 0)
