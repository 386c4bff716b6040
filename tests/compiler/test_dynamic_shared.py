"""Dynamic shared memory is counted, is part of a device's limits, and is refused where it would be something else."""

import pytest
from steps import dynamic_sums, lower_function
from tvm.script import tirx as T  # noqa: N812

import tvmconv as tc
from tvmconv.builtin import tvm_script
from tvmconv.compiler import nvrtc
from tvmconv.devices import find_device
from tvmconv.target import get_block_limits

needs_nvrtc = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))
KIB = 1 << 10
WORDS = 60 * KIB // 4  # more than static shared memory may be, less than every architecture's opt-in limit


def test_static_and_dynamic_shared_memory_are_both_counted():
    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer((64,), "float16"), Y: T.Buffer((64,), "float16")):
        with T.sblock("root"):
            for _block in T.thread_binding(1, thread="blockIdx.x"):
                S = T.alloc_buffer((64,), "float16", scope="shared")
                D = T.alloc_buffer((64,), "float32", scope="shared.dyn")
                for thread in T.thread_binding(64, thread="threadIdx.x"):
                    S[thread] = X[thread]
                    D[thread] = T.Cast("float32", X[thread])
                for thread in T.thread_binding(64, thread="threadIdx.x"):
                    Y[thread] = S[63 - thread] + T.Cast("float16", D[63 - thread])

    (step,) = lower_function(main, find_device("sm_90")).kernels
    assert (step.shared_bytes, step.dynamic_shared_bytes) == (128, 256)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_dynamic_memory_compiles_for_every_architecture(arch):
    (step,) = lower_function(dynamic_sums(WORDS), find_device(arch)).executable.kernels
    assert step.dynamic_shared_bytes == 4 * WORDS
    assert step.resources.shared_bytes == 0
    assert step.resources.spills == 0


@pytest.mark.parametrize(("arch", "most"), [("sm_75", 64), ("sm_90", 227)])
def test_an_architecture_has_its_own_limit(arch, most):
    device = find_device(arch)
    assert device.limits == get_block_limits(arch)
    device.check_block_limits(lower_function(dynamic_sums(most * KIB // 4, threads=64), device))
    with pytest.raises(tc.DeviceError, match=f"{arch} has {most * KIB} bytes of shared memory a block, static and dyn"):
        device.check_block_limits(lower_function(dynamic_sums((most + 1) * KIB // 4, threads=64), device))


def test_it_is_refused_for_opencl(opencl):
    """TVM would make it an array of each work-item alone, without barriers: wrong in silence."""
    with pytest.raises(tc.CompileError, match=r"dynamic shared memory \(shared.dyn\): expected the scope shared"):
        lower_function(dynamic_sums(256), opencl)
