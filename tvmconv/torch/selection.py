"""The selection of the convolutions that run on tvmconv's kernels: those whose results are correct and faster."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch

from tvmconv.deadline import Deadline
from tvmconv.errors import Error, TuningError
from tvmconv.torch import operator
from tvmconv.torch.kernels import AvailableKernel, KernelProvider
from tvmconv.torch.layer import InputKey, TunedConv
from tvmconv.torch.match import ConvMatch
from tvmconv.torch.model import Optimized
from tvmconv.torch.partition import GraphPartition
from tvmconv.torch.report import PYTORCH_NAME, LayerReport, Report
from tvmconv.torch.signature import parse_signature
from tvmconv.torch.timing_cache import TimingCache, use_cudnn_heuristics
from tvmconv.workloads import dtypes

OTHER_INPUTS_NOTE = (
    "PyTorch computes inputs of other shapes and dtypes, on other devices, in training mode, or with gradients."
)
NO_TIME_REASON = "not compared: no time left"
COMPARE_SECONDS = {"cuda": 0.15, "cpu": 1.0}  # approximate time of two timings and a check of a layer
ChooseMode = Literal["fastest", "tuned"]
TOLERANCE_FACTOR = 4.0  # of the dtype's tolerance: PyTorch's result errs too, and is rounded between operations


def validate_choice(choose: str) -> ChooseMode:
    """Return `choose` if it is valid; raise TuningError otherwise."""
    if choose not in get_args(ChooseMode):
        raise TuningError(f"choose={choose!r}: expected one of {', '.join(get_args(ChooseMode))}")
    return cast(ChooseMode, choose)


def kernels_deadline(num_workloads: int, torch_device: torch.device, deadline: Deadline) -> Deadline:
    """Return the deadline for finding kernels, which leaves time to compare the layers with PyTorch.

    At most half of the time until the deadline, and until its cut-off, is reserved for the comparison.

    Args:
        num_workloads: Number of distinct layers.
        torch_device: PyTorch's device.
        deadline: Deadline of the comparison.
    """
    comparison_seconds = num_workloads * COMPARE_SECONDS[torch_device.type]
    end = deadline.end_time - min(comparison_seconds, deadline.remaining_seconds / 2)
    cut_off = deadline.cut_off.end_time - min(comparison_seconds, deadline.cut_off.remaining_seconds / 2)
    return Deadline(end, max(cut_off - end, 0.0))


@dataclass
class _Selection:
    """The measurements and the selected kernel of a workload, for all layers with the same memory formats."""

    pytorch_seconds: float
    tvmconv_seconds: float | None = None
    kernel: AvailableKernel | None = None
    reason: str = ""


class KernelSelector:
    """A selector that decides what runs each layer.

    Args:
        provider: Kernels of the model's workloads.
        timing_cache: Times of the model's parts.
        choose: "fastest" selects what is measured to be faster, "tuned" selects every correct kernel.
        deadline: Deadline of all decisions. After it, only the most promising kernel of each layer is compared; layers
            that would pass its cut-off are left to PyTorch.

    Attributes:
        num_omitted: Number of layers for which no time was left.
    """

    def __init__(
        self, provider: KernelProvider, timing_cache: TimingCache, choose: ChooseMode, deadline: Deadline | None = None
    ) -> None:
        self._provider, self._timing_cache, self._choose_mode = provider, timing_cache, choose
        self._deadline = deadline or Deadline()
        self._selection_seconds: list[float] = []  # one per workload
        self.num_omitted = 0
        self._assigned: list[tuple[TunedConv, InputKey]] = []
        self._kernel_digests: list[str] = []
        self._selections: dict[str, _Selection] = {}

    def select(self, conv_match: ConvMatch) -> LayerReport:
        """Decide what runs one convolution, and return its report."""
        followed_by = conv_match.site.followed_by if conv_match.site else ""
        layer_report = LayerReport(
            conv_match.path, conv_match.workload_text, PYTORCH_NAME, conv_match.reason, followed_by=followed_by
        )
        if conv_match.module is None or conv_match.input_metadata is None:
            return layer_report
        if not self._provider.list_available_kernels(conv_match.workload_text):
            return replace(layer_report, reason=self._provider.failure_reason(conv_match.workload_text))
        module, key = conv_match.module, conv_match.input_metadata.key
        started_at = time.monotonic()
        arguments = [
            conv_match.input_metadata.make_random_like(),
            *([conv_match.residual.make_random_like()] if conv_match.residual else []),
        ]
        selection_key = (
            f"{conv_match.workload_text}, {conv_match.input_metadata}, "
            f"{conv_match.residual}, {'no ' if module.norm is None else ''}normalisation"
        )
        layer_selection = self._selections.get(selection_key)
        if self._deadline.cut_off.remaining_seconds <= (
            0.0
            if layer_selection
            else max(self._selection_seconds, default=COMPARE_SECONDS[self._provider.torch_device.type])
        ):
            self.num_omitted += 1
            return replace(layer_report, reason=NO_TIME_REASON)
        with torch.no_grad():
            with use_cudnn_heuristics():
                expected = module(*arguments)
            if layer_selection is None:
                layer_selection = self._selections[selection_key] = self._measure(
                    conv_match, selection_key, arguments, expected
                )
                self._selection_seconds.append(time.monotonic() - started_at)
            layer_report = replace(
                layer_report,
                pytorch_seconds=layer_selection.pytorch_seconds,
                tvmconv_seconds=layer_selection.tvmconv_seconds,
                reason=layer_selection.reason,
            )
            if layer_selection.kernel is None:
                return layer_report
            problem = self._try_kernel(conv_match, layer_selection.kernel, arguments, expected)
        if problem:
            module.clear_kernel(key)
            return replace(layer_report, reason=problem)
        self._assigned.append((module, key))
        self._kernel_digests.append(f"{conv_match.path} {layer_selection.kernel.digest}")
        return replace(
            layer_report,
            implementation=layer_selection.kernel.schedule,
            config_source=layer_selection.kernel.config_source,
        )

    def _measure(
        self, conv_match: ConvMatch, selection_key: str, arguments: Sequence[torch.Tensor], expected: torch.Tensor
    ) -> _Selection:
        """Time PyTorch and the kernels of a layer; select the fastest kernel that is correct."""
        module, x = conv_match.module, conv_match.input_metadata
        assert x is not None
        layer_selection = _Selection(
            self._timing_cache.get_seconds(f"PyTorch: {selection_key}", lambda: module(*arguments))
        )
        for kernel_number, kernel in enumerate(self._provider.list_available_kernels(conv_match.workload_text)):
            if self._deadline.cut_off.has_passed or (kernel_number and self._deadline.has_passed):
                break
            was_installed = operator.is_kernel_installed(kernel.name, self._provider.torch_device)
            problem = self._try_kernel(conv_match, kernel, arguments, expected)
            if not problem:
                tvmconv_seconds = self._timing_cache.get_seconds(
                    f"{kernel.digest}: {selection_key}", lambda: module(*arguments)
                )
                if layer_selection.tvmconv_seconds is None or tvmconv_seconds < layer_selection.tvmconv_seconds:
                    layer_selection.tvmconv_seconds, layer_selection.kernel, layer_selection.reason = (
                        tvmconv_seconds,
                        kernel,
                        "",
                    )
            elif layer_selection.kernel is None:
                layer_selection.reason = problem
            module.clear_kernel(x.key)
            if not was_installed:
                operator.remove_kernel(kernel.name, self._provider.torch_device)
        if layer_selection.kernel is None and not layer_selection.reason:
            self.num_omitted, layer_selection.reason = self.num_omitted + 1, NO_TIME_REASON
        if (
            self._choose_mode == "fastest"
            and layer_selection.tvmconv_seconds is not None
            and layer_selection.tvmconv_seconds >= layer_selection.pytorch_seconds
        ):
            layer_selection.kernel, layer_selection.reason = None, "PyTorch is no slower"
        return layer_selection

    def _try_kernel(
        self, conv_match: ConvMatch, kernel: AvailableKernel, arguments: Sequence[torch.Tensor], expected: torch.Tensor
    ) -> str:
        """Compute a layer by a kernel and return the problem with it; "" if there is none."""
        assert conv_match.input_metadata is not None
        try:
            launcher = kernel.load_launcher(self._provider.device, self._provider.torch_device)
            operator.install_kernel(kernel.name, self._provider.torch_device, launcher)
            conv_match.module.assign_kernel(
                conv_match.input_metadata.key,
                kernel.name,
                truncates=kernel.is_truncating(self._provider.device, self._provider.torch_device),
            )
            error, tolerance = (
                compute_relative_error(conv_match.module(*arguments), expected),
                _find_tolerance(conv_match.workload_text),
            )
        except (Error, RuntimeError) as failure:
            return str(failure).splitlines()[0]
        return "" if error <= tolerance else f"the kernel's result differs by {error:.1e}, more than {tolerance:.1e}"

    def select_whole_model(
        self,
        model: Optimized,
        partitions: Sequence[GraphPartition],
        arguments: Sequence[Any],
        report: Report,
        *,
        has_time: bool = True,
    ) -> Report:
        """Time the whole model, and restore PyTorch if the kernels do not make it faster.

        Args:
            model: The whole model.
            partitions: Its traced parts.
            arguments: Arguments of the model.
            report: Report of the layers, with the time of the unchanged model.
            has_time: Whether there is time for the timing; otherwise all selected kernels stay.

        Returns:
            The report with the time of the optimized model.
        """
        assigned_ids = {id(module) for module, _ in self._assigned}
        tuned_modules = [
            partition.module
            for partition in partitions
            if assigned_ids & {id(module) for module in partition.module.graph.modules()}
        ]
        for partition in partitions:
            partition.module.use_eager(partition.module not in tuned_modules)
        pytorch_seconds = report.pytorch_seconds
        digest_of_kernels = hashlib.sha256("\n".join(self._kernel_digests).encode()).hexdigest()
        if tuned_modules and not has_time:
            note = "No time was left to time the whole model with tvmconv's kernels."
            return replace(report, notes=(*report.notes, note))
        tvmconv_seconds = (
            self._timing_cache.get_seconds(f"the whole by {digest_of_kernels}", lambda: model(*arguments))
            if tuned_modules
            else pytorch_seconds
        )
        if tuned_modules and (
            self._choose_mode == "tuned"
            or pytorch_seconds is None
            or tvmconv_seconds is None
            or tvmconv_seconds < pytorch_seconds
        ):
            return replace(report, tvmconv_seconds=tvmconv_seconds)
        for partition in partitions:
            partition.module.use_eager()
        model.restore_memory_format()
        if not tuned_modules:
            return replace(report, tvmconv_seconds=pytorch_seconds)
        reason = "the whole model is no faster"
        lines = [replace(line, implementation=PYTORCH_NAME, reason=line.reason or reason) for line in report.lines]
        note = "PyTorch runs all layers, because the whole model was no faster with tvmconv's kernels."
        return Report(tuple(lines), pytorch_seconds, pytorch_seconds, notes=(OTHER_INPUTS_NOTE, note))


def _find_tolerance(text: str) -> float:
    return TOLERANCE_FACTOR * dtypes.DTYPES[parse_signature(text).workload.dtype].tolerance


def compute_relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative L2 difference ‖output - expected‖ / ‖expected‖; the absolute one if `expected` is zero."""
    norm = float(expected.double().norm())
    return float((output.double() - expected.double()).norm()) / norm if norm else float(output.double().norm())
