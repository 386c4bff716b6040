"""The selection of the convolutions that run on tvmconv's kernels: those whose results are correct and faster."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch

from tvmconv.deadline import Deadline
from tvmconv.errors import Error, TuningError, get_first_line
from tvmconv.search.time_budget import sort_by_cost
from tvmconv.torch import operator
from tvmconv.torch.accuracy import TOLERANCE_FACTOR, compute_relative_error
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
COMPARE_SECONDS = {"cuda": 0.05, "cpu": 1.0}  # approximate time of the check of a layer, on the CPU with two timings
PYTORCH_TIMING_FRACTION = 0.2  # of the time until the deadline, for PyTorch's times, which order the search
CLOSE_RATIO = 0.1  # relative difference of two times below which both are measured again, one after the other
ChooseMode = Literal["fastest", "tuned"]


def validate_choice(choose: str) -> ChooseMode:
    """Return `choose` if it is valid; raise TuningError otherwise."""
    if choose not in get_args(ChooseMode):
        raise TuningError(f"choose={choose!r}: expected one of {', '.join(get_args(ChooseMode))}")
    return cast(ChooseMode, choose)


def kernels_deadline(num_workloads: int, torch_device: torch.device, deadline: Deadline) -> Deadline:
    """Return the deadline for finding kernels of workloads, which leaves time to compare the layers with PyTorch."""
    return reserve_comparison(num_workloads * COMPARE_SECONDS[torch_device.type], deadline)


def reserve_comparison(seconds: float, deadline: Deadline) -> Deadline:
    """Return a deadline that leaves some seconds for a comparison.

    At most half of the time until the deadline of the comparison, and until its cut-off, is reserved for it.
    """
    end = deadline.end_time - min(seconds, deadline.remaining_seconds / 2)
    cut_off = deadline.cut_off.end_time - min(seconds, deadline.cut_off.remaining_seconds / 2)
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

    The mode "fastest" selects what is measured to be faster, "tuned" selects every correct kernel. On a GPU, the time
    of a kernel is that of the search which found it. Only if it is close to PyTorch's, both are measured again, in
    turns. After the deadline, only the most promising kernel of each layer is compared; layers that would pass its
    cut-off are left to PyTorch.
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
        self.pytorch_seconds: dict[str, float] = {}  # of a layer by the text of its workload

    def iterate_pytorch_timings(self, sites: Sequence[ConvSite], counts: Mapping[str, int]) -> Iterator[None]:
        """Time one layer with PyTorch in each step, those that cost most first; most of the time is left for others.

        On the CPU there are no steps, because other processes would disturb the timings.
        """
        if self._provider.torch_device.type != "cuda":
            return
        deadline = Deadline.after(PYTORCH_TIMING_FRACTION * self._deadline.remaining_seconds)
        for index in self._sort_by_cost(sites, counts):
            site = sites[index]
            if site.module is None or site.workload_text in self.pytorch_seconds:
                continue
            if deadline.has_passed:
                return
            arguments = make_random_arguments(site)
            with torch.no_grad(), use_cudnn_heuristics(), contextlib.suppress(RuntimeError):  # for example, no memory
                self.pytorch_seconds[site.workload_text] = self._time_pytorch(site, arguments)
            yield

    def _time_pytorch(self, site: ConvSite, arguments: Sequence[torch.Tensor], *, again: bool = False) -> float:
        """Return the seconds of a layer by PyTorch."""
        get_seconds = self._timing_cache.measure if again else self._timing_cache.get_seconds
        return get_seconds(f"PyTorch: {_make_key(site)}", lambda: site.module.run_eager(*arguments))

    def _sort_by_cost(self, sites: Sequence[ConvSite], counts: Mapping[str, int]) -> list[int]:
        """Return the indices of the sites, those first whose workloads cost most in the model."""
        by_cost = sort_by_cost({parse(text): count for text, count in counts.items()}, self._provider.device)
        ranks = {workload.text: rank for rank, workload in enumerate(by_cost)}
        return sorted(range(len(sites)), key=lambda index: ranks.get(sites[index].workload_text, len(ranks)))

    def select_all(self, sites: Sequence[ConvSite], counts: Mapping[str, int]) -> tuple[LayerReport, ...]:
        """Decide what runs each convolution, those that cost most first; return their reports in the given order.

        `counts` are the numbers of layers by workload text.
        """
        reports = {index: self._select(sites[index]) for index in self._sort_by_cost(sites, counts)}
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
        arguments, key = make_random_arguments(site), _make_key(site)
        selection = self._selections.get(key)
        if self._deadline.cut_off.remaining_seconds <= (0.0 if selection else self._selection_seconds):
            self.num_omitted += 1
            return replace(report, reason=NO_TIME_REASON)
        with torch.no_grad():
            with use_cudnn_heuristics():
                expected = module(*arguments)
            if selection is None:
                is_first = not self._selections
                selection = self._selections[key] = self._measure(site, arguments, expected)
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

    def _measure(self, site: ConvSite, arguments: Sequence[torch.Tensor], expected: torch.Tensor) -> _Selection:
        """Time PyTorch and the kernels of a layer; select the fastest kernel that is correct."""
        module, torch_device = site.module, self._provider.torch_device
        selection = _Selection(self._time_pytorch(site, arguments))
        for number, kernel in enumerate(self._provider.available[site.workload_text]):
            if self._deadline.cut_off.has_passed or (number and self._deadline.has_passed):
                break
            was_installed = operator.is_kernel_installed(kernel.name, torch_device)
            problem = self._try_kernel(site, kernel, arguments, expected)
            if not problem:
                seconds = self._time_kernel(site, kernel, arguments, selection)
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

    def _time_kernel(
        self, site: ConvSite, kernel: AvailableKernel, arguments: Sequence[torch.Tensor], selection: _Selection
    ) -> float:
        """Return the seconds of a layer by an assigned kernel; where they are close to PyTorch's, update those, too."""
        name, timing_cache = f"{kernel.digest}: {_make_key(site)}", self._timing_cache
        is_new = not timing_cache.has_seconds(name)
        if is_new and kernel.seconds is not None and not _converts(site, arguments):
            timing_cache.add(name, kernel.seconds)

        def run() -> object:
            return site.module(*arguments)

        seconds = timing_cache.get_seconds(name, run)
        is_close = abs(seconds / selection.pytorch_seconds - 1) < CLOSE_RATIO
        if is_new and is_close and not self._deadline.has_passed and self._choose_mode == "fastest":
            selection.pytorch_seconds = self._time_pytorch(site, arguments, again=True)
            seconds = timing_cache.measure(name, run)
        return seconds

    def _try_kernel(
        self, site: ConvSite, kernel: AvailableKernel, arguments: Sequence[torch.Tensor], expected: torch.Tensor
    ) -> str:
        """Compute a layer by a kernel and return the problem with it; "" if there is none."""
        try:
            operator.install_kernel(kernel.name, kernel.torch_device, kernel.launcher)
            site.module.assign_kernel(site.input_metadata.key, kernel.name, truncates=kernel.truncates)
            error = compute_relative_error(site.module(*arguments), expected)
        except (Error, RuntimeError) as failure:
            return get_first_line(failure)
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


def make_random_arguments(site: ConvSite) -> list[torch.Tensor]:
    """Return random inputs of a layer."""
    metadata = [site.input_metadata, *([site.residual_metadata] if site.residual_metadata else [])]
    return [tensor_metadata.make_random_like() for tensor_metadata in metadata]


def _make_key(site: ConvSite) -> str:
    """Return a text that is equal for layers with equal times."""
    return f"{site.workload_text}, {site.input_metadata}, {site.residual_metadata}, {site.former_names}"


def _converts(site: ConvSite, arguments: Sequence[torch.Tensor]) -> bool:
    """Return whether a layer converts its inputs before the kernel reads them, or runs on the CPU."""
    x, *residuals = arguments
    signature = parse_signature(site.workload_text)
    read = [signature.to_input_layout(x.to(signature.dtype)), *map(signature.to_output_layout, residuals)]
    return not x.is_cuda or any(a.data_ptr() != b.data_ptr() for a, b in zip(arguments, read, strict=True))
