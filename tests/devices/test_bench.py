"""Many kernels on one problem's arrays: each is compared with the reference, and timed as long as it deserves."""

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest
from steps import with_step

import tvmconv as tc
from tvmconv.compiler import nvrtc
from tvmconv.devices.comparison import ReferenceOutput
from tvmconv.devices.cuda import benchmark as cuda_bench
from tvmconv.devices.cuda import graphs
from tvmconv.devices.cuda import loaded_kernel as cuda_kernel
from tvmconv.devices.cuda.benchmark import format_comparison_source
from tvmconv.devices.device import measurement_fraction
from tvmconv.errors import DeviceError
from tvmconv.workloads.base import OutputSample

needs_nvrtc = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))


@pytest.fixture(scope="module", params=["opencl", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def bench(device, vectors):
    inputs, expected = vectors
    made = device.create_benchmark(inputs, expected.astype(np.float64))
    yield made
    made.close()


def test_parameters_go_where_the_device_function_wants_them(device, lower_difference, vectors):
    inputs, expected = vectors
    assert lower_difference(device).kernels[0].arguments == (1, 0, 2)
    np.testing.assert_allclose(device.load(lower_difference(device).executable).run(inputs), expected, rtol=1e-6)
    y = device.load(lower_difference(device, written=900).executable).run(inputs)
    assert np.flatnonzero(np.isnan(y)).tolist() == list(range(900, 1000))


def test_unwritten_element_is_nan_even_after_a_right_kernel(device, bench, lower_difference):
    assert math.isfinite(bench.compare(device.load(lower_difference(device).executable)).relative_error)
    assert math.isnan(bench.compare(device.load(lower_difference(device, written=999).executable)).relative_error)


def sampled(expected, allowed=1e-5):
    """A reference of some points alone."""
    positions = np.array([0, 7, 500, 998])
    values = expected.astype(np.float64)[positions]
    return ReferenceOutput(sample=OutputSample(positions, values, np.full(4, allowed, np.float32)))


def test_a_sample_is_compared_alone_or_beside_the_whole(device, vectors, lower_difference):
    inputs, expected = vectors
    right, short = (device.load(lower_difference(device, written=written).executable) for written in (1000, 999))
    bench = device.create_benchmark(inputs, sampled(expected))
    found = bench.compare(right)
    assert found.relative_error < 1e-6
    assert found.is_within_tolerance(1e-5)
    assert math.isnan(bench.compare(short).relative_error)
    bench.close()
    spoilt = sampled(expected).sample
    spoilt.values[2] += 2e-5
    bench = device.create_benchmark(inputs, ReferenceOutput(expected.astype(np.float64), spoilt))
    found = bench.compare(right)
    assert found.relative_error < 1e-6
    assert found.max_error_ratio == pytest.approx(2.0, abs=0.1)
    assert "a single output is off by" in found.describe_mismatch(1e-5)
    bench.close()


def test_inputs_that_a_kernel_wrote_over_can_be_restored(device, bench, lower_difference):
    right = lower_difference(device).executable
    (step,) = right.kernels
    x, k, y = step.arguments.index(0), step.arguments.index(1), step.arguments.index(2)
    swapped = [0, 0, 0]
    swapped[y], swapped[k], swapped[x] = 0, 1, 2  # writes to X what it computes of the output
    bench.compare(device.load(with_step(right, arguments=tuple(swapped))))
    kernel = device.load(right)
    assert not bench.compare(kernel).relative_error < 1e-6
    bench.restore_inputs()
    assert bench.compare(kernel).relative_error < 1e-6


def test_a_kernel_that_is_far_from_the_best_gets_one_sample(device, bench, lower_difference):
    kernel = device.load(lower_difference(device).executable)
    bench.compare(kernel)
    assert len(bench.time(kernel, best_seconds=1e-12)) == 1
    assert len(bench.time(kernel, best_seconds=math.inf)) >= 3


@pytest.mark.gpu
def test_launches_take_copies_of_arrays_that_exceed_the_cache_in_turn(gpu, vectors, lower_difference):
    inputs, expected = vectors
    num_bytes = sum(array.nbytes for array in (*inputs, expected))
    for cache_size, num_copies in ((2.0, 0), (0.8, 1), (0.4, 0)):  # one copy exceeds twice the last cache
        device = dataclasses.replace(gpu, l2_bytes=int(cache_size * num_bytes))
        bench = device.create_benchmark(inputs, expected.astype(np.float64))
        kernel = device.load(lower_difference(device).executable)
        bench.compare(kernel)
        assert min(bench.time(kernel, best_seconds=math.inf)) > 0
        assert len(bench.time_final(kernel)) == cuda_bench.NUM_FINAL_SAMPLES + 1
        assert [len(copies) for copies in bench._copies.values()] == [num_copies]
        bench.restore_inputs()
        assert bench.compare(kernel).relative_error < 1e-6
        bench.close()


@pytest.mark.parametrize(
    ("seconds", "best", "share"), [(1.0, math.inf, 1.0), (1.1, 1.0, 1.0), (2.0, 1.0, 0.2), (3.0, 1.0, 0.0)]
)
def test_effort_falls_with_the_distance_from_the_best(seconds, best, share):
    assert measurement_fraction(seconds, best) == share


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_comparison_compiles_for_every_dtype(dtype):
    assert nvrtc.compile_cubin(format_comparison_source(dtype), "sm_90").resources.spills == 0


def test_inputs_of_another_shape_or_dtype_are_refused(device, vectors, lower_difference):
    kernel = device.load(lower_difference(device).executable)
    (x, k), _ = vectors
    with pytest.raises(DeviceError, match=r"takes inputs float32 \(1000,\), float32 \(1000,\), not float64"):
        kernel.run((x.astype(np.float64), k))


def test_a_device_process_loads_neither_tvm_nor_pytorch():
    code = "import sys, tvmconv.measure.runner; sys.exit(bool({'tvm', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["kernel", "trial", "final timing"])
def test_a_launch_of_half_a_second_is_timed_once(gpu, monkeypatch, method):
    """A kernel counts as so slow that it is launched once: the limit is set to a part of its time."""
    for module in (graphs, cuda_bench, cuda_kernel):
        monkeypatch.setattr(module, "LONG_LAUNCH_SECONDS", 1e-9)
    w = tc.parse("conv2d:1x16x12x12,16x16x3x3,s1,p1")
    problem, kernel = tc.Problem(w), gpu.load(tc.build(w, "tiling", device=gpu).executable)
    bench = gpu.create_benchmark(problem.inputs, problem.reference)
    times = {
        "kernel": lambda: kernel.time(problem.inputs, seconds=0.1).seconds,
        "trial": lambda: bench.time(kernel, math.inf),
        "final timing": lambda: set(bench.time_final(kernel)),  # its quantiles are of one sample
    }
    assert len(times[method]()) == 1
    bench.close()
