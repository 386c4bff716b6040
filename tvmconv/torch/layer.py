"""A convolution of a model with what follows it, by our kernel where there is one for its input, else by PyTorch."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from tvmconv.torch.form import ACTIVATIONS, form_of
from tvmconv.torch.operator import conv as operator
from tvmconv.torch.operator import watch
from tvmconv.torch.rounding import for_truncated_inputs

CONVOLUTIONS = {torch.nn.Conv1d: 1, torch.nn.Conv2d: 2, torch.nn.Conv3d: 3}
NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)

Stamp = tuple[weakref.ref[torch.Tensor], int, int]  # of a tensor: itself, its memory, and how often it was written to
Key = tuple[tuple[int, ...], torch.dtype, torch.device, bool]


def key_of(x: torch.Tensor) -> Key:
    """What an input has to be for a kernel, and PyTorch to be set to.

    Returns:
        Its shape; the dtype that PyTorch computes the convolution in, its own or autocast's; its device; and whether
        PyTorch may round operands in float32 to TF32.
    """
    dtype, kind = x.dtype, x.device.type
    if dtype.is_floating_point and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    tf32 = kind == "cuda" and dtype is torch.float32 and tf32_allowed()
    return tuple(x.shape), dtype, x.device, tf32


def tf32_allowed() -> bool:
    """Whether convolutions in float32 may round their operands to TF32."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # since PyTorch 2.9, where it was set by its newer name
        return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")


