"""The optimization of a model for training: recording, search, selection, and the report."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tvmconv.deadline import Deadline
from tvmconv.devices import Device
from tvmconv.errors import ModelError, get_first_line, translate_to_model_error
from tvmconv.measure.workers.pool import keep_workers_alive
from tvmconv.search.options import TuneOptions
from tvmconv.torch.conv_call import STATS_IN_GRAPHS
from tvmconv.torch.device_match import find_common_device, find_device_for
from tvmconv.torch.functional import record_calls
from tvmconv.torch.fused_training import FusedGraphBackend, fuse_model, separate_model
from tvmconv.torch.kernel_table import RecordedCall, table
from tvmconv.torch.kernels import KernelProvider, make_training_provider
from tvmconv.torch.product_search import start_search_early
from tvmconv.torch.product_selection import fill_table, make_reports
from tvmconv.torch.product_task import ProductTask, can_return_stats, collect_tasks
from tvmconv.torch.report import PYTORCH_NAME
from tvmconv.torch.selection import ChooseMode, validate_choice
from tvmconv.torch.timing import time_call
from tvmconv.torch.trainable import NOT_RUN_REASON, find_other_convolutions, list_layers, make_trainable
from tvmconv.torch.training_report import ProductReport, TrainingReport

REPORT_ATTRIBUTE = "_tvmconv_training_report"
OTHER_CALLS_NOTE = "PyTorch computes calls of other shapes, dtypes and layouts, and on other devices."
SLOWER_NOTE = "PyTorch runs all layers, because the whole step was no faster with tvmconv's kernels."
UNTIMED_NOTE = "No time was left to time the whole step."
LAYOUT_NOTE = (
    "Images are contiguous: with model and images channels last, tensor cores are mostly faster, also by PyTorch."
)
MAX_TIMING_FRACTION = 0.2  # of the time until the deadline, for the last timing of the whole step
FUSING_SECONDS, FUSING_FRACTION = 6.0, 0.15  # time to trace the model as a graph; limited to a part of that time


def tune(
    calls: Sequence[RecordedCall],
    *,
    seconds: float | None = None,
    log: str | os.PathLike[str] | None = None,
    device: str | None = None,
    choose: ChooseMode = "fastest",
    progress: Callable[[str], None] | None = None,
) -> TrainingReport:
    """Fill the kernel table of this process for recorded calls of convolutions.

    Args:
        calls: Calls on one device, as `tvmconv.torch.functional.record_calls` records them.
        seconds: Time limit of this call in seconds, with a search for products that the log does not cover. None for no
            search: kernels come from the log, from the packaged logs, or from predictions.
        log: Path of a tuning log, from which kernels are taken and to which the search appends.
        device: Device to tune on and run on, such as "cuda:0"; by default that of the calls.
        choose: "fastest" uses kernels that are faster than PyTorch when both are measured, "tuned" uses every kernel.
        progress: Callback that receives a line of text now and then.

    Returns:
        The report of what runs for each product of each call.

    Raises:
        ModelError: There are no calls, or they are on several devices.
        DeviceError: The device does not exist.
        TuningError: `choose` has another value, or `seconds` is not a positive number.
        Error: The log cannot be read or written.

    Examples:
        >>> import torch, tvmconv.torch
        >>> import tvmconv.torch.functional as F
        >>> with F.record_calls() as calls:  # doctest: +SKIP
        ...     F.conv2d(x, weight, padding=1).sum().backward()
        >>> print(tvmconv.torch.tune(calls, seconds=60, log="train.jsonl"))  # doctest: +SKIP
    """
    TuneOptions(seconds=seconds)  # raises TuningError for an invalid limit
    deadline = None if seconds is None else Deadline.after(seconds)
    validate_choice(choose)
    found_devices = {recorded.call.device for recorded in calls}
    if len(found_devices) != 1:
        names = ", ".join(sorted(map(str, found_devices))) or "no device"
        raise ModelError(f"the recorded calls are on {names}: expected one")
    torch_device = found_devices.pop()
    provider = make_training_provider(find_device_for(torch_device, device), torch_device, log, progress)
    tasks = collect_tasks(calls)
    with torch.no_grad(), _select_device(torch_device):
        notes = fill_table(tasks, provider, choose, deadline)
    return TrainingReport(make_reports(tasks), notes=(*notes, OTHER_CALLS_NOTE))


def optimize_training(
    model: torch.nn.Module,
    example: Any,
    *,
    deadline: Deadline | None,
    log: str | os.PathLike[str] | None,
    device: str | None,
    choose: ChooseMode,
    progress: Callable[[str], None] | None,
    fused: bool = False,
) -> torch.nn.Module:
    """Return a trainable copy of a model, as `optimize(train=True)` documents it."""
    arguments = example if isinstance(example, tuple) else (example,)
    torch_device = find_common_device(model, arguments)
    provider = make_training_provider(find_device_for(torch_device, device), torch_device, log, progress)
    trainable = make_trainable(model)
    searches = deadline is not None and torch_device.type == "cuda"  # on the CPU, processes would disturb the timings
    with torch.inference_mode(False), _select_device(torch_device):
        _start_backward_thread(torch_device)
        with keep_workers_alive() if searches else contextlib.nullcontext():
            if searches:
                start_search_early(torch_device)
            with record_calls() as calls:
                run_step(trainable, arguments, has_backward=False)
            calls = _mark_normalized(trainable, calls, provider.device)
            tasks = collect_tasks(calls)
            pytorch_seconds, notes = None, ["No convolution ran that kernels could compute."]
            if tasks:
                pytorch_seconds, notes = _find_kernels(
                    trainable, arguments, tasks, provider, deadline, choose, fused=fused
                )
        tvmconv_seconds = None
        has_kernels = _enable_kernels(trainable, calls)
        if has_kernels:
            run_step(trainable, arguments)  # fails now and not in the first step, if it fails
            tvmconv_seconds = _time_step(trainable, arguments, torch_device, deadline)
        if fused and tasks:
            fused_seconds, note = _fuse(
                *(trainable, arguments, torch_device, deadline, FusedGraphBackend(log, choose)),
                *(choose, pytorch_seconds, tvmconv_seconds),
            )
            notes.append(note)
            if trainable._compiled_call_impl is not None:
                tvmconv_seconds, has_kernels = fused_seconds, True
    lines = _list_reports(trainable, tasks)
    notes += [LAYOUT_NOTE] if any(_prefers_channels_last(task) for task in tasks) else []
    report = TrainingReport(lines, pytorch_seconds, tvmconv_seconds, notes=(*notes, OTHER_CALLS_NOTE))
    report = _drop_slower_kernels(trainable, report, choose, has_kernels=has_kernels)
    trainable.__dict__[REPORT_ATTRIBUTE] = report
    return trainable


def _find_kernels(
    model: torch.nn.Module,
    arguments: Sequence[Any],
    tasks: Sequence[ProductTask],
    provider: KernelProvider,
    deadline: Deadline | None,
    choose: ChooseMode,
    *,
    fused: bool,
) -> tuple[float | None, list[str]]:
    """Time a step by PyTorch, and find the kernels of its products; return the seconds of the step, and notes.

    Some time before the deadline is left for another timing of the step and, with `fused`, for tracing the model.
    """
    started_at = time.monotonic()
    pytorch_seconds = _time_step(model, arguments, provider.torch_device, deadline)
    reserved_seconds = time.monotonic() - started_at + (FUSING_SECONDS if fused else 0.0)
    reserved_fraction = MAX_TIMING_FRACTION + (FUSING_FRACTION if fused else 0.0)
    limit = deadline and deadline.shift_earlier(min(reserved_seconds, reserved_fraction * deadline.remaining_seconds))
    with torch.no_grad():
        return pytorch_seconds, fill_table(tasks, provider, choose, limit)


def get_training_report(model: torch.nn.Module) -> TrainingReport:
    """Return the report of a model that `optimize(train=True)` returned.

    Args:
        model: The model, or a wrapper with the attribute `module`, such as `DistributedDataParallel`.

    Returns:
        The report of what runs for each product of each convolution.

    Raises:
        ModelError: The model has no report.

    Examples:
        >>> import torch, tvmconv.torch
        >>> model = tvmconv.torch.optimize(torch.nn.Conv2d(4, 4, 3), x, train=True)  # doctest: +SKIP
        >>> print(tvmconv.torch.get_training_report(model))  # doctest: +SKIP
    """
    report = model.__dict__.get(REPORT_ATTRIBUTE)
    if report is None and isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        report = inner.__dict__.get(REPORT_ATTRIBUTE)
    if not isinstance(report, TrainingReport):
        raise ModelError(f"{type(model).__name__} has no report: expected a model of optimize(train=True)")
    return report


def _select_device(torch_device: torch.device) -> Any:
    gpu_index = torch_device.index if torch_device.type == "cuda" else -1  # the device -1 changes nothing
    return torch.cuda.device(gpu_index)


def _start_backward_thread(torch_device: torch.device) -> None:
    """Run a kernel in the thread of a device's backward passes, which then has a context.

    PyTorch warns if the first call of a thread is one of cuBLAS, as the gradient of a classifier is.
    """
    with torch.enable_grad():
        torch.zeros(1, device=torch_device, requires_grad=True).exp().backward()


def run_step(model: torch.nn.Module, arguments: Sequence[Any], *, has_backward: bool = True) -> None:
    """Run a model forward in training mode, and backward from ones; parameters, gradients and buffers stay as they are.

    Raises ModelError if the model does not run.
    """
    failure = "the model does not run on the example"
    with translate_to_model_error(failure), torch.enable_grad(), _keep_random_state(), _keep_buffers(model) as buffers:
        outputs = torch.func.functional_call(model, buffers, _clone_example(arguments))
        if has_backward:
            _compute_gradients(model, outputs)


@contextlib.contextmanager
def _keep_buffers(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Give copies of a model's buffers, and restore those that a backward pass with checkpoints has written to."""
    copies, saved = ({name: buffer.detach().clone() for name, buffer in model.named_buffers()} for _ in range(2))
    try:
        yield copies
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if not torch.equal(buffer, saved[name]):  # expanded buffers, for example, cannot be written to
                    buffer.copy_(saved[name])


