"""Networks whose operations between convolutions are done channels last, and the forms that prepare epilogues."""

import pytest
import torch
import tvm
from relax_models import CPU, differ, exported, randomized
from torch import nn

import tvmconv.relax
from tvmconv.relax.linear import convert_linear_layers
from tvmconv.relax.optimize import prepare_module


class SplitAndResized(nn.Module):
    """The blocks of a YOLO: a split, concatenations, an upsampled image and a slice."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(11, 4, 1)

    def forward(self, x):
        left, right = nn.functional.mish(self.first(x)).chunk(2, 1)
        y = torch.cat([left, right, self.inner(right)[:, 1:]], 1)
        return self.last(nn.functional.interpolate(y, scale_factor=2, mode="nearest"))


class Shuffled(nn.Module):
    """Shuffled channels of a ShuffleNet, between convolutions, and reflected pixels."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect")

    def forward(self, x):
        y = self.first(x)
        return self.last(y.view(2, 3, 2, 6, 5).transpose(1, 2).contiguous().view(2, 6, 6, 5))


class PreActivated(nn.Module):
    """Normalizations and activations before convolutions, and slopes of channels."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 1), nn.Conv2d(9, 4, 3)
        self.norm, self.slopes = nn.BatchNorm2d(9), nn.Parameter(torch.rand(6, 1, 1))

    def forward(self, x):
        y = self.first(x)
        return self.last(nn.functional.relu(self.norm(torch.cat([torch.where(y > 0, y, y * self.slopes), x], 1))))


class ConvNeXtBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 1)
        self.norm, self.wide, self.narrow = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        x = self.first(x)
        y = self.narrow(nn.functional.gelu(self.wide(self.norm(x.permute(0, 2, 3, 1)))))
        return self.last(x + y.permute(0, 3, 1, 2))


@pytest.mark.sample(2)
@pytest.mark.parametrize("network", [SplitAndResized, Shuffled, PreActivated, ConvNeXtBlock])
def test_only_the_borders_are_transposed(network):
    model, x = randomized(network()), torch.randn(2, 3, 6, 5)
    optimized = tvmconv.relax.optimize_with_report(exported(model, x), CPU, layout="nhwc")
    assert optimized.report.num_replaced == len(optimized.report.lines)
    text = optimized.mod["main"].script()
    assert text.count("axes=[0, 2, 3, 1]") == text.count("axes=[0, 3, 1, 2]") == 1
    assert "batch_norm" not in text
    assert differ(optimized.compile(), model, x) < 1e-5


def test_linear_layers_of_any_rank_have_epilogues_and_residuals():
    model = randomized(ConvNeXtBlock())
    x = torch.randn(2, 3, 6, 5)
    converted = convert_linear_layers(prepare_module(exported(model, x), has_kernels=False))
    optimized = tvmconv.relax.optimize_with_report(converted, CPU, layout="nhwc")
    texts = [line.workload for line in optimized.report.lines]
    assert texts[1:3] == [
        "conv2d:60x6x1x1,12x6x1x1,s1,p0,nhwc,bias,gelu",
        "conv2d:60x12x1x1,6x12x1x1,s1,p0,nhwc,bias",
    ]
    assert differ(optimized.compile(), model, x) < 1e-5


def test_zeros_around_an_image_are_the_padding_of_the_convolution():
    model = nn.Sequential(nn.ZeroPad2d((0, 1, 2, 1)), nn.Conv2d(3, 4, 3, 2, (0, 1)), nn.ZeroPad2d((0, -1, 0, 0)))
    model.append(nn.Conv2d(4, 4, 2)).append(nn.ConstantPad2d(1, 0.5)).append(nn.Conv2d(4, 2, 1)).eval()
    x = torch.randn(1, 3, 6, 9)
    optimized = tvmconv.relax.optimize_with_report(exported(model, x), CPU)
    texts = [line.workload.split(",s")[1] for line in optimized.report.lines]
    assert texts == ["2,p2x1x1x2,bias", "1,p0,bias", "1,p0,bias"]
    assert differ(optimized.compile(), model, x) < 1e-5


def test_convolution_with_another_reader_is_not_repeated_for_its_norm():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

        def forward(self, x):
            y = self.conv(x)
            return y + nn.functional.relu(self.norm(y))

    model, x = randomized(Model()), torch.randn(1, 3, 6, 6)
    mod = tvmconv.relax.to_float16(exported(model, x))
    assert mod["main"].script().count("R.nn.conv2d") == 1
    assert differ(tvm.compile(mod, CPU), model, x) < 1e-2
