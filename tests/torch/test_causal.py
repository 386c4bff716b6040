import copy

import numpy as np
import pytest
import torch

import tvmconv.torch
from tvmconv.errors import ModelError
from tvmconv.torch import causal


class ReferenceKernel:
    """A kernel on the CPU: the reference of its workload."""

    def __init__(self, workload, device):
        self.workload = workload

    def __call__(self, *tensors):
        return torch.from_numpy(self.workload.reference(*(np.asarray(tensor) for tensor in tensors))).float()


@pytest.fixture
def kernels(monkeypatch):
    """The kernels of the modules, by workload and device."""
    monkeypatch.setattr(causal, "_kernels", {})
    monkeypatch.setattr(causal, "_build_kernel", ReferenceKernel)
    monkeypatch.setattr(causal.CausalConv3d, "_has_kernels", lambda self, x: True)
    return causal._kernels


def make_module(**options):
    torch.manual_seed(0)
    return tvmconv.torch.CausalConv3d(4, 6, (3, 3, 2), padding=1, groups=2, activation="silu", **options)


@pytest.mark.parametrize("options", [{}, {"dilation": (2, 1, 1), "upsample": 2}])
def test_chunks_have_the_result_of_the_whole_video(options, kernels):
    conv, video = make_module(**options), torch.randn(2, 4, 6, 5, 4)
    expected = conv._compute_by_pytorch(video, None, None)  # with gradients
    with torch.no_grad():
        for chunks in ([1, 1, 4], [3, 3]):
            cache, results = None, []
            for chunk in video.split(chunks, dim=2):
                y, cache = conv.stream(chunk, cache)
                results.append(y)
            torch.testing.assert_close(torch.cat(results, dim=2), expected, atol=1e-5, rtol=1e-5)
        residual = torch.randn_like(expected)
        by_pytorch = conv._compute_by_pytorch(video, None, residual)
        torch.testing.assert_close(conv(video, residual=residual), by_pytorch, atol=1e-5, rtol=1e-5)
    assert {kernel.workload.operator for kernel in kernels.values()} == {"conv3d"}


def test_training_and_the_cpu_are_pytorchs():
    conv, video = make_module(), torch.randn(1, 4, 3, 5, 4, requires_grad=True)
    y, cache = conv.stream(video)
    y.sum().backward()
    assert video.grad is not None
    assert conv.weight.grad is not None
    assert cache.shape == (1, 4, 2, 5, 4)
    with torch.no_grad():
        torch.testing.assert_close(conv(video), y)


def test_what_a_module_cannot_compute_is_refused():
    with pytest.raises(ModelError, match="activation='prelu'"):
        tvmconv.torch.CausalConv3d(4, 4, 3, activation="prelu")
    with pytest.raises(ModelError, match="needs a stride of 1"):
        tvmconv.torch.CausalConv3d(4, 4, 3, stride=(2, 1, 1)).stream(torch.randn(1, 4, 3, 5, 4))


@pytest.mark.usefixtures("kernels")
def test_weights_of_inference_mode_are_read_as_they_are_now():
    with torch.inference_mode():
        conv, video = make_module(), torch.randn(1, 4, 3, 5, 4)
        for _ in range(2):
            expected = conv._compute_by_pytorch(video, None, None)
            torch.testing.assert_close(conv(video), expected, atol=1e-5, rtol=1e-5)
            conv.weight.mul_(2)  # which no version counts


@torch.no_grad()
def test_a_new_weight_in_the_memory_of_the_old_one_is_packed():
    conv = make_module()
    conv._pack_weight()
    memory = conv.weight.data
    conv.weight = torch.nn.Parameter(memory)  # as an allocator may place it
    torch.from_numpy(memory.numpy()).mul_(2)  # which no version counts
    torch.testing.assert_close(conv._pack_weight(), conv.weight.permute(0, 2, 3, 4, 1))
    assert copy.deepcopy(conv)._packed is None


def test_biases_and_transforms_have_derivatives(kernels):
    conv, video = make_module().requires_grad_(False), torch.randn(1, 4, 3, 5, 4)
    conv.bias.requires_grad_()
    conv(video).sum().backward()
    assert conv.bias.grad is not None
    conv.requires_grad_(False)
    _, tangent = torch.func.jvp(conv, (video,), (video,))
    assert tangent.any()
    assert not kernels
