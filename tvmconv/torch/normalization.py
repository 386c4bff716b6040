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

from tvmconv.torch.conv_call import ConvCall, compute_output_strides
from tvmconv.torch.kernel_table import table

EPS = 1e-5  # of the timed normalizations
STATS_ATTRIBUTE, SOURCE_ATTRIBUTE = "_tvmconv_stats", "_tvmconv_source"  # of outputs of convolutions


class OutputStats(NamedTuple):
    """Statistics of a convolution's output.

    Attributes:
        mean: Mean of each channel, in float32.
        variance: Biased variance of each channel, in float32.
        version: Version of the output, which writes in place change.
    """

    mean: torch.Tensor
    variance: torch.Tensor
    version: int


def attach_stats(y: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """Attach the statistics (2, channels) of an output to it, and return it."""
    setattr(y, STATS_ATTRIBUTE, OutputStats(stats[0], stats[1], y._version))
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
    """The normalization of an input by its own statistics, which are given."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Normalize by the kernel of evaluation, which reads the statistics in place of running ones."""
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps = eps
        y: torch.Tensor = torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        """Compute the gradients by PyTorch's function, which can itself be differentiated."""
        x, weight, mean, variance = ctx.saved_tensors
        mask, statistics = list(ctx.needs_input_grad[:3]), (mean, torch.rsqrt(variance + ctx.eps))
        gradients = torch.ops.aten.native_batch_norm_backward(
            dy, x, weight, None, None, *statistics, True, ctx.eps, mask
        )
        return *(each if needed else None for each, needed in zip(gradients, mask, strict=True)), None, None, None


def normalize(layer: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Compute a batch normalization by the statistics of its input; None if it is left to PyTorch.

    PyTorch computes it in evaluation mode, without statistics, and in compiled graphs.
    """
    if torch.compiler.is_dynamo_compiling() or not _uses_batch_stats(layer):
        return None
    if table.recorded is not None:
        source, version = getattr(x, SOURCE_ATTRIBUTE, (None, 0))
        if source is not None and version == x._version:
            source.__dict__["normalized_by"] = layer.path
    stats = find_stats(x)
    count = math.prod(x.shape) // x.shape[1] if x.dim() > 1 else 0
    if stats is None or count < 2 or stats.mean.shape[0] != layer.num_features:
        return None
    _update_running_stats(layer, stats, count)
    y: torch.Tensor = BatchNormFunction.apply(x, layer.weight, layer.bias, stats.mean, stats.variance, layer.eps)
    return y


def _uses_batch_stats(layer: Any) -> bool:
    return layer.training or (layer.running_mean is None and layer.running_var is None)


def _update_running_stats(layer: Any, stats: OutputStats, count: int) -> None:
    """Update the running statistics as PyTorch's module does, in training mode."""
    if not (layer.training and layer.track_running_stats) or layer.running_mean is None:
        return
    with torch.no_grad():
        factor = layer.momentum
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
            if factor is None:  # a cumulative average
                factor = 1.0 / float(layer.num_batches_tracked)
        running = layer.running_mean, layer.running_var
        update_running_stats(running, stats.mean, stats.variance, count, factor or 0.0)


def update_running_stats(
    running: tuple[torch.Tensor, torch.Tensor],
    mean: torch.Tensor,
    variance: torch.Tensor,
    count: int,
    factor: float,
) -> None:
    """Update running mean and variance, which is unbiased, by the statistics of `count` elements per channel."""
    with torch.no_grad():
        running_mean, running_variance = running
        running_mean.lerp_(mean.to(running_mean.dtype), factor)
        running_variance.lerp_((variance * (count / (count - 1))).to(running_variance.dtype), factor)


class TrainableBatchNorm1d(nn.BatchNorm1d):
    """A 1-D batch normalization that takes statistics from the convolution before it."""

    path = ""  # of the module in its model

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize the input, as `torch.nn.BatchNorm1d`."""
        y = normalize(self, input)
        return super().forward(input) if y is None else y


class TrainableBatchNorm2d(nn.BatchNorm2d):
    """A 2-D batch normalization that takes statistics from the convolution before it."""

    path = ""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize the input, as `torch.nn.BatchNorm2d`."""
        y = normalize(self, input)
        return super().forward(input) if y is None else y


class TrainableBatchNorm3d(nn.BatchNorm3d):
    """A 3-D batch normalization that takes statistics from the convolution before it."""

    path = ""

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
    """A batch normalization of random parameters, to be timed.

    Attributes:
        dy: Gradient of the output.
        weight: Factor of each channel.
        bias: Summand of each channel.
        running: Running mean and running variance.
    """

    dy: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    running: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def for_output(cls, call: ConvCall) -> NormalizationExample:
        """Return the normalization of a convolution's output."""
        shape, options = call.output_shape, {"device": call.device}
        stride = compute_output_strides(shape, call.channels_last)
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
                update_running_stats(self.running, stats[0], stats[1], x.numel() // x.shape[1], 0.1)
                y = BatchNormFunction.apply(leaf, self.weight, self.bias, stats[0], stats[1], EPS)
            return y, *torch.autograd.grad(y, (leaf, self.weight, self.bias), self.dy)


def compute_stats_error(stats: torch.Tensor, y: torch.Tensor) -> float:
    """Return the relative error of an output's mean and standard deviation against those in float64.

    `stats` has the mean and the variance of each channel, of shape (2, channels).
    """
    variance, mean = torch.var_mean(y.double(), [0, *range(2, y.dim())], correction=0)
    expected = torch.stack([mean, variance.sqrt()])
    found = torch.stack([stats[0].double(), stats[1].double().sqrt()])
    return float((found - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float32).tiny))
