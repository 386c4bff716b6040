"""The optimization of a model: tracing, search for kernels, selection of the faster ones, and the report."""

from __future__ import annotations

import contextlib
import copy
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch.utils._pytree import tree_leaves

from tvmconv.deadline import Deadline
from tvmconv.errors import FallbackWarning, ModelError, translate_to_model_error
from tvmconv.measure.workers.pool import keep_workers_alive
from tvmconv.search.options import TuneOptions
from tvmconv.torch.accuracy import compute_relative_error
from tvmconv.torch.conv_source import copy_model
from tvmconv.torch.device_match import find_common_device, find_device_for
from tvmconv.torch.fusion import ConvSite, match_convolutions
from tvmconv.torch.group_norm_fusion import NormFuser
from tvmconv.torch.kernels import KernelProvider
from tvmconv.torch.layer_search import find_layer_kernels
from tvmconv.torch.layout_plan import LayoutCosts, LayoutPlanner
from tvmconv.torch.lazy_modules import initialize_lazy_modules
from tvmconv.torch.model import MEMORY_FORMAT_BY_NAME, Optimized, choose_memory_format, find_memory_format
from tvmconv.torch.observers import ObserverName
from tvmconv.torch.partition import GraphPartition, clone_tensors, partition_model, record_calls
from tvmconv.torch.product_search import start_search_early
from tvmconv.torch.qdq import has_pairs, normalize_graph
from tvmconv.torch.qdq_quantizer import QdqQuantizer
from tvmconv.torch.quantization import GraphQuantizer, ModelQuantizer
from tvmconv.torch.quantization_options import DEFAULT_MAX_ERROR, QuantizationOptions, make_quantization_options
from tvmconv.torch.quantize import find_quantized_kernels, quantize_with_kernels
from tvmconv.torch.report import Report
from tvmconv.torch.selection import (
    OTHER_INPUTS_NOTE,
    ChooseMode,
    KernelSelector,
    count_workloads,
    kernels_deadline,
    validate_choice,
)
from tvmconv.torch.timing import TimingCache, use_cudnn_heuristics
from tvmconv.torch.training import optimize_training

CPU_MODEL_WARNING = (
    "the model is on the CPU, where PyTorch is mostly faster: the search will most likely leave all layers to PyTorch; "
    'choose="tuned" (--all) uses tvmconv\'s kernels'
)
PLANNING_FRACTION = 0.1  # of the time until the deadline, for timings that decide about layouts, or normalizations
COMPARISON_FRACTION = 0.25  # of the time after calibration, for the comparison of 8-bit kernels
NUM_TIMING_CALLS = 12  # approximate number of calls in one timing of a model


@overload
def optimize(
    model: torch.nn.Module,
    example: Any,
    *,
    seconds: float | None = None,
    log: str | os.PathLike[str] | None = None,
    device: str | None = None,
    choose: ChooseMode = "fastest",
    train: Literal[False] = False,
    dtype: str | None = None,
    calibrate: Iterable[Any] | None = None,
    observer: ObserverName = "mse",
    max_layer_error: float = DEFAULT_MAX_ERROR,
    progress: Callable[[str], None] | None = None,
) -> Optimized: ...


@overload
def optimize(
    model: torch.nn.Module,
    example: Any,
    *,
    seconds: float | None = None,
    log: str | os.PathLike[str] | None = None,
    device: str | None = None,
    choose: ChooseMode = "fastest",
    train: bool,
    fused: bool = False,
    progress: Callable[[str], None] | None = None,
) -> torch.nn.Module: ...


