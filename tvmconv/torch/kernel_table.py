"""The kernel table: which of tvmconv's kernels computes a product of a convolution in this process.

A product is a forward pass, a dgrad or a wgrad. It has an entry if a kernel was measured to be faster than PyTorch's;
PyTorch computes all other products. `tvmconv.torch.tune` and `optimize(train=True)` fill the table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tvmconv.torch.conv_call import WGRAD, ConvCall
from tvmconv.torch.operator import Launcher
from tvmconv.torch.signature import ConvSignature


@dataclass(frozen=True)
class TableEntry:
    """A kernel of a product."""

    name: str  # name of the kernel, with the text of its workload
    signature: ConvSignature  # shapes, dtypes and layouts of the kernel's tensors
    launcher: Launcher  # function that launches the kernel
    schedule: str  # name of the kernel's schedule
    config_source: str  # source of the kernel's config: "tuned", "predicted" or "default"
    # Factor on the result that compensates the mean loss of operands that the kernel truncates to TF32.
    compensation: float = 1.0

    def run(
        self,
        product: str,
        first: torch.Tensor,
        second: torch.Tensor,
        bias: torch.Tensor | None,
        stats: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute a product from its operands in the order of the workload; the bias is in float32.

        A product with statistics writes mean and variance of the output's channels to `stats`, of shape (2, channels).

        The weight is read anew in each call. The factor is applied to the weight, or to the gradient of the weight,
        which are small.
        """
        signature = self.signature
        first, second = signature.to_input_layout(first), signature.to_input_layout(second)
        if self.compensation != 1 and product != WGRAD:
            second = second * self.compensation
        result = self.launcher(first, second, bias, None, **({} if stats is None else {"stats": stats}))
        if self.compensation != 1 and product == WGRAD:
            result.mul_(self.compensation)
        return result


@dataclass(frozen=True)
class RecordedCall:
    """A call of a convolution that was recorded."""

    path: str  # path of the module in its model; "" for a call of a function
    call: ConvCall  # shapes, options, dtype, layout and device
    bias_dtype: torch.dtype | None  # data type of the bias; None if there is none
    needs_dgrad: bool  # whether the gradient of the input is needed
    needs_wgrad: bool  # whether the gradient of the weight is needed
    x_stride: tuple[int, ...]  # strides of the input in elements
    weight_stride: tuple[int, ...]  # strides of the weight in elements
    is_normalized: bool = False  # whether a batch normalization in training mode reads the output


class KernelTable:
    """The kernels of a process by product and call, and the calls that are being recorded."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, ConvCall], TableEntry] = {}
        self.calls: set[ConvCall] = set()  # calls of which at least one product has a kernel
        self.compared: set[tuple[str, ConvCall]] = set()  # products whose kernels were selected
        self.recorded: list[RecordedCall] | None = None  # None while nothing is recorded

    def find(self, product: str, call: ConvCall) -> TableEntry | None:
        """Return the entry of a product; None if PyTorch computes it."""
        return self._entries.get((product, call))

    def install(self, product: str, call: ConvCall, entry: TableEntry) -> None:
        """Have a kernel compute a product from now on."""
        self._entries[product, call] = entry
        self.calls.add(call)

    def remove(self, product: str, call: ConvCall) -> None:
        """Have PyTorch compute a product from now on."""
        self._entries.pop((product, call), None)
        if not any(entry_call == call for _, entry_call in self._entries):
            self.calls.discard(call)

    def clear(self) -> None:
        """Have PyTorch compute everything."""
        self._entries.clear()
        self.calls.clear()
        self.compared.clear()

    @contextlib.contextmanager
    def record(self) -> Iterator[list[RecordedCall]]:
        """Record the calls of convolutions inside of the block; recordings may be nested."""
        outer, self.recorded = self.recorded, []
        try:
            yield self.recorded
        finally:
            if outer is not None:
                outer.extend(self.recorded)
            self.recorded = outer


table = KernelTable()
