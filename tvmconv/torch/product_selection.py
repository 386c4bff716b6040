"""The selection of kernels for the products of recorded convolutions, which fills the kernel table.

Each product is timed with PyTorch and with the kernels that logs, a search or predictions provide. The products that
take most of PyTorch's time are searched and compared first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from tvmconv.deadline import Deadline
from tvmconv.errors import Error, WorkloadError
from tvmconv.measure.workers.pool import keep_workers_alive, prestart_workers
from tvmconv.target import UNKNOWN_TARGET
from tvmconv.torch.conv_call import (
    DGRAD,
    FORWARD,
    FORWARD_BIAS,
    FORWARD_STATS,
    STATS_IN_GRAPHS,
    WGRAD,
    ConvCall,
    compute_output_strides,
    make_workload,
)
from tvmconv.torch.conv_operators import (
    compute_dgrad_by_pytorch,
    compute_wgrad_by_pytorch,
    convolve_by_pytorch,
    run_forward,
    run_forward_with_stats,
    run_with_stats,
)
from tvmconv.torch.kernel_table import RecordedCall, TableEntry, table
from tvmconv.torch.kernels import AvailableKernel, KernelProvider
from tvmconv.torch.normalization import NormalizationExample, compute_stats_error
from tvmconv.torch.report import PYTORCH_NAME
from tvmconv.torch.rounding import MEAN_TRUNCATION_LOSS
from tvmconv.torch.selection import (
    NO_TIME_REASON,
    TOLERANCE_FACTOR,
    ChooseMode,
    compute_relative_error,
    kernels_deadline,
)
from tvmconv.torch.signature import ConvSignature, parse_signature
from tvmconv.torch.timing import CallTimingCache
from tvmconv.torch.training_report import ProductReport
from tvmconv.workloads import dtypes
from tvmconv.workloads.conv_operator import ConvOperator

PYTORCH_TIMING_FRACTION = 0.2  # of the time until the deadline, for PyTorch's times, which order the searches
CLOSE_RATIO = 0.1  # relative difference of two times below which both are measured again, one after the other
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

    def make_operands(self) -> Operands:
        """Return random operands in the order of PyTorch's operator."""
        call = self.call
        y_stride = compute_output_strides(call.output_shape, call.channels_last)
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


def _make_random(shape: Sequence[int], stride: Sequence[int], call: ConvCall) -> torch.Tensor:
    if any(step == 0 and size > 1 for step, size in zip(stride, shape, strict=True)):  # an expanded tensor
        stride = compute_output_strides(shape, call.channels_last)
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


