"""The selection of the convolutions that run with 8-bit operands: those that are faster so, the rounding included."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tvmconv.deadline import Deadline
from tvmconv.devices import Device
from tvmconv.errors import Error, get_first_line
from tvmconv.measure.workers.pool import keep_workers_alive
from tvmconv.target import UNKNOWN_TARGET
from tvmconv.torch import operator
from tvmconv.torch.accuracy import compute_relative_error
from tvmconv.torch.conv_site import ConvSite
from tvmconv.torch.eight_bit_rounding import round_to_8_bits
from tvmconv.torch.kernels import AvailableKernel, KernelProvider
from tvmconv.torch.layout_plan import KERNEL_ROOFLINE_RATIO
from tvmconv.torch.quantization import GraphQuantizer, QuantizedSite, get_output_dtype
from tvmconv.torch.quantization_choice import StepCosts
from tvmconv.torch.quantization_plan import list_factors
from tvmconv.torch.quantized_epilogue import ADD
from tvmconv.torch.quantized_layer import Dequantize, Quantize
from tvmconv.torch.selection import NO_TIME_REASON, ChooseMode
from tvmconv.torch.signature import parse_signature
from tvmconv.torch.tensor_layout import lay_out
from tvmconv.torch.timing import TimingCache, use_cudnn_heuristics
from tvmconv.workloads import parse
from tvmconv.workloads.layout import CHANNELS_LAST

TOLERANCE_FACTOR = 4.0  # of the workload's tolerance: PyTorch's sums err too
CHECK_SECONDS = 0.05  # approximate time of the check of a kernel, or of a timing
PASS_SECONDS, PASS_BANDWIDTH_RATIO = 2e-6, 0.7  # launch of a kernel that converts a tensor, and its share of the peak
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
        choose: "fastest" for layers that make the model faster, "tuned" for all with a kernel.
        deadline: End of searches and timings.
        former_seconds: Known seconds of convolutions in the model's precision, by the identity of their module.
    """

    def __init__(
        self,
        provider: KernelProvider,
        timing_cache: TimingCache,
        choose: ChooseMode,
        deadline: Deadline | None,
        former_seconds: Mapping[int, float] | None = None,
    ) -> None:
        self._provider, self._timing_cache, self._choose_mode = provider, timing_cache, choose
        self._deadline, self._former_seconds = deadline, former_seconds or {}
        self._selections: dict[tuple[str, str], QuantizedSelection] = {}
        self._problems: dict[tuple[str, str], str] = {}  # of checked kernels, by the key of the selection
        self._num_expected = 0  # selections that the choice of layers needs

    def select_all(self, quantizer: GraphQuantizer) -> list[tuple[QuantizedSite, QuantizedSelection]]:
        """Quantize a model with the selected convolutions, and return these.

        Without a convolution's quantization, the outputs before it have another type, and thus other kernels. The
        remaining ones are then selected again.
        """
        if self._choose_mode == "fastest" and quantizer.may_choose:
            self._leave_out_slower(quantizer)
        while True:
            sites = quantizer.apply()
            self._find_kernels(site.workload_text for site in sites)
            selected = [(site, self._select(site)) for site in sites]
            selected = [(site, self._check(site, selection)) for site, selection in selected]
            rejected = [(site, selection) for site, selection in selected if selection.kernel is None]
            if self._choose_mode == "fastest" and not quantizer.may_choose:
                slower = [(site, selection) for site, selection in selected if self._is_slower(site, selection)]
                rejected += [(site, replace(selection, reason=NOT_FASTER_REASON)) for site, selection in slower]
            if not rejected:
                break
            for site, selection in rejected:
                quantizer.reasons[id(site.site.module)] = selection.reason
        for site, selection in selected:
            assert selection.kernel is not None
            self._assign(site, selection.kernel)
        return selected

    def _leave_out_slower(self, quantizer: GraphQuantizer) -> None:
        """Have a quantizer leave out the convolutions without which the model is faster, by times of all steps."""
        sites = {id(site.site.module): site for site in quantizer.apply()}
        texts = [*(site.workload_text for site in sites.values()), *quantizer.float_output_texts.values()]
        self._find_kernels(texts)
        self._num_expected = len({*texts})
        float_sites = dict[int, QuantizedSite]()

        def get_variant(node: fx.Node, is_stored: bool) -> QuantizedSite:
            site = sites[id(quantizer.get_site(node).module)]
            if is_stored or site.module.output_dtype is not site.module.dtype:
                return site
            key = id(site.site.module)
            if key not in float_sites:
                float_sites[key] = quantizer.make_float_output(site)
            return float_sites[key]

        def time_quantized(node: fx.Node, is_stored: bool) -> float:
            seconds = self._select(get_variant(node, is_stored)).seconds
            return math.inf if seconds is None else seconds

        def time_rounding(node: fx.Node, tensor: fx.Node) -> float:
            site = sites[id(quantizer.get_site(node).module)]
            metadata = site.site.residual_metadata if tensor is not node.args[0] else site.site.input_metadata
            assert metadata is not None
            time_rounding = self._time_gated_rounding if list_factors(tensor) else self._time_rounding
            return time_rounding(metadata.make_random_like(), site.module.dtype)

        def time_widening(node: fx.Node) -> float:
            return self._time_widening(sites[id(quantizer.get_site(node).module)])

        costs = StepCosts(
            lambda node: self._time_former(quantizer.get_site(node)), time_quantized, time_rounding, time_widening
        )
        chosen = quantizer.choose(costs, self._has_time)
        for key, site in sites.items():
            if key not in chosen:
                reason = self._select(site).reason
                quantizer.reasons[key] = reason or NOT_FASTER_REASON

    def _has_time(self) -> bool:
        return self._deadline is None or not self._deadline.cut_off.has_passed

    def _has_time_to_compare(self) -> bool:
        """Return whether a timing leaves time to check the selected kernels."""
        if self._deadline is None:
            return True
        num_checks = len({key for key, selection in self._selections.items() if selection.kernel} - {*self._problems})
        return self._deadline.remaining_seconds > CHECK_SECONDS * (1 + num_checks)

    def _find_kernels(self, texts: Iterable[str]) -> None:
        """Find kernels of workloads that have none, with the configs of those that differ in the epilogue only."""
        provider = self._provider
        missing = [text for text in dict.fromkeys(texts) if text not in provider.available]
        if not missing:
            return
        known = {strip_epilogue(text): text for text in provider.available}
        known |= {make_sharing_key(text): text for text in provider.available}
        siblings = {
            text: known[key]
            for text in missing
            for key in (strip_epilogue(text), make_sharing_key(text))  # the last known one counts
            if key in known
        }
        with keep_workers_alive():
            provider.adopt_configs(siblings, self._deadline)
            others = {text: 1.0 for text in missing if text not in siblings}
            provider.find_kernels(others, self._deadline)

    def _select(self, site: QuantizedSite) -> QuantizedSelection:
        """Measure a convolution, unless an equal one was measured."""
        key = _make_key(site)
        if key not in self._selections:
            self._selections[key] = self._measure(site)
        return self._selections[key]

    def _measure(self, site: QuantizedSite) -> QuantizedSelection:
        """Return the time of a convolution with the fastest kernel for 8-bit operands.

        The search has timed and checked its kernels. Others, with another epilogue, are timed as long as there is time,
        and are then estimated by the kernel with the same config that was searched.
        """
        provider, text = self._provider, site.workload_text
        kernels = provider.available.get(text)
        if not kernels:
            return QuantizedSelection(reason=provider.failure_reasons.get(text, "it has no kernel"))
        timed = [(kernel.seconds, number) for number, kernel in enumerate(kernels) if kernel.seconds is not None]
        if timed:
            seconds, number = min(timed)
            return QuantizedSelection(seconds, kernels[number])
        if self._has_time_to_compare():
            return self._find_fastest(site, _make_former_arguments(site.site))
        return QuantizedSelection(self._estimate_seconds(site), kernels[0])

    def _estimate_seconds(self, site: QuantizedSite) -> float:
        """Return the seconds of a convolution by those of one with another epilogue, or else in the model's precision.

        The whole model is timed in the end, and nothing is quantized if it is no faster.
        """
        key, provider = strip_epilogue(site.workload_text), self._provider
        times = [
            (estimate_traffic_seconds(text, provider.device), kernel.seconds)
            for text, kernels in provider.available.items()
            for kernel in kernels
            if kernel.seconds is not None and parse(text).dtype == parse(key).dtype and strip_epilogue(text) == key
        ]
        own_traffic = estimate_traffic_seconds(site.workload_text, provider.device)
        if not times:
            ratio = own_traffic / estimate_traffic_seconds(site.site.workload_text, provider.device)
            return self._time_former(site.site) * (1 + ratio) / 2
        return min(seconds + max(own_traffic - traffic, 0.0) for traffic, seconds in times)

    def _check(self, site: QuantizedSite, selection: QuantizedSelection) -> QuantizedSelection:
        """Return a selection without its kernel if that is wrong for this convolution's weights and scales."""
        key, kernel = _make_key(site), selection.kernel
        if kernel is None:
            return selection
        if key not in self._problems:
            if self._deadline is not None and self._deadline.cut_off.has_passed:
                return QuantizedSelection(reason=NO_TIME_REASON)
            was_installed = operator.is_kernel_installed(kernel.name, kernel.torch_device)
            arguments = _make_arguments(site, _make_former_arguments(site.site))
            self._problems[key] = self._try_kernel(site, kernel, arguments, _compute_reference(site, arguments))
            site.module.clear_kernel(site.module.make_key(arguments[0]))
            if not was_installed:
                operator.remove_kernel(kernel.name, kernel.torch_device)
        problem = self._problems[key]
        return QuantizedSelection(reason=problem) if problem else selection

    def _is_slower(self, site: QuantizedSite, selection: QuantizedSelection) -> bool:
        """Return whether a convolution is faster in the model's precision, with the rounding that its readers need."""
        former, module = site.site, site.module
        if selection.seconds is None or selection.seconds < (former_seconds := self._time_former(former)):
            return False
        if module.output_dtype is module.dtype:
            output = former.module(*_make_former_arguments(former))
            former_seconds += self._time_rounding(output, module.dtype)
        return selection.seconds >= former_seconds

    def _has_time_for_alternatives(self) -> bool:
        """Return whether there is time for further kernels of a convolution, besides one kernel of each other."""
        num_remaining = max(self._num_expected - len(self._selections), 1)
        return self._deadline is None or self._deadline.remaining_seconds > 2 * CHECK_SECONDS * num_remaining

    def _time_former(self, former: ConvSite) -> float:
        """Return the seconds of a convolution in the model's precision."""
        if (seconds := self._former_seconds.get(id(former.module))) is not None:
            return seconds
        arguments = _make_former_arguments(former)
        name = f"precision of the model: {former.workload_text}, {former.former_names}, {former.module.kernels}"
        if not (self._timing_cache.has_seconds(name) or self._has_time_to_compare()):
            target = self._provider.device.target or UNKNOWN_TARGET
            return KERNEL_ROOFLINE_RATIO * target.roofline_seconds(parse(former.workload_text))
        return self._timing_cache.get_seconds(name, lambda: former.module(*arguments))

    def _find_fastest(self, site: QuantizedSite, former_arguments: list[torch.Tensor]) -> QuantizedSelection:
        """Return the fastest kernel that computes a convolution correctly."""
        selection = QuantizedSelection()
        arguments = _make_arguments(site, former_arguments)
        expected = _compute_reference(site, arguments)
        for number, kernel in enumerate(self._provider.available[site.workload_text]):
            if number and selection.kernel and not self._has_time_for_alternatives():
                break
            was_installed = operator.is_kernel_installed(kernel.name, kernel.torch_device)
            if problem := self._try_kernel(site, kernel, arguments, expected):
                selection.reason = problem
            else:
                name = f"{kernel.digest}: {site.workload_text}"
                seconds = self._timing_cache.get_seconds(name, lambda: site.module(*arguments))
                if selection.seconds is None or seconds < selection.seconds:
                    selection.seconds, selection.kernel = seconds, kernel
            site.module.clear_kernel(site.module.make_key(arguments[0]))
            if not was_installed:
                operator.remove_kernel(kernel.name, kernel.torch_device)
        return selection

    def _time_widening(self, site: QuantizedSite) -> float:
        """Return the seconds of the widening of a convolution's residual of 8 bits."""
        residual = _make_arguments(site, _make_former_arguments(site.site))[1].to(site.module.dtype)
        widening = Dequantize(1.0, get_output_dtype(site.site))
        name = f"widening of {tuple(residual.shape)}, {residual.stride()}, {residual.dtype}"
        if not (self._timing_cache.has_seconds(name) or self._has_time_to_compare()):
            return self._estimate_pass(residual, get_output_dtype(site.site).itemsize)
        return self._timing_cache.get_seconds(name, lambda: widening(residual))

    def _time_rounding(self, tensor: torch.Tensor, dtype: torch.dtype) -> float:
        """Return the seconds of the rounding of a tensor."""
        rounding = Quantize(1.0, dtype, tensor.device)
        name = f"rounding of {tuple(tensor.shape)}, {tensor.stride()}, {tensor.dtype} to {dtype}"
        if not (self._timing_cache.has_seconds(name) or self._has_time_to_compare()):
            return self._estimate_pass(tensor, dtype.itemsize)
        return self._timing_cache.get_seconds(name, lambda: rounding(tensor))

    def _time_gated_rounding(self, tensor: torch.Tensor, dtype: torch.dtype) -> float:
        """Return the seconds that the rounding of a product takes longer than the product, which it computes as well.

        One factor is assumed to be a gate, with one element for each image and channel.
        """
        gate, rounding = (
            tensor.new_ones(tensor.shape[:2] + (1,) * (tensor.dim() - 2)),
            Quantize(1.0, dtype, tensor.device),
        )
        name = f"{tuple(tensor.shape)}, {tensor.stride()}, {tensor.dtype} times a gate"
        names = f"rounding of {name} to {dtype}", f"product of {name}"
        if not (self._timing_cache.has_seconds(names[1]) or self._has_time_to_compare()):
            return self._estimate_pass(tensor, dtype.itemsize) - self._estimate_pass(tensor, tensor.element_size())
        calls = lambda: rounding(tensor, gate), lambda: tensor * gate
        rounded, product = (self._timing_cache.get_seconds(name, call) for name, call in zip(names, calls, strict=True))
        return rounded - product

    def _estimate_pass(self, tensor: torch.Tensor, result_itemsize: int) -> float:
        """Return the estimated seconds of a kernel that reads a tensor, and writes one of other elements."""
        target = self._provider.device.target or UNKNOWN_TARGET
        nbytes = tensor.numel() * (tensor.element_size() + result_itemsize)
        return PASS_SECONDS + nbytes / (PASS_BANDWIDTH_RATIO * target.bandwidth)

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
            return get_first_line(failure)
        tolerance = TOLERANCE_FACTOR * parse_signature(site.workload_text).workload.tolerance
        return "" if error <= tolerance else f"the kernel's result differs by {error:.1e}, more than {tolerance:.1e}"


