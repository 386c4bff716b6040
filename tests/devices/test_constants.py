"""A mask in a GPU's constant memory is there before the kernel is, however the kernel is launched."""

import math

import numpy as np
import pytest
from placed import lower_filter

import tvmconv as tc
from tvmconv.devices.cuda.loaded_kernel import DeviceArrays

pytestmark = pytest.mark.gpu


@pytest.fixture
def loaded(gpu):
    return gpu.load(lower_filter(gpu, K="constant").executable)


@pytest.fixture
def problem():
    return tc.Problem(tc.Filter1d(1000, 5))


def test_each_run_brings_its_own(loaded):
    for seed in range(3):
        problem = tc.Problem(tc.Filter1d(1000, 5), seed=seed)
        assert problem.check(loaded.run(problem.inputs)).ok


def test_two_kernels_do_not_share_theirs(gpu, loaded, problem):
    other = gpu.load(lower_filter(gpu, K="constant").executable)
    x, k = problem.inputs
    y, doubled = np.empty_like(x), np.empty_like(x)
    with loaded.translate_errors(), DeviceArrays() as arrays:
        first = arrays.upload_all((x, k), loaded.executable.output)
        second = arrays.upload_all((x, 2 * k), loaded.executable.output)
        with loaded.bind(first, stream=0) as one, other.bind(second, stream=0) as two:
            one.launch()
            two.launch()
            arrays.download(first[-1], y)
            arrays.download(second[-1], doubled)
    assert problem.check(y).ok
    np.testing.assert_array_equal(doubled, 2 * y)


def test_it_reaches_a_call_on_torchs_tensors(loaded, problem):
    torch = pytest.importorskip("torch")
    with torch.cuda.stream(torch.cuda.Stream()):
        y = loaded.call_dlpack([torch.from_numpy(array).cuda() for array in problem.inputs])
        assert problem.check(y.cpu().numpy()).ok


def test_it_reaches_a_bench(gpu, loaded, problem):
    bench = gpu.create_benchmark(problem.inputs, problem.reference)
    assert bench.compare(loaded).relative_error < 1e-6
    assert min(bench.time(loaded, math.inf)) > 0
    assert bench.compare(loaded).relative_error < 1e-6
    bench.close()