def _clone_example(arguments: Sequence[Any]) -> Any:
    """Return copies of the tensors, of which those need gradients that needed them before."""
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), tuple(arguments)
    )


def _keep_random_state() -> Any:
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])


def _compute_gradients(model: torch.nn.Module, outputs: Any) -> None:
    """Compute the gradients of all parameters from ones at the outputs, without storing them in the parameters."""
    tensors = [value for value in tree_leaves(outputs) if isinstance(value, torch.Tensor) and value.requires_grad]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if tensors and parameters:
        ones = [torch.ones_like(tensor) for tensor in tensors]
        torch.autograd.grad(tensors, parameters, ones, allow_unused=True)
    torch.clear_autocast_cache()  # the next step converts the weights again, as steps of a training loop do


def _time_step(
    model: torch.nn.Module, arguments: Sequence[Any], torch_device: torch.device, deadline: Deadline | None
) -> float | None:
    """Return the seconds of a forward and backward pass; None if no time is left."""
    if deadline is not None and deadline.cut_off.has_passed:
        return None
    inputs = _clone_example(arguments)
    try:
        with _keep_random_state(), _keep_buffers(model) as buffers:

            def step() -> None:
                with torch.enable_grad():
                    _compute_gradients(model, torch.func.functional_call(model, buffers, inputs))

            return time_call(step, torch_device)
    except RuntimeError as error:
        raise ModelError(f"a training step does not run on the example: {get_first_line(error)}") from error


