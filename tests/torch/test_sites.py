"""What follows a convolution in a model's graph, found without running a kernel."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is missing")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from tvmconv.torch.layer import ACTIVATIONS  # noqa: E402
from tvmconv.torch.sites import find_sites, trace  # noqa: E402

X = torch.linspace(-8, 8, 65)
BEHIND = {
    "relu": [nn.ReLU(), nn.ReLU(inplace=True), torch.relu, functional.relu, lambda y: y.clamp(min=0)],
    "relu6": [nn.ReLU6(), functional.relu6, nn.Hardtanh(0, 6), lambda y: torch.clamp(y, 0, 6)],
    "silu": [nn.SiLU(), functional.silu],
    "gelu": [nn.GELU(), functional.gelu],
    "sigmoid": [nn.Sigmoid(), torch.sigmoid, lambda y: y.sigmoid()],
    "hardsigmoid": [nn.Hardsigmoid(), functional.hardsigmoid],
    "hardswish": [nn.Hardswish(), functional.hardswish],
    "clamp": [lambda y: y.clamp(0, 1), lambda y: torch.clip(y, max=1, min=0), lambda y: functional.hardtanh(y, 0)],
    "": [
        nn.Tanh(),
        nn.Hardtanh(),
        nn.GELU(approximate="tanh"),
        lambda y: functional.gelu(y, approximate="tanh"),
        lambda y: y.clamp(0, 5),
        lambda y: y.clamp(max=6),
        lambda y: y * torch.sigmoid(y),
    ],
}


class Followed(nn.Module):
    """A convolution, and a function or a module behind it."""

    def __init__(self, behind):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)
        self.behind = behind

    def forward(self, x):
        return self.behind(self.conv(x))


CASES = [(name, behind) for name, several in BEHIND.items() for behind in several]


@pytest.mark.parametrize(("name", "behind"), CASES)
def test_an_activation_becomes_part_of_the_kernel(name, behind):
    (site,) = find_sites(trace(Followed(behind)), {})
    assert site.names == ([name] if name else [])
    if name:  # and PyTorch would compute the same in its place
        torch.testing.assert_close(ACTIVATIONS[name](X), behind(X.clone()))
