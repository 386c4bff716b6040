"""Kernels of several steps on devices: run, verified, benched and timed as one."""

import math

import ml_dtypes
import numpy as np
import pytest
from placed import lower_product_in_steps
from steps import (
    COLUMNS,
    ROWS,
    SCHEDULE,
    WORKLOAD,
    chain,
    dynamic_sums,
    lower_function,
    make_row_sums,
    products_then_sums,
)
from tvm.script import tirx as T  # noqa: N812

import tvmconv as tc
from tvmconv.builtin import tvm_script
from tvmconv.compiler.device_lowering import lower_module
from tvmconv.target import get_block_limits


@pytest.fixture(scope="module", params=["opencl", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def rows():
    """X and K of `make_row_sums`, and the Y that belongs to them, in float64."""
    random = np.random.default_rng(0)
    x, k = random.standard_normal((ROWS, COLUMNS), np.float32), random.standard_normal(ROWS, np.float32)
    return (x, k), x.astype(np.float64).sum(axis=1) * k


def error(y, reference):
    return np.linalg.norm(y - reference) / np.linalg.norm(reference)


def test_the_second_step_reads_what_the_first_one_wrote(device, rows):
    inputs, expected = rows
    assert error(device.load(lower_function(make_row_sums(), device).executable).run(inputs), expected) < 1e-6


def test_scratch_is_poisoned_again_for_every_kernel_of_a_bench(device):
    problem = tc.Problem(WORKLOAD, seed=0)
    bench = device.create_benchmark(problem.inputs, problem.reference)
    right = device.load(tc.build(WORKLOAD, SCHEDULE, device=device).executable)
    assert bench.compare(right).relative_error < 1e-6
    assert math.isnan(
        bench.compare(device.load(lower_function(products_then_sums(3), device).executable)).relative_error
    )
    assert bench.compare(right).relative_error < 1e-6
    bench.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("cold", [False, True])
def test_all_steps_are_timed(device, cold):
    """Of 64 steps, each far too short to be seen, the time is that of more than one."""
    x = np.ones(ROWS, np.float32)
    one, many = (device.load(lower_module(chain(length), device.make_target()).executable) for length in (1, 64))
    assert many.time([x], seconds=0.02, cold=cold).median > 4 * one.time([x], seconds=0.02, cold=cold).median


def test_a_constant_is_there_in_every_step(device):
    random = np.random.default_rng(0)
    x, k = random.standard_normal(100, np.float32), random.standard_normal(4, np.float32)
    places = np.arange(100) % 4
    y = device.load(lower_product_in_steps(device).executable).run([x, k])
    np.testing.assert_allclose(y, (x * k[places])[::-1] + k[places], rtol=1e-6)


@tvm_script.prim_func(s_tir=True)
def weighted(
    X: T.Buffer((64,), "bfloat16"),
    K: T.Buffer((64,), "bfloat16"),
    B: T.Buffer((64,), "float32"),
    R: T.Buffer((64,), "bfloat16"),
    Y: T.Buffer((64,), "float32"),
):
    for thread in T.thread_binding(64, thread="threadIdx.x"):
        Y[thread] = (
            T.Cast("float32", X[thread]) * T.Cast("float32", K[thread]) + B[thread] + T.Cast("float32", R[thread])
        )


def test_inputs_are_of_any_number_and_of_several_dtypes(device):
    random = np.random.default_rng(0)
    x, k, r = (random.standard_normal(64).astype(ml_dtypes.bfloat16) for _ in range(3))
    b = random.standard_normal(64, np.float32)
    expected = x.astype(float) * k.astype(float) + b + r.astype(float)
    kernel = device.load(lower_function(weighted, device).executable)
    y = kernel.run([x, k, b, r])
    assert y.dtype == np.float32
    assert error(y, expected) < 1e-6
    bench = device.create_benchmark([x, k, b, r], expected)
    assert bench.compare(kernel).relative_error < 1e-6
    bench.close()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torchs_tensors_of_every_dtype_go_in_and_out(gpu, dtype):
    torch = pytest.importorskip("torch")

    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer((1000,), dtype), Y: T.Buffer((1000,), dtype)):
        for thread in T.thread_binding(1000, thread="threadIdx.x"):
            Y[thread] = X[thread] + X[thread]

    x = torch.randn(1000, device=f"cuda:{gpu.index}").to(getattr(torch, dtype))
    y = gpu.load(lower_function(main, gpu).executable).call_dlpack([x])
    assert y.dtype == x.dtype
    assert torch.equal(y, x + x)


@pytest.mark.gpu
def test_scratch_of_torch_calls_lives_as_long_as_their_launches(gpu, rows):
    torch = pytest.importorskip("torch")
    inputs, expected = rows
    kernel = gpu.load(lower_function(make_row_sums(), gpu).executable)
    with torch.cuda.stream(torch.cuda.Stream()):
        tensors = [torch.from_numpy(array).cuda() for array in inputs]
        outputs = []
        for _ in range(100):  # each call's scratch is the memory that the one before it gave back
            outputs.append(kernel.call_dlpack(tensors))
            torch.full((ROWS * COLUMNS,), torch.nan, device="cuda")
        assert all(error(y.cpu().numpy(), expected) < 1e-6 for y in outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("kib", [4, 48, 60])
def test_dynamic_shared_memory_is_there(gpu, kib):
    words = kib * 1024 // 4
    x = np.random.default_rng(0).standard_normal(words).astype(np.float32)
    kernel = gpu.load(lower_function(dynamic_sums(words), gpu).executable)
    np.testing.assert_array_equal(kernel.run([x]), x[::-1])
    bench = gpu.create_benchmark([x], x[::-1].astype(np.float64))
    assert bench.compare(kernel).relative_error == 0
    assert min(bench.time(kernel, math.inf)) > 0
    bench.close()


@pytest.mark.gpu
def test_no_more_dynamic_shared_memory_is_there_than_the_limit(gpu):
    most = gpu.limits.max_shared_bytes
    assert most == get_block_limits(gpu.arch).max_shared_bytes
    words = most // 4
    x = np.random.default_rng(0).standard_normal(words).astype(np.float32)
    np.testing.assert_array_equal(gpu.load(lower_function(dynamic_sums(words), gpu).executable).run([x]), x[::-1])
    with pytest.raises(tc.DeviceError, match=f"has {most} bytes of shared memory a block, static and dynamic together"):
        gpu.load(lower_function(dynamic_sums(words + 256), gpu).executable)
