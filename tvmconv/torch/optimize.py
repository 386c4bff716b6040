"""A model, and an example of its input, become a faster model."""

from __future__ import annotations

import contextlib
import copy
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tvmconv import devices
from tvmconv.deadline import Deadline
from tvmconv.devices import Device
from tvmconv.errors import DeviceError, FallbackWarning, ModelError, translate_to_model_error
from tvmconv.measure.workers.pool import keep_workers_alive
from tvmconv.measure.workers.prestart import prestart_workers
from tvmconv.search.options import TuneOptions
from tvmconv.search.time_budget import sort_by_cost
from tvmconv.torch.kernels import KernelProvider
from tvmconv.torch.match import ConvMatch, match_convolutions
from tvmconv.torch.memory_format import MEMORY_FORMAT_BY_NAME, choose_memory_format, find_memory_format
from tvmconv.torch.model import Optimized
from tvmconv.torch.partition import clone_tensors, partition_model, record_calls
from tvmconv.torch.report import LayerReport, Report
from tvmconv.torch.selection import (
    OTHER_INPUTS_NOTE,
    ChooseMode,
    KernelSelector,
    compute_relative_error,
    kernels_deadline,
    validate_choice,
)
from tvmconv.torch.timing_cache import TimingCache, use_cudnn_heuristics
from tvmconv.workloads import parse

CPU_MODEL_WARNING = (
    "the model is on the CPU, where PyTorch is mostly faster: the search will most likely leave all layers to PyTorch; "
    'choose="tuned" (--all) takes our kernels'
)
NUM_TIMING_CALLS = 12  # that the timing of a model takes, about


def optimize(
    model: torch.nn.Module,
    example: Any,
    *,
    seconds: float | None = None,
    log: str | os.PathLike[str] | None = None,
    device: str | None = None,
    choose: ChooseMode = "fastest",
    progress: Callable[[str], None] | None = None,
) -> Optimized:
    """A copy of a model whose convolutions run by kernels of ours, where these are faster.

    A convolution is computed together with the batch normalisation, the activations and the residual that follow it.
    Where the model is run on what is not like the example, in training mode, or where a gradient is asked for, PyTorch
    computes it.

    Args:
        model: whose modules may be anywhere, but all of them on one device; it stays as it is. It is copied in
            evaluation mode, and its parameters ask for no gradients.
        example: its input: a tensor, or a tuple of all arguments. Shapes, dtypes, memory formats, `torch.autocast` and
            the settings of TF32 are taken as they are when this is called.
        seconds: how long this call may take, with a search for kernels of layers that the log does not have; see
            `tvmconv.deadline`. What there was no time for is left to PyTorch, and `report()` says so. Without it
            nothing is searched: kernels are those of the log, those that are shipped, or predicted.
        log: what the search has measured so far, and appends to: the next time its kernels come from there. A file.
        device: to tune on and for, such as "cuda:0"; by default the model's own, and the first of OpenCL for a model on
            the CPU.
        choose: "fastest": our kernels where they are faster than PyTorch's when both are measured; "tuned": wherever
            there is one.
        progress: is called with a line of text now and then.

    Raises:
        ModelError: the model is no module, cannot be copied, does not run on the example, or lies on several devices.
        DeviceError: there is no such device.
        TuningError: `choose` is neither, or `seconds` is no positive number.
        Error: the log cannot be read or written.
        KeyboardInterrupt: the user's; the log has what was measured.
    """
    TuneOptions(seconds=seconds)  # which refuses what is no limit
    deadline = None if seconds is None else Deadline.after(seconds)
    if deadline and choose == "fastest" and isinstance(model, torch.nn.Module) and is_cpu_model(model):
        warnings.warn(CPU_MODEL_WARNING, FallbackWarning, stacklevel=2)
    return optimize_within(deadline, model, example, log=log, device=device, choose=choose, progress=progress)


