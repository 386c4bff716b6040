"""Models of PyTorch, small enough to be built and run without a GPU, and by our kernels on the CPU."""

import torch
from torch import nn

import tvmconv.torch
from tvmconv.torch.group_norm_fusion import KERNEL_NAME
from tvmconv.torch.report import PYTORCH_NAME

X = torch.randn(2, 4, 9, 11, generator=torch.Generator().manual_seed(0))


def optimized(model, example=X, **options):
    return tvmconv.torch.optimize(model.eval(), example, choose="tuned", **options)


def differ(ours, theirs, x=X):
    """How far outputs are apart, relative to the largest."""
    with torch.no_grad():
        y, wanted = ours(x), theirs(x)
    assert y.shape == wanted.shape
    assert y.dtype == wanted.dtype
    return float((y.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def runs(model):
    """Whether each convolution runs by a kernel of ours."""
    lines = [line for line in model.report().lines if line.implementation != KERNEL_NAME]
    return {line.path: line.implementation != PYTORCH_NAME for line in lines}


def with_statistics(model):
    """A model in evaluation mode whose normalisations do something."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return model.eval()


class Model(nn.Module):
    """A model with these parts, whose forward pass is a function of itself and its input."""

    def __init__(self, call, **parts):
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.call(self, x)


class Block(nn.Module):
    """A residual block whose shortcut has a convolution of its own, which comes behind the others."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8, affine=False)
        self.shortcut = nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8))
        self.dropout = nn.Dropout()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.dropout(self.bn2(self.conv2(y)))
        identity = self.shortcut(x)
        y += identity
        return self.relu(y)


class NormAct(nn.BatchNorm2d):
    """A normalisation and an activation in one module, as timm's `BatchNormAct2d`."""

    def __init__(self, channels, act):
        super().__init__(channels)
        self.act = act

    def forward(self, x):
        y = nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return self.act(y)


def undecided():
    """What cannot be traced, as it looks at an element; its parts can be."""

    def call(model, x):
        y = model.block(x)
        return model.last(y) if y.sum() < 1e9 else y

    return Model(call, block=Block(), last=nn.Conv2d(8, 2, 1))


def shared():
    """Two convolutions of the same weight, and one that is called twice."""
    first, second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    second.weight = first.weight
    return Model(lambda m, x: m.second(torch.relu(m.first(torch.relu(m.first(x))))), first=first, second=second)


def between():
    """Writes over the input of a convolution before what follows it is there."""

    def call(model, x):
        x = x + 1
        y = model.conv(x)
        x.mul_(2)
        return torch.relu(y + x)

    return Model(call, conv=nn.Conv2d(4, 4, 3, padding=1))


def scaled():
    """Reads a parameter of its own."""
    scale = nn.Parameter(torch.full((4, 1, 1), 0.5))
    return Model(lambda m, x: x + m.scale * m.conv(x), scale=scale, conv=nn.Conv2d(4, 4, 1))


def normalised():
    """Computes something from its buffers at each call."""
    model = Model(
        lambda m, x: m.conv((x - m.mean.view(4, 1, 1)) / (1 + m.deviation.view(4, 1, 1))), conv=nn.Conv2d(4, 4, 1)
    )
    model.register_buffer("mean", torch.full((4,), 0.5))
    model.register_buffer("deviation", torch.full((4,), 2.0))
    return model
