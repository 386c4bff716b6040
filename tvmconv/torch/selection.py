"""The selection of the convolutions that run on tvmconv's kernels: those whose results are correct and faster."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch

from tvmconv.deadline import Deadline
from tvmconv.errors import Error, TuningError
from tvmconv.search.time_budget import sort_by_cost
from tvmconv.torch import operator
from tvmconv.torch.fusion import ConvSite
from tvmconv.torch.kernels import AvailableKernel, KernelProvider
from tvmconv.torch.model import Optimized
from tvmconv.torch.partition import GraphPartition
from tvmconv.torch.report import PYTORCH_NAME, LayerReport, Report
from tvmconv.torch.signature import parse_signature
from tvmconv.torch.timing import TimingCache, use_cudnn_heuristics
from tvmconv.workloads import dtypes, parse

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

    At most half of the time until the deadline of the comparison, and until its cut-off, is reserved for it.
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

    The mode "fastest" selects what is measured to be faster, "tuned" selects every correct kernel. After the deadline,
    only the most promising kernel of each layer is compared; layers that would pass its cut-off are left to PyTorch.
    """

    def __init__(
        self, provider: KernelProvider, timing_cache: TimingCache, choose: ChooseMode, deadline: Deadline | None = None
    ) -> None:
        self._provider, self._timing_cache, self._choose_mode = provider, timing_cache, choose
        self._deadline = deadline or Deadline()
        # Seconds of the longest selection of a workload, at first an estimate.
        self._selection_seconds = COMPARE_SECONDS[provider.torch_device.type]
        self.num_omitted = 0  # layers for which no time was left
        self._tuned_ids: set[int] = set()  # of the modules that kernels compute
        self._kernel_digests: list[str] = []
        self._selections: dict[str, _Selection] = {}

    def select_all(self, sites: Sequence[ConvSite], counts: Mapping[str, int]) -> tuple[LayerReport, ...]:
        """Decide what runs each convolution, those that cost most first; return their reports in the given order.

        `counts` are the numbers of layers by workload text.
        """
        by_cost = sort_by_cost({parse(text): count for text, count in counts.items()}, self._provider.device)
        ranks = {workload.text: rank for rank, workload in enumerate(by_cost)}
        order = sorted(range(len(sites)), key=lambda index: ranks.get(sites[index].workload_text, len(ranks)))
        reports = {index: self._select(sites[index]) for index in order}
        return tuple(reports[index] for index in range(len(sites)))

    def note_tuned(self, module: torch.nn.Module, digest: str) -> None:
        """Note a module that a kernel computes, with a text that identifies module and kernel."""
        self._tuned_ids.add(id(module))
        self._kernel_digests.append(digest)

    def describe_omissions(self, num_workloads: int) -> list[str]:
        """Return sentences about the work for which no time was left, given the number of the model's workloads."""
        num_unsearched, sentences = len(self._provider.unsearched_workloads), []
        if num_unsearched:
            sentences.append(f"No time was left for the search of {num_unsearched} of {num_workloads} workloads.")
        if self.num_omitted:
            sentences.append(
                f"No time was left to compare {self.num_omitted} layers with PyTorch, which computes them."
            )
        return sentences

    def _select(self, site: ConvSite) -> LayerReport:
        """Decide what runs one convolution, and return its report."""
        text, module = site.workload_text, site.module
        report = LayerReport(
            site.path,
            text,
            PYTORCH_NAME,
            site.reason,
            followed_by=site.followed_by,
            missed_reason=site.missed_reason,
            former=site.former_names,
        )
        if module is None:
            return report
        if text not in self._provider.available:
            return replace(report, reason=self._provider.failure_reasons.get(text, ""))
        started_at = time.monotonic()
        metadata = [site.input_metadata, *([site.residual_metadata] if site.residual_metadata else [])]
        arguments = [tensor_metadata.make_random_like() for tensor_metadata in metadata]
        key = f"{text}, {site.input_metadata}, {site.residual_metadata}, {site.former_names}"
        selection = self._selections.get(key)
        if self._deadline.cut_off.remaining_seconds <= (0.0 if selection else self._selection_seconds):
            self.num_omitted += 1
            return replace(report, reason=NO_TIME_REASON)
        with torch.no_grad():
            with use_cudnn_heuristics():
                expected = module(*arguments)
            if selection is None:
                is_first = not self._selections
                selection = self._selections[key] = self._measure(site, key, arguments, expected)
                elapsed = time.monotonic() - started_at
                self._selection_seconds = elapsed if is_first else max(self._selection_seconds, elapsed)
            report = replace(
                report,
                pytorch_seconds=selection.pytorch_seconds,
                tvmconv_seconds=selection.tvmconv_seconds,
                reason=selection.reason,
            )
            kernel = selection.kernel
            if kernel is None:
                return report
            if problem := self._try_kernel(site, kernel, arguments, expected):
                module.clear_kernel(site.input_metadata.key)
                return replace(report, reason=problem)
        self._tuned_ids.add(id(module))
        self._kernel_digests.append(f"{site.path} {kernel.digest}")
        return replace(report, implementation=kernel.schedule, config_source=kernel.config_source)

    def _measure(
        self, site: ConvSite, key: str, arguments: Sequence[torch.Tensor], expected: torch.Tensor
    ) -> _Selection:
        """Time PyTorch and the kernels of a layer; select the fastest kernel that is correct."""
        module, torch_device = site.module, self._provider.torch_device
        selection = _Selection(self._timing_cache.get_seconds(f"PyTorch: {key}", lambda: module(*arguments)))
        for number, kernel in enumerate(self._provider.available[site.workload_text]):
            if self._deadline.cut_off.has_passed or (number and self._deadline.has_passed):
                break
            was_installed = operator.is_kernel_installed(kernel.name, torch_device)
            problem = self._try_kernel(site, kernel, arguments, expected)
            if not problem:
                seconds = self._timing_cache.get_seconds(f"{kernel.digest}: {key}", lambda: module(*arguments))
                if selection.tvmconv_seconds is None or seconds < selection.tvmconv_seconds:
                    selection.tvmconv_seconds, selection.kernel, selection.reason = seconds, kernel, ""
            elif selection.kernel is None:
                selection.reason = problem
            module.clear_kernel(site.input_metadata.key)
            if not was_installed:
                operator.remove_kernel(kernel.name, torch_device)
        if selection.kernel is None and not selection.reason:
            self.num_omitted, selection.reason = self.num_omitted + 1, NO_TIME_REASON
        tvmconv_seconds = selection.tvmconv_seconds
        is_slower = tvmconv_seconds is not None and tvmconv_seconds >= selection.pytorch_seconds
        if is_slower and self._choose_mode == "fastest":
            selection.kernel, selection.reason = None, "PyTorch is no slower"
        return selection

    def _try_kernel(
        self, site: ConvSite, kernel: AvailableKernel, arguments: Sequence[torch.Tensor], expected: torch.Tensor
    ) -> str:
        """Compute a layer by a kernel and return the problem with it; "" if there is none."""
        try:
            operator.install_kernel(kernel.name, kernel.torch_device, kernel.launcher)
            site.module.assign_kernel(site.input_metadata.key, kernel.name, truncates=kernel.truncates)
            error = compute_relative_error(site.module(*arguments), expected)
        except (Error, RuntimeError) as failure:
            return str(failure).splitlines()[0]
        dtype = parse_signature(site.workload_text).workload.dtype
        tolerance = TOLERANCE_FACTOR * dtypes.DTYPES[dtype].tolerance
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

        Without time for that, all selected kernels stay. The report of the layers, with the time of the unchanged
        model, is returned with the time of the optimized one.
        """
        for partition in partitions:
            is_tuned = any(id(module) in self._tuned_ids for module in partition.module.graph.modules())
            partition.module.uses_eager = not is_tuned
        if self._tuned_ids and not has_time:
            note = "No time was left to time the whole model with tvmconv's kernels."
            return replace(report, notes=(*report.notes, note))
        pytorch_seconds = report.pytorch_seconds
        if self._tuned_ids:
            digest_of_kernels = hashlib.sha256("\n".join(self._kernel_digests).encode()).hexdigest()
            name = f"the whole by {digest_of_kernels}"
            tvmconv_seconds = self._timing_cache.get_seconds(name, lambda: model(*arguments))
            if self._choose_mode == "tuned" or pytorch_seconds is None or tvmconv_seconds < pytorch_seconds:
                return replace(report, tvmconv_seconds=tvmconv_seconds)
        for partition in partitions:
            partition.module.uses_eager = True
        model.restore_memory_format()
        if not self._tuned_ids:
            return replace(report, tvmconv_seconds=pytorch_seconds)
        reason = "the whole model is no faster"
        lines = [replace(line, implementation=PYTORCH_NAME, reason=line.reason or reason) for line in report.lines]
        note = "PyTorch runs all layers, because the whole model was no faster with tvmconv's kernels."
        return Report(tuple(lines), pytorch_seconds, pytorch_seconds, notes=(OTHER_INPUTS_NOTE, note))


def count_workloads(sites: Sequence[ConvSite]) -> Counter[str]:
    """Return the number of convolutions by the text of their workload."""
    return Counter(site.workload_text for site in sites if site.workload_text)


def compute_relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative L2 difference ‖output - expected‖ / ‖expected‖; the absolute one if `expected` is zero."""
    norm = float(expected.double().norm())
    return float((output.double() - expected.double()).norm()) / norm if norm else float(output.double().norm())