def _fuse(
    model: torch.nn.Module,
    arguments: Sequence[Any],
    torch_device: torch.device,
    deadline: Deadline | None,
    backend: FusedGraphBackend,
    choose: ChooseMode,
    *other_seconds: float | None,
) -> tuple[float | None, str]:
    """Have a trainable model run as a graph if a step is then faster than others; return its seconds and a note."""
    backend.deadline = deadline
    fuse_model(model, backend)
    try:
        run_step(model, arguments)
        backend.is_selecting = False
        seconds = _time_step(model, arguments, torch_device, deadline)
    except ModelError as error:  # for example, of checkpoints that write to buffers
        separate_model(model)
        return None, f"The model does not run as a graph: {error}."
    others = [each for each in other_seconds if each is not None]
    if seconds is not None and choose != "tuned" and seconds >= min(others, default=math.inf):
        separate_model(model)
        return seconds, "The model does not run as a graph, because the whole step was no faster with the operators."
    if seconds is None or not others:
        return seconds, backend.describe()
    times = f"The whole step took {seconds * 1e6:,.0f} µs, and {min(others) * 1e6:,.0f} µs otherwise."
    return seconds, f"{backend.describe()} {times}"


def _mark_normalized(model: torch.nn.Module, calls: Sequence[RecordedCall], device: Device) -> list[RecordedCall]:
    """Return the calls, with a mark on those whose output is normalized and whose statistics a kernel may return."""
    layers = list_layers(model)

    def is_normalized(recorded: RecordedCall) -> bool:
        layer = layers.get(recorded.path)
        return bool(getattr(layer, "normalized_by", "")) and can_return_stats(recorded.call, device)

    return [replace(recorded, is_normalized=is_normalized(recorded)) for recorded in calls]


