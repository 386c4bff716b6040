"""Models by our kernels on the CPU, and how far what they give is from what PyTorch gives."""

import torch

import tvmconv.torch
from tvmconv.torch.report import PYTORCH_NAME

X = torch.randn(2, 4, 9, 11, generator=torch.Generator().manual_seed(0))


def optimized(model, example=X, **options):
    return tvmconv.torch.optimize(model, example, choose="tuned", **options)


def differ(ours, theirs, x=X):
    """How far outputs are apart, relative to the largest."""
    with torch.no_grad():
        y, wanted = ours(x), theirs(x)
    assert y.shape == wanted.shape
    assert y.dtype == wanted.dtype
    return float((y.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def runs(model):
    """What runs each convolution."""
    return {line.path: line.implementation != PYTORCH_NAME for line in model.report().lines}
