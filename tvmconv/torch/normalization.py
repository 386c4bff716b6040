"""Batch normalization in training whose statistics the convolution before it returns.

A convolution whose kernel returns mean and variance of its output's channels attaches them to the output. A batch
normalization that reads this output takes them, and saves a pass over it. It computes what PyTorch's module does: it
updates the running statistics, normalizes, and its gradients are those of PyTorch's own backward function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tvmconv.torch import normalization_kernel
from tvmconv.torch.conv_call import ConvCall
from tvmconv.torch.kernel_table import table
from tvmconv.torch.tensor_layout import compute_strides

EPS = 1e-5  # of the timed normalizations
STATS_ATTRIBUTE, SOURCE_ATTRIBUTE = "_tvmconv_stats", "_tvmconv_source"  # of outputs of convolutions


class OutputStats(NamedTuple):
    """Statistics of a convolution's output."""

    values: torch.Tensor  # mean and biased variance of each channel, of shape (2, channels), in float32
    version: int  # version of the output, which writes in place change


def attach_stats(y: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """Attach the statistics (2, channels) of an output to it, and return it."""
    setattr(y, STATS_ATTRIBUTE, OutputStats(stats, y._version))
    return y


def find_stats(y: torch.Tensor) -> OutputStats | None:
    """Return the statistics of a convolution's output; None if it has none, or was written to since."""
    stats: OutputStats | None = getattr(y, STATS_ATTRIBUTE, None)
    return stats if stats is not None and stats.version == y._version else None


def attach_source(y: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """Attach the layer that computed an output to it, while calls are recorded, and return it."""
    setattr(y, SOURCE_ATTRIBUTE, (layer, y._version))
    return y


class BatchNormFunction(torch.autograd.Function):
    """The normalization of an input by its own statistics: mean, and reciprocal of the standard deviation."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        reciprocal: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Normalize the input by the kernel of PyTorch's synchronized batch normalization, or by other operations."""
        ctx.save_for_backward(x, weight, mean, reciprocal)
        ctx.eps = eps
        if x.is_cuda and not torch.compiler.is_dynamo_compiling():
            y: torch.Tensor = torch.batch_norm_elemt(x, weight, bias, mean, reciprocal, eps)
            return y
        shape = 1, -1, *(1,) * (x.dim() - 2)
        scale = reciprocal if weight is None else reciprocal * weight
        y = (x.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        return (y if bias is None else y + bias.view(shape)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Compute the gradients by PyTorch's function, which can itself be differentiated."""
        x, weight, mean, reciprocal = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:3])
        gradients = torch.ops.aten.native_batch_norm_backward(
            dy, x, weight, None, None, mean, reciprocal, True, ctx.eps, mask
        )
        return (
            *(gradient if needed else None for gradient, needed in zip(gradients, mask, strict=True)),
            None,
            None,
            None,
        )


def normalize(layer: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Compute a batch normalization by the statistics of its input; None if it is left to PyTorch.

    PyTorch computes it in evaluation mode, and without statistics.
    """
    if not _uses_batch_stats(layer):
        return None
    if torch.compiler.is_dynamo_compiling():
        stats = _take_stats_in_graph(layer, x)
    else:
        if table.recorded is not None:
            _record_source(layer, x)
        attached = find_stats(x)
        stats = attached and attached.values
    count = math.prod(x.shape) // x.shape[1] if x.dim() > 1 else 0
    if stats is None or count < 2 or stats.shape[1] != layer.num_features:
        return None
    running, factor = _advance(layer)
    reciprocal = finish_stats(stats, running, layer.eps, factor, count)
    y: torch.Tensor = BatchNormFunction.apply(x, layer.weight, layer.bias, stats[0], reciprocal, layer.eps)
    return y


def _record_source(layer: Any, x: torch.Tensor) -> None:
    """Have a convolution and the normalization that reads its output know each other."""
    source, version = getattr(x, SOURCE_ATTRIBUTE, (None, 0))
    if source is not None and version == x._version:
        source.__dict__["normalized_by"] = layer.path
        layer.__dict__["source"] = source  # not as a child, which would have a second path


def _take_stats_in_graph(layer: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Return the statistics of an input in a graph that is being compiled; None if there are none.

    Tensors have no attributes there. The convolution keeps its output with statistics until the normalization comes.
    """
    source = layer.source
    if source is None or layer.momentum is None or source.output_stats is None:
        return None
    y, stats = source.output_stats
    source.output_stats = None
    return stats.detach() if y is x else None


def _uses_batch_stats(layer: Any) -> bool:
    return layer.training or (layer.running_mean is None and layer.running_var is None)


def _advance(layer: Any) -> tuple[tuple[torch.Tensor, torch.Tensor] | None, float]:
    """Count a batch in training mode, and return the running statistics to be updated, and the new ones' weight."""
    if not (layer.training and layer.track_running_stats) or layer.running_mean is None:
        return None, 0.0
    factor = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if factor is None:  # a cumulative average
            factor = 1.0 / float(layer.num_batches_tracked)
    return (layer.running_mean, layer.running_var), factor or 0.0


def finish_stats(
    stats: torch.Tensor, running: tuple[torch.Tensor, torch.Tensor] | None, eps: float, factor: float, count: int
) -> torch.Tensor:
    """Return 1 / √(variance + eps) of each channel, and update the running statistics, whose variance is unbiased.

    Args:
        stats: Mean and biased variance of each channel, of shape (2, channels).
        running: Running mean and variance; None if there are none.
        eps: Summand of the variance.
        factor: Weight of the new statistics in the running ones.
        count: Elements per channel.
    """
    correction = count / (count - 1)
    is_plain = running is None or all(
        statistic.dtype is torch.float32 and statistic.is_contiguous() and statistic.device == stats.device
        for statistic in running
    )
    if stats.is_cuda and is_plain and not torch.compiler.is_dynamo_compiling():
        return normalization_kernel.finish_stats(stats, running, eps, factor, correction)
    with torch.no_grad():
        if running is not None:
            for old, new in zip(running, (stats[0], stats[1] * correction), strict=True):
                old.lerp_(new.to(old.dtype), factor)
        return torch.rsqrt(stats[1] + eps)


class TrainableBatchNorm1d(nn.BatchNorm1d):
    """A 1-D batch normalization that takes statistics from the convolution before it."""

    path = ""  # of the module in its model
    source = None  # convolution that computes its input, if there is one

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize the input, as `torch.nn.BatchNorm1d`."""
        y = normalize(self, input)
        return super().forward(input) if y is None else y


class TrainableBatchNorm2d(nn.BatchNorm2d):
    """A 2-D batch normalization that takes statistics from the convolution before it."""

    path = ""
    source = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize the input, as `torch.nn.BatchNorm2d`."""
        y = normalize(self, input)
        return super().forward(input) if y is None else y


class TrainableBatchNorm3d(nn.BatchNorm3d):
    """A 3-D batch normalization that takes statistics from the convolution before it."""

    path = ""
    source = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize the input, as `torch.nn.BatchNorm3d`."""
        y = normalize(self, input)
        return super().forward(input) if y is None else y


BATCH_NORM_TYPES: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: TrainableBatchNorm1d,
    nn.BatchNorm2d: TrainableBatchNorm2d,
    nn.BatchNorm3d: TrainableBatchNorm3d,
}


@dataclass(frozen=True)
class NormalizationExample:
    """A batch normalization of random parameters, to be timed."""

    dy: torch.Tensor  # gradient of the output
    weight: torch.Tensor  # factor of each channel
    bias: torch.Tensor  # summand of each channel
    running: tuple[torch.Tensor, torch.Tensor]  # running mean and running variance

    @classmethod
    def for_output(cls, call: ConvCall) -> NormalizationExample:
        """Return the normalization of a convolution's output."""
        shape, options = call.output_shape, {"device": call.device}
        stride = compute_strides(shape, call.layout)
        dy = torch.empty_strided(shape, stride, dtype=call.dtype, **options).normal_()
        weight, bias, mean, variance = torch.rand(4, shape[1], **options).unbind()
        return cls(dy, weight.requires_grad_(), bias.requires_grad_(), (mean, variance))

    def run(self, x: torch.Tensor, stats: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return output and gradients for an input, with its given statistics (2, channels), or by PyTorch."""
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            if stats is None:
                y = functional.batch_norm(leaf, *self.running, self.weight, self.bias, training=True)
            else:
                reciprocal = finish_stats(stats, self.running, EPS, 0.1, x.numel() // x.shape[1])
                y = BatchNormFunction.apply(leaf, self.weight, self.bias, stats[0], reciprocal, EPS)
            return y, *torch.autograd.grad(y, (leaf, self.weight, self.bias), self.dy)


def compute_stats_error(stats: torch.Tensor, y: torch.Tensor) -> float:
    """Return the relative error of an output's mean and standard deviation against those in float64.

    `stats` has the mean and the variance of each channel, of shape (2, channels).
    """
    variance, mean = torch.var_mean(y.detach().double(), [0, *range(2, y.dim())], correction=0)
    expected = torch.stack([mean, variance.sqrt()])
    computed = torch.stack([stats[0].detach().double(), stats[1].detach().double().sqrt()])
    return float((computed - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float32).tiny))
