"""Group and instance normalizations with activations: the kernels, the operator, and the graphs that call it."""

import copy
import shutil

import pytest
import torch
from host_cuda import compile_kernels
from small_models import Model, differ, optimized
from torch import nn
from torch.nn import functional as F  # noqa: N812  as PyTorch's is usually named

import tvmconv.torch
from tvmconv.compiler import nvrtc
from tvmconv.torch import group_norm_operator as operator
from tvmconv.torch.group_norm_fusion import NO_SLOWER, NormFuser
from tvmconv.torch.group_norm_operator import group_norm_act
from tvmconv.torch.group_norm_source import ACTIVATION_CODE, make_source
from tvmconv.torch.layout_plan import LayoutCosts
from tvmconv.torch.partition import partition_model, record_calls
from tvmconv.torch.report import PYTORCH_NAME
from tvmconv.torch.tensor_layout import lay_out
from tvmconv.workloads import parse
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST

NAMES = "sum_channels", "finish", "apply"
EPS = 1e-5


def draw(shape, layout=CHANNELS_FIRST, dtype=torch.float32):
    torch.manual_seed(0)
    offsets = 3 * torch.randn(shape[1]).view(-1, *(1,) * (len(shape) - 2))
    return lay_out((torch.randn(shape) + offsets).to(dtype), layout)


def compute_in_double(x, weight, bias, num_groups, activation="", slope=0.0):
    weight, bias = (None if each is None else each.double() for each in (weight, bias))
    y = F.group_norm(x.double(), num_groups, weight, bias, EPS)
    return operator.apply_activation(y, activation, slope)


# Shape, groups, elements of an access, whether there are weight and bias, and CTAs that the device runs.
CASES = [
    ((2, 6, 5, 7), 6, 1, True, 64),
    ((1, 8, 50, 10), 8, 4, True, 1),
    ((2, 48, 16, 8), 3, 4, False, 40),
    ((1, 96, 12), 2, 2, True, 8),
    ((3, 70, 4, 4, 4), 1, 2, True, 8),
    ((1, 40, 500), 8, 4, False, 200),
]


@pytest.mark.skipif(not shutil.which("g++"), reason="g++ is missing")
@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", [CHANNELS_FIRST, CHANNELS_LAST])
@pytest.mark.parametrize(("shape", "num_groups", "vector", "has_parameters", "num_ctas"), CASES)
def test_kernels_on_the_cpu(shape, num_groups, vector, has_parameters, num_ctas, layout, tmp_path, monkeypatch):
    """The source computes the normalization in float64, with g++ in place of the compiler for GPUs."""
    x, is_last = draw(shape, layout), layout == CHANNELS_LAST
    source = make_source("float32", "leaky_relu", vector=vector, is_channels_last=is_last)
    functions = compile_kernels(source, NAMES, tmp_path)

    class HostKernels:
        def launch(self, name, launch, parameters):
            functions[name](launch, parameters)

    class Properties:
        multi_processor_count = num_ctas

    monkeypatch.setattr(operator, "CTAS_PER_MULTIPROCESSOR", 1)
    monkeypatch.setattr(operator, "count_vector_elements", lambda *_: vector)
    monkeypatch.setattr(operator, "_load_kernels", lambda *_: HostKernels())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    weight, bias = torch.randn(2, shape[1]) if has_parameters else (None, None)
    found = operator._run_on_gpu(x, weight, bias, num_groups, EPS, "leaky_relu", 0.2)
    expected = compute_in_double(x, weight, bias, num_groups, "leaky_relu", 0.2)
    assert found.stride() == x.stride()
    assert float((found - expected).abs().max()) < 2e-5


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("is_last", [False, True])
def test_sources_compile_for_gpus(dtype, is_last):
    if reason := nvrtc.explain_unavailability():
        pytest.skip(reason)
    vector = 4 if dtype == "float32" else 8
    for activation in [*ACTIVATION_CODE][:: 1 if dtype == "float16" and is_last else 5]:
        source = make_source(
            dtype, activation, vector=vector, is_channels_last=is_last, has_float_parameters=dtype == "float32"
        )
        cubin = nvrtc.compile_cubin(source, "sm_90")
        assert {*cubin.kernels} == {*NAMES}
        assert cubin.resources.spills == 0


@pytest.mark.parametrize("activation", ACTIVATION_CODE)
def test_operator_is_as_pytorch_wants_it(activation):
    for layout, dtype in ((CHANNELS_FIRST, torch.float32), (CHANNELS_LAST, torch.bfloat16)):
        x, weight = draw((2, 6, 5, 4), layout, dtype), torch.randn(6).to(dtype)
        arguments = x, weight, None, 3, EPS, activation, 0.1
        checks = ["test_schema", "test_faketensor"]
        assert set(torch.library.opcheck(group_norm_act, arguments, test_utils=checks).values()) == {"SUCCESS"}
        y, expected = group_norm_act(*arguments), compute_in_double(x, weight, None, 3, activation, 0.1)
        assert y.stride() == x.stride()
        assert float((y - expected).norm() / expected.norm()) < (1e-6 if dtype is torch.float32 else 4e-3)