def optimize(
    model: torch.nn.Module,
    example: Any,
    *,
    seconds: float | None = None,
    log: str | os.PathLike[str] | None = None,
    device: str | None = None,
    choose: ChooseMode = "fastest",
    train: bool = False,
    fused: bool = False,
    dtype: str | None = None,
    calibrate: Iterable[Any] | None = None,
    observer: ObserverName = "mse",
    max_layer_error: float = DEFAULT_MAX_ERROR,
    progress: Callable[[str], None] | None = None,
) -> torch.nn.Module:
    """Return a copy of a model whose convolutions run on tvmconv's kernels where these are faster than PyTorch's.

    For inference, a kernel computes a convolution and the batch normalization, activations and residual that follow
    it. PyTorch computes calls with other shapes or dtypes than the example's, in training mode, or where a gradient is
    needed.

    For training, kernels compute the forward pass of a convolution and the gradients of its input and weight, each
    where it is faster. The copy is a module of the model's class with the model's own parameters and buffers. Wrap it
    for distributed training after this call.

    Args:
        model: Model with all its tensors on one device. It is not modified, but lazy modules are initialized by a call
            on the example. The copy is in evaluation mode and its parameters need no gradients. A graph with pairs of
            operators that quantize and dequantize, as `torch.export` writes it, keeps its 8-bit convolutions.
        example: Input of the model: a tensor, or a tuple of all arguments. The shapes, dtypes and memory formats, and
            the current settings of `torch.autocast` and TF32, are those that the copy is optimized for.
        seconds: Time limit of this call in seconds, with a search for layers that the log does not cover; see
            `tvmconv.deadline`. Layers for which no time was left run by PyTorch, and `report()` names them. None for no
            search: kernels come from the log, from the packaged logs, or from predictions.
        log: Path of a tuning log, from which kernels are taken and to which the search appends.
        device: Device to tune on and run on, such as "cuda:0"; by default the model's own, and the first OpenCL device
            for a model on the CPU.
        choose: "fastest" uses kernels that are faster than PyTorch when both are measured, "tuned" uses every kernel.
        train: Whether the copy is for training. The example is then a batch as in training.
        fused: With `train`, whether tvmconv's operators also compute normalizations and element-wise operations, if
            that is faster. The copy then runs as a graph that `torch.compile` captures, and each step should be
            captured in a CUDA graph, because it takes longer on the host.
        dtype: "e4m3" or "i8" for convolutions of 8-bit operands where these are faster and accurate enough. None for
            the model's own precision.
        calibrate: With `dtype`, typical inputs of the model, each a tensor or a tuple of all arguments.
        observer: With `dtype`, how the scale of an activation is chosen: by the least mean squared error ("mse"), the
            largest value ("minmax"), or that of 99.9 % of the values ("percentile").
        max_layer_error: With `dtype`, the largest relative L2 error of the output of a layer of 8-bit operands. Layers
            beyond it keep the model's precision.
        progress: Callback that receives a line of text now and then.

    Returns:
        The optimized copy, whose `report()` lists what runs. With `train`, a module for training, whose report
        `tvmconv.torch.get_training_report` returns.

    Raises:
        ModelError: The model is not a module, cannot be copied, does not run on the example, or is on several devices;
            or an argument about quantization is invalid.
        DeviceError: The device does not exist.
        TuningError: `choose` has another value, or `seconds` is not a positive number.
        Error: The log cannot be read or written.
        KeyboardInterrupt: The user interrupted the search; the log has what was measured until then.

    Examples:
        >>> import torch, tvmconv.torch
        >>> model, x = torch.nn.Conv2d(4, 4, 3, padding=1).cuda(), torch.randn(1, 4, 8, 8).cuda()  # doctest: +SKIP
        >>> optimized = tvmconv.torch.optimize(model, x, seconds=20, log="my.jsonl")  # doctest: +SKIP
        >>> print(optimized.report())  # doctest: +SKIP
    """
    TuneOptions(seconds=seconds)  # raises TuningError for an invalid limit
    deadline = None if seconds is None else Deadline.after(seconds)
    if deadline and choose == "fastest" and isinstance(model, torch.nn.Module) and _is_cpu_model(model):
        warnings.warn(CPU_MODEL_WARNING, FallbackWarning, stacklevel=2)
    quantization = None
    if fused and not train:
        raise ModelError("fused=True: expected train=True")
    if dtype is not None:
        if train:
            raise ModelError(f"dtype={dtype!r}: expected no quantization with train=True")
        quantization = make_quantization_options(dtype, calibrate, observer, max_layer_error)
    _check_model(model)
    initialize_lazy_modules(model, example)
    if train:
        options: dict[str, Any] = {"log": log, "device": device, "choose": validate_choice(choose)}
        return optimize_training(model, example, deadline=deadline, progress=progress, fused=fused, **options)
    return optimize_within(
        deadline,
        model,
        example,
        log=log,
        device=device,
        choose=choose,
        quantization=quantization,
        progress=progress,
    )


