"""Activations in graphs with gradients, as PyTorch computes them where tvmconv has no kernels, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

aten = torch.ops.aten

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda u: u,
    "relu": functional.relu,
    "relu6": functional.relu6,
    "silu": functional.silu,
    "hardswish": functional.hardswish,
    "gelu": functional.gelu,
    "gelu_tanh": lambda u: functional.gelu(u, approximate="tanh"),
}
# The gradient of the argument from that of the result, and the argument.
ACTIVATION_GRADIENTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "": lambda dz, u: dz,
    "relu": lambda dz, u: aten.threshold_backward(dz, u, 0),
    "relu6": lambda dz, u: aten.hardtanh_backward(dz, u, 0, 6),
    "silu": aten.silu_backward,
    "hardswish": aten.hardswish_backward,
    "gelu": aten.gelu_backward,
    "gelu_tanh": lambda dz, u: aten.gelu_backward(dz, u, approximate="tanh"),
}
