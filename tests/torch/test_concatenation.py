"""Concatenations of images and of views of them: the kernel, the operator, and the graphs that call it."""

import shutil

import pytest
import torch
from host_cuda import compile_kernels
from small_models import Model, differ, optimized
from torch import nn

from tvmconv.compiler import nvrtc
from tvmconv.torch import concatenation
from tvmconv.torch.concatenation import VECTOR_TYPES, concatenate, find_common_layout, make_source
from tvmconv.torch.tensor_layout import find_layout, lay_out
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST

VECTORS = "struct uint4 { unsigned x, y, z, w; }; struct uint2 { unsigned x, y; };\n"


def draw_parts(layout, dtype, device="cpu", space=(5, 3)):
    """Two dense images, and a view of the last channels of another one."""
    torch.manual_seed(0)
    parts = [lay_out(torch.randn(2, channels, *space, device=device).to(dtype), layout) for channels in (8, 24, 4)]
    return [parts[0], parts[1][:, 8:], parts[2]]


@pytest.mark.skipif(not shutil.which("g++"), reason="g++ is missing")
@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", [CHANNELS_FIRST, CHANNELS_LAST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_on_the_cpu(layout, dtype, tmp_path, monkeypatch):
    xs = draw_parts(layout, dtype)

    class HostKernels:
        def __init__(self, _, vector_bytes, num_inputs):
            source = VECTORS + make_source(vector_bytes, num_inputs)
            self.functions = compile_kernels(source, ["concatenate"], tmp_path)

        def launch(self, name, launch, parameters):
            self.functions[name](launch, parameters)

    monkeypatch.setattr(concatenation, "_load_kernels", HostKernels)
    z = concatenation._run_on_gpu(xs)
    assert torch.equal(z, torch.cat(xs, 1))
    assert find_layout(z.shape, z.stride()) == layout


def test_sources_compile_for_gpus():
    if reason := nvrtc.explain_unavailability():
        pytest.skip(reason)
    for vector_bytes, num_inputs in zip(VECTOR_TYPES, (8, 4, 3, 2, 1), strict=True):
        assert nvrtc.compile_cubin(make_source(vector_bytes, num_inputs), "sm_90").resources.spills == 0


@pytest.mark.parametrize("layout", [CHANNELS_FIRST, CHANNELS_LAST])
@pytest.mark.parametrize("space", [(5,), (5, 3), (2, 3, 4)])
def test_operator_is_as_pytorch_wants_it(layout, space):
    xs = [x.requires_grad_() for x in draw_parts(layout, torch.float32, space=space)]
    checks = ["test_schema", "test_faketensor", "test_autograd_registration"]
    assert set(torch.library.opcheck(concatenate, (xs,), test_utils=checks).values()) == {"SUCCESS"}
    assert find_common_layout(xs) == layout
    factors = torch.randn(2, 28, *space)
    found, expected = (
        torch.autograd.grad((join(xs) * factors).sum(), xs) for join in (concatenate, lambda xs: torch.cat(xs, 1))
    )
    assert all(map(torch.equal, found, expected))


def test_other_views_have_no_rows():
    x = torch.randn(2, 4, 6, 6)
    assert find_common_layout([x[:, :, ::2]]) is None
    assert find_common_layout([x.transpose(2, 3)]) is None
    assert find_common_layout([x.expand(2, 4, 6, 6)[:1].expand(3, 4, 6, 6)]) is None
    assert find_common_layout([x, lay_out(x, CHANNELS_LAST)]) is None


def join_parts(m, x):
    first, second = m.first(x).chunk(2, 1)
    return m.last(torch.cat([first, second, m.middle(second), x], dim=1))


def conv(channels, outputs):
    return nn.Conv2d(channels, outputs, 3, padding=1)


def test_concatenations_of_a_graph_are_replaced(monkeypatch):
    monkeypatch.setattr("tvmconv.torch.inference.find_layer_kernels", lambda *_: None)
    model = Model(join_parts, first=conv(4, 8), middle=nn.MaxPool2d(3, 1, 1), last=conv(16, 4)).eval()
    x = torch.randn(2, 4, 9, 11)
    ours = optimized(model, x)
    assert "A kernel computes 1 concatenation of images." in ours.report().notes
    assert "torch.cat" not in "".join(ours.graph_code())
    assert differ(ours, model, x) < 1e-6
    gradients = [torch.autograd.grad(each(x.requires_grad_()).square().sum(), x)[0] for each in (ours, model)]
    assert torch.allclose(*gradients, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 2, -1])
def test_concatenations_along_other_axes_stay(axis, monkeypatch):
    monkeypatch.setattr("tvmconv.torch.inference.find_layer_kernels", lambda *_: None)
    model = Model(lambda m, x: torch.cat([m.first(x), x], axis), first=conv(4, 4)).eval()
    ours = optimized(model, torch.randn(2, 4, 9, 11))
    assert not any("concatenation" in note for note in ours.report().notes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("layout", [CHANNELS_FIRST, CHANNELS_LAST])
def test_kernel_on_a_gpu(layout, dtype):
    for space in ((5, 3), (40, 64), (6, 10, 12)):
        xs = draw_parts(layout, dtype, "cuda", space)
        z = concatenate(xs)
        assert torch.equal(z, torch.cat(xs, 1))
        assert find_layout(z.shape, z.stride()) == layout
        assert torch.equal(concatenation.make_dense(xs[1], layout), xs[1])
