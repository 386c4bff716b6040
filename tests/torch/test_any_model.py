"""Models in the style of timm, diffusers, MONAI, Ultralytics and torchaudio: what is fused, and the same results."""

import copy
import operator

import pytest
import torch
from small_models import Model, X, differ, optimized, runs, with_statistics
from torch import nn
from torch.nn import Conv1d, Conv2d, Conv3d, functional
from torch.nn.utils.parametrizations import weight_norm

import tvmconv.torch

SIGNAL, VOLUME = X[:, :, 0], X[:, :, None, :6, :7].repeat(1, 1, 4, 1, 1)


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm's: it asserts the number of axes, and calls the function."""

    def __init__(self, channels, act):
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x):
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        bn_training = self.training or (self.running_mean is None and self.running_var is None)
        x = functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, bn_training, 0.1, self.eps
        )
        return self.act(self.drop(x))


class FrozenBatchNorm2d(nn.Module):
    """As torchvision's: buffers, and a product and a sum."""

    def __init__(self, channels):
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)

    def forward(self, x):
        weight, bias = self.weight.reshape(1, -1, 1, 1), self.bias.reshape(1, -1, 1, 1)
        mean, var = self.running_mean.reshape(1, -1, 1, 1), self.running_var.reshape(1, -1, 1, 1)
        scale = weight * (var + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


class OwnNorm(nn.BatchNorm2d):
    """A subclass that computes the same."""


class StdConv2d(Conv2d):
    """As timm's: it standardizes its weight at each call."""

    def forward(self, x):
        weight = functional.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0.0, eps=1e-6
        ).reshape_as(self.weight)
        return functional.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class OwnConv2d(Conv2d):
    """A subclass that computes the same."""


class LayerScale(nn.Module):
    def __init__(self, channels, value=0.3):
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(value, 2 * value, channels))

    def forward(self, x):
        return x * self.gamma.view(1, -1, 1, 1)


def followed(conv, *after):
    return nn.Sequential(conv, *after)


def normed(*act):
    return followed(Conv2d(4, 6, 3, padding=1, bias=False), *act)


def added(call):
    return Model(call, a=Conv2d(4, 4, 3, padding=1), b=Conv2d(4, 4, 1))


def padded_mode(mode):
    return followed(Conv2d(4, 6, 3, padding=1, padding_mode=mode), nn.ReLU())


def old_weight_norm():
    with pytest.warns(FutureWarning):
        return followed(nn.utils.weight_norm(Conv1d(4, 6, 3, padding=1)), nn.LeakyReLU(0.1))


def drawn_slopes(module):
    nn.init.uniform_(module.weight, -0.5, 1.5)
    return module