class TunedConv(torch.nn.Module):
    """A convolution and what follows it; it owns no parameter, but reads those of the model's own modules.

    A weight that is written to, or replaced, is packed anew before the next launch. What is written to through `.data`,
    PyTorch tells nobody.

    Args:
        conv: the model's convolution.
        norm: the batch normalisation behind it, which in evaluation mode is a factor and a summand for each channel.
        names: what follows: names of activations, and `add` for a residual; in their order.
    """

    def __init__(self, conv: torch.nn.Module, norm: Any, names: Sequence[str]) -> None:
        super().__init__()
        self._own: tuple[Any, Any] = (conv, norm)  # in a tuple, as the model has registered them
        self.names = tuple(names)
        self.kernels: dict[Key, str] = {}  # their names
        self._names: dict[str, tuple[str, str]] = {}  # of the buffers with its weight and bias
        self._formats: dict[str, torch.memory_format] = {}
        self._truncates: dict[str, bool] = {}
        self._stamps: dict[str, list[Stamp]] = {}

    @property
    def conv(self) -> Any:
        """The model's convolution."""
        return self._own[0]

    @property
    def norm(self) -> Any:
        """The model's normalisation, if there is one."""
        return self._own[1]

    def forward(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """The output, from the input and the residual, if there is one."""
        key = key_of(x)
        kernel = self.kernels.get(key)
        if kernel is None or self._is_otherwise() or (torch.is_grad_enabled() and self._asks_for_gradients(x, add)):
            return self.plain(x, add)
        dtype = key[1]
        if add is not None and add.dtype is not dtype:
            return self.plain(x, add)  # which promotes the sum
        weight, bias = self._names[kernel]
        if x.dtype is not dtype:  # as autocast does
            x = x.to(dtype)
        # Here, and not only in the operator: what is compiled writes it so in the first place.
        memory_format = self._formats[kernel]
        x = x.contiguous(memory_format=memory_format)
        if add is not None:
            add = add.contiguous(memory_format=memory_format)
        return operator(x, self._buffers[weight], self._buffers[bias], add, kernel)

    def _is_otherwise(self) -> bool:
        """Whether somebody has since set the normalisation to training, or put a hook on one of the modules."""
        conv, norm = self._own
        return bool(
            conv._forward_hooks
            or conv._forward_pre_hooks
            or (norm is not None and (norm.training or norm._forward_hooks or norm._forward_pre_hooks))
        )

    def _asks_for_gradients(self, x: torch.Tensor, add: torch.Tensor | None) -> bool:
        conv, norm = self._own
        return (
            x.requires_grad
            or (add is not None and add.requires_grad)
            or any(each is not None and each.requires_grad for each in conv._parameters.values())
            or (norm is not None and any(each is not None and each.requires_grad for each in norm._parameters.values()))
        )

    def plain(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """The same by PyTorch."""
        y = self.conv(x)
        if self.norm is not None:
            y = self.norm(y)
        for name in self.names:
            y = y + add if name == "add" else ACTIVATIONS[name](y)
        return y

    def take(self, key: Key, kernel: str, *, truncates: bool = False) -> None:
        """Compute inputs of this key by a kernel, which has to be installed.

        Args:
            key: of the inputs.
            kernel: its name.
            truncates: whether it truncates its inputs to TF32.
        """
        if kernel not in self._names:
            self._formats[kernel], self._truncates[kernel] = form_of(kernel).memory_format, truncates
            number = next(number for number in itertools.count() if f"weight{number}" not in self._buffers)
            names = self._names[kernel] = f"weight{number}", f"bias{number}"
            for name, packed in zip(names, self._pack(kernel), strict=True):
                self.register_buffer(name, packed, persistent=False)
            self._stamps[kernel] = self._stamp()
            self._watch(kernel)
        self.kernels[key] = kernel

    def refresh(self) -> None:
        """Bring packed weights up to date, as each launch does."""
        for kernel in self._names:
            self._refresh(kernel)

    def leave(self, key: Key) -> None:
        """Leave inputs of this key to PyTorch."""
        kernel = self.kernels.pop(key, None)
        if kernel is not None and kernel not in self.kernels.values():
            for name in self._names.pop(kernel):
                del self._buffers[name]
            for told in (self._formats, self._truncates, self._stamps):
                del told[kernel]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stamps": {kernel: [] for kernel in self._stamps}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has to be brought up to date by itself."""
        super().__setstate__(state)
        for kernel in self._names:
            self._watch(kernel)

    def _watch(self, kernel: str) -> None:
        own = weakref.ref(self)

        def refresh() -> None:
            if (module := own()) is not None and kernel in module._names:
                module._refresh(kernel)

        watch(getattr(self, self._names[kernel][0]), refresh)

    def _refresh(self, kernel: str) -> None:
        """Make weight and bias anew, in the same memory, if the model's have changed."""
        if self._is_current(kernel):
            return
        stamp = self._stamp()
        for name, new in zip(self._names[kernel], self._pack(kernel), strict=True):
            old = self._buffers[name]
            if old is not None and new is not None:
                with torch.no_grad():
                    old.copy_(new)
        self._stamps[kernel] = stamp

    def sources(self) -> list[torch.Tensor]:
        """All tensors that weight and bias are made from."""
        conv, norm = self._own
        found = [*conv._parameters.values()]
        if norm is not None:
            found += [*norm._parameters.values(), norm._buffers["running_mean"], norm._buffers["running_var"]]
        return [tensor for tensor in found if tensor is not None]

    def _stamp(self) -> list[Stamp]:
        """What changes when one of the sources does: is written to, replaced, or moved."""
        return [(weakref.ref(tensor), tensor.data_ptr(), tensor._version) for tensor in self.sources()]

    def _is_current(self, kernel: str) -> bool:
        """Whether the sources are those that weight and bias were made from."""
        then, now = self._stamps[kernel], self.sources()
        for (of, pointer, version), tensor in zip(then, now, strict=False):
            if version != tensor._version or pointer != tensor.data_ptr() or of() is not tensor:
                return False
        return len(then) == len(now)

    def expire(self) -> None:
        """Have weights packed anew before the next launch: memory of old ones may be that of others by now."""
        self._stamps = {kernel: [] for kernel in self._stamps}

    @torch.no_grad()
    def _pack(self, kernel: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight and the bias as a kernel reads them, in memory of their own."""
        form, (conv, norm) = form_of(kernel), self._own
        weight, bias = conv.weight, conv.bias
        if norm is not None:  # in float64, to be rounded once
            factor = (norm.running_var.double() + norm.eps).rsqrt()
            if norm.weight is not None:
                factor = factor * norm.weight.double()
            shift = -norm.running_mean.double() * factor
            if norm.bias is not None:
                shift = shift + norm.bias.double()
            weight = weight.double() * factor.view(-1, *(1,) * (weight.dim() - 1))
            bias = shift if bias is None else bias.double() * factor + shift
        if self._truncates[kernel]:
            weight = for_truncated_inputs(weight.double())
        packed = torch.empty_like(weight, dtype=form.dtype, memory_format=form.memory_format).copy_(weight)
        return packed, None if bias is None else torch.empty_like(bias, dtype=form.bias_dtype).copy_(bias)