def conv(channels=4, outputs=8):
    return nn.Conv2d(channels, outputs, 3, padding=1)


def timm_like(m, x):
    return F.silu(F.group_norm(m.conv(x), m.norm.num_groups, m.norm.weight, m.norm.bias, m.norm.eps))


SPELLINGS = {
    "InstanceNorm2d + LeakyReLU": lambda: nn.Sequential(conv(), nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.3)),
    "InstanceNorm2d": lambda: nn.Sequential(conv(), nn.InstanceNorm2d(8), nn.Softshrink()),
    "GroupNorm + SiLU": lambda: nn.Sequential(conv(), nn.GroupNorm(2, 8), nn.SiLU(inplace=True)),
    "GroupNorm + sigmoid + mul": lambda: Model(
        lambda m, x: (lambda y: y * torch.sigmoid(y))(m.norm(m.conv(x))), conv=conv(), norm=nn.GroupNorm(4, 8)
    ),
    "group_norm + silu": lambda: Model(timm_like, conv=conv(), norm=nn.GroupNorm(2, 8)),
    "instance_norm + relu": lambda: Model(lambda m, x: F.instance_norm(m.conv(x)).relu(), conv=conv()),
}


@pytest.fixture
def is_cheap(monkeypatch):
    """Leaves the convolutions to PyTorch, whose kernels would have to be built."""
    monkeypatch.setattr("tvmconv.torch.inference.find_layer_kernels", lambda *_: None)


def draw_parameters(model):
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model.eval()


@pytest.mark.usefixtures("is_cheap")
@pytest.mark.parametrize("name", SPELLINGS)
def test_normalizations_are_found_in_every_spelling(name):
    model, x = draw_parameters(SPELLINGS[name]()), torch.randn(2, 4, 9, 11)
    ours = optimized(model, x)
    (line,) = (line for line in ours.report().lines if not line.workload)
    assert (line.former, line.implementation) == (name, "group_norm")
    assert "group_norm" not in ours.graph.code
    assert differ(ours, model, x) < 1e-5
    assert differ(copy.deepcopy(ours), model, x) < 1e-5


@pytest.mark.usefixtures("is_cheap")
def test_changes_and_gradients_are_those_of_pytorch(tmp_path):
    model, x = draw_parameters(SPELLINGS["GroupNorm + SiLU"]()), torch.randn(2, 4, 9, 11)
    ours = optimized(model, x)
    ours.save(tmp_path / "model")
    assert differ(tvmconv.torch.load(tmp_path / "model"), model, x) < 1e-5
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    ours.load_state_dict(state)
    assert differ(ours, model, x) < 1e-5
    assert differ(ours, model, x[:1]) < 1e-5
    gradients = [torch.autograd.grad(each(x.requires_grad_()).square().sum(), x)[0] for each in (ours, model)]
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("is_cheap")
@pytest.mark.parametrize(
    "norm",
    [nn.InstanceNorm2d(8, track_running_stats=True), nn.LocalResponseNorm(2), nn.GroupNorm(2, 8).double()],
    ids=lambda norm: type(norm).__name__,
)
def test_other_normalizations_are_left_to_pytorch(norm):
    is_double = any(parameter.dtype is torch.float64 for parameter in norm.parameters())
    model = nn.Sequential(conv(), norm)
    model, x = (model.double(), torch.randn(1, 4, 5, 5).double()) if is_double else (model, torch.randn(1, 4, 5, 5))
    ours = optimized(model, x)
    assert all(line.workload or is_double for line in ours.report().lines)
    assert differ(ours, model, x) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_kernels_on_a_gpu(dtype):
    bound = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}[dtype]
    for shape, num_groups in (((2, 64, 31, 33), 8), ((1, 32, 40, 48, 24), 32), ((3, 36, 100), 1), ((2, 5, 7, 9), 5)):
        for layout in (CHANNELS_FIRST, CHANNELS_LAST):
            x, weight = draw(shape, layout, dtype).cuda(), torch.randn(shape[1]).cuda()
            for activation, parameter in (("silu", weight), ("leaky_relu", weight.to(dtype)), ("gelu", None)):
                found = group_norm_act(x, parameter, parameter, num_groups, EPS, activation, 0.1)
                expected = compute_in_double(x, parameter, parameter, num_groups, activation, 0.1)
                assert found.stride() == x.stride()
                assert float((found - expected).norm() / expected.norm()) < bound