def optimize_within(
    deadline: Deadline | None,
    model: torch.nn.Module,
    example: Any,
    *,
    log: str | os.PathLike[str] | None = None,
    device: str | None = None,
    choose: ChooseMode = "fastest",
    progress: Callable[[str], None] | None = None,
) -> Optimized:
    """As `optimize`, but for what it says of time.

    Args:
        deadline: when all shall be done, with a search; None for no search, and no limit.
        model: as of `optimize`, and so are the others.
        example: its input.
        log: what the search has measured so far, and appends to.
        device: to tune on and for.
        choose: "fastest" or "tuned".
        progress: is called with a line of text now and then.

    Raises:
        Error: as `optimize` does.
    """
    _check_model(model)
    validate_choice(choose)
    arguments = example if isinstance(example, tuple) else (example,)
    torch_device = _find_torch_device(model, arguments)
    target_device = find_device_for(torch_device, device)
    provider = KernelProvider(target_device, torch_device, log, progress or (lambda text: None))
    with torch.inference_mode(False), torch.no_grad():  # a copy made for inference alone would hide that it changes
        if torch_device.type != "cuda":
            return _optimize_on_device(model, tuple(arguments), provider, deadline, choose)
        with torch.cuda.device(torch_device):
            return _optimize_on_device(model, tuple(arguments), provider, deadline, choose)


def _optimize_on_device(
    model: torch.nn.Module,
    example: tuple[Any, ...],
    provider: KernelProvider,
    deadline: Deadline | None,
    choose: ChooseMode,
) -> Optimized:
    torch_device = provider.torch_device
    with contextlib.ExitStack() as stack:
        with keep_workers_alive() if deadline else contextlib.nullcontext():
            if deadline and torch_device.type == "cuda":  # on the CPU they would take it from what is timed
                prestart_workers(None, [provider.device])
            model_copy = _copy_model(model)
            with record_calls(model_copy) as static_calls:
                expected = _run_model(model_copy, example)
            optimized, partitions = partition_model(model_copy, static_calls, example)
            arguments = clone_tensors(example)  # a model may write to them
            optimized.set_example(arguments, torch_device)
            timing_cache = TimingCache(optimized, arguments, torch_device, provider.device.name)
            stack.callback(timing_cache.save)  # also those that were measured before an interruption
            started_at = time.monotonic()
            pytorch_seconds = timing_cache.get_seconds("the whole by PyTorch", lambda: optimized(*arguments))
            whole_seconds = time.monotonic() - started_at
            if whole_seconds < pytorch_seconds:  # it was known from an earlier call
                whole_seconds = NUM_TIMING_CALLS * pytorch_seconds
            notes = [*_set_fastest_format(optimized, torch_device, example, expected), OTHER_INPUTS_NOTE]
            with use_cudnn_heuristics():
                matches = match_convolutions(optimized, partitions, clone_tensors(example))
            counts = Counter(conv_match.workload_text for conv_match in matches if conv_match.workload_text)
            selection_deadline = None if deadline is None else deadline.shift_earlier(whole_seconds)
            provider.find_kernels(
                counts, selection_deadline and kernels_deadline(len(counts), torch_device, selection_deadline)
            )
        timing_cache.mark_idle()
        kernel_selector = KernelSelector(provider, timing_cache, choose, selection_deadline)
        layer_reports = select_kernels(kernel_selector, matches, counts, provider.device)
        report = Report(layer_reports, pytorch_seconds=pytorch_seconds, notes=tuple(notes))
        has_time = deadline is None or deadline.cut_off.remaining_seconds > whole_seconds
        report = kernel_selector.select_whole_model(optimized, partitions, arguments, report, has_time=has_time)
    difference = _find_largest_difference(_run_model(optimized, example), expected)
    notes = [
        *report.notes,
        *describe_omissions(len(provider.unsearched_workloads), len(counts), kernel_selector.num_omitted),
    ]
    optimized.set_report(replace(report, difference=difference, notes=tuple(notes)))
    return optimized


def select_kernels(
    kernel_selector: KernelSelector, matches: Sequence[ConvMatch], counts: Mapping[str, int], device: Device
) -> tuple[LayerReport, ...]:
    """What runs each convolution, in the order of the sites; those that cost the model most are decided on first."""
    cost_ranks = {
        workload.text: cost_rank
        for cost_rank, workload in enumerate(
            sort_by_cost({parse(text): count for text, count in counts.items()}, device)
        )
    }
    order = sorted(
        range(len(matches)), key=lambda match_index: cost_ranks.get(matches[match_index].workload_text, len(cost_ranks))
    )
    layer_reports = {match_index: kernel_selector.select(matches[match_index]) for match_index in order}
    return tuple(layer_reports[match_index] for match_index in range(len(matches)))


