"""The optimization of a model for inference: tracing, plans, search for kernels, selection, and the report.

`training.py` has the same for training.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tvmconv.deadline import Deadline
from tvmconv.errors import ModelError
from tvmconv.measure.workers.pool import keep_workers_alive
from tvmconv.torch.fusion import ConvSite, match_convolutions
from tvmconv.torch.group_norm_fusion import NormFuser
from tvmconv.torch.kernels import KernelProvider
from tvmconv.torch.layer_search import find_layer_kernels
from tvmconv.torch.layout_plan import LayoutCosts, LayoutPlanner
from tvmconv.torch.model import MEMORY_FORMAT_BY_NAME, Optimized, choose_memory_format, find_memory_format
from tvmconv.torch.partition import GraphPartition, clone_tensors
from tvmconv.torch.product_search import start_search_early
from tvmconv.torch.qdq import has_pairs
from tvmconv.torch.qdq_quantizer import QdqQuantizer
from tvmconv.torch.quantization import GraphQuantizer, ModelQuantizer
from tvmconv.torch.quantization_options import QuantizationOptions
from tvmconv.torch.quantize import find_quantized_kernels, quantize_with_kernels
from tvmconv.torch.report import Report
from tvmconv.torch.selection import (
    OTHER_INPUTS_NOTE,
    ChooseMode,
    KernelSelector,
    count_workloads,
    kernels_deadline,
)
from tvmconv.torch.timing import TimingCache, use_cudnn_heuristics
from tvmconv.torch.traced_model import TracedModel, find_largest_difference, run_model, trace_model

PLANNING_FRACTION = 0.1  # of the time until the deadline, for timings that decide about layouts, or normalizations
COMPARISON_FRACTION = 0.25  # of the time after calibration, for the comparison of 8-bit kernels
NUM_TIMING_CALLS = 12  # approximate number of calls in one timing of a model


@dataclass(frozen=True)
class _PlannedModel:
    """The convolutions of a traced model, after normalizations were fused and layouts were planned.

    Attributes:
        sites: The convolutions.
        norm_fuser: What replaced normalizations and concatenations.
        planner: Planner of the layouts; None for a model of several graphs, or one that is quantized already.
        notes: Sentences about layouts and normalizations for the report.
    """

    sites: list[ConvSite]
    norm_fuser: NormFuser
    planner: LayoutPlanner | None
    notes: list[str]


def optimize_for_inference(
    model: torch.nn.Module,
    example: tuple[Any, ...],
    provider: KernelProvider,
    deadline: Deadline | None,
    choose: ChooseMode,
    quantization: QuantizationOptions | None,
) -> Optimized:
    """Trace a model, find kernels for its convolutions, and select what makes it faster."""
    torch_device, is_quantized = provider.torch_device, has_pairs(model)
    if is_quantized and quantization:
        raise ModelError("the model is quantized already: expected no dtype")
    with contextlib.ExitStack() as stack:
        if deadline and (quantization or is_quantized):  # which has searches of its own
            stack.enter_context(keep_workers_alive())
        with keep_workers_alive() if deadline else contextlib.nullcontext():
            if deadline and torch_device.type == "cuda":  # on the CPU, workers would disturb the timings
                start_search_early(torch_device)
            traced = trace_model(model, example, torch_device, is_quantized=is_quantized)
            timing_cache = TimingCache(traced.model, traced.arguments, torch_device, provider.device.name)
            stack.callback(timing_cache.save)  # also after an interruption
            pytorch_seconds, timing_seconds = _time_whole_model(traced, timing_cache)
            planned = _plan_model(traced, provider, timing_cache, deadline, choose, quantization)
            quantizer = _make_quantizer(traced, planned, quantization)
            end_deadline = deadline and deadline.shift_earlier(timing_seconds)  # time for that of the whole model
            selection_deadline = end_deadline
            if quantizer and end_deadline:
                selection_deadline = end_deadline.shift_earlier(COMPARISON_FRACTION * end_deadline.remaining_seconds)
            selector = KernelSelector(provider, timing_cache, choose, selection_deadline)
            num_workloads = _find_kernels(planned, quantizer, provider, selector, selection_deadline)
        timing_cache.is_awake = False
        report = _select_layers(planned, selector, pytorch_seconds)
        if quantizer:
            report = quantize_with_kernels(
                *(traced.model, traced.partitions, planned.sites, quantizer, provider, timing_cache, selector, report),
                *(choose, end_deadline, traced.arguments),
            )
        has_time = deadline is None or deadline.cut_off.remaining_seconds > timing_seconds
        report = selector.select_whole_model(
            traced.model, traced.partitions, traced.arguments, report, has_time=has_time
        )
        if planned.planner and traced.model.uses_eager:
            planned.planner.restore_weights()
    difference = find_largest_difference(run_model(traced.model, example), traced.expected)
    notes = (*report.notes, *selector.describe_omissions(num_workloads))
    traced.model.set_report(replace(report, difference=difference, notes=notes))
    return traced.model


def _time_whole_model(traced: TracedModel, timing_cache: TimingCache) -> tuple[float, float]:
    """Return the seconds of the model by PyTorch, and the seconds that their measurement takes."""
    started_at = time.monotonic()
    pytorch_seconds = timing_cache.get_seconds("the whole by PyTorch", lambda: traced.model(*traced.arguments))
    timing_seconds = time.monotonic() - started_at
    if timing_seconds < pytorch_seconds:  # the cache had the time of an earlier call
        timing_seconds = NUM_TIMING_CALLS * pytorch_seconds
    return pytorch_seconds, timing_seconds


def _plan_model(
    traced: TracedModel,
    provider: KernelProvider,
    timing_cache: TimingCache,
    deadline: Deadline | None,
    choose: ChooseMode,
    quantization: QuantizationOptions | None,
) -> _PlannedModel:
    """Fuse the normalizations of a model, choose the layouts inside it, and match its convolutions."""
    model, partitions, torch_device = traced.model, traced.partitions, provider.torch_device
    norm_fuser = make_norm_fuser(timing_cache, choose, deadline)
    if not (traced.is_quantized or quantization) and (torch_device.type == "cuda" or choose == "tuned"):
        with use_cudnn_heuristics():
            norm_fuser.fuse(model, partitions, traced.example)
    planner: LayoutPlanner | None = None
    notes: list[str] = []
    if [partition.module for partition in partitions] == [model] and not traced.is_quantized:
        planner = make_planner(provider, timing_cache, deadline, needs_channels_last=quantization is not None)
    else:
        notes += _set_fastest_format(model, torch_device, traced.example, traced.expected)
    with use_cudnn_heuristics():
        sites = _match_convolutions(model, partitions, traced.example, traced.expected, planner)
    notes += [*norm_fuser.describe(), *(planner.describe() if planner else []), OTHER_INPUTS_NOTE]
    return _PlannedModel(sites, norm_fuser, planner, notes)


def _make_quantizer(
    traced: TracedModel, planned: _PlannedModel, quantization: QuantizationOptions | None
) -> GraphQuantizer | None:
    """Return the quantizer of a model that is quantized already, or is to be; None for others."""
    if traced.is_quantized:
        return QdqQuantizer(traced.partitions, planned.sites)
    if quantization:
        with use_cudnn_heuristics():  # layers are computed in float32, each once
            return ModelQuantizer(traced.model, traced.partitions, planned.sites, quantization)
    return None


def _find_kernels(
    planned: _PlannedModel,
    quantizer: GraphQuantizer | None,
    provider: KernelProvider,
    selector: KernelSelector,
    deadline: Deadline | None,
) -> int:
    """Find kernels of all convolutions while PyTorch is timed; return the number of searched workloads."""
    counts = count_workloads(planned.sites)
    search_arguments = (
        *(provider, counts, deadline and kernels_deadline(len(counts), provider.torch_device, deadline)),
        selector.iterate_pytorch_timings(planned.sites, counts),
        selector.pytorch_seconds,
    )
    if quantizer:
        return find_quantized_kernels(quantizer, *search_arguments)
    find_layer_kernels(*search_arguments)
    return len(counts)


def _select_layers(planned: _PlannedModel, selector: KernelSelector, pytorch_seconds: float) -> Report:
    """Select what computes each convolution, and return the report of all layers."""
    lines = selector.select_all(planned.sites, count_workloads(planned.sites))
    if planned.planner:
        planned.planner.restore_weights(only_of_kernels=True)
    for layer, digest in planned.norm_fuser.layers:
        selector.note_tuned(layer, digest)
    lines = (*lines, *planned.norm_fuser.reports)
    return Report(lines, pytorch_seconds=pytorch_seconds, notes=tuple(planned.notes))


def make_norm_fuser(timing_cache: TimingCache, choose: ChooseMode, deadline: Deadline | None) -> NormFuser:
    """Return what replaces normalizations, which takes a small part of the time until the deadline."""
    fusing_deadline = Deadline()
    if deadline:
        fusing_deadline = deadline.shift_earlier((1 - PLANNING_FRACTION) * deadline.remaining_seconds)
    time_call = timing_cache.get_seconds if choose == "fastest" else None
    return NormFuser(time_call, lambda: not fusing_deadline.has_passed)


def make_planner(
    provider: KernelProvider, timing_cache: TimingCache, deadline: Deadline | None, *, needs_channels_last: bool = False
) -> LayoutPlanner:
    """Return the planner of the layouts inside a model, which takes a small part of the time until the deadline."""
    planning_deadline = Deadline()
    if deadline:
        planning_deadline = deadline.shift_earlier((1 - PLANNING_FRACTION) * deadline.remaining_seconds)
    return LayoutPlanner(
        LayoutCosts(provider.device, provider.read_record_index(deadline), needs_channels_last=needs_channels_last),
        timing_cache.get_seconds if provider.torch_device.type == "cuda" else None,
        lambda: not planning_deadline.has_passed,
    )


def _match_convolutions(
    model: Optimized,
    partitions: Sequence[GraphPartition],
    example: Sequence[Any],
    expected: Sequence[Any],
    planner: LayoutPlanner | None,
) -> list[ConvSite]:
    """Match the convolutions of a model, and plan the layouts inside it if it is one graph.

    The plan is dropped if the model does not run with it, or its results then have other strides than PyTorch's.
    """
    if planner is None:
        return match_convolutions(model, partitions, clone_tensors(example))
    former_graph = copy.deepcopy(model.graph.graph)
    sites = match_convolutions(model, partitions, clone_tensors(example), planner)
    if not planner.num_moved:
        return sites
    with contextlib.suppress(ModelError):
        if list_strides(run_model(model, example)) == list_strides(expected):
            return sites
    planner.drop()
    model.graph.graph = former_graph
    return match_convolutions(model, partitions, clone_tensors(example))


def list_strides(values: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return the strides of the tensors among some values."""
    return [value.stride() for value in values if isinstance(value, torch.Tensor)]


def _set_fastest_format(
    model: Optimized, torch_device: torch.device, arguments: Sequence[Any], expected: Sequence[Any]
) -> list[str]:
    """Convert a model to its fastest memory format and return notes about that."""
    name = choose_memory_format(model, arguments, torch_device)
    if name is None:
        return []
    model.set_memory_format(MEMORY_FORMAT_BY_NAME[name], find_memory_format(expected))
    try:
        run_model(model, arguments)
    except ModelError as error:  # a `view`, for example, needs the model's own format
        model.restore_memory_format()
        return [f"Images keep their memory format: with {name}, {error}."]
    return [f"Inside the model, images are {name}, which is faster: inputs and results are converted."]
