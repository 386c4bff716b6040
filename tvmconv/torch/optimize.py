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
from tvmconv.errors import DeviceError, FallbackWarning, ModelError, as_model_error
from tvmconv.measuring.ready import begin_processes
from tvmconv.measuring.standing import standing
from tvmconv.searching.request import Request
from tvmconv.searching.shares import by_cost
from tvmconv.torch.choose import OTHERWISE, Choose, Chooser, checked, deviation, kernels_deadline
from tvmconv.torch.formats import FORMATS, fastest_format, format_of
from tvmconv.torch.kernels import Kernels
from tvmconv.torch.look import Found, look
from tvmconv.torch.model import Optimized
from tvmconv.torch.report import Line, Report
from tvmconv.torch.split import calls_of, copied, split
from tvmconv.torch.times import Times, by_heuristics
from tvmconv.workloads import parse

ON_THE_CPU = (
    "the model is on the CPU, where PyTorch is mostly faster: the search will most likely leave all layers to PyTorch; "
    'choose="tuned" (--all) takes our kernels'
)
CALLS = 12  # that the timing of a model takes, about


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
    Request(seconds=seconds)  # which refuses what is no limit
    deadline = None if seconds is None else Deadline.after(seconds)
    if deadline and choose == "fastest" and isinstance(model, torch.nn.Module) and is_on_the_cpu(model):
        warnings.warn(ON_THE_CPU, FallbackWarning, stacklevel=2)
    return optimize_within(deadline, model, example, log=log, device=device, choose=choose, progress=progress)


def optimize_within(
    deadline: Deadline | None,
    model: torch.nn.Module,
    example: Any,
    *,
    log: str | os.PathLike[str] | None = None,
    device: str | None = None,
    choose: Choose = "fastest",
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
    checked(choose)
    arguments = example if isinstance(example, tuple) else (example,)
    place = _place(model, arguments)
    ours = device_of(place, device)
    kernels = Kernels(ours, place, log, progress or (lambda text: None))
    with torch.inference_mode(False), torch.no_grad():  # a copy made for inference alone would hide that it changes
        if place.type != "cuda":
            return _optimized(model, tuple(arguments), kernels, deadline, choose)
        with torch.cuda.device(place):
            return _optimized(model, tuple(arguments), kernels, deadline, choose)


def _optimized(
    model: torch.nn.Module, example: tuple[Any, ...], kernels: Kernels, deadline: Deadline | None, choose: Choose
) -> Optimized:
    place = kernels.place
    with contextlib.ExitStack() as stack:
        with standing() if deadline else contextlib.nullcontext():
            if deadline and place.type == "cuda":  # on the CPU they would take it from what is timed
                begin_processes(None, [kernels.device])
            mine = _copy(model)
            with calls_of(mine) as calls:
                wanted = _result(mine, example)
            optimized, parts = split(mine, calls, example)
            arguments = copied(example)  # a model may write to them
            optimized.made_for(arguments, place)
            times = Times(optimized, arguments, place, kernels.device.name)
            stack.callback(times.keep)  # also those that were measured before an interruption
            begun = time.monotonic()
            before = times.seconds("the whole by PyTorch", lambda: optimized(*arguments))
            whole_seconds = time.monotonic() - begun
            if whole_seconds < before:  # it was known from an earlier call
                whole_seconds = CALLS * before
            notes = [*_lay_out(optimized, place, example, wanted), OTHERWISE]
            with by_heuristics():
                sites = look(optimized, parts, copied(example))
            counts = Counter(site.text for site in sites if site.text)
            deciding = None if deadline is None else deadline.earlier(whole_seconds)
            kernels.find(counts, deciding and kernels_deadline(len(counts), place, deciding))
        times.pause()
        chooser = Chooser(kernels, times, choose, deciding)
        lines = chosen_lines(chooser, sites, counts, kernels.device)
        report = Report(lines, before=before, notes=tuple(notes))
        timed = deadline is None or deadline.cut_off.left > whole_seconds
        report = chooser.whole(optimized, parts, arguments, report, timed=timed)
    difference = _difference(_result(optimized, example), wanted)
    notes = [*report.notes, *left_out(len(kernels.unsearched), len(counts), chooser.omitted)]
    optimized.tell(replace(report, difference=difference, notes=tuple(notes)))
    return optimized


def chosen_lines(
    chooser: Chooser, sites: Sequence[Found], counts: Mapping[str, int], device: Device
) -> tuple[Line, ...]:
    """What runs each convolution, in the order of the sites; those that cost the model most are decided on first."""
    ranks = {w.text: rank for rank, w in enumerate(by_cost({parse(text): n for text, n in counts.items()}, device))}
    order = sorted(range(len(sites)), key=lambda place: ranks.get(sites[place].text, len(ranks)))
    lines = {place: chooser.choose(sites[place]) for place in order}
    return tuple(lines[place] for place in range(len(sites)))


def left_out(unsearched: int, workloads: int, not_compared: int) -> list[str]:
    """What there was no time left for, in sentences.

    Args:
        unsearched: how many workloads were not searched.
        workloads: how many the model has.
        not_compared: how many layers were not compared with PyTorch.
    """
    told = []
    if unsearched:
        told.append(f"No time was left for the search of {unsearched} of {workloads} workloads.")
    if not_compared:
        told.append(f"No time was left to compare {not_compared} layers with PyTorch, which computes them.")
    return told


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


def is_on_the_cpu(model: torch.nn.Module) -> bool:
    """Whether a model's parameters are on the CPU."""
    parameter = next(model.parameters(), None)
    return parameter is not None and parameter.device.type == "cpu"


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
