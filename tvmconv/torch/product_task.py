"""Products of recorded convolutions: their operands, PyTorch's results, and checks of kernels against those."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from tvmconv import registry
from tvmconv.devices import Device
from tvmconv.errors import WorkloadError
from tvmconv.torch import operator
from tvmconv.torch.accuracy import TOLERANCE_FACTOR, compute_relative_error
from tvmconv.torch.conv_call import (
    DGRAD,
    FORWARD,
    FORWARD_BIAS,
    FORWARD_STATS,
    WGRAD,
    ConvCall,
    make_workload,
)
from tvmconv.torch.conv_operators import (
    compute_dgrad_by_pytorch,
    compute_wgrad_by_pytorch,
    convolve_by_pytorch,
    run_with_stats,
)
from tvmconv.torch.kernel_table import RecordedCall, TableEntry
from tvmconv.torch.kernels import AvailableKernel
from tvmconv.torch.normalization import compute_stats_error
from tvmconv.torch.product_runner import KernelCalls
from tvmconv.torch.rounding import MEAN_TRUNCATION_LOSS
from tvmconv.torch.signature import ConvSignature, parse_signature
from tvmconv.torch.tensor_layout import compute_strides
from tvmconv.workloads import dtypes
from tvmconv.workloads.conv_operator import ConvOperator

NUM_PROBES = 64  # elements of an operand that are not zero when a kernel's rounding is tested

Operands = tuple[torch.Tensor, torch.Tensor, "torch.Tensor | None"]


@dataclass
class ProductTask:
    """A product of one or more recorded convolutions, with PyTorch's time and the kernel that was selected."""

    product: str
    example: RecordedCall  # one of the calls
    paths: list[str] = field(default_factory=list)  # of all calls
    workload: ConvOperator | None = None
    reason: str = ""
    pytorch_seconds: float | None = None
    tvmconv_seconds: float | None = None
    entry: TableEntry | None = None  # of the selected kernel

    @property
    def call(self) -> ConvCall:
        """Shapes, options, dtype, layout and device of the convolution."""
        return self.example.call

    @property
    def name(self) -> str:
        """Text that tells the task from others in a cache of times."""
        strides = self.example.x_stride, self.example.weight_stride, self.example.bias_dtype
        return f"{self.product} {self.workload.text if self.workload else ''} {strides}"

    @property
    def num_calls(self) -> float:
        """Number of calls in the model."""
        return len(self.paths)

    @property
    def torch_device(self) -> torch.device:
        """Device of the operands."""
        return self.call.device

    def strip(self) -> ProductTask:
        """Return a copy for another process, without paths and launchers."""
        return replace(self, paths=[], entry=None)

    def make_operands(self) -> Operands:
        """Return random operands in the order of PyTorch's operator."""
        call = self.call
        y_stride = compute_strides(call.output_shape, call.layout)
        x = (call.x_shape, self.example.x_stride)
        weight = (call.weight_shape, self.example.weight_stride)
        dy = (call.output_shape, y_stride)
        shapes = {DGRAD: (dy, weight), WGRAD: (dy, x)}.get(self.product, (x, weight))
        first, second = (_make_random(shape, stride, call) for shape, stride in shapes)
        if self.product != FORWARD_BIAS:
            return first, second, None
        bias = torch.randn(call.output_shape[1], dtype=self.example.bias_dtype, device=call.device)
        return first, second, bias

    def run_by_pytorch(self, operands: Operands) -> torch.Tensor:
        """Compute the product by PyTorch."""
        first, second, bias = operands
        if self.product == DGRAD:
            return compute_dgrad_by_pytorch(self.call, first, second)
        if self.product == WGRAD:
            return compute_wgrad_by_pytorch(self.call, first, second)
        return convolve_by_pytorch(self.call, first, second, bias)

    def compute_reference(self, operands: Operands) -> torch.Tensor:
        """Compute the product by PyTorch in float32."""
        call = self.call._replace(dtype=torch.float32)
        exact_task = replace(self, example=replace(self.example, call=call))
        first, second, bias = (None if each is None else each.float() for each in operands)
        assert first is not None
        assert second is not None
        return exact_task.run_by_pytorch((first, second, bias))

    def make_calls(self, kernel: AvailableKernel, operands: Operands) -> KernelCalls:
        """Return the calls of a kernel; raise Error or RuntimeError if it cannot be loaded."""
        entry = make_entry(kernel)

        def run(operands: Operands) -> object:
            return run_with_stats(self.product, self.call, entry, *operands)

        run_packed = None
        if kernel.program.num_prepack_kernels and self.product != WGRAD:
            first, weight, bias = operands
            weight = weight.clone()
            operator.register_weight_refresh(weight, lambda: None)  # a weight with a known lifetime is packed once
            run_packed = functools.partial(run, (first, weight, bias))
        return KernelCalls(
            lambda expected: check_kernel(self, entry, operands, expected), lambda: run(operands), run_packed
        )


