"""A group or instance normalization with its activation, run by the kernels of tvmconv, or else by PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from tvmconv.torch.group_norm_operator import apply_activation, find_kernel_layout, group_norm_act
from tvmconv.torch.layer import InputKey, make_input_key
from tvmconv.torch.tensor_layout import lay_out
from tvmconv.torch.torch_modules import has_hooks


@dataclass(frozen=True)
class NormParameters:
    """A normalization of the model: its sizes, and where its weight and bias are."""

    num_groups: int | None  # None for one per channel
    eps: float
    weight: tuple[torch.nn.Module, str] | None  # module and name of the attribute; None for a factor of 1
    bias: tuple[torch.nn.Module, str] | None
    module: torch.nn.Module | None = None  # the normalization itself; None for a call of PyTorch's function

    def read_parameters(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return weight and bias."""
        weight, bias = (None if each is None else getattr(*each) for each in (self.weight, self.bias))
        return weight, bias

    def run_eager(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize an input by PyTorch."""
        if self.module is not None:
            y: torch.Tensor = self.module(x)
            return y
        return functional.group_norm(x, self.num_groups or x.shape[1], *self.read_parameters(), self.eps)


class FusedNorm(torch.nn.Module):
    """A normalization with an activation, which reads the parameters of the model's module and owns none.

    The result has the layout of the input.

    Args:
        parameters: The normalization.
        activation: Name of the activation after it; "" for none.
        slope: Slope of a leaky ReLU.
    """

    def __init__(self, parameters: NormParameters, activation: str = "", slope: float = 0.0) -> None:
        super().__init__()
        self._norm = (parameters,)  # a tuple hides registered modules
        self.activation, self.slope = activation, slope
        self._kernel_inputs: set[tuple[InputKey, str | None]] = set()  # inputs, with layouts, that kernels compute

    @property
    def parameters_of_norm(self) -> NormParameters:
        """The model's normalization."""
        return self._norm[0]

    def add_input(self, x: torch.Tensor) -> None:
        """Compute inputs like this one by kernels."""
        self._kernel_inputs.add((make_input_key(x), find_kernel_layout(x)))

    def clear_inputs(self) -> None:
        """Compute all inputs by PyTorch."""
        self._kernel_inputs.clear()

    def extra_repr(self) -> str:
        """Return what decides about the time of a call, besides the input."""
        norm = self.parameters_of_norm
        has_parameters = [each is not None for each in (norm.weight, norm.bias)]
        return f"{norm.num_groups or 'all'} groups, {has_parameters}, {self.activation}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the input."""
        layout, parameters = find_kernel_layout(x), self._norm[0]
        is_known = (make_input_key(x), layout) in self._kernel_inputs
        if layout is None or not is_known or torch.is_autocast_enabled(x.device.type):
            return self.run_eager(x)
        weight, bias = parameters.read_parameters()
        needs_gradient = torch.is_grad_enabled() and any(
            each is not None and each.requires_grad for each in (x, weight, bias)
        )
        if needs_gradient or (parameters.module is not None and has_hooks(parameters.module)):
            return self.run_eager(x)
        num_groups = parameters.num_groups or x.shape[1]
        return group_norm_act(x, weight, bias, num_groups, parameters.eps, self.activation, self.slope)

    def run_eager(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the input by PyTorch."""
        y, layout = self._norm[0].run_eager(x), find_kernel_layout(x)
        y = apply_activation(y, self.activation, self.slope)
        return y if layout is None else lay_out(y, layout)
