"""Models of PyTorch as Relax modules, and what both compute."""

import numpy as np
import torch
import tvm
from torch import nn
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program

# Code that LLVM has not optimized: it is compiled in a fourth of the time, and the models are small.
CPU = tvm.target.Target({"kind": "llvm", "opt-level": 0})


def randomized(model):
    """A model in evaluation mode whose normalisations do something."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model.eval()


def exported(model, *inputs):
    return from_exported_program(torch.export.export(model, inputs))


def differ(executable, model, *inputs):
    """The relative L2 difference between what TVM's virtual machine and PyTorch compute."""
    machine = relax.VirtualMachine(executable, tvm.cpu())
    output = machine["main"](*(tvm.runtime.tensor(x.numpy()) for x in inputs))
    found = (output if isinstance(output, tvm.runtime.Tensor) else output[0]).numpy()
    with torch.no_grad():
        expected = model(*inputs).numpy()
    assert found.shape == expected.shape
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


class Residual(nn.Module):
    """Convolutions with batch normalisation, a strided depthwise one, a transposed one and a residual."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6())
        self.depthwise = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1, groups=8, bias=False), nn.BatchNorm2d(8), nn.SiLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 4, 4, 2, 1, groups=2), nn.BatchNorm2d(4))

    def forward(self, x):
        return nn.functional.hardswish(self.up(self.depthwise(self.first(x))) + x)


class UNet(nn.Module):
    """A U-Net of three levels with transposed convolutions and skip connections."""

    def __init__(self, channels=8):
        super().__init__()
        widths = [channels, 2 * channels, 4 * channels]
        self.down = nn.ModuleList(
            self._make_level(before, after) for before, after in zip((3, *widths), widths, strict=False)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, 2) for width in widths[:2])
        self.merge = nn.ModuleList(self._make_level(2 * width, width) for width in widths[:2])
        self.last = nn.Conv2d(channels, 2, 1)

    @staticmethod
    def _make_level(channels, filters):
        convs = [nn.Conv2d(channels, filters, 3, padding=1, bias=False), nn.Conv2d(filters, filters, 3, padding=1)]
        return nn.Sequential(convs[0], nn.BatchNorm2d(filters), nn.ReLU(), convs[1], nn.ReLU())

    def forward(self, x):
        skips = []
        for index, level in enumerate(self.down):
            x = level(nn.functional.max_pool2d(x, 2) if index else x)
            skips.append(x)
        for index in (1, 0):
            x = self.merge[index](torch.cat([skips[index], self.up[index](x)], 1))
        return self.last(x)


class UNet3d(nn.Module):
    """A 3-D U-Net of two levels with a strided convolution, an instance normalization and a transposed convolution."""

    def __init__(self, channels=4):
        super().__init__()
        self.first = self._make_level(1, channels)
        self.down = nn.Conv3d(channels, 2 * channels, 3, 2, 1)
        self.second = self._make_level(2 * channels, 2 * channels)
        self.up = nn.ConvTranspose3d(2 * channels, channels, 2, 2)
        self.merge = self._make_level(2 * channels, channels)
        self.last = nn.Conv3d(channels, 3, 1)

    @staticmethod
    def _make_level(channels, filters):
        convs = [nn.Conv3d(channels, filters, 3, padding=1, bias=False), nn.Conv3d(filters, filters, 3, padding=1)]
        norms = [nn.BatchNorm3d(filters), nn.InstanceNorm3d(filters, affine=True)]
        return nn.Sequential(convs[0], norms[0], nn.ReLU(), convs[1], norms[1], nn.LeakyReLU(0.01))

    def forward(self, x):
        skip = self.first(x)
        x = self.up(self.second(self.down(skip)))
        return self.last(self.merge(torch.cat([skip, x], 1)))


class WaveNet(nn.Module):
    """A WaveNet of four causal layers with dilations, gates, residuals and skip connections."""

    def __init__(self, channels=8, num_layers=4):
        super().__init__()
        self.first = nn.Conv1d(1, channels, 1)
        dilated = [nn.Conv1d(channels, 2 * channels, 2, dilation=2**layer) for layer in range(num_layers)]
        self.dilated = nn.ModuleList(dilated)
        self.residual = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(num_layers))
        self.skip = nn.ModuleList(nn.Conv1d(channels, 16, 1) for _ in range(num_layers))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(16, 16, 1), nn.ReLU(), nn.Conv1d(16, 5, 1))

    def forward(self, x):
        x, total = self.first(x), 0
        for dilated, residual, skip in zip(self.dilated, self.residual, self.skip, strict=True):
            filters, gates = dilated(nn.functional.pad(x, (dilated.dilation[0], 0))).chunk(2, 1)
            y = torch.tanh(filters) * torch.sigmoid(gates)
            total, x = total + skip(y), x + residual(y)
        return self.head(total)


class DenseBlock(nn.Module):
    """A dense block and a transition of a DenseNet: normalizations come before convolutions, and inputs grow."""

    def __init__(self, channels=8, growth=4, num_layers=3):
        super().__init__()
        widths = [channels + growth * layer for layer in range(num_layers + 1)]
        self.layers = nn.ModuleList(self._make_layer(width, growth) for width in widths[:-1])
        last = [nn.BatchNorm2d(widths[-1]), nn.ReLU(), nn.Conv2d(widths[-1], channels, 1, bias=False), nn.AvgPool2d(2)]
        self.transition = nn.Sequential(*last)

    @staticmethod
    def _make_layer(channels, growth):
        narrow = [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 2 * growth, 1, bias=False)]
        wide = [nn.BatchNorm2d(2 * growth), nn.ReLU(), nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)]
        return nn.Sequential(*narrow, *wide)

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return self.transition(x)


class BasicBlock(nn.Module):
    """The block of ResNet-18."""

    def __init__(self, channels, filters, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(filters)
        is_same = stride == 1 and channels == filters
        shortcut = nn.Conv2d(channels, filters, 1, stride, bias=False)
        self.shortcut = None if is_same else nn.Sequential(shortcut, nn.BatchNorm2d(filters))

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class InvertedResidual(nn.Module):
    """The block of MobileNetV2."""

    def __init__(self, channels, filters, stride, expansion):
        super().__init__()
        wide = channels * expansion
        expand = [nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()] if expansion > 1 else []
        depthwise = [nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()]
        self.layers = nn.Sequential(
            *expand, *depthwise, nn.Conv2d(wide, filters, 1, bias=False), nn.BatchNorm2d(filters)
        )
        self.is_residual = stride == 1 and channels == filters

    def forward(self, x):
        y = self.layers(x)
        return x + y if self.is_residual else y


def make_resnet18():
    """ResNet-18 with 20 convolutions."""
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    widths += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    return randomized(nn.Sequential(*stem, *(BasicBlock(*width) for width in widths), *head))


def make_mobilenet_v2():
    """MobileNetV2 with 52 convolutions."""
    settings = [
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ]
    layers, channels = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()], 32
    for expansion, filters, count, stride in settings:
        for number in range(count):
            layers.append(InvertedResidual(channels, filters, stride if number == 0 else 1, expansion))
            channels = filters
    layers += [nn.Conv2d(320, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6()]
    return randomized(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000)))
