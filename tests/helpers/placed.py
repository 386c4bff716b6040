"""Small kernels whose arguments lie elsewhere than in global memory."""

import tvm
from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812
from tvmconv.builtin.primitives import inline_consumers, inline_producers, set_memory_scope

from tvmconv.builtin import tvm_script
from tvmconv.compiler.device_lowering import lower_module
from tvmconv.workloads import Filter1d

THREADS = 64


def lower_filter(device, workload=None, **spaces):
    """Lower a filter of signals, by default of 1000 samples and 5 taps, with its arguments in these spaces."""
    workload = workload or Filter1d(1000, 5)
    s = Schedule(workload.prim_func())
    total = s.get_sblock("sum")
    inline_producers(s, total)
    store = s.cache_write(total, 0, "local")
    inline_consumers(s, store)
    block, thread = s.split(s.get_loops(total)[0], [None, THREADS])
    s.bind(block, "blockIdx.x")
    s.bind(thread, "threadIdx.x")
    s.reverse_compute_at(store, thread)
    set_memory_scope(s, **spaces)
    return lower_module(s.mod, device.make_target())


def lower_product(device, dtype, space="constant"):
    """Lower Y = X · K in a dtype, K in a space: two arrays of 100 elements and one of 4."""

    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer((100,), dtype), K: T.Buffer((4,), dtype), Y: T.Buffer((100,), dtype)):
        with T.sblock("root"):
            T.sblock_attr({"tvmconv.space": {"K": space}})
            for thread in T.thread_binding(100, thread="threadIdx.x"):
                with T.sblock("Y"):
                    i = T.axis.spatial(100, thread)
                    Y[i] = X[i] * K[i % 4]

    return lower_module(tvm.IRModule({"main": main}), device.make_target())


def lower_product_in_steps(device):
    """Lower Y = X · K + K in two steps, both of which read K from constant memory, and the second from scratch."""

    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer((100,), "float32"), K: T.Buffer((4,), "float32"), Y: T.Buffer((100,), "float32")):
        with T.sblock("root"):
            T.sblock_attr({"tvmconv.space": {"K": "constant"}})
            P = T.alloc_buffer((100,), "float32")
            for thread in T.thread_binding(100, thread="threadIdx.x"):
                with T.sblock("P"):
                    i = T.axis.spatial(100, thread)
                    P[i] = X[i] * K[i % 4]
            for thread in T.thread_binding(100, thread="threadIdx.x"):
                with T.sblock("Y"):
                    i = T.axis.spatial(100, thread)
                    Y[i] = P[99 - i] + K[i % 4]

    return lower_module(tvm.IRModule({"main": main}), device.make_target())


def lower_shift(device, shape, down, right):
    """Lower Y = X moved by rows and by elements of a row, an image read through a texture."""
    height, width, channels = shape
    row = width * channels

    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer(shape, "float32"), Y: T.Buffer(shape, "float32")):
        with T.sblock("root"):
            T.sblock_attr({"tvmconv.space": {"X": "texture"}})
            for block in T.thread_binding((height * row + THREADS - 1) // THREADS, thread="blockIdx.x"):
                for thread in T.thread_binding(THREADS, thread="threadIdx.x"):
                    with T.sblock("Y"):
                        i = T.axis.spatial(height * row, block * THREADS + thread)
                        T.where(block * THREADS + thread < height * row)
                        Y[i // row, i % row // channels, i % channels] = T.call_pure_extern(
                            "float32",
                            "tex2D<float>",
                            T.address_of(X[0, 0, 0]),
                            T.Cast("float32", i % row - right) + T.float32(0.5),
                            T.Cast("float32", i // row - down) + T.float32(0.5),
                        )

    return lower_module(tvm.IRModule({"main": main}), device.make_target())
