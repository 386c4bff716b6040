"""A model, and an example of its input, become a faster model."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tvmconv import devices
from tvmconv.devices import Device
from tvmconv.errors import DeviceError, ModelError, as_model_error
from tvmconv.torch.choose import OTHERWISE, Choose, Chooser, checked, deviation
from tvmconv.torch.formats import FORMATS, fastest_format, format_of
from tvmconv.torch.kernels import Kernels
from tvmconv.torch.look import look
from tvmconv.torch.model import Optimized
from tvmconv.torch.report import Report
from tvmconv.torch.split import calls_of, copied, split
from tvmconv.torch.times import Times, by_heuristics


def optimize(
    model: torch.nn.Module,
    example: Any,
    *,
    seconds: float | None = None,
    log: str | os.PathLike[str] | None = None,
    device: str | None = None,
    choose: Choose = "fastest",
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
        seconds: how long to search for kernels, for all layers together; without it none is searched: kernels are those
            of the log, those that are shipped, or predicted.
        log: what the search has measured so far, and appends to: the next time its kernels come from there. A file.
        device: to tune on and for, such as "cuda:0"; by default the model's own, and the first of OpenCL for a model on
            the CPU.
        choose: "fastest": our kernels where they are faster than PyTorch's when both are measured; "tuned": wherever
            there is one.
        progress: is called with a line of text now and then.

    Raises:
        ModelError: the model is no module, cannot be copied, does not run on the example, or lies on several devices.
        DeviceError: there is no such device.
        TuningError: `choose` is neither.
        Error: the log cannot be read or written.
    """
    _check_model(model)
    checked(choose)
    arguments = example if isinstance(example, tuple) else (example,)
    place = _place(model, arguments)
    ours = device_of(place, device)
    kernels = Kernels(ours, place, log, progress or (lambda text: None))
    with torch.inference_mode(False), torch.no_grad():  # a copy made for inference alone would hide that it changes
        if place.type != "cuda":
            return _optimized(model, tuple(arguments), kernels, seconds, choose)
        with torch.cuda.device(place):
            return _optimized(model, tuple(arguments), kernels, seconds, choose)


def _optimized(
    model: torch.nn.Module, example: tuple[Any, ...], kernels: Kernels, seconds: float | None, choose: Choose
) -> Optimized:
    mine, place = _copy(model), kernels.place
    with calls_of(mine) as calls:
        wanted = _result(mine, example)
    optimized, parts = split(mine, calls, example)
    arguments = copied(example)  # a model may write to them
    optimized.made_for(arguments, place)
    times = Times(optimized, arguments, place, kernels.device.name)
    before = times.seconds("the whole by PyTorch", lambda: optimized(*arguments))
    notes = [*_lay_out(optimized, place, example, wanted), OTHERWISE]
    with by_heuristics():
        sites = look(optimized, parts, copied(example))
    kernels.find(Counter(site.text for site in sites if site.text), seconds)
    times.pause()
    chooser = Chooser(kernels, times, choose)
    lines = [chooser.choose(site) for site in sites]
    report = Report(tuple(lines), before=before, notes=tuple(notes))
    report = chooser.whole(optimized, parts, arguments, report)
    optimized.tell(replace(report, difference=_difference(_result(optimized, example), wanted)))
    times.keep()
    return optimized


def _copy(model: torch.nn.Module) -> torch.nn.Module:
    """A model of its own, in evaluation mode and without gradients.

    Raises:
        ModelError: it cannot be copied, as one that keeps a tensor that was computed with gradients.
    """
    with as_model_error("the model cannot be copied"):
        return copy.deepcopy(model).eval().requires_grad_(False)


def _result(model: torch.nn.Module, arguments: Sequence[Any]) -> list[Any]:
    """What is in the model's result.

    Raises:
        ModelError: it does not run on the example.
    """
    with as_model_error("the model does not run on the example"), by_heuristics():
        return _values(model(*copied(arguments)))


def _lay_out(model: Optimized, place: torch.device, arguments: Sequence[Any], wanted: Sequence[Any]) -> list[str]:
    """Lay a model out in the memory format that is fastest; what there is to tell of it."""
    name = fastest_format(model, arguments, place)
    if name is None:
        return []
    outside = format_of(wanted)
    model.lie(FORMATS[name], outside)
    try:
        _result(model, arguments)
    except ModelError as error:  # it looks at images in a form that they have in their own format alone
        model.lie_as_before()
        return [f"Images lie as they come: with {name}, {error}."]
    return [f"Inside, images lie with {name}, which is faster: they are converted where they come in and go out."]


def _values(result: Any) -> list[Any]:
    """A model's result, as a list of what is in it."""
    if isinstance(result, (tuple, list)):
        return [value for each in result for value in _values(each)]
    return [value for each in result.values() for value in _values(each)] if isinstance(result, dict) else [result]


def _difference(ours: Sequence[Any], wanted: Sequence[Any]) -> float | None:
    """The largest difference of tensors that lie in the same places."""
    pairs = [
        deviation(mine, theirs)
        for mine, theirs in zip(ours, wanted, strict=False)
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor) and theirs.is_floating_point()
    ]
    return max(pairs, default=None)


def _check_model(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"expected a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, (torch.jit.ScriptModule, Optimized)):
        raise ModelError(f"{type(model).__name__} cannot be optimised: give the module that it was made from")


def _place(model: torch.nn.Module, arguments: Sequence[Any]) -> torch.device:
    """The one device on which all tensors are."""
    tensors = [*model.parameters(), *model.buffers(), *(each for each in arguments if isinstance(each, torch.Tensor))]
    places = {tensor.device for tensor in tensors}
    if len(places) != 1:
        raise ModelError(
            f"the model and its example are on {', '.join(sorted(map(str, places))) or 'no device'}: expected one"
        )
    (place,) = places
    if place.type not in ("cpu", "cuda"):
        raise ModelError(f"the model is on {place}: expected a GPU or the CPU")
    return place


def device_of(place: torch.device, named: str | None) -> Device:
    """Our device for PyTorch's.

    Args:
        place: PyTorch's.
        named: its text; by default the same GPU, and the first device of OpenCL for the CPU.

    Raises:
        DeviceError: there is none, or it is another one than PyTorch's.
    """
    wanted = named or (f"cuda:{place.index}" if place.type == "cuda" else "opencl:0")
    found = devices.find(wanted)
    expected = "cuda" if place.type == "cuda" else "opencl"
    if found.kind != expected or (expected == "cuda" and found.text != f"cuda:{place.index}"):
        raise DeviceError(f"the model is on {place}, whose kernels do not run on {found.text}")
    return found
