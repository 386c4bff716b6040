"""Quantized copies of models: with kernels for a device, and computed by PyTorch anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tvmconv.deadline import Deadline
from tvmconv.errors import ModelError
from tvmconv.measure.workers.pool import keep_workers_alive
from tvmconv.torch.calibration import run_recorders
from tvmconv.torch.conv_site import ConvSite
from tvmconv.torch.device_match import find_common_device
from tvmconv.torch.fusion import match_convolutions
from tvmconv.torch.kernels import KernelProvider
from tvmconv.torch.layer_search import find_layer_kernels
from tvmconv.torch.model import Optimized, list_shapes
from tvmconv.torch.observers import ObserverName
from tvmconv.torch.partition import GraphPartition, clone_tensors
from tvmconv.torch.quantization import GraphQuantizer, ModelQuantizer, QuantizedSite
from tvmconv.torch.quantization_options import DEFAULT_MAX_ERROR, make_quantization_options
from tvmconv.torch.quantized_selection import QuantizedSelection, QuantizedSelector, make_sharing_key
from tvmconv.torch.report import PYTORCH_NAME, LayerReport, Report
from tvmconv.torch.selection import ChooseMode, KernelSelector
from tvmconv.torch.shape_recorder import ShapeRecorder
from tvmconv.torch.timing import TimingCache
from tvmconv.torch.traced_model import find_largest_difference, run_model, trace_model

# Parts of the remaining time: for known and predicted kernels in the model's precision of layers to quantize, then for
# the search, and then for builds of its configs with other outputs.
FLOAT_FRACTION, SEARCH_FRACTION, ADOPTION_FRACTION = 0.3, 0.8, 0.7


def quantize(
    model: torch.nn.Module,
    example: Any,
    *,
    dtype: str,
    calibrate: Iterable[Any],
    observer: ObserverName = "mse",
    max_layer_error: float = DEFAULT_MAX_ERROR,
) -> Optimized:
    """Return a copy of a model that computes with PyTorch what `optimize` with the same arguments computes in 8 bits.

    It needs no kernels and no GPU, and is slow. Its results show what a quantization does to a model's accuracy.

    Args:
        model: Model with all its tensors on one device. It is not modified.
        example: Input of the model: a tensor, or a tuple of all arguments.
        dtype: Type of the operands of quantized convolutions: "e4m3" or "i8".
        calibrate: Typical inputs of the model, each a tensor or a tuple of all arguments.
        observer: How the scale of an activation is chosen: "mse", "minmax" or "percentile".
        max_layer_error: Largest relative L2 error of the output of a quantized layer. Others keep the model's
            precision, and the report says so.

    Returns:
        The copy, whose `report()` lists the layers with their errors.

    Raises:
        ModelError: The model does not run on the example, or an argument is invalid.

    Examples:
        >>> import torch, tvmconv.torch
        >>> model, x = torch.nn.Conv2d(16, 8, 3), torch.randn(2, 16, 8, 8)
        >>> quantized = tvmconv.torch.quantize(model, x, dtype="i8", calibrate=[x])
        >>> error = (quantized(x) - model(x)).norm() / model(x).norm()
        >>> bool(error < 0.02)
        True
    """
    options = make_quantization_options(dtype, calibrate, observer, max_layer_error)
    if not isinstance(model, torch.nn.Module) or isinstance(model, (torch.jit.ScriptModule, Optimized)):
        raise ModelError(f"expected a torch.nn.Module, not {type(model).__name__}")
    arguments = example if isinstance(example, tuple) else (example,)
    torch_device = find_common_device(model, arguments)
    with torch.inference_mode(False), torch.no_grad():
        traced = trace_model(model, arguments, torch_device)
        quantized, partitions = traced.model, traced.partitions
        sites = match_convolutions(quantized, partitions, clone_tensors(arguments))
        quantizer = ModelQuantizer(quantized, partitions, sites, options)
        layers = quantizer.apply()
        set_quantized(quantized, partitions, layers)
        outputs = run_model(quantized, arguments)
    lines = [LayerReport(site.path, site.workload_text, PYTORCH_NAME, site.reason) for site in sites]
    difference = find_largest_difference(outputs, traced.expected)
    report = Report(tuple(lines), difference=difference, notes=(quantizer.describe(len(layers), len(sites)),))
    quantized.set_report(annotate_report(report, sites, quantizer, [(layer, None) for layer in layers]))
    return quantized


def set_quantized(
    model: Optimized,
    partitions: Sequence[GraphPartition],
    layers: Sequence[QuantizedSite],
    example: Sequence[Any] | None = None,
) -> None:
    """Have the parts of a model run their quantized graphs, for calls with the example's shapes if there is one."""
    if example is not None:
        recorders = [_ShapeOfCallRecorder(partition.module) for partition in partitions]
        run_recorders(model, partitions, recorders, example)
    for partition in partitions:
        partition.module.is_quantized = bool(layers)
        partition.module.graph.recompile()