class Stage(nn.Sequential):
    """Two convolutions of a U-Net, each with an instance normalization and a leaky ReLU."""

    def __init__(self, channels, filters, stride):
        layers = []
        for size, step in ((channels, stride), (filters, 1)):
            layers += [nn.Conv3d(size, filters, 3, step, 1), nn.InstanceNorm3d(filters, affine=True)]
            layers.append(nn.LeakyReLU(inplace=True))
        super().__init__(*layers)


def call_unet(m, x):
    skip = m.down(x)
    return m.last(m.up(torch.cat([m.upsampling(m.bottom(skip)), skip], 1)))


@pytest.mark.usefixtures("is_cheap")
def test_a_unet_is_channels_last_throughout(monkeypatch):
    """Between normalizations and concatenations, no image is converted."""

    class Costs(LayoutCosts):
        def kernel_seconds(self, text):
            return {"nchw": 10e-6, "nchw-nhwc": 5e-6, "nhwc-nchw": 5e-6, "nhwc": 1e-6}

        def conversion_seconds(self, nbytes):
            return 6e-6

    monkeypatch.setattr("tvmconv.torch.inference.LayoutCosts", Costs)
    parts = {"down": Stage(1, 4, 1), "bottom": Stage(4, 8, 2), "up": Stage(8, 4, 1), "last": nn.Conv3d(4, 3, 1)}
    model = Model(call_unet, upsampling=nn.ConvTranspose3d(8, 4, 2, 2), **parts).eval()
    x = torch.randn(1, 1, 8, 8, 8)
    ours = optimized(model, x)
    layouts = [parse(line.workload).layout for line in ours.report().lines if line.workload]
    assert layouts == ["nhwc"] * 7 + ["nhwc-nchw"]
    assert sum(line.implementation == "group_norm" for line in ours.report().lines) == 6
    assert "A kernel computes 1 concatenation of images." in ours.report().notes
    assert "convert_images" not in ours.graph.code
    assert differ(ours, model, x) < 1e-5
    assert ours(x).stride() == model(x).stride()


@pytest.mark.parametrize("kernel_seconds", [1.0, 3.0])
def test_the_faster_of_both_runs_by_measured_times(kernel_seconds):
    """PyTorch takes 2 s in any layout; the concatenation follows the same times."""
    parts = {"conv": conv(4, 8), "norm": nn.GroupNorm(2, 8), "last": conv(12, 4)}
    model = Model(lambda m, x: m.last(torch.cat([torch.relu(m.norm(m.conv(x))), x], 1)), **parts).eval()
    x = torch.randn(2, 4, 9, 11)
    with record_calls(model) as static_calls, torch.no_grad():
        model(x)
    traced, partitions = partition_model(model, static_calls, (x,))
    fuser = NormFuser(lambda name, call: 2.0 if "PyTorch" in name else kernel_seconds)
    fuser.fuse(traced, partitions, (x,))
    (line,) = fuser.reports
    assert (line.pytorch_seconds, line.tvmconv_seconds) == (2.0, kernel_seconds)
    is_faster = kernel_seconds < 2
    assert (line.implementation, line.reason) == (("group_norm", "") if is_faster else ("PyTorch", NO_SLOWER))
    assert fuser.num_concatenations == int(is_faster)
    assert fuser.describe() == ["A kernel computes 1 concatenation of images."] * is_faster
    with torch.no_grad():
        assert torch.allclose(traced(x), model(x), atol=1e-6)


def test_without_time_kernels_are_used_if_they_are_correct():
    model, x = nn.Sequential(conv(), nn.GroupNorm(2, 8)).eval(), torch.randn(1, 4, 5, 5)
    with record_calls(model) as static_calls:
        model(x)
    traced, partitions = partition_model(model, static_calls, (x,))
    times: list[str] = []
    fuser = NormFuser(lambda name, call: times.append(name) or 1.0, lambda: False)
    with torch.no_grad():
        fuser.fuse(traced, partitions, (x,))
    assert times == []
    assert [line.implementation for line in fuser.reports] == ["group_norm"]


def test_a_view_of_a_normalization_is_pytorchs():
    """PyTorch's instance normalization is contiguous; a kernel's result would be channels last."""
    conv, norm = nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4, affine=True)
    model = Model(lambda m, x: m.norm(m.conv(x)).view(len(x), -1), conv=conv, norm=norm)
    model, x = model.to(memory_format=torch.channels_last), draw((2, 4, 9, 11), CHANNELS_LAST)
    ours = optimized(model, x)
    assert differ(ours, model, x) < 1e-5
    conv_line, norm_line = ours.report().lines
    assert conv_line.implementation != PYTORCH_NAME
    assert norm_line.implementation == PYTORCH_NAME
    assert "view" in norm_line.reason