def _make_key(site: QuantizedSite) -> tuple[str, str]:
    """Return what equal convolutions share: their workloads in 8 bits and in the model's precision."""
    return site.workload_text, site.site.workload_text


def _compute_reference(site: QuantizedSite, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the output of a convolution by PyTorch in float32."""
    with use_cudnn_heuristics():
        return site.module.run_reference(*arguments)


def estimate_traffic_seconds(text: str, device: Device) -> float:
    """Return the seconds of the memory traffic of a workload."""
    target = device.target or UNKNOWN_TARGET
    return parse(text).min_bytes / target.bandwidth


def _make_former_arguments(former: ConvSite) -> list[torch.Tensor]:
    """Return a random input, and a residual if there is one, in the model's precision."""
    metadata = [former.input_metadata, *([former.residual_metadata] if former.residual_metadata else [])]
    return [each.make_random_like() for each in metadata]


def _make_arguments(site: QuantizedSite, former_arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return an 8-bit input whose values have the sizes of calibrated ones, and a residual of the output's type."""
    module, (x, *residuals) = site.module, former_arguments
    factor = 30.0 if module.dtype is torch.int8 else 100.0
    rounded = lay_out(round_to_8_bits(factor * x.float(), module.dtype), CHANNELS_LAST)
    if module.output_dtype is module.dtype:
        residuals = [round_to_8_bits(factor * residual.float(), module.dtype) for residual in residuals]
    return [rounded, *(lay_out(residual, CHANNELS_LAST) for residual in residuals)]


def make_sharing_key(text: str) -> str:
    """Return a text that workloads share whose kernels are about as fast with the same config.

    They may differ in the epilogue, but all or none have a residual, which takes a large part of the time.
    """
    has_residual = ADD in parse(text).epilogue
    return f"{strip_epilogue(text)} {ADD}" if has_residual else strip_epilogue(text)


def strip_epilogue(text: str) -> str:
    """Return the text of a workload without its epilogue, and with the default output."""
    workload: Any = parse(text)
    result: str = replace(workload, epilogue=(), out_dtype="").text
    return result
