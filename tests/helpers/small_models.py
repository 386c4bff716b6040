"""Models of PyTorch, small enough to be built and run without a GPU."""

import torch
from torch import nn


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


class Undecided(nn.Module):
    """What cannot be traced, as it looks at an element; its parts can be."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        y = self.block(x)
        return self.last(y) if y.sum() < 1e9 else y


class Between(nn.Module):
    """Writes over the input of a convolution before what follows it is there."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        x = x + 1
        y = self.conv(x)
        x.mul_(2)
        return torch.relu(y + x)


class Shared(nn.Module):
    """Two convolutions of the same weight, and one that is called twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(torch.relu(self.first(x)))))


class Scaled(nn.Module):
    """Reads a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4, 1, 1), 0.5))
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return x + self.scale * self.conv(x)


class Normalised(nn.Module):
    """Computes something from its buffers at each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((4,), 0.5))
        self.register_buffer("deviation", torch.full((4,), 2.0))
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.conv((x - self.mean.view(4, 1, 1)) / (1 + self.deviation.view(4, 1, 1)))
