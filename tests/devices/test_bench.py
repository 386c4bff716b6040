"""Many kernels on one problem's arrays: each is compared with the reference, and timed as long as it deserves."""

import contextlib
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from steps import with_step

from tvmconv.compiler import nvrtc
from tvmconv.devices.comparison import ReferenceOutput
from tvmconv.devices.cuda import benchmark as cuda_bench
from tvmconv.devices.cuda import graphs
from tvmconv.devices.cuda import loaded_kernel as cuda_kernel
from tvmconv.devices.cuda.benchmark import CudaBenchmark, format_comparison_source
from tvmconv.devices.cuda.loaded_kernel import CudaLoadedKernel
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


def test_unwritten_element_is_nan_even_after_a_right_kernel(device, bench, lower_difference):
    assert math.isfinite(bench.measure_relative_error(device.load(lower_difference(device).executable)))
    assert math.isnan(bench.measure_relative_error(device.load(lower_difference(device, written=999).executable)))


def sampled(expected, allowed=1e-5):
    """A reference of some points alone."""
    positions = np.array([0, 7, 500, 998])
    values = expected.astype(np.float64)[positions]
    return ReferenceOutput(sample=OutputSample(positions, values, np.full(4, allowed, np.float32)))


def test_a_sample_is_compared_where_the_reference_is_one(device, vectors, lower_difference):
    inputs, expected = vectors
    bench = device.create_benchmark(inputs, sampled(expected))
    found = bench.compare(device.load(lower_difference(device).executable))
    assert found.relative_error < 1e-6
    assert found.max_error_ratio < 1
    assert found.is_within_tolerance(1e-5)
    assert math.isnan(bench.compare(device.load(lower_difference(device, written=999).executable)).relative_error)
    bench.close()


def test_a_point_that_is_off_is_seen_beside_the_whole(device, vectors, lower_difference):
    inputs, expected = vectors
    spoilt = sampled(expected).sample
    spoilt.values[2] += 2e-5
    bench = device.create_benchmark(inputs, ReferenceOutput(expected.astype(np.float64), spoilt))
    found = bench.compare(device.load(lower_difference(device).executable))
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
    bench.measure_relative_error(device.load(with_step(right, arguments=tuple(swapped))))
    kernel = device.load(right)
    assert not bench.measure_relative_error(kernel) < 1e-6
    bench.restore_inputs()
    assert bench.measure_relative_error(kernel) < 1e-6


def test_a_kernel_that_is_far_from_the_best_gets_one_sample(device, bench, lower_difference):
    kernel = device.load(lower_difference(device).executable)
    bench.measure_relative_error(kernel)
    assert len(bench.time(kernel, best_seconds=1e-12)) == 1
    assert len(bench.time(kernel, best_seconds=math.inf)) >= 3


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
    code = "import sys, tvmconv.measure.runner_process; sys.exit(bool({'tvm', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class FakeGpu:
    """A GPU whose launches all take so many seconds; it counts them, and remembers how long it was warmed up."""

    def __init__(self, monkeypatch, launch_seconds):
        self.launches, self.warm_ups = 0, []

        def time_between_events(stream, replay, count):
            for _ in range(count):
                replay()
            return [launch_seconds] * count

        def warm_up(replay, stream, seconds=None):
            self.warm_ups.append(seconds)
            replay()
            return launch_seconds

        def make_capture(stream, launch):
            return lambda launches: lambda: [launch(number) for number in range(launches)]

        for module in (graphs, cuda_bench, cuda_kernel):
            for function in (time_between_events, warm_up, make_capture):
                monkeypatch.setattr(module, function.__name__, function, raising=False)
        monkeypatch.setattr(cuda_kernel, "create_stream", lambda index: contextlib.nullcontext(0))
        monkeypatch.setattr(cuda_kernel, "check_inputs", lambda *_: None)
        monkeypatch.setattr(cuda_kernel.DeviceArrays, "upload_all", lambda *_: [0, 0, 0])
        monkeypatch.setattr(cuda_kernel.DeviceArrays, "free_all", lambda *_: None)
        monkeypatch.setattr(CudaLoadedKernel, "bind", lambda *_, **__: contextlib.nullcontext(self))
        monkeypatch.setattr(CudaLoadedKernel, "translate_errors", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(CudaBenchmark, "_get_output_buffer", lambda *_: SimpleNamespace(pointer=0))
        self.kernel = object.__new__(CudaLoadedKernel)
        self.kernel.device = SimpleNamespace(index=0, l2_bytes=0)
        self.kernel.executable = SimpleNamespace(nbytes=1, output=None)
        self.bench = object.__new__(CudaBenchmark)
        vars(self.bench).update(_stream=0, _pointers=[0, 0], _last_busy_at=-math.inf)

    def launch(self):
        self.launches += 1


@pytest.mark.parametrize("launch_seconds", [0.5, 7.0])
@pytest.mark.parametrize(
    "time",
    [
        lambda gpu: gpu.kernel.time([], seconds=0.1).seconds,
        lambda gpu: gpu.bench.time(gpu.kernel, math.inf),
        lambda gpu: gpu.bench.time_final(gpu.kernel)[:1],
    ],
    ids=["kernel", "trial", "last timing"],
)
def test_a_launch_of_half_a_second_is_timed_once(monkeypatch, time, launch_seconds):
    gpu = FakeGpu(monkeypatch, launch_seconds)
    assert time(gpu) == (launch_seconds,)
    assert gpu.launches == 1
