"""The function `optimize`, which returns a copy of a model whose convolutions run on tvmconv's kernels."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal, overload

import torch

from tvmconv.deadline import Deadline
from tvmconv.errors import FallbackWarning, ModelError
from tvmconv.search.options import TuneOptions
from tvmconv.torch.device_match import find_common_device, find_device_for
from tvmconv.torch.inference import optimize_for_inference
from tvmconv.torch.kernels import KernelProvider
from tvmconv.torch.lazy_modules import initialize_lazy_modules
from tvmconv.torch.model import Optimized
from tvmconv.torch.observers import ObserverName
from tvmconv.torch.quantization_options import DEFAULT_MAX_ERROR, QuantizationOptions, make_quantization_options
from tvmconv.torch.selection import ChooseMode, validate_choice
from tvmconv.torch.training import optimize_training

CPU_MODEL_WARNING = (
    "the model is on the CPU, where PyTorch is mostly faster: the search will most likely leave all layers to PyTorch; "
    'choose="tuned" (--all) uses tvmconv\'s kernels'
)


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
        return optimize_for_inference(model, arguments, provider, deadline, choose, quantization)


def _check_model(model: Any) -> None:
    """Raise ModelError for what cannot be optimized."""
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"expected a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, (torch.jit.ScriptModule, Optimized)):
        raise ModelError(f"{type(model).__name__} cannot be optimized: expected the module that it was made from")


def _is_cpu_model(model: torch.nn.Module) -> bool:
    parameter = next(model.parameters(), None)
    return parameter is not None and parameter.device.type == "cpu"