# The model, its input, and the end of the workload of each convolution.
CASES = {
    "batch norm with an activation, as in timm": (lambda: normed(BatchNormAct2d(6, nn.SiLU())), X, ["p1,bias,silu"]),
    "frozen batch norm": (lambda: normed(FrozenBatchNorm2d(6), nn.ReLU()), X, ["p1,bias,relu"]),
    "a subclass of batch norm": (lambda: normed(OwnNorm(6), nn.Hardswish()), X, ["p1,bias,hardswish"]),
    "two normalizations": (lambda: normed(nn.BatchNorm2d(6), FrozenBatchNorm2d(6)), X, ["p1,bias"]),
    "a layer scale and a residual": (
        lambda: Model(lambda m, x: x + m.scale(m.conv(x)), conv=Conv2d(4, 4, 1), scale=LayerScale(4)),
        X,
        ["p0,bias,add"],
    ),
    "a scale and no bias": (lambda: Model(lambda m, x: m.c(x).mul(0.5), c=Conv2d(4, 4, 1, bias=False)), X, ["p0"]),
    "arithmetic with numbers": (lambda: Model(lambda m, x: 1 - m.c(x) / 3, c=Conv2d(4, 4, 1)), X, ["p0,bias"]),
    "PReLU per channel": (lambda: followed(Conv2d(4, 6, 1), drawn_slopes(nn.PReLU(6))), X, ["p0,bias,prelu"]),
    "PReLU of one slope": (lambda: followed(Conv2d(4, 6, 1), nn.PReLU()), X, ["p0,bias,prelu"]),
    "LeakyReLU of another slope": (lambda: followed(Conv2d(4, 6, 1), nn.LeakyReLU(0.3)), X, ["p0,bias,prelu"]),
    "Mish by hand": (
        lambda: Model(lambda m, x: (y := m.c(x)) * functional.softplus(y).tanh(), c=Conv2d(4, 4, 1)),
        X,
        ["p0,bias,mish"],
    ),
    "a residual first": (
        lambda: added(lambda m, x: m.b(x).tanh() + m.a(x)),
        X,
        ["p0,bias,tanh,add", "p1,bias"],
    ),
    "a residual that the sum overwrites": (
        lambda: added(lambda m, x: operator.iadd(x.exp(), m.b(m.a(x))).relu_()),
        X,
        ["p1,bias", "p0,bias,add,relu"],
    ),
    "a residual that is read after it was overwritten": (
        lambda: added(lambda m, x: operator.iadd(y := x.exp(), m.b(m.a(x))) * y),
        X,
        ["p1,bias", "p0,bias"],
    ),
    "zero padding before": (
        lambda: followed(nn.ZeroPad2d((0, 1, 2, 1)), Conv2d(4, 6, 3, stride=2, padding=1)),
        X,
        ["s2,p3x1x2x2,bias"],
    ),
    "constant padding of zero": (
        lambda: followed(nn.ConstantPad1d((3, 0), 0.0), Conv1d(4, 6, 4)),
        SIGNAL,
        ["p3x0,bias"],
    ),
    "functional padding": (
        lambda: Model(lambda m, x: m.c(functional.pad(x, (1, 1, 1, 1, 1, 1))), c=Conv3d(4, 6, 3)),
        VOLUME,
        ["p1,bias"],
    ),
    "padding with ones": (lambda: followed(nn.ConstantPad2d(1, 1.0), Conv2d(4, 6, 3)), X, ["p0,bias"]),
    "reflection": (lambda: followed(nn.ReflectionPad2d(1), Conv2d(4, 6, 3)), X, ["p0,bias"]),
    "padding_mode reflect": (lambda: padded_mode("reflect"), X, ["p0,bias,relu"]),
    "padding_mode replicate": (lambda: padded_mode("replicate"), X, ["p0,bias,relu"]),
    "padding_mode circular": (lambda: padded_mode("circular"), X, ["p0,bias,relu"]),
    "transposed 1-D": (
        lambda: followed(nn.ConvTranspose1d(4, 6, 4, stride=2, padding=1), nn.LeakyReLU(0.1)),
        SIGNAL,
        ["s2,p1,bias,leaky_relu0.1"],
    ),
    "transposed 2-D": (
        lambda: followed(nn.ConvTranspose2d(4, 8, 3, 2, 1, 1, groups=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        X,
        ["s2,p1,g2,op1,bias,relu"],
    ),
    "transposed 3-D": (lambda: followed(nn.ConvTranspose3d(4, 6, 2, stride=2), nn.ELU()), VOLUME, ["s2,p0,bias,elu"]),
    "weight norm": (lambda: followed(weight_norm(Conv1d(4, 6, 3)), nn.SiLU()), SIGNAL, ["p0,bias,silu"]),
    "weight norm, transposed": (
        lambda: followed(weight_norm(nn.ConvTranspose1d(4, 6, 4, stride=2))),
        SIGNAL,
        ["s2,p0,bias"],
    ),
    "weight norm of old": (old_weight_norm, SIGNAL, ["p1,bias,leaky_relu0.1"]),
    "weight standardization": (lambda: followed(StdConv2d(4, 6, 3), nn.ReLU()), X, ["p0,bias,relu"]),
    "a subclass of a convolution": (lambda: followed(OwnConv2d(4, 6, 3), nn.GELU()), X, ["p0,bias,gelu"]),
    "lazy modules": (
        lambda: followed(nn.LazyConv2d(6, 3), nn.LazyBatchNorm2d(), nn.ReLU()),
        X,
        ["p0,bias,relu"],
    ),
}


# Each case builds kernels, which takes some seconds; one of each kind runs by default.
BY_DEFAULT = (
    *("batch norm with an activation, as in timm", "PReLU per channel", "zero padding before"),
    *("transposed 1-D", "weight norm of old"),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_what_follows_is_fused_with_the_same_results(name):
    make, x, expected = CASES[name]
    torch.manual_seed(0)
    model = with_statistics(make())
    if name == "lazy modules":
        model(x)
        model = with_statistics(model)
    ours = optimized(model, x)
    lines = ours.report().lines
    texts = [line.workload.partition(",s")[2] for line in lines]
    assert all(f"s{text}".endswith(end) for text, end in zip(texts, expected, strict=True)), texts
    assert all(runs(ours).values())
    assert differ(ours, model, x) < 1e-5
    with torch.no_grad():
        assert ours(x).stride() == model(x).stride()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("frozen batch norm", lambda m: m[1].running_var.mul_(3)),
        ("PReLU per channel", lambda m: m[1].weight.mul_(-2)),
        ("weight norm", lambda m: m[0].parametrizations.weight.original0.mul_(2)),
        ("weight norm of old", lambda m: m[0].weight_g.mul_(2)),
        ("weight standardization", lambda m: m[0].weight.exp_()),
        ("transposed 2-D", lambda m: m[1].running_mean.add_(1)),
        ("a layer scale and a residual", lambda m: m.scale.gamma.add_(1)),
    ],
)
def test_computed_weights_follow_their_parameters(name, change):
    make, x, _ = CASES[name]
    model = with_statistics(make())
    ours = optimized(model, x)
    copied = copy.deepcopy(ours)
    with torch.no_grad():
        change(ours.original)
        assert differ(ours, model, x) > 1e-3
        assert differ(copied, model, x) < 1e-5
        change(model)
    assert differ(ours, model, x) < 1e-5


def test_a_convolution_that_is_called_twice_is_fused_at_each_call():
    def call(model, x):
        y = torch.relu(model.norm1(model.conv(x)))
        return model.norm2(model.conv(y)) + y

    model = Model(call, conv=Conv2d(4, 4, 3, padding=1), norm1=nn.BatchNorm2d(4), norm2=nn.BatchNorm2d(4))
    ours = optimized(with_statistics(model))
    assert [line.workload.partition("p1,")[2] for line in ours.report().lines] == ["bias,relu", "bias,add"]
    assert differ(ours, model) < 1e-5


def test_lazy_modules_are_initialized_by_the_example():
    model = nn.Sequential(nn.LazyConv2d(6, 3), nn.LazyBatchNorm2d(), nn.ReLU())
    ours = tvmconv.torch.optimize(model, X, choose="tuned")
    assert model.training
    assert type(model[0]) is nn.Conv2d
    assert [line.workload.partition("p0,")[2] for line in ours.report().lines] == ["bias,relu"]
    assert differ(ours, model.eval()) < 1e-5


def as_tested_tensor(model, x):
    if not isinstance(x, torch.Tensor):
        raise TypeError
    return model.conv(torch.as_tensor(x))


@pytest.mark.parametrize(
    "call",
    [
        as_tested_tensor,
        lambda m, x: m.conv(torch.jit.wait(torch.jit.fork(torch.relu, x))),
        lambda m, x: torch.vmap(m.conv)(x[:, None])[:, 0],
        lambda m, x: torch.func.grad(lambda y: m.conv(y).square().sum())(x),
    ],
    ids=["as_tensor", "fork", "vmap", "grad"],
)
def test_functions_in_c_that_take_no_proxy_do_not_end_the_process(call):
    model = Model(call, conv=Conv2d(4, 4, 3, padding=1)).eval()
    assert differ(optimized(model), model) < 1e-5


def test_a_weight_that_depends_on_the_input_is_left_to_pytorch():
    model = Model(lambda m, x: functional.conv2d(x, m.w * x.mean()) + m.conv(x), conv=Conv2d(4, 4, 1))
    model.w = nn.Parameter(torch.randn(4, 4, 1, 1))
    ours = optimized(model)
    assert [line.reason for line in ours.report().lines] == ["its weight is computed", ""]
    assert differ(ours, model) < 1e-5


def test_a_shape_that_is_read_from_an_inner_result_does_not_prevent_fusion():
    def call(model, x):
        y = model.conv(x)
        shape = y.shape
        return torch.relu(y).view(shape[0], -1)

    model = Model(call, conv=Conv2d(4, 4, 3, padding=1))
    ours = optimized(model)
    assert ours.report().lines[0].workload.endswith("bias,relu")
    assert differ(ours, model) < 1e-5


def test_the_kernel_replaces_the_computation_of_the_weight():
    model = followed(weight_norm(Conv1d(4, 6, 3)), FrozenBatchNorm2d(6)).eval()
    model[1].forward = lambda x: x
    assert "parametrizations" not in optimized(model, SIGNAL).graph.code


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "note"),
    [
        (
            lambda: Model(lambda m, x: torch.relu(y := m.c(x)) + y, c=Conv2d(4, 4, 1)),
            "relu, which is not fused: the res",
        ),
        (
            lambda: followed(Conv2d(4, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)),
            "BatchNorm2d, which is not fused: it follows",
        ),
        (lambda: followed(Conv2d(4, 4, 1), nn.GroupNorm(2, 4)), "followed by GroupNorm, which no kernel does"),
        (lambda: Model(lambda m, x: m.c(x) + x[:1], c=Conv2d(4, 4, 1)), "add, which is not fused: the tensors have"),
    ],
)
def test_the_report_says_which_fusion_was_missed_and_why(model, note):
    assert note in str(optimized(model()).report())