class ProductSelector:
    """A selector of the kernels of products, which are installed in the kernel table.

    The mode "fastest" selects kernels that are faster than PyTorch, "tuned" selects every correct kernel.
    """

    def __init__(
        self, provider: KernelProvider, choose: ChooseMode, deadline: Deadline | None, timing_cache: CallTimingCache
    ) -> None:
        self._provider, self._choose_mode, self._deadline = provider, choose, deadline
        self._timing_cache = timing_cache
        self.num_omitted = 0  # products for which no time was left

    def select(self, tasks: Sequence[ProductTask]) -> None:
        """Select what computes each product, and install the selected kernels."""
        supported = [task for task in tasks if task.workload is not None]
        try:
            with keep_workers_alive():
                if self._deadline and self._provider.torch_device.type == "cuda":
                    prestart_workers(None, [self._provider.device])  # they start while PyTorch is timed
                self._time_pytorch(supported)
                weights = self._compute_weights(supported)
                search_deadline = self._deadline and kernels_deadline(
                    len(weights), self._provider.torch_device, self._deadline
                )
                derived = [task.workload.text for task in supported if task.workload and task.product == FORWARD_STATS]
                self._provider.find_kernels(weights, search_deadline, derived)
            self._timing_cache.is_awake = False
            # Products with statistics are compared with forward passes, which are selected before them.
            for task in sorted(
                supported,
                key=lambda task: (task.product == FORWARD_STATS, -(task.pytorch_seconds or 0.0) * len(task.paths)),
            ):
                self._select_kernel(task)
        finally:
            self._timing_cache.save()

    def _time_pytorch(self, tasks: Sequence[ProductTask]) -> None:
        """Time the products with PyTorch, the most expensive ones first; a part of the time is reserved for that."""
        deadline = Deadline()
        if self._deadline:
            deadline = self._deadline.reserve_seconds((1 - PYTORCH_TIMING_FRACTION) * self._deadline.remaining_seconds)
        for task in sorted(tasks, key=lambda task: -self._estimate_seconds(task)):
            if deadline.has_passed:
                return
            operands = task.make_operands()
            try:
                task.pytorch_seconds = self._timing_cache.get_seconds(
                    f"PyTorch: {task.name}", functools.partial(task.run_by_pytorch, operands)
                )
            except RuntimeError as error:  # for example, no memory
                task.reason = str(error).splitlines()[0]

    def _estimate_seconds(self, task: ProductTask) -> float:
        target = self._provider.device.target or UNKNOWN_TARGET
        assert task.workload is not None
        return len(task.paths) * target.roofline_seconds(task.workload)

    def _compute_weights(self, tasks: Sequence[ProductTask]) -> dict[str, float]:
        """Return a weight for each workload, such that the search orders and divides its time by PyTorch's times.

        The search multiplies weights by the workloads' times at the device's peak rates.
        """
        weights: dict[str, float] = {}
        for task in tasks:
            assert task.workload is not None
            weight = float(len(task.paths))
            if task.pytorch_seconds is not None:
                weight *= weight * task.pytorch_seconds / self._estimate_seconds(task)
            weights[task.workload.text] = weights.get(task.workload.text, 0.0) + weight
        return weights

    def _select_kernel(self, task: ProductTask) -> None:
        """Select the fastest correct kernel of a product, and install it if it should run."""
        assert task.workload is not None
        kernels = self._provider.available.get(task.workload.text, [])
        if not kernels:
            task.reason = task.reason or self._provider.failure_reasons.get(task.workload.text, "")
        elif self._deadline and self._deadline.cut_off.has_passed:
            self.num_omitted, task.reason = self.num_omitted + 1, NO_TIME_REASON
        else:
            self._compare_kernels(task, kernels)
        if not task.tvmconv_seconds:  # nothing was compared, so that an earlier selection is still valid
            task.entry = table.find(task.product, task.call)
            return
        if task.entry is None:
            table.remove(task.product, task.call)
        else:
            table.install(task.product, task.call, task.entry)

    def _compare_kernels(self, task: ProductTask, kernels: Sequence[AvailableKernel]) -> None:
        """Compare the kernels of a product with PyTorch, and select one."""
        operands = task.make_operands()
        try:
            expected = task.run_by_pytorch(operands)
            task.pytorch_seconds = self._timing_cache.get_seconds(
                f"PyTorch: {task.name}", functools.partial(task.run_by_pytorch, operands)
            )
        except RuntimeError as error:  # for example, no memory
            task.reason = str(error).splitlines()[0]
            return
        for number, kernel in enumerate(kernels):
            if self._deadline and (self._deadline.cut_off.has_passed or (number and self._deadline.has_passed)):
                break
            self._try_kernel(task, kernel, operands, expected)
        if task.entry is None or task.tvmconv_seconds is None:
            return
        if task.product == FORWARD_STATS:
            self._select_for_graphs(task, task.entry, operands)
            self._time_with_normalization(task, task.entry, operands)
        if task.entry is None:
            return
        if self._choose_mode == "fastest" and task.tvmconv_seconds >= task.pytorch_seconds:
            task.entry, task.reason = None, "PyTorch is no slower"

    def _try_kernel(
        self, task: ProductTask, kernel: AvailableKernel, operands: Operands, expected: torch.Tensor
    ) -> None:
        """Check and time a kernel, and keep it if it is the fastest so far."""
        try:
            entry = make_entry(kernel)
            result, stats = run_with_stats(task.product, task.call, entry, *operands)
            error = compute_relative_error(result, expected)
            if stats is not None:
                error += compute_stats_error(stats, result)
        except (Error, RuntimeError) as failure:
            task.reason = task.reason or str(failure).splitlines()[0]
            return
        assert task.workload is not None
        tolerance = TOLERANCE_FACTOR * task.workload.tolerance
        if not error <= tolerance:
            task.reason = task.reason or f"the kernel's result differs by {error:.1e}, more than {tolerance:.1e}"
            return
        seconds = self._compare(task, kernel, entry, operands)
        if task.tvmconv_seconds is None or seconds < task.tvmconv_seconds:
            task.tvmconv_seconds, task.entry, task.reason = seconds, entry, ""

    def _select_for_graphs(self, task: ProductTask, entry: TableEntry, operands: Operands) -> None:
        """Have compiled graphs use a kernel with statistics if these cost less than a pass over the output.

        A compiler fuses the operations of a normalization, so that the kernels and this pass are all that differs.
        """
        call, (x, weight, _) = task.call, operands
        forward_entry = table.find(FORWARD, call)
        name = f"{forward_entry.name if forward_entry else PYTORCH_NAME}, without statistics: {task.name}"
        seconds = self._timing_cache.get_seconds(name, lambda: run_forward(call, x, weight, None))
        target = self._provider.device.target or UNKNOWN_TARGET
        seconds += math.prod(call.output_shape) * call.dtype.itemsize / target.bandwidth
        if self._choose_mode == "tuned" or (task.tvmconv_seconds or math.inf) < seconds:
            table.install(STATS_IN_GRAPHS, call, entry)
        else:
            table.remove(STATS_IN_GRAPHS, call)

    def _time_with_normalization(self, task: ProductTask, entry: TableEntry, operands: Operands) -> None:
        """Replace a task's seconds by those of the convolution, and both passes of the batch normalization after it.

        The convolution without statistics is computed by the kernel in the table, or by PyTorch.
        """
        call, (x, weight, _) = task.call, operands

        def run_by_pytorch() -> object:
            return normalization.run(run_forward(call, x, weight, None), None)

        def run_with_statistics() -> object:
            return normalization.run(*run_forward_with_stats(call, entry, x, weight))

        forward_entry = table.find(FORWARD, call)
        name, suffix = forward_entry.name if forward_entry else PYTORCH_NAME, f", normalized: {task.name}"
        try:
            normalization = NormalizationExample.for_output(call)
            task.pytorch_seconds = self._timing_cache.get_seconds(name + suffix, run_by_pytorch)
            task.tvmconv_seconds = self._timing_cache.get_seconds(entry.name + suffix, run_with_statistics)
        except RuntimeError as error:  # for example, no memory
            task.entry, task.reason = None, str(error).splitlines()[0]

    def _compare(self, task: ProductTask, kernel: AvailableKernel, entry: TableEntry, operands: Operands) -> float:
        """Return the seconds of a kernel; if they are close to PyTorch's, both are measured again, in turns."""
        pytorch_name, name = f"PyTorch: {task.name}", f"{kernel.digest}: {task.name}"
        is_new = not self._timing_cache.has_seconds(name)

        def run_kernel() -> object:
            return run_with_stats(task.product, task.call, entry, *operands)

        seconds = self._timing_cache.get_seconds(name, run_kernel)
        assert task.pytorch_seconds is not None
        if is_new and abs(seconds / task.pytorch_seconds - 1) < CLOSE_RATIO:
            task.pytorch_seconds = self._timing_cache.measure(pytorch_name, lambda: task.run_by_pytorch(operands))
            seconds = self._timing_cache.measure(name, run_kernel)
        return seconds


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