def _enable_kernels(model: torch.nn.Module, calls: Sequence[RecordedCall]) -> bool:
    """Let the layers with kernels use them, and return whether there are any."""
    layers = list_layers(model)
    paths_with_kernels = {recorded.path for recorded in calls if recorded.call in table.calls}
    paths_with_stats = {recorded.path for recorded in calls if table.find(STATS_IN_GRAPHS, recorded.call)}
    for path, layer in layers.items():
        layer.uses_kernels = path in paths_with_kernels
        if hasattr(layer, "returns_stats"):
            layer.returns_stats = path in paths_with_stats and bool(layer.normalized_by)
    return bool(paths_with_kernels)


def _prefers_channels_last(task: ProductTask) -> bool:
    """Return whether a product of images is channels first, and runs on tensor cores."""
    call = task.call
    has_tensor_cores = call.device.type == "cuda" and (call.dtype is not torch.float32 or call.uses_tf32)
    return has_tensor_cores and not call.channels_last and len(call.x_shape) > 3 and max(call.x_shape[2:]) > 1


def _list_reports(model: torch.nn.Module, tasks: Sequence[ProductTask]) -> tuple[ProductReport, ...]:
    """Return the reports of all products, in the order of the layers, and of the convolutions without any."""
    lines = make_reports(tasks)
    found_paths = {line.path for line in lines}
    missing = [path for path in list_layers(model) if path not in found_paths]
    lines += tuple(ProductReport(path, "", "", reason=NOT_RUN_REASON) for path in missing)
    others = find_other_convolutions(model)
    lines += tuple(ProductReport(path, "", "", reason=reason) for path, reason in others.items())
    order = {path: number for number, (path, _) in enumerate(model.named_modules())}
    return tuple(sorted(lines, key=lambda line: order.get(line.path, len(order))))


def _drop_slower_kernels(
    model: torch.nn.Module, report: TrainingReport, choose: ChooseMode, *, has_kernels: bool
) -> TrainingReport:
    """Let PyTorch run all layers if the whole step is no faster with the kernels, and return the report of that."""
    before, after = report.pytorch_seconds, report.tvmconv_seconds
    if not has_kernels:
        return replace(report, tvmconv_seconds=before)
    if before is None or after is None:
        return replace(report, notes=(*report.notes, UNTIMED_NOTE))
    if choose == "tuned" or after < before:
        return report
    for layer in list_layers(model).values():
        layer.uses_kernels = False
    lines = [
        replace(line, implementation=PYTORCH_NAME, reason=line.reason or "the whole step is no faster")
        for line in report.lines
    ]
    return TrainingReport(tuple(lines), before, before, notes=(*report.notes, SLOWER_NOTE))