class _ShapeOfCallRecorder(ShapeRecorder):
    """An interpreter that has a part of a model run its quantized graph for the shapes of the call that it sees."""

    def __init__(self, part: Optimized) -> None:
        super().__init__(part.graph)
        self._part = part

    def run_with_arguments(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph, after noting the shapes."""
        self._part.quantized_shapes = list_shapes((args, kwargs))
        return super().run_with_arguments(*args, **kwargs)


def find_quantized_kernels(
    quantizer: GraphQuantizer,
    provider: KernelProvider,
    counts: Mapping[str, int],
    deadline: Deadline | None,
    pytorch_timings: Iterable[None],
    pytorch_seconds: Mapping[str, float],
) -> int:
    """Find kernels of the convolutions with 8-bit operands, and of all convolutions in the model's precision.

    The search is for the former, and for convolutions that are not quantized. Others in the model's precision are only
    compared, and need no search; their known or predicted kernels are built before it. Each config that was found also
    serves the same convolution with outputs in the model's precision, which is needed if a reader of its output is not
    quantized in the end.

    Args:
        quantizer: Which convolutions have 8-bit operands.
        provider: Source of kernels.
        counts: Numbers of convolutions by the text of their workload in the model's precision.
        deadline: End of the search and of builds; None for no search.
        pytorch_timings: Steps of PyTorch's timings; see `find_layer_kernels`.
        pytorch_seconds: Seconds of PyTorch by workload text, which these steps may add to.

    Returns:
        The number of searched workloads.
    """
    layers = quantizer.apply()
    quantizer.restore()
    searched = Counter(counts) - Counter(layer.site.workload_text for layer in layers)
    texts = {id(layer.site.module): layer.workload_text for layer in layers}
    representatives: dict[str, str] = {}  # by what workloads share
    searched.update(representatives.setdefault(make_sharing_key(text), text) for text in texts.values())
    outputs = [*texts.values(), *(quantizer.float_output_texts[key] for key in texts)]
    siblings = {text: each for text in outputs if (each := representatives[make_sharing_key(text)]) != text}

    def take_part(fraction: float) -> Deadline | None:
        return deadline and deadline.reserve_seconds((1 - fraction) * deadline.remaining_seconds)

    with keep_workers_alive():
        if deadline:  # first, as the model has to be no slower than without 8 bits, however short the time is
            not_searched = {text: count for text, count in counts.items() if text not in searched}
            provider.find_kernels(not_searched, take_part(FLOAT_FRACTION))
        find_layer_kernels(provider, searched, take_part(SEARCH_FRACTION), pytorch_timings, pytorch_seconds)
        if deadline:
            provider.adopt_configs(siblings, take_part(ADOPTION_FRACTION))
        provider.find_kernels(counts, deadline)
    return len(searched)


def quantize_with_kernels(
    model: Optimized,
    partitions: Sequence[GraphPartition],
    sites: Sequence[ConvSite],
    quantizer: GraphQuantizer,
    provider: KernelProvider,
    timing_cache: TimingCache,
    kernel_selector: KernelSelector,
    report: Report,
    choose: ChooseMode,
    deadline: Deadline | None,
    example: Sequence[Any],
) -> Report:
    """Quantize the convolutions of an optimized model that are faster so; return the report with them.

    If the whole model is no faster, nothing is quantized.
    """
    name = f"the whole before quantization: {[module.kernels for module in model.list_tuned_convs()]}"
    former_seconds = timing_cache.get_seconds(name, lambda: model(*example))
    known_seconds = list_seconds(report, sites)
    selected = QuantizedSelector(provider, timing_cache, choose, deadline, known_seconds).select_all(quantizer)
    set_quantized(model, partitions, [site for site, _ in selected], example)
    notes = [*report.notes, quantizer.describe(len(selected), len(sites))]
    seconds = (
        timing_cache.measure(f"the whole in {quantizer.dtype.text}", lambda: model(*example)) if selected else None
    )
    if seconds is not None and seconds >= former_seconds and choose == "fastest":
        quantizer.restore()
        set_quantized(model, partitions, [])
        note = f"No layer is quantized: the whole model would take {seconds:.3g} s, and takes {former_seconds:.3g} s."
        return replace(report, notes=(*report.notes, note))
    for site, selection in selected:
        assert selection.kernel is not None
        kernel_selector.note_tuned(site.module, f"{site.site.path} {selection.kernel.digest}")
    if selected:
        notes.append(f"Before quantization, the model takes {former_seconds * 1e6:.3g} µs.")
    return annotate_report(replace(report, notes=tuple(notes)), sites, quantizer, selected)


def list_seconds(report: Report, sites: Sequence[ConvSite]) -> dict[int, float]:
    """Return the known seconds of convolutions in the model's precision, by the identity of their module."""
    known = dict[int, float]()
    for line, site in zip(report.lines, sites, strict=False):  # lines of normalizations follow those of convolutions
        seconds = line.pytorch_seconds if line.implementation == PYTORCH_NAME else line.tvmconv_seconds
        if site.module is not None and seconds is not None:
            known[id(site.module)] = seconds
    return known


def annotate_report(
    report: Report,
    sites: Sequence[ConvSite],
    quantizer: GraphQuantizer,
    layers: Sequence[tuple[QuantizedSite, QuantizedSelection | None]],
) -> Report:
    """Return a report with the workloads, kernels and errors of quantized layers, and reasons for the others.

    Args:
        report: Report of the model before its quantization.
        sites: All convolutions, in the order of its lines.
        quantizer: Errors and reasons.
        layers: Quantized convolutions, with what was measured if kernels compute them.
    """
    quantized: Mapping[int, Any] = {id(site.site.module): (site, selection) for site, selection in layers}
    lines = []
    for line, site in zip(report.lines, sites, strict=True):
        key = id(site.module)
        error = quantizer.errors.get(key)
        if key not in quantized:
            reason = quantizer.reasons.get(key, "")
            lines.append(replace(line, quantization=reason and f"not quantized: {reason}"))
            continue
        quantized_site, selection = quantized[key]
        line = replace(
            line, workload=quantized_site.workload_text, quantization="" if error is None else f"error {error:.2g}"
        )
        if selection is not None:
            kernel = selection.kernel
            line = replace(
                line,
                implementation=kernel.schedule,
                config_source=kernel.config_source,
                tvmconv_seconds=selection.seconds,
                reason="",
            )
        lines.append(line)
    return replace(report, lines=tuple(lines))