class C2f(nn.Module):
    """As in YOLOv8: chunks, a list of blocks, and a concatenation."""

    def __init__(self):
        super().__init__()
        self.cv1, self.cv2 = self.conv(4, 8, 1), self.conv(12, 4, 1)
        self.m = nn.ModuleList([nn.Sequential(self.conv(4, 4, 3), self.conv(4, 4, 3))])

    @staticmethod
    def conv(channels, filters, size):
        return nn.Sequential(
            Conv2d(channels, filters, size, 1, size // 2, bias=False), nn.BatchNorm2d(filters), nn.SiLU(inplace=True)
        )

    def forward(self, x):
        y = list(self.cv1(x).chunk(2, 1))
        y.extend(y[-1] + m(y[-1]) for m in self.m)
        return self.cv2(torch.cat(y, 1))


class ResnetBlock(nn.Module):
    """As in diffusers: normalization before the convolutions, checks of shapes and dtypes, a scaled sum."""

    def __init__(self, channels, scale=1.5):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, channels), nn.GroupNorm(2, channels)
        self.conv1, self.conv2 = Conv2d(channels, channels, 3, padding=1), Conv2d(channels, channels, 3, padding=1)
        self.channels, self.scale = channels, scale

    def forward(self, x, temb=None):
        assert x.shape[1] == self.channels
        y = self.conv1(functional.silu(self.norm1(x)))
        if temb is not None:
            y = y + temb[:, :, None, None]
        if y.dtype == torch.bfloat16:
            y = y.float()
        y = self.conv2(functional.silu(self.norm2(y)))
        return (x + y) / self.scale


