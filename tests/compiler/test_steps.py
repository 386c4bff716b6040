"""A schedule with several root loop nests lowers to several steps, with scratch memory between them."""

import dataclasses

import numpy as np
import pytest
from steps import COLUMNS, ROWS, SCHEDULE, WORKLOAD, chain, lower_function, make_row_sums
from tvm.script import tirx as T  # noqa: N812

import tvmconv as tc
from tvmconv.builtin import tvm_script
from tvmconv.cli.show import format_ir_level
from tvmconv.compiler import nvrtc
from tvmconv.compiler.device_lowering import lower_module
from tvmconv.compiler.executable import LaunchConfig
from tvmconv.compiler.lowering import lower_schedule
from tvmconv.devices import find_device

needs_nvrtc = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))
N = 64


@pytest.fixture(scope="module")
def sm_90():
    return find_device("sm_90")


@pytest.mark.parametrize("device", ["sm_90", "opencl:0"])
def test_each_root_loop_nest_is_a_step_in_launch_order(device):
    first, second = lower_function(make_row_sums(), find_device(device)).kernels
    assert first.launch == LaunchConfig((ROWS, 1, 1), (COLUMNS, 1, 1))
    assert second.launch == LaunchConfig((1, 1, 1), (ROWS, 1, 1))


@pytest.mark.parametrize("device", ["sm_90", "opencl:0"])
def test_what_lies_between_steps_is_scratch_behind_the_arrays(device):
    lowered = lower_function(make_row_sums(), find_device(device))
    assert [array.nbytes for array in lowered.workspace] == [4 * ROWS * COLUMNS]
    first, second = (dict(zip(names(step), step.arguments, strict=True)) for step in lowered.kernels)
    assert first == {"X": 0, "K": 1, "P": 3}
    assert second == {"Y": 2, "P": 3}


def names(step):
    return [parameter.name.removesuffix("_ptr") for parameter in step.function.params]


def test_steps_run_in_their_order_whatever_their_names(opencl):
    """Of twelve, main_kernel_10 sorts before main_kernel_2; each step's number tells them apart."""
    lowered = lower_module(chain(12), opencl.make_target())
    assert len(lowered.kernels) == 12
    x = expected = np.arange(ROWS, dtype="float32")
    for number in range(12):
        expected = 2 * expected + number
    np.testing.assert_array_equal(opencl.load(lowered.executable).run([x]), expected)


@needs_nvrtc
def test_one_text_and_one_cubin_hold_all_steps(sm_90):
    lowered = lower_function(make_row_sums(), sm_90)
    program = lowered.executable
    assert len({step.code for step in program.kernels}) == 1
    assert set(lowered.cubin.kernels) == {step.name for step in program.kernels}
    assert all(step.resources == lowered.cubin.kernels[step.name] for step in program.kernels)


def test_launches_in_a_loop_of_the_host_are_refused(sm_90):
    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer((N,), "float32"), Y: T.Buffer((N,), "float32")):
        for i in range(4):
            for thread in T.thread_binding(16, thread="threadIdx.x"):
                Y[i * 16 + thread] = X[i * 16 + thread]

    with pytest.raises(tc.CompileError, match="launches in a loop or under a condition of the host: bind the loop"):
        lower_function(main, sm_90)


def test_shared_memory_outside_of_any_block_is_refused(sm_90):
    """TVM would make it global memory that all blocks have in common."""

    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer((N,), "float32"), Y: T.Buffer((N,), "float32")):
        with T.sblock("root"):
            S = T.alloc_buffer((N,), "float32", scope="shared")
            for _block in T.thread_binding(2, thread="blockIdx.x"):
                for thread in T.thread_binding(N, thread="threadIdx.x"):
                    S[thread] = X[thread]
                for thread in T.thread_binding(N, thread="threadIdx.x"):
                    Y[thread] = S[N - 1 - thread]

    with pytest.raises(tc.CompileError, match="allocates S in shared memory outside the loops"):
        lower_function(main, sm_90)


def test_a_schedule_that_binds_nothing_is_refused(sm_90):
    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer((N,), "float32"), Y: T.Buffer((N,), "float32")):
        T.evaluate(0)

    with pytest.raises(tc.CompileError, match="runs nothing on the device"):
        lower_function(main, sm_90)


def test_build_with_a_step_that_exceeds_the_limits_is_refused(opencl):
    limits = dataclasses.replace(opencl.limits, max_threads=32)
    with pytest.raises(tc.DeviceError, match="small runs at most 32 threads a block and the kernel has 64"):
        lower_schedule(WORKLOAD, SCHEDULE, None, opencl.make_target(), limits, "small")


def test_every_stage_of_a_kernel_has_all_its_steps():
    kernel = tc.build(WORKLOAD, SCHEDULE, arch="sm_90")
    assert len(kernel.kernels) == 2
    for stage in ("lowered", "source", "ptx", "resources", "traffic"):
        assert all(step.name in format_ir_level(kernel, stage) for step in kernel.kernels), stage
    assert kernel.lowered is kernel.kernels[0].function
    assert kernel.launch == kernel.kernels[0].launch
