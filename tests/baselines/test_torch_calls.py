"""What cuDNN is asked to compute is the workload; here PyTorch computes it on the CPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import convolutions, filters

from tvmconv.baselines.torch_calls import list_calls, to_tensor
from tvmconv.verification import Problem
from tvmconv.workloads import Conv, parse
from tvmconv.workloads.layout import LAYOUTS

torch = pytest.importorskip("torch")


@given(filters() | convolutions())
def test_every_call_of_a_workload_computes_it(w):
    check_every_call(w)


@given(st.sampled_from(["conv1d", "conv3d"]).flatmap(lambda operator: convolutions(2000, operator, layouts=LAYOUTS)))
def test_every_call_of_a_signal_or_a_volume_computes_it(w):
    check_every_call(w)


def check_every_call(w):
    problem = Problem(w, seed=0)
    for call in list_calls(w):
        if is_wrong_on_the_cpu(w, call):
            continue
        y = call.finish(call.compute(*call.prepare(*map(to_tensor, problem.inputs)))).float().numpy()
        assert y.shape == w.argument_shapes[-1]
        assert y.flags.c_contiguous
        assert problem.check(y).ok, call.notes


def is_wrong_on_the_cpu(w, call):
    """PyTorch 2.13 takes what lies behind images of one channel, channels last: conv2d:2x1x4x4,1x1x3x3,s1x2, say."""
    return isinstance(w, Conv) and w.C == 1 and "in NHWC" in call.notes


EPILOGUES = ("relu", "bias,relu", "bias,add,relu", "add,bias,relu", "add,relu")


@pytest.fixture(scope="module")
def fused_on_cpu():
    """PyTorch's functions for cuDNN, which know NVIDIA GPUs alone, on the CPU as they are documented."""

    def relu(x, k, bias, stride, padding, dilation, groups):
        return torch.relu(torch.conv2d(x, k, bias, stride, padding, dilation, groups))

    def add_relu(x, k, z, alpha, bias, stride, padding, dilation, groups):
        return torch.relu(torch.conv2d(x, k, bias, stride, padding, dilation, groups) + alpha * z)

    aten = torch.library.Library("aten", "IMPL")
    aten.impl("cudnn_convolution_relu", relu, "CPU")
    aten.impl("cudnn_convolution_add_relu", add_relu, "CPU")
    yield
    aten._destroy()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_a_fused_epilogue_is_the_workload_s(fused_on_cpu, epilogue, layout):
    w = parse(f"conv2d:2x6x7x9,4x3x3x3,s2x1,p1x2,d1x2,g2,{layout},{epilogue}")
    assert ["fused" in " ".join(call.notes) for call in list_calls(w)] == [False, True] * 2
    check_every_call(w)


@pytest.mark.parametrize(
    "text", ["conv2d:1x4x6x6,8x4x1x1", "conv2d:2x4x1x1,8x4x1x1", "conv3d:1x4x3x5x5,8x4x1x1x1", "conv1d:2x4x9,8x4x1"]
)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_tensors_lie_as_the_call_says_whatever_the_layout(text, layout):
    """Also those whose strides could be of either layout, which PyTorch would bring to another one in the time."""
    w = parse(f"{text},nhwc" if layout == "nhwc" else text)
    last = torch.channels_last_3d if w.spatial_ndim == 3 else torch.channels_last
    for call, memory_format in zip(list_calls(w), (torch.contiguous_format, last), strict=True):
        for lies in call.prepare(*map(to_tensor, w.inputs(0))):
            assert lies.stride() == torch.empty(lies.shape, memory_format=memory_format).stride()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("filter1d:99,k5,clamp", "clamped by a kernel of its own"),
        ("conv2d:1x16x32x32,16x16x3x3,p0x1x1x0", "padded by a kernel of its own"),
        ("conv2d:1x16x32x32,16x1x3x3,g16", "depthwise"),
        ("conv2d:1x16x32x32,16x16x3x3,bias,silu", "silu by kernels of PyTorch's"),
    ],
)
def test_what_cudnn_does_not_do_itself_is_told(text, said):
    assert all(said in ", ".join(call.notes) for call in list_calls(parse(text)))


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        ("conv2d:1x4x6x6,4x4x3x3", [(), ("in NHWC",)]),
        ("conv2d:1x4x6x6,4x4x3x3,nhwc", [("in NCHW",), ("in NHWC",)]),
        (
            "conv2d:1x4x6x6,4x4x3x3,nchw-nhwc",
            [("in NCHW", "conversion in the time"), ("in NHWC", "conversion in the time")],
        ),
        ("conv1d:1x4x6,4x4x3", [(), ("as images of one row", "in NHWC")]),
        (
            "conv2d:1x4x6x6,4x4x3x3,nhwc,bias,relu",
            [
                ("relu by kernels of PyTorch's", "in NCHW"),
                ("bias+relu fused", "in NCHW"),
                ("relu by kernels of PyTorch's", "in NHWC"),
                ("bias+relu fused", "in NHWC"),
            ],
        ),
    ],
)
def test_the_layout_and_the_fusion_are_told(text, notes):
    assert [call.notes for call in list_calls(parse(text))] == notes