def make_reports(tasks: Sequence[ProductTask]) -> tuple[ProductReport, ...]:
    """Return one report for each product of each call."""
    reports = []
    for task in tasks:
        report = ProductReport(
            "",
            task.product,
            task.workload.text if task.workload else "",
            reason=task.reason,
            pytorch_seconds=task.pytorch_seconds,
            tvmconv_seconds=task.tvmconv_seconds,
        )
        if task.entry is not None:
            report = replace(report, implementation=task.entry.schedule, config_source=task.entry.config_source)
        reports += [replace(report, path=path) for path in dict.fromkeys(task.paths)]
    return tuple(reports)


def fill_table(
    tasks: Sequence[ProductTask],
    provider: KernelProvider,
    choose: ChooseMode,
    deadline: Deadline | None,
) -> list[str]:
    """Fill the kernel table for some products, and return sentences about the work for which no time was left."""
    timing_cache = CallTimingCache(["products of convolutions"], provider.torch_device, provider.device.name)
    selector = ProductSelector(provider, choose, deadline, timing_cache)
    selector.select(tasks)
    notes = []
    if num_unsearched := len(provider.unsearched_workloads):
        notes.append(f"No time was left for the search of {num_unsearched} of {len(tasks)} products.")
    if selector.num_omitted:
        notes.append(f"No time was left to compare {selector.num_omitted} products with PyTorch, which computes them.")
    return notes