def describe_omissions(num_unsearched: int, num_workloads: int, num_not_compared: int) -> list[str]:
    """What there was no time left for, in sentences.

    Args:
        num_unsearched: how many workloads were not searched.
        num_workloads: how many the model has.
        num_not_compared: how many layers were not compared with PyTorch.
    """
    sentences = []
    if num_unsearched:
        sentences.append(f"No time was left for the search of {num_unsearched} of {num_workloads} workloads.")
    if num_not_compared:
        sentences.append(f"No time was left to compare {num_not_compared} layers with PyTorch, which computes them.")
    return sentences


def _copy_model(model: torch.nn.Module) -> torch.nn.Module:
    """A model of its own, in evaluation mode and without gradients.

    Raises:
        ModelError: it cannot be copied, as one that keeps a tensor that was computed with gradients.
    """
    with translate_to_model_error("the model cannot be copied"):
        return copy.deepcopy(model).eval().requires_grad_(False)


def _run_model(model: torch.nn.Module, arguments: Sequence[Any]) -> list[Any]:
    """What is in the model's result.

    Raises:
        ModelError: it does not run on the example.
    """
    with translate_to_model_error("the model does not run on the example"), use_cudnn_heuristics():
        return _flatten_values(model(*clone_tensors(arguments)))


def _set_fastest_format(
    model: Optimized, torch_device: torch.device, arguments: Sequence[Any], expected: Sequence[Any]
) -> list[str]:
    """Lay a model out in the memory format that is fastest; what there is to tell of it."""
    name = choose_memory_format(model, arguments, torch_device)
    if name is None:
        return []
    outer_format = find_memory_format(expected)
    model.set_memory_format(MEMORY_FORMAT_BY_NAME[name], outer_format)
    try:
        _run_model(model, arguments)
    except ModelError as error:  # it looks at images in a form that they have in their own format alone
        model.restore_memory_format()
        return [f"Images lie as they come: with {name}, {error}."]
    return [f"Inside, images lie with {name}, which is faster: they are converted where they come in and go out."]


def _flatten_values(result: Any) -> list[Any]:
    """A model's result, as a list of what is in it."""
    if isinstance(result, (tuple, list)):
        return [value for item in result for value in _flatten_values(item)]
    return (
        [value for item in result.values() for value in _flatten_values(item)] if isinstance(result, dict) else [result]
    )


def _find_largest_difference(outputs: Sequence[Any], expected: Sequence[Any]) -> float | None:
    """The largest difference of tensors that lie in the same places."""
    pairs = [
        compute_relative_error(output, expected_output)
        for output, expected_output in zip(outputs, expected, strict=False)
        if isinstance(output, torch.Tensor)
        and isinstance(expected_output, torch.Tensor)
        and expected_output.is_floating_point()
    ]
    return max(pairs, default=None)


def _check_model(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"expected a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, (torch.jit.ScriptModule, Optimized)):
        raise ModelError(f"{type(model).__name__} cannot be optimised: give the module that it was made from")


def _find_torch_device(model: torch.nn.Module, arguments: Sequence[Any]) -> torch.device:
    """The one device on which all tensors are."""
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *(argument for argument in arguments if isinstance(argument, torch.Tensor)),
    ]
    torch_devices = {tensor.device for tensor in tensors}
    if len(torch_devices) != 1:
        raise ModelError(
            "the model and its example are on "
            f"{', '.join(sorted(map(str, torch_devices))) or 'no device'}: expected one"
        )
    (torch_device,) = torch_devices
    if torch_device.type not in ("cpu", "cuda"):
        raise ModelError(f"the model is on {torch_device}: expected a GPU or the CPU")
    return torch_device


def is_cpu_model(model: torch.nn.Module) -> bool:
    """Whether a model's parameters are on the CPU."""
    parameter = next(model.parameters(), None)
    return parameter is not None and parameter.device.type == "cpu"


def find_device_for(torch_device: torch.device, device_text: str | None) -> Device:
    """Our device for PyTorch's.

    Args:
        torch_device: PyTorch's.
        device_text: its text; by default the same GPU, and the first device of OpenCL for the CPU.

    Raises:
        DeviceError: there is none, or it is another one than PyTorch's.
    """
    requested = device_text or (f"cuda:{torch_device.index}" if torch_device.type == "cuda" else "opencl:0")
    found_device = devices.find_device(requested)
    expected_kind = "cuda" if torch_device.type == "cuda" else "opencl"
    if found_device.kind != expected_kind or (
        expected_kind == "cuda" and found_device.text != f"cuda:{torch_device.index}"
    ):
        raise DeviceError(f"the model is on {torch_device}, whose kernels do not run on {found_device.text}")
    return found_device
