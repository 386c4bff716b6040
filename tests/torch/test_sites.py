"""What follows a convolution in a model's graph, found without running a kernel."""

import math

import pytest
import torch
from small_models import Model, NormAct
from torch import nn
from torch.nn import functional

from tvmconv.torch.fusion import find_fusion_sites
from tvmconv.torch.layer import ACTIVATIONS, TunedConv
from tvmconv.torch.partition import trace_model

X = torch.linspace(-8, 8, 65)


class Swish(nn.Module):
    """An activation of the user's own."""

    def forward(self, x):
        return x * x.sigmoid()


BEHIND = {
    "relu": [nn.ReLU(), nn.ReLU(inplace=True), torch.relu, functional.relu, lambda y: y.clamp(min=0)],
    "relu6": [nn.ReLU6(), functional.relu6, nn.Hardtanh(0, 6), lambda y: torch.clamp(y, 0, 6)],
    "silu": [
        nn.SiLU(),
        nn.SiLU(inplace=True),
        functional.silu,
        lambda y: y * torch.sigmoid(y),
        lambda y: y.mul_(y.sigmoid()),
        Swish(),
    ],
    "gelu": [nn.GELU(), functional.gelu],
    "gelu_tanh": [
        nn.GELU(approximate="tanh"),
        lambda y: functional.gelu(y, approximate="tanh"),
        lambda y: 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0)))),
    ],
    "tanh": [nn.Tanh(), torch.tanh, lambda y: y.tanh()],
    "mish": [nn.Mish(), functional.mish, lambda y: y.mul(functional.softplus(y).tanh())],
    "elu": [nn.ELU(), functional.elu, lambda y: functional.elu(y, inplace=True)],
    "softplus": [nn.Softplus(), functional.softplus],
    "leaky_relu": [nn.LeakyReLU(), functional.leaky_relu],
    "leaky_relu0.1": [nn.LeakyReLU(0.1, inplace=True), lambda y: functional.leaky_relu(y, negative_slope=0.1)],
    "leaky_relu0.2": [nn.LeakyReLU(0.2), lambda y: functional.leaky_relu(y, 0.2)],
    "sigmoid": [nn.Sigmoid(), torch.sigmoid, lambda y: y.sigmoid()],
    "hardsigmoid": [nn.Hardsigmoid(), functional.hardsigmoid, lambda y: functional.relu6(y + 3.0) / 6.0],
    "hardswish": [
        nn.Hardswish(),
        functional.hardswish,
        lambda y: y * functional.relu6(y + 3.0).div_(6.0),
        lambda y: y * functional.relu6(y + 3) / 6,
    ],
    "clamp": [lambda y: y.clamp(0, 1), lambda y: torch.clip(y, max=1, min=0), lambda y: functional.hardtanh(y, 0)],
    "hardtanh": [nn.Hardtanh(), lambda y: y.clamp(-1, 1)],
    "selu": [nn.SELU(), functional.selu],
    "quick_gelu": [lambda y: y * torch.sigmoid(1.702 * y)],
    "hard_mish": [lambda y: 0.5 * y * (y + 2).clamp(min=0, max=2)],
    "prelu": [nn.PReLU(), nn.PReLU(init=-0.5), nn.LeakyReLU(0.3), nn.RReLU().eval()],
    "": [
        nn.ELU(0.5),
        nn.Softplus(2),
        nn.Softmax(1),
        nn.RReLU().train(),
        lambda y: functional.elu(y, 2.0),
        lambda y: y.clamp(0, 5),
        lambda y: y.clamp(0, 20),
        lambda y: torch.clamp(y, torch.zeros(()), torch.ones(())),
        lambda y: y.clamp(max=6),
        lambda y: y * torch.sigmoid(y + y.mean()),
        lambda y: y * torch.sigmoid(y) + y.exp() * y.detach(),
    ],
}


def followed(behind):
    """A convolution, and a function or a module behind it."""
    return Model(lambda m, x: m.behind(m.conv(x)), conv=nn.Conv2d(1, 1, 1), behind=behind)


CASES = [(name, behind) for name, several in BEHIND.items() for behind in several]


@pytest.mark.parametrize(("name", "behind"), CASES)
def test_an_activation_becomes_part_of_the_kernel(name, behind):
    (site,) = find_fusion_sites(trace_model(followed(behind)), {})
    assert site.epilogue_names == ([name] if name else [])
    if name == "prelu":
        module = TunedConv(nn.Conv2d(1, 1, 1), (), [name], slope=site.slope)
        y = torch.randn(2, 1, 8, 8)
        torch.testing.assert_close(functional.prelu(y, module._expand_slope(y)), behind(y.clone()))
    elif name:  # and PyTorch would compute the same in its place
        torch.testing.assert_close(ACTIVATIONS[name](X), behind(X.clone()))


class Statistics(nn.Module):
    """A normalisation by statistics that are computed at each call."""

    def forward(self, x):
        return functional.batch_norm(x, x.mean((0, 2, 3)), x.var((0, 2, 3)))


def test_functional_batch_norm_becomes_part_of_the_kernel():
    model = followed(NormAct(1, nn.ReLU())).eval()
    nn.init.uniform_(model.behind.weight)
    model.behind.running_mean.fill_(0.5)
    (site,) = find_fusion_sites(trace_model(model), {})
    assert site.epilogue_names == ["relu"]
    y = torch.randn(2, 1, 4, 4)
    expected = functional.batch_norm(y, *(getattr(model.behind, name) for name in NORM_TENSORS))
    torch.testing.assert_close(site.affines[0](y), expected)
    model.behind.running_mean.data = torch.full((1,), 2.0)  # the model's own tensor is read, not a copy
    assert site.affines[0].running_mean.item() == 2.0


NORM_TENSORS = ("running_mean", "running_var", "weight", "bias")


def test_sync_batch_norm_becomes_part_of_the_kernel():
    (site,) = find_fusion_sites(trace_model(followed(nn.SyncBatchNorm(1)).eval()), {})
    assert isinstance(site.affines[0], nn.SyncBatchNorm)


@pytest.mark.parametrize("behind", [Statistics(), NormAct(1, nn.ReLU()).train()])
def test_batch_norm_by_statistics_of_the_call_is_left_to_pytorch(behind):
    (site,) = find_fusion_sites(trace_model(followed(behind)), {})
    assert not site.affines


@pytest.mark.parametrize(
    ("behind", "name"),
    [
        (nn.Softplus(2), "Softplus"),
        (nn.GroupNorm(1, 1), "GroupNorm"),
        (lambda y: functional.elu(y, 2.0), "elu"),
        (nn.ReLU(), ""),
        (nn.MaxPool2d(2), ""),
    ],
)
def test_what_no_kernel_does_is_named(behind, name):
    (site,) = find_fusion_sites(trace_model(followed(behind)), {})
    assert site.followed_by == name