def _make_random(shape: Sequence[int], stride: Sequence[int], call: ConvCall) -> torch.Tensor:
    if any(step == 0 and size > 1 for step, size in zip(stride, shape, strict=True)):  # an expanded tensor
        stride = compute_strides(shape, call.layout)
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=call.dtype, device=call.device).normal_()


def collect_tasks(calls: Sequence[RecordedCall]) -> list[ProductTask]:
    """Return the distinct products of recorded calls, in the order of the calls."""
    tasks: dict[tuple[str, ConvCall], ProductTask] = {}
    for recorded in calls:
        forward = FORWARD if recorded.bias_dtype is None else FORWARD_BIAS
        stats = [FORWARD_STATS] if recorded.is_normalized and recorded.bias_dtype is None else []
        gradients = [DGRAD] * recorded.needs_dgrad + [WGRAD] * recorded.needs_wgrad
        products = [forward, *stats, *gradients]
        for product in products:
            task = tasks.setdefault((product, recorded.call), ProductTask(product, recorded))
            task.paths.append(recorded.path)
    for task in tasks.values():
        try:
            task.workload = make_workload(task.product, task.call)
        except WorkloadError as error:
            task.reason = str(error)
    return list(tasks.values())


def check_kernel(task: ProductTask, entry: TableEntry, operands: Operands, expected: torch.Tensor) -> tuple[float, str]:
    """Return the relative error of a kernel's result, and the problem with it; "" if there is none.

    Raises Error or RuntimeError if the kernel cannot run.
    """
    result, stats = run_with_stats(task.product, task.call, entry, *operands)
    error = compute_relative_error(result, expected)
    if stats is not None:
        error += compute_stats_error(stats, result)
    assert task.workload is not None
    tolerance = TOLERANCE_FACTOR * task.workload.tolerance
    is_correct = error <= tolerance  # also false for NaN
    return error, "" if is_correct else f"the kernel's result differs by {error:.1e}, more than {tolerance:.1e}"


def make_entry(kernel: AvailableKernel) -> TableEntry:
    """Return the table's entry of a kernel; raise DeviceError if the kernel cannot be loaded."""
    signature = parse_signature(kernel.workload_text)
    compensation = 1.0
    if signature.workload.dtype == dtypes.TF32.name:
        # The relative losses of both operands add up in the products.
        compensation += MEAN_TRUNCATION_LOSS * sum(_is_truncated(signature, kernel, index) for index in range(2))
    return TableEntry(kernel.name, signature, kernel.launcher, kernel.schedule, kernel.config_source, compensation)


def _is_truncated(signature: ConvSignature, kernel: AvailableKernel, operand_index: int) -> bool:
    """Return whether a TF32 kernel truncates an operand; others round it, or compute in float32.

    The operand is constant, and the other one has a few ones. The products of ones with a number slightly above a TF32
    number sum to those with the TF32 number if the kernel truncates.
    """
    device, shapes = kernel.torch_device, (signature.x_shape, signature.weight_shape)
    probe = torch.zeros(shapes[1 - operand_index], device=device)
    step = max(1, probe.numel() // NUM_PROBES)
    probe.view(-1)[step // 2 :: step] = 1
    stats = {"stats": torch.empty(2, signature.output_shape[1], device=device)} if signature.takes_stats else {}
    bias = torch.zeros(signature.output_shape[1], device=device) if signature.takes_bias else None

    def compute_sums(value: float) -> torch.Tensor:
        operands = [probe, torch.full(shapes[operand_index], value, device=device)]
        first, second = operands if operand_index else reversed(operands)
        first, second = signature.to_input_layout(first), signature.to_input_layout(second)
        return kernel.launcher(first, second, bias, None, **stats).double()

    sums, larger_sums = compute_sums(0.25), compute_sums(0.25 * (1 + 2.0**-11 + 2.0**-12))
    position = int(sums.flatten().argmax())
    return float(larger_sums.flatten()[position] / sums.flatten()[position]) < 1 + 2.0**-12


def can_return_stats(call: ConvCall, device: Device) -> bool:
    """Return whether a schedule on the device returns the statistics of a convolution's output."""
    if device.kind != "cuda" or not call.channels_last or call.transposed:
        return False
    try:
        workload = make_workload(FORWARD_STATS, call)
    except WorkloadError:
        return False
    return registry.is_computable(workload, device.kind, device.arch)
