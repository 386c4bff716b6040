"""The selection of the convolutions that run with 8-bit operands: those that are faster so, the rounding included."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tvmconv.deadline import Deadline
from tvmconv.errors import Error
from tvmconv.measure.workers.pool import keep_workers_alive
from tvmconv.torch import operator
from tvmconv.torch.accuracy import compute_relative_error
from tvmconv.torch.eight_bit_rounding import round_to_8_bits
from tvmconv.torch.kernels import AvailableKernel, KernelProvider
from tvmconv.torch.quantization import GraphQuantizer, QuantizedSite
from tvmconv.torch.quantized_layer import Quantize
from tvmconv.torch.selection import NO_TIME_REASON, ChooseMode
from tvmconv.torch.signature import lay_out, parse_signature
from tvmconv.torch.timing import TimingCache
from tvmconv.workloads import parse
from tvmconv.workloads.layout import CHANNELS_LAST

TOLERANCE_FACTOR = 4.0  # of the workload's tolerance: PyTorch's sums err too
NOT_FASTER_REASON = "8 bits are no faster"


@dataclass
class QuantizedSelection:
    """The measurements of a convolution with 8-bit operands, and its kernel; without one, the reason."""

    seconds: float | None = None
    kernel: AvailableKernel | None = None
    reason: str = ""


class QuantizedSelector:
    """A selector that decides which convolutions of a quantized model keep their 8-bit operands.

    Args:
        provider: Source of kernels.
        timing_cache: Times of calls.
        choose: "fastest" for layers that are faster than in the model's precision, "tuned" for all with a kernel.
        deadline: End of searches and timings.
    """

    def __init__(
        self, provider: KernelProvider, timing_cache: TimingCache, choose: ChooseMode, deadline: Deadline | None
    ) -> None:
        self._provider, self._timing_cache, self._choose_mode = provider, timing_cache, choose
        self._deadline = deadline
        self._selections: dict[tuple[str, str, bool], QuantizedSelection] = {}

    def select_all(self, quantizer: GraphQuantizer) -> list[tuple[QuantizedSite, QuantizedSelection]]:
        """Quantize a model with the selected convolutions, and return these.

        Without a convolution's quantization, the outputs before it have another type, and thus other kernels. The
        remaining ones are then selected again.
        """
        while True:
            sites = quantizer.apply()
            self._find_kernels(site.workload_text for site in sites)
            selected = [(site, self._select(site)) for site in sites]
            rejected = [(site, selection) for site, selection in selected if selection.kernel is None]
            if not rejected:
                break
            for site, selection in rejected:
                quantizer.reasons[id(site.site.module)] = selection.reason
        for site, selection in selected:
            assert selection.kernel is not None
            self._assign(site, selection.kernel)
        return selected

    def _find_kernels(self, texts: Iterable[str]) -> None:
        """Find kernels of workloads that have none, with the configs of those that differ in the epilogue only."""
        provider = self._provider
        missing = [text for text in dict.fromkeys(texts) if text not in provider.available]
        if not missing:
            return
        known = {strip_epilogue(text): text for text in provider.available}
        siblings = {text: known[key] for text in missing if (key := strip_epilogue(text)) in known}
        with keep_workers_alive():
            provider.adopt_configs(siblings, self._deadline)
            others = {text: 1.0 for text in missing if text not in siblings}
            provider.find_kernels(others, self._deadline)

    def _select(self, site: QuantizedSite) -> QuantizedSelection:
        """Measure a convolution, unless an equal one was measured."""
        key = site.workload_text, site.site.workload_text, site.is_rounded
        if key not in self._selections:
            self._selections[key] = self._measure(site)
        return self._selections[key]

    def _measure(self, site: QuantizedSite) -> QuantizedSelection:
        """Time a convolution in the model's precision and with the kernels for 8-bit operands."""
        provider, text = self._provider, site.workload_text
        if text not in provider.available:
            return QuantizedSelection(reason=provider.failure_reasons.get(text, "it has no kernel"))
        if self._deadline and self._deadline.cut_off.has_passed:
            return QuantizedSelection(reason=NO_TIME_REASON)
        former = site.site
        metadata = [former.input_metadata, *([former.residual_metadata] if former.residual_metadata else [])]
        former_arguments = [each.make_random_like() for each in metadata]
        former_name = f"precision of the model: {former.workload_text}, {former.former_names}, {former.module.kernels}"
        former_seconds = self._timing_cache.get_seconds(former_name, lambda: former.module(*former_arguments))
        selection = self._find_fastest(site, former_arguments)
        if self._choose_mode == "tuned" or selection.seconds is None:
            return selection
        is_slower = selection.seconds >= former_seconds
        if is_slower and site.module.output_dtype is site.module.dtype:  # its readers round an output of floats
            former_seconds += self._time_rounding(former.module(*former_arguments), site.module.dtype)
            is_slower = selection.seconds >= former_seconds
        if is_slower:
            selection = replace(selection, kernel=None, reason=NOT_FASTER_REASON)
        return selection

    def _find_fastest(self, site: QuantizedSite, former_arguments: list[torch.Tensor]) -> QuantizedSelection:
        """Return the fastest kernel that computes a convolution correctly."""
        selection = QuantizedSelection()
        arguments = _make_arguments(site, former_arguments)
        expected = site.module(*arguments)
        for number, kernel in enumerate(self._provider.available[site.workload_text]):
            if number and selection.kernel and self._deadline and self._deadline.has_passed:
                break
            was_installed = operator.is_kernel_installed(kernel.name, kernel.torch_device)
            if problem := self._try_kernel(site, kernel, arguments, expected):
                selection.reason = problem
            else:
                seconds = self._time(site, kernel, arguments, former_arguments[0])
                if selection.seconds is None or seconds < selection.seconds:
                    selection.seconds, selection.kernel = seconds, kernel
            site.module.clear_kernel(site.module.make_key(arguments[0]))
            if not was_installed:
                operator.remove_kernel(kernel.name, kernel.torch_device)
        return selection

    def _time(
        self, site: QuantizedSite, kernel: AvailableKernel, arguments: list[torch.Tensor], former_input: torch.Tensor
    ) -> float:
        """Return the seconds of a layer with an assigned kernel, and with the rounding of its input if it has one."""
        name = f"{kernel.digest}: {site.workload_text}"
        if not site.is_rounded:
            return self._timing_cache.get_seconds(name, lambda: site.module(*arguments))
        rounding = Quantize(1.0, site.module.dtype, former_input.device)
        return self._timing_cache.get_seconds(
            f"{name}, with the rounding of {former_input.dtype}",
            lambda: site.module(rounding(former_input), *arguments[1:]),
        )

    def _time_rounding(self, tensor: torch.Tensor, dtype: torch.dtype) -> float:
        """Return the seconds of the rounding of a tensor."""
        rounding = Quantize(1.0, dtype, tensor.device)
        name = f"rounding of {tuple(tensor.shape)}, {tensor.stride()}, {tensor.dtype} to {dtype}"
        return self._timing_cache.get_seconds(name, lambda: rounding(tensor))

    def _assign(self, site: QuantizedSite, kernel: AvailableKernel) -> None:
        """Have a kernel compute a layer."""
        operator.install_kernel(kernel.name, kernel.torch_device, kernel.launcher)
        key = (tuple(site.site.input_metadata.shape), site.module.dtype, kernel.torch_device, False)
        site.module.assign_kernel(key, kernel.name)

    def _try_kernel(
        self, site: QuantizedSite, kernel: AvailableKernel, arguments: list[torch.Tensor], expected: torch.Tensor
    ) -> str:
        """Compute a layer by a kernel and return the problem with it; "" if there is none."""
        try:
            self._assign(site, kernel)
            error = compute_relative_error(site.module(*arguments), expected)
        except (Error, RuntimeError) as failure:
            return str(failure).splitlines()[0]
        tolerance = TOLERANCE_FACTOR * parse_signature(site.workload_text).workload.tolerance
        return "" if error <= tolerance else f"the kernel's result differs by {error:.1e}, more than {tolerance:.1e}"


def _make_arguments(site: QuantizedSite, former_arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return an 8-bit input whose values have the sizes of calibrated ones, and a residual of the output's type."""
    module, (x, *residuals) = site.module, former_arguments
    factor = 30.0 if module.dtype is torch.int8 else 100.0
    rounded = lay_out(round_to_8_bits(factor * x.float(), module.dtype), CHANNELS_LAST)
    if module.output_dtype is module.dtype:
        residuals = [round_to_8_bits(factor * residual.float(), module.dtype) for residual in residuals]
    return [rounded, *(lay_out(residual, CHANNELS_LAST) for residual in residuals)]


def strip_epilogue(text: str) -> str:
    """Return the text of a workload without its epilogue, and with the default output."""
    workload: Any = parse(text)
    result: str = replace(workload, epilogue=(), out_dtype="").text
    return result
