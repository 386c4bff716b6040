"""Maximum poolings in graphs with gradients: the kernels, the operators, and the graphs that call them."""

import itertools
import shutil

import pytest
import torch
from host_cuda import compile_kernels
from torch import nn
from torch.nn import functional

from tvmconv.compiler import nvrtc
from tvmconv.torch import max_pool, training_backend
from tvmconv.torch.backend import backend
from tvmconv.torch.conv_call import KERNEL_DTYPES
from tvmconv.torch.tensor_layout import find_layout, lay_out
from tvmconv.workloads.layout import CHANNELS_LAST

KERNELS = "max_pool", "max_pool_backward"
WINDOWS = [([3, 3], [2, 2], [1, 1]), ([2, 3], [2, 1], [0, 1]), ([2, 2], [3, 3], [1, 0])]


def draw(device="cpu", dtype=torch.float32):
    """Return an image in which most windows have several maxima."""
    torch.manual_seed(0)
    return lay_out(torch.randint(0, 4, (2, 6, 9, 8), device=device).to(dtype), CHANNELS_LAST)


def pool_with_gradient(pool, x, *window):
    leaf = x.detach().requires_grad_()
    z = pool(leaf, *window)
    dz = torch.arange(z.numel(), device=x.device).remainder(17).to(x.dtype).view(z.shape)
    return z, torch.autograd.grad(z, leaf, dz)[0]


@pytest.mark.skipif(not shutil.which("g++"), reason="g++ is missing")
@pytest.mark.sample(1)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("vector", [1, 2])
def test_kernels_on_the_cpu(window, vector, tmp_path, monkeypatch):
    monkeypatch.setattr(max_pool, "THREADS", 32)
    functions = compile_kernels(max_pool.make_source("float32", vector, window), KERNELS, tmp_path)

    class HostKernels:
        def launch(self, name, launch, parameters):
            functions[name](launch, parameters)

    monkeypatch.setattr(max_pool, "count_vector_elements", lambda *_: vector)
    monkeypatch.setattr(max_pool, "_load_kernels", lambda *_: HostKernels())
    x = draw()
    z, taps = max_pool._run_on_gpu(x, *window)
    assert all(map(torch.equal, (z, taps), max_pool.max_pool(x, *window)))
    dz = torch.randn(z.shape)
    found = max_pool._differentiate_on_gpu(dz, taps, x.shape, *window)
    assert torch.allclose(found, max_pool.max_pool_backward(dz, taps, x.shape, *window))


@pytest.mark.parametrize("window", WINDOWS)
def test_operators_are_as_pytorch_wants_them(window):
    x = draw()
    checks = ["test_schema", "test_faketensor", "test_autograd_registration"]
    arguments = x.clone().requires_grad_(), *window
    assert set(torch.library.opcheck(max_pool.max_pool, arguments, test_utils=checks).values()) == {"SUCCESS"}
    found, expected = (pool_with_gradient(pool, x, *window) for pool in (max_pool.pool_in_graph, functional.max_pool2d))
    assert all(map(torch.equal, found, expected))
    assert find_layout(found[1].shape, found[1].stride()) == CHANNELS_LAST


def test_sources_compile_for_gpus():
    if reason := nvrtc.explain_unavailability():
        pytest.skip(reason)
    for (dtype, vector), window in zip((("float16", 8), ("bfloat16", 8), ("float32", 4)), WINDOWS, strict=True):
        cubin = nvrtc.compile_cubin(max_pool.make_source(dtype, vector, window), "sm_90")
        assert {*cubin.kernels} == {*KERNELS}
        assert cubin.resources.spills == 0


@pytest.mark.parametrize(
    ("options", "is_replaced"),
    [((3, 2, 1), True), ((2,), True), ((3, 2, 1, 2), False), ((3, 2, 1, 1, False, True), False)],
)
def test_poolings_of_graphs_with_gradients_are_replaced(options, is_replaced, monkeypatch):
    monkeypatch.setattr(training_backend, "fill_table", lambda *_: [])
    calls, run = [], max_pool.max_pool
    monkeypatch.setattr(max_pool, "max_pool", lambda *values: calls.append(values) or run(*values))
    model = nn.Sequential(nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(*options[:5]))
    if ceil_mode := len(options) > 5:
        model[-1].ceil_mode = ceil_mode
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, options={"choose": "tuned", "fallback_backend": "eager"})
    found, expected = (pool_with_gradient(network, draw()) for network in (compiled, model))
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(found, expected, strict=True))
    assert bool(calls) == is_replaced


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "window"), itertools.product(KERNEL_DTYPES, WINDOWS))
def test_kernels_on_a_gpu(dtype, window):
    x = draw("cuda", dtype)
    found, expected = (pool_with_gradient(pool, x, *window) for pool in (max_pool.pool_in_graph, functional.max_pool2d))
    assert all(map(torch.equal, found, expected))