def optimize_within(
    deadline: Deadline | None,
    model: torch.nn.Module,
    example: Any,
    *,
    log: str | os.PathLike[str] | None = None,
    device: str | None = None,
    choose: ChooseMode = "fastest",
    quantization: QuantizationOptions | None = None,
    progress: Callable[[str], None] | None = None,
) -> Optimized:
    """Optimize a model as `optimize` does, until a deadline of the whole call; None for no search and no limit."""
    _check_model(model)
    validate_choice(choose)
    arguments = example if isinstance(example, tuple) else (example,)
    torch_device = find_common_device(model, arguments)
    target_device = find_device_for(torch_device, device)
    provider = KernelProvider(target_device, torch_device, log, progress or (lambda text: None))
    gpu_index = torch_device.index if torch_device.type == "cuda" else -1  # the device -1 changes nothing
    # Inference tensors have no version counter.
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(gpu_index):
        return _optimize_on_device(model, arguments, provider, deadline, choose, quantization)


def _check_model(model: Any) -> None:
    """Raise ModelError for what cannot be optimized."""
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"expected a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, (torch.jit.ScriptModule, Optimized)):
        raise ModelError(f"{type(model).__name__} cannot be optimized: expected the module that it was made from")


def _optimize_on_device(
    model: torch.nn.Module,
    example: tuple[Any, ...],
    provider: KernelProvider,
    deadline: Deadline | None,
    choose: ChooseMode,
    quantization: QuantizationOptions | None,
) -> Optimized:
    torch_device = provider.torch_device
    with contextlib.ExitStack() as stack:
        is_quantized = has_pairs(model)
        if is_quantized and quantization:
            raise ModelError("the model is quantized already: expected no dtype")
        if deadline and (quantization or is_quantized):  # which has searches of its own
            stack.enter_context(keep_workers_alive())
        with keep_workers_alive() if deadline else contextlib.nullcontext():
            if deadline and torch_device.type == "cuda":  # on the CPU, workers would disturb the timings
                start_search_early(torch_device)
            with translate_to_model_error("the model cannot be copied"):  # for example a tensor with gradient history
                model_copy = copy_model(model).eval().requires_grad_(False)
                if isinstance(model_copy, torch.fx.GraphModule) and is_quantized:
                    normalize_graph(model_copy)
            with record_calls(model_copy) as static_calls:
                expected = _run_model(model_copy, example)
            optimized, partitions = partition_model(model_copy, static_calls, example)
            arguments = clone_tensors(example)  # a model may write to its arguments
            optimized.set_example(arguments, torch_device)
            timing_cache = TimingCache(optimized, arguments, torch_device, provider.device.name)
            stack.callback(timing_cache.save)  # also after an interruption
            started_at = time.monotonic()
            pytorch_seconds = timing_cache.get_seconds("the whole by PyTorch", lambda: optimized(*arguments))
            whole_seconds = time.monotonic() - started_at
            if whole_seconds < pytorch_seconds:  # the cache had the time of an earlier call
                whole_seconds = NUM_TIMING_CALLS * pytorch_seconds
            norm_fuser = make_norm_fuser(timing_cache, choose, deadline)
            if not (is_quantized or quantization) and (torch_device.type == "cuda" or choose == "tuned"):
                with use_cudnn_heuristics():
                    norm_fuser.fuse(optimized, partitions, example)
            planner: LayoutPlanner | None = None
            if [partition.module for partition in partitions] == [optimized] and not is_quantized:
                planner = make_planner(provider, timing_cache, deadline, needs_channels_last=quantization is not None)
                notes = []
            else:
                notes = _set_fastest_format(optimized, torch_device, example, expected)
            with use_cudnn_heuristics():
                sites = _match_convolutions(optimized, partitions, example, expected, planner)
            notes += [*norm_fuser.describe(), *(planner.describe() if planner else []), OTHER_INPUTS_NOTE]
            counts = count_workloads(sites)
            end_deadline = selection_deadline = deadline and deadline.shift_earlier(whole_seconds)
            quantizer: GraphQuantizer | None = None
            if is_quantized:
                quantizer = QdqQuantizer(partitions, sites)
            elif quantization:
                with use_cudnn_heuristics():  # layers are computed in float32, each once
                    quantizer = ModelQuantizer(optimized, partitions, sites, quantization)
            if quantizer and end_deadline:
                selection_deadline = end_deadline.shift_earlier(COMPARISON_FRACTION * end_deadline.remaining_seconds)
            kernel_selector = KernelSelector(provider, timing_cache, choose, selection_deadline)
            num_workloads = len(counts)
            search_arguments = (
                *(provider, counts),
                selection_deadline and kernels_deadline(num_workloads, torch_device, selection_deadline),
                kernel_selector.iterate_pytorch_timings(sites, counts),
                kernel_selector.pytorch_seconds,
            )
            if quantizer:
                num_workloads = find_quantized_kernels(quantizer, *search_arguments)
            else:
                find_layer_kernels(*search_arguments)
        timing_cache.is_awake = False
        layer_reports = kernel_selector.select_all(sites, counts)
        if planner:
            planner.restore_weights(only_of_kernels=True)
        for layer, digest in norm_fuser.layers:
            kernel_selector.note_tuned(layer, digest)
        layer_reports = (*layer_reports, *norm_fuser.reports)
        report = Report(layer_reports, pytorch_seconds=pytorch_seconds, notes=tuple(notes))
        if quantizer:
            report = quantize_with_kernels(
                *(optimized, partitions, sites, quantizer, provider, timing_cache, kernel_selector, report),
                *(choose, end_deadline, arguments),
            )
        has_time = deadline is None or deadline.cut_off.remaining_seconds > whole_seconds
        report = kernel_selector.select_whole_model(optimized, partitions, arguments, report, has_time=has_time)
        if planner and optimized.uses_eager:
            planner.restore_weights()
    difference = _find_largest_difference(_run_model(optimized, example), expected)
    notes = [*report.notes, *kernel_selector.describe_omissions(num_workloads)]
    optimized.set_report(replace(report, difference=difference, notes=tuple(notes)))
    return optimized


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
        if list_strides(_run_model(model, example)) == list_strides(expected):
            return sites
    planner.drop()
    model.graph.graph = former_graph
    return match_convolutions(model, partitions, clone_tensors(example))