class UpBlock(nn.Module):
    """As in MONAI's U-Nets: the sizes are compared, and the smaller image is padded."""

    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose3d(4, 4, 2, 2)
        self.conv = nn.Sequential(Conv3d(8, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.LeakyReLU(0.1))

    def forward(self, x, skip):
        y = self.up(x)
        pads = [0] * 6
        for axis in range(3):
            if skip.shape[-axis - 1] != y.shape[-axis - 1]:
                pads[axis * 2 + 1] = 1
        return self.conv(torch.cat([skip, functional.pad(y, pads, "replicate")], 1))


class ResBlock1d(nn.Module):
    """As in HiFi-GAN: dilated convolutions with weight normalization."""

    def __init__(self, channels=4):
        super().__init__()
        self.convs = nn.ModuleList(weight_norm(Conv1d(channels, channels, 3, dilation=d, padding=d)) for d in (1, 3, 5))

    def forward(self, x):
        for conv in self.convs:
            x = conv(functional.leaky_relu(x, 0.1)) + x
        return x


class MelEncoder(nn.Module):
    """As in torchaudio's wav2vec2 and Conformer: extraction of features, a GLU, and a depthwise convolution."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = Conv1d(4, 8, 3, 2, bias=False), nn.BatchNorm1d(4)
        self.depthwise, self.last = Conv1d(4, 4, 3, padding=1, groups=4), Conv1d(4, 4, 1)

    def forward(self, x):
        y = functional.glu(self.first(x), dim=1)
        y = functional.silu(self.norm(self.depthwise(y)))
        return self.last(y).transpose(1, 2)


STYLES = {
    "ultralytics": (C2f, (X,), 4),
    "diffusers": (lambda: ResnetBlock(4), (X, torch.randn(2, 4)), 2),
    "diffusers, without an embedding": (lambda: ResnetBlock(4), (X,), 2),
    "monai": (UpBlock, (VOLUME[..., :3, :3, :3], torch.randn(2, 4, 7, 6, 7)), 2),
    "hifigan": (ResBlock1d, (SIGNAL,), 3),
    "torchaudio": (MelEncoder, (SIGNAL,), 3),
}


@pytest.mark.parametrize(
    "style", [style if style == "monai" else pytest.param(style, marks=pytest.mark.slow) for style in STYLES]
)
def test_models_of_libraries_are_one_graph(style):
    make, example, count = STYLES[style]
    torch.manual_seed(0)
    model = with_statistics(make())
    ours = optimized(model, example)
    assert len(ours.graph_code()) == 1
    assert list(runs(ours).values()) == [True] * count
    with torch.no_grad():
        for arguments in (example, tuple(value[:1] for value in example)):  # another batch size runs by PyTorch
            result, expected = ours(*arguments), model(*arguments)
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
            assert result.stride() == expected.stride()
