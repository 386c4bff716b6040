import numpy as np
import pytest
import tvm
from tvm.script import tirx as T  # noqa: N812

from tvmconv.builtin import tvm_script
from tvmconv.compiler.device_lowering import lower_module

N = 1000


@pytest.fixture(scope="session")
def lower_difference():
    """Lower Y[i] = 2·X[i] - K[i] for i < `written` of N; the device function takes K before X."""

    def lowered(device, *, threads=64, written=N):
        @tvm_script.prim_func(s_tir=True)
        def main(X: T.Buffer((N,), "float32"), K: T.Buffer((N,), "float32"), Y: T.Buffer((N,), "float32")):
            for block in T.thread_binding((written + threads - 1) // threads, thread="blockIdx.x"):
                for thread in T.thread_binding(threads, thread="threadIdx.x"):
                    if block * threads + thread < written:
                        Y[block * threads + thread] = (
                            T.float32(2) * X[block * threads + thread] - K[block * threads + thread]
                        )

        return lower_module(tvm.IRModule({"main": main}), device.make_target())

    return lowered


@pytest.fixture(scope="session")
def vectors():
    """X and K for the above, and the Y that belongs to them."""
    x, k = np.random.default_rng(0).standard_normal((2, N), np.float32)
    return (x, k), 2 * x - k