def list_strides(values: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return the strides of the tensors among some values."""
    return [value.stride() for value in values if isinstance(value, torch.Tensor)]


def _run_model(model: torch.nn.Module, arguments: Sequence[Any]) -> list[Any]:
    """Run a model and return the values in its result as a flat list; raise ModelError if it does not run."""
    with translate_to_model_error("the model does not run on the example"), use_cudnn_heuristics():
        return tree_leaves(model(*clone_tensors(arguments)))


def _set_fastest_format(
    model: Optimized, torch_device: torch.device, arguments: Sequence[Any], expected: Sequence[Any]
) -> list[str]:
    """Convert a model to its fastest memory format and return notes about that."""
    name = choose_memory_format(model, arguments, torch_device)
    if name is None:
        return []
    model.set_memory_format(MEMORY_FORMAT_BY_NAME[name], find_memory_format(expected))
    try:
        _run_model(model, arguments)
    except ModelError as error:  # a `view`, for example, needs the model's own format
        model.restore_memory_format()
        return [f"Images keep their memory format: with {name}, {error}."]
    return [f"Inside the model, images are {name}, which is faster: inputs and results are converted."]


def _find_largest_difference(outputs: Sequence[Any], expected: Sequence[Any]) -> float | None:
    """Return the largest relative L2 difference of corresponding tensors; None if there are none."""
    differences = [
        compute_relative_error(output, expected_output)
        for output, expected_output in zip(outputs, expected, strict=False)
        if isinstance(output, torch.Tensor)
        and isinstance(expected_output, torch.Tensor)
        and expected_output.is_floating_point()
    ]
    return max(differences, default=None)


def _is_cpu_model(model: torch.nn.Module) -> bool:
    parameter = next(model.parameters(), None)
    return parameter is not None and parameter.device.type == "cpu"
