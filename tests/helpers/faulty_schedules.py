"""A schedule that fails as its knob says, in the builder process or on the device.

TVM takes its time to read a kernel. Many processes import this module: they read the kernels that they are asked for.
"""

import ctypes
import os
import sys
import time

import tvm
from tvm.s_tir import Schedule as TirSchedule
from tvm.script import tirx as T  # noqa: N812

from tvmconv.builtin import tvm_script
from tvmconv.logs.record import ErrorKind
from tvmconv.registry import Schedule
from tvmconv.space import Knobs
from tvmconv.workloads import parse

WORKLOAD = parse("conv2d:1x1x8x8,1x1x1x1,s1,p0")
SHAPE, ONE = (1, 1, 8, 8), (1, 1, 1, 1)


def right():
    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer(SHAPE, "float32"), K: T.Buffer(ONE, "float32"), Y: T.Buffer(SHAPE, "float32")):
        for i in T.thread_binding(8, thread="blockIdx.x"):
            for j in T.thread_binding(8, thread="threadIdx.x"):
                Y[0, 0, i, j] = X[0, 0, i, j] * K[0, 0, 0, 0]

    return main


def wrong():
    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer(SHAPE, "float32"), K: T.Buffer(ONE, "float32"), Y: T.Buffer(SHAPE, "float32")):
        for i in T.thread_binding(8, thread="blockIdx.x"):
            for j in T.thread_binding(8, thread="threadIdx.x"):
                Y[0, 0, i, j] = X[0, 0, i, j] + K[0, 0, 0, 0]

    return main


def unwritten():
    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer(SHAPE, "float32"), K: T.Buffer(ONE, "float32"), Y: T.Buffer(SHAPE, "float32")):
        for i in T.thread_binding(7, thread="blockIdx.x"):
            for j in T.thread_binding(8, thread="threadIdx.x"):
                Y[0, 0, i, j] = X[0, 0, i, j] * K[0, 0, 0, 0]

    return main


def endless():
    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer(SHAPE, "float32"), K: T.Buffer(ONE, "float32"), Y: T.Buffer(SHAPE, "float32")):
        for i in T.thread_binding(8, thread="blockIdx.x"):
            for j in T.thread_binding(8, thread="threadIdx.x"):
                while X[0, 0, i, j] > T.float32(-1e30):
                    Y[0, 0, i, j] = Y[0, 0, i, j] + K[0, 0, 0, 0]

    return main


def out_of_bounds():
    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer(SHAPE, "float32"), K: T.Buffer(ONE, "float32"), Y: T.Buffer(SHAPE, "float32")):
        for i in T.thread_binding(8, thread="blockIdx.x"):
            for j in T.thread_binding(8, thread="threadIdx.x"):
                Y[0, 0, i + 150_000_000, j] = X[0, 0, i, j] * K[0, 0, 0, 0]

    return main


def wide():
    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer(SHAPE, "float32"), K: T.Buffer(ONE, "float32"), Y: T.Buffer(SHAPE, "float32")):
        for j in T.thread_binding(1 << 20, thread="threadIdx.x"):
            if j < 64:
                Y[0, 0, j // 8, j % 8] = X[0, 0, j // 8, j % 8] * K[0, 0, 0, 0]

    return main


def hang():
    while True:
        time.sleep(1)


def hog():
    blocks = []
    while True:
        blocks.append(bytearray(64 << 20))


def fault():
    raise ValueError("no such\ntile")


HOST = {
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: sys.exit(3),
    "exception": fault,
    "hang": hang,
    "hog": hog,
}
DEVICE = {
    "none": right,
    "wrong": wrong,
    "unwritten": unwritten,
    "endless": endless,
    "out_of_bounds": out_of_bounds,
    "wide": wide,
}

EXPECTED = {
    "none": ErrorKind.NONE,
    "abort": ErrorKind.COMPILE_HOST,
    "segfault": ErrorKind.COMPILE_HOST,
    "exit": ErrorKind.INSTANTIATION,
    "exception": ErrorKind.INSTANTIATION,
    "hang": ErrorKind.BUILD_TIMEOUT,
    "hog": ErrorKind.COMPILE_HOST,
    "wrong": ErrorKind.WRONG_ANSWER,
    "unwritten": ErrorKind.WRONG_ANSWER,
    "endless": ErrorKind.RUN_TIMEOUT,
    "out_of_bounds": ErrorKind.RUNTIME,
    "wide": ErrorKind.INSTANTIATION,
}


class Faulty(Schedule):
    def apply(self, w, config=None):
        knobs = Knobs(config)
        fault = knobs.choice("fault", tuple(EXPECTED), default="none")
        knobs.choice("number", tuple(range(100)), default=0)
        if fault in HOST:
            HOST[fault]()
        return TirSchedule(tvm.IRModule({"main": DEVICE[fault]()})), knobs


def function(s, w, k):
    """`Faulty` needs none."""


SCHEDULE = Faulty("faulty", "conv2d", function, ("float32",), 0)
