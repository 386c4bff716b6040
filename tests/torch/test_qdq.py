"""Exported models with pairs of operators that quantize and dequantize: graphs, results of kernels, and exceptions."""

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines the operators
from torch import nn
from torch.nn import functional

import tvmconv.torch
from tvmconv.errors import ModelError
from tvmconv.torch import timing
from tvmconv.torch.report import PYTORCH_NAME

OPERATORS = torch.ops.quantized_decomposed


class Quantized(nn.Module):
    """Convolutions with weights of integers, a residual, and a tensor that is read as floats, too."""

    def __init__(self, dtype=torch.int8, weight_zero=0, unused=0):
        super().__init__()
        self.dtype, self.unused, generator = dtype, unused, torch.Generator().manual_seed(0)
        for name, shape in {"a": (16, 16, 3, 3), "b": (16, 16, 3, 3), "c": (8, 16, 1, 1)}.items():
            self.register_buffer(f"{name}_w", torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8))
            self.register_buffer(f"{name}_s", torch.rand(shape[0], generator=generator) * 0.001 + 0.0005)
            self.register_buffer(f"{name}_z", torch.full(shape[:1], weight_zero))
            self.register_buffer(f"{name}_b", torch.randn(shape[0], generator=generator))

    def convolve(self, name, x, padding):
        weight, scale, zero, bias = (getattr(self, f"{name}_{letter}") for letter in "wszb")
        weight = OPERATORS.dequantize_per_channel.default(weight, scale, zero, 0, -127, 127, torch.int8)
        return functional.conv2d(x, weight, bias, padding=padding)

    def round(self, x, scale, zero):
        offset = 0 if self.dtype is torch.int8 else 128
        arguments = scale, zero + offset, offset - 128, offset + 127 - self.unused, self.dtype
        return OPERATORS.dequantize_per_tensor.default(OPERATORS.quantize_per_tensor.default(x, *arguments), *arguments)

    def forward(self, x):
        x = self.round(x, 0.03, 3)
        y = self.round(torch.relu(self.convolve("a", x, 1)), 0.02, -128)
        z = self.round(torch.relu(self.convolve("b", y, (1, 0)) + x[..., :-2]), 0.03, -128)
        return self.convolve("c", z, 0) + z.mean()


def export(*arguments, device="cpu"):
    torch.manual_seed(0)
    model, x = Quantized(*arguments).eval().to(device), torch.randn(2, 16, 6, 7).to(device)
    return model, x, torch.export.export(model, (x,)).module()


def is_quantized(line):
    return ",i8," in line.workload


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_exported_pairs_become_kernels_of_integers(tmp_path, monkeypatch, device):
    monkeypatch.setattr(timing, "MAX_SAMPLES", 1)
    monkeypatch.setattr(timing, "MAX_TIMING_SECONDS", 0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, x, exported = export(torch.uint8, device=device)
    ours = tvmconv.torch.optimize(exported, x, choose="tuned")
    lines = ours.report().lines
    assert [line.workload.partition("i8,nhwc,")[2] for line in lines] == [
        "scale,bias,relu,quantize,zero_point",
        "scale,bias,add,relu",  # the residual is a slice, which is not dequantized itself
        "scale,bias",
    ]
    assert [line.workload.partition(",")[0] for line in lines] == [
        "conv2d:2x16x8x9",
        "conv2d:2x16x8x7",
        "conv2d:2x16x6x5",
    ]
    assert all(line.implementation != PYTORCH_NAME for line in lines)
    tolerance = 1e-5 if device == "cpu" else 3e-3  # of a few results that are rounded the other way
    with torch.no_grad():
        assert (ours(x) - model(x)).norm() < tolerance * model(x).norm()
        ours.save(tmp_path / "model.tvmconv")
        assert torch.equal(tvmconv.torch.load(tmp_path / "model.tvmconv")(x), ours(x))


class Residual(Quantized):
    def forward(self, x):
        x = self.round(x, 0.03, 3)
        y = self.round(self.convolve("a", x, 1), 0.02, 5)
        z = self.round(torch.relu(self.convolve("b", y, 1) + x), 0.03, -128)
        return self.convolve("c", z, 0), z.mean()


def test_residuals_are_added_as_integers(monkeypatch):
    """The zero point of the residual is in the bias."""
    monkeypatch.setattr(timing, "MAX_SAMPLES", 1)
    monkeypatch.setattr(timing, "MAX_TIMING_SECONDS", 0)
    torch.manual_seed(0)
    model, x = Residual().eval(), torch.randn(2, 16, 6, 7)
    exported = torch.export.export(model, (x,)).module()
    ours = tvmconv.torch.optimize(exported, x, choose="tuned")
    texts = [line.workload.partition("i8,nhwc,")[2] for line in ours.report().lines]
    assert texts == ["scale,bias,quantize,zero_point", "scale,bias,add,relu,quantize,zero_point", "scale,bias"]
    (code,) = ours.graph_code()
    assert code.count("self.quantize_") == 1
    assert code.count("self.dequantize_") == 1  # for the mean
    with torch.no_grad():
        for result, expected in zip(ours(x), model(x), strict=True):
            assert torch.allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((torch.int8, 1), "its weight is no dequantized one of int8"),
        ((torch.int8, 0, 64), "its input is no dequantized"),
    ],
)
def test_other_pairs_stay(monkeypatch, arguments, reason):
    monkeypatch.setattr(timing, "MAX_SAMPLES", 1)
    monkeypatch.setattr(timing, "MAX_TIMING_SECONDS", 0)
    model, x, exported = export(*arguments)
    ours = tvmconv.torch.optimize(exported, x, choose="tuned")
    assert all(reason in line.explanation and not is_quantized(line) for line in ours.report().lines)
    with torch.no_grad():
        assert torch.allclose(ours(x), model(x), atol=1e-4)


def test_a_quantized_model_is_not_quantized_again():
    _, x, exported = export()
    with pytest.raises(ModelError, match="quantized already"):
        tvmconv.torch.optimize(exported, x, dtype="i8", calibrate=[x])
