"""A small network of ConvNeXt's blocks."""

import torch
from torch import nn
from torch.nn import functional


class Permute(nn.Module):
    def __init__(self, *dims):
        super().__init__()
        self.dims = dims

    def forward(self, x):
        return torch.permute(x, self.dims)


class ImageNorm(nn.LayerNorm):
    def forward(self, x):
        x = functional.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Block(nn.Module):
    """A block of ConvNeXt, of linear layers or of convolutions, with stochastic depth."""

    def __init__(self, channels, probability, is_linear=True):
        super().__init__()
        self.probability = probability
        first = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.scale = nn.Parameter(torch.rand(channels, 1, 1) + 0.5)
        if is_linear:
            layers = [Permute(0, 2, 3, 1), nn.LayerNorm(channels), nn.Linear(channels, 8), nn.GELU()]
            layers += [nn.Linear(8, channels), nn.Dropout(0.0), Permute(0, 3, 1, 2)]
        else:
            layers = [ImageNorm(channels), nn.Conv2d(channels, 8, 1), nn.GELU("tanh"), nn.Conv2d(8, channels, 1)]
        self.layers = nn.Sequential(first, *layers)

    def forward(self, x):
        y = self.scale * self.layers(x)
        noise = torch.empty((x.shape[0], 1, 1, 1), dtype=y.dtype, device=y.device)
        noise = noise.bernoulli_(1 - self.probability)
        noise.div_(1 - self.probability)
        y = y * noise
        y += x
        return y


def make_network(probability=0.25, widths=(4, 6), num_classes=5):
    """Return a network of three blocks, one of convolutions, with stochastic depth of a probability."""
    torch.manual_seed(0)
    first, second = widths
    blocks = [Block(first, probability), Block(first, probability, False), ImageNorm(first)]
    layers = [*blocks, nn.Conv2d(first, second, 2, 2), Block(second, probability), nn.AdaptiveAvgPool2d(1)]
    classifier = nn.Flatten(), nn.Linear(second, num_classes)
    return nn.Sequential(nn.Conv2d(3, first, 2, 2), ImageNorm(first), *layers, *classifier)
