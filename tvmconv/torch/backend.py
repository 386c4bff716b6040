"""The backend `tvmconv` of `torch.compile`: convolutions by our kernels, and all else by another backend.

>>> faster = torch.compile(model, backend="tvmconv", options={"seconds": 60, "log": "my.jsonl"})

The graph that a backend is given has parameters as inputs, and these at hand: kernels are chosen for them as `optimize`
does it, and the graph runs by them as long as it is called with the same parameters. The rest is compiled with and
without our kernels, and the faster of both runs.

Source of the interface: PyTorch's documentation, "Custom Backends".
"""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tvmconv.deadline import Deadline
from tvmconv.errors import DeviceError, TuningError
from tvmconv.searching.request import Request
from tvmconv.torch.choose import Chooser, checked, kernels_deadline
from tvmconv.torch.kernels import Kernels
from tvmconv.torch.layer import CONVOLUTIONS
from tvmconv.torch.look import look
from tvmconv.torch.model import Optimized
from tvmconv.torch.optimize import chosen_lines, device_of, left_out
from tvmconv.torch.report import Report
from tvmconv.torch.sites import MODEL, Site, rewrite, strip
from tvmconv.torch.split import Part
from tvmconv.torch.times import Times, by_heuristics
from tvmconv.torch.timing import seconds_of

Compiled = Callable[..., Any]
OPTIONS = ("seconds", "log", "choose", "then")  # as of `optimize`; and the backend for all else
THEN = "inductor"
OF = "tvmconv"  # under which a node keeps the name of the one that it stands for
OPERATORS = {torch.conv1d: torch.nn.Conv1d, torch.conv2d: torch.nn.Conv2d, torch.conv3d: torch.nn.Conv3d}
BATCH_NORMS = {
    torch.nn.Conv1d: torch.nn.BatchNorm1d,
    torch.nn.Conv2d: torch.nn.BatchNorm2d,
    torch.nn.Conv3d: torch.nn.BatchNorm3d,
}
ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
NORM_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
AUTOCAST = torch.amp.autocast_mode._enter_autocast  # what comes behind computes in other dtypes, and is timed alone

_told = logging.getLogger("tvmconv.torch")


def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None) -> Compiled:
    """Compile a graph that `torch.compile` has captured.

    Graphs with gradients, of other devices than one GPU or the CPU, of sizes that change, or in which autocast changes
    are the other backend's.
    What was decided is logged, layer by layer, under the name `tvmconv.torch` at the level INFO.

    Args:
        gm: the graph.
        example_inputs: its inputs, with the parameters among them.
        options: `seconds`, `log` and `choose` as of `optimize`, where the time that the other backend takes counts, as
            it was for the graph without our kernels; `then` names the backend for all else, by default
            "inductor".

    Raises:
        TuningError: there is no such option, or no such choice.
        Error: the log cannot be read or written.
    """
    given, begun = dict(options or {}), time.monotonic()
    for name in given:
        if name not in OPTIONS:
            raise TuningError(f"option {name!r}: expected one of {', '.join(OPTIONS)}")
    how = checked(given.get("choose", "fastest"))
    seconds = given.get("seconds")
    Request(seconds=seconds)  # which refuses what is no limit
    deadline = None if seconds is None else Deadline.after(seconds, begun)
    compile_rest = torch._dynamo.lookup_backend(given.get("then", THEN))
    theirs = compile_rest(fx.GraphModule(gm, copy.deepcopy(gm.graph)), example_inputs)
    compiling = time.monotonic() - begun  # which the graph with our kernels takes as well
    place = _place(example_inputs)
    targets = {node.target for node in gm.graph.nodes}
    if place is None or _trains(gm) or AUTOCAST in targets or targets.isdisjoint(OPERATORS):
        return theirs
    try:
        with torch.no_grad():
            chosen, report = _chosen(gm, example_inputs, place, given, deadline and deadline.reserving(compiling))
    except DeviceError as error:  # there is none of ours for PyTorch's
        _told.warning("%s: convolutions are left as they are", error)
        return theirs
    if not chosen:
        _told.info("%s", report)
        return theirs
    ours_graph = _with(gm, chosen)
    ours = compile_rest(ours_graph, example_inputs)
    before, after = (_seconds(run, example_inputs, place) for run in (theirs, ours))
    _told.info("%s", replace(report, before=before, after=after))
    if after >= before and how != "tuned":
        return theirs
    fixed = _parameters_of(chosen, example_inputs)

    def run(*args: Any) -> Any:
        _ = ours_graph  # its modules bring weights up to date, as long as they are there
        if all(args[place] is tensor for place, tensor in fixed):
            return ours(*args)
        return theirs(*args)  # of other parameters nothing is packed

    return run


def _place(inputs: Sequence[Any]) -> torch.device | None:
    """The device of all inputs; None if they are on several, or not all are tensors that ask for no gradients."""
    if not all(isinstance(each, torch.Tensor) for each in inputs):
        return None
    if torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
        return None
    places = {each.device for each in inputs}
    return places.pop() if len(places) == 1 and next(iter(places)).type in ("cpu", "cuda") else None


def _trains(gm: fx.GraphModule) -> bool:
    """Whether a normalisation takes statistics of what it is given, and writes them down."""
    of_norms = [node for node in gm.graph.nodes if node.target is torch.nn.functional.batch_norm]
    return any(_arguments(node).get("training") for node in of_norms)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a convolution or a normalisation, by name."""
    names = ARGUMENTS if node.target in OPERATORS else NORM_ARGUMENTS
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph, without what does nothing in evaluation mode."""
    made = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    strip(made.graph, dict(made.named_modules()))
    return made


def _chosen(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    place: torch.device,
    given: Mapping[str, Any],
    deadline: Deadline | None,
) -> tuple[list[Site], Report]:
    """The convolutions that are faster by our kernels, and what was decided by the deadline."""
    tried = _of_modules(gm, inputs)
    own = {
        id(tensor)
        for module in getattr(tried, MODEL, tried).children()
        for tensor in (*module.parameters(), *module.buffers())
    }
    inputs = [each if id(each) in own else each.clone() for each in inputs]  # it may be written to
    model = Optimized(gm, tried)
    device = device_of(place, None)
    kernels = Kernels(device, place, given.get("log"), lambda text: _told.debug("%s", text))
    with by_heuristics():
        found = look(model, [Part("", model)], inputs)
    counts = Counter(one.text for one in found if one.text)
    kernels.find(counts, deadline and kernels_deadline(len(counts), place, deadline))
    times = Times(model, inputs, place, device.name)
    chooser = Chooser(kernels, times, given.get("choose", "fastest"), deadline)
    lines = chosen_lines(chooser, found, counts, device)
    times.keep()
    notes = left_out(len(kernels.unsearched), len(counts), chooser.omitted)
    return [one.site for one in found if one.site and one.module.kernels], Report(lines, notes=tuple(notes))


def _of_modules(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """The same graph, in which convolutions and normalisations of parameters are modules, called as their nodes are."""
    made = _copied(gm)
    values = _values(made.graph, inputs)
    kinds: dict[fx.Node, type] = {}
    for node in list(made.graph.nodes):
        module = _module(node, values, kinds) if node.op == "call_function" else None
        if module is None:
            continue
        name = f"{MODEL}.{node.name}"
        made.add_submodule(name, module)
        with made.graph.inserting_before(node):
            called = made.graph.call_module(name, (_arguments(node)["input"],))
        called.meta[OF] = node.name
        node.replace_all_uses_with(called)
        made.graph.erase_node(node)
        if type(module) in CONVOLUTIONS:
            kinds[called] = type(module)
    made.recompile()
    return made


def _values(graph: fx.Graph, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    return dict(zip((node for node in graph.nodes if node.op == "placeholder"), inputs, strict=True))


def _module(node: fx.Node, values: Mapping[fx.Node, Any], kinds: Mapping[fx.Node, type]) -> torch.nn.Module | None:
    """The module that a call is one of; None if it is none, or its parameters are no inputs of the graph."""
    kind = OPERATORS.get(node.target)
    of_norm = node.target is torch.nn.functional.batch_norm
    if kind is None and not of_norm:
        return None
    told = _arguments(node)
    if of_norm and told["input"] not in kinds:
        return None
    tensors = {
        name: values.get(told[name]) if told.get(name) is not None else None
        for name in ("weight", "bias", "running_mean", "running_var")
    }
    if any(told.get(name) is not None and tensors[name] is None for name in tensors):
        return None
    if of_norm:
        return None if told.get("training") else _norm(BATCH_NORMS[kinds[told["input"]]], tensors, told)
    return _convolution(kind, tensors, told)  # type: ignore[arg-type]


def _convolution(kind: type, tensors: Mapping[str, Any], told: Mapping[str, Any]) -> torch.nn.Module | None:
    weight, groups = tensors["weight"], told.get("groups", 1)
    if not isinstance(weight, torch.nn.Parameter):
        return None
    how = {name: told[name] for name in ("stride", "padding", "dilation") if name in told}
    module: Any = kind(
        weight.shape[1] * groups,
        weight.shape[0],
        tuple(weight.shape[2:]),
        groups=groups,
        bias=False,
        device="meta",
        **how,
    )
    module._parameters.update(weight=weight, bias=tensors["bias"])
    return module


def _norm(kind: type, tensors: Mapping[str, Any], told: Mapping[str, Any]) -> torch.nn.Module | None:
    if tensors["running_mean"] is None or tensors["running_var"] is None:
        return None
    channels, eps = tensors["running_mean"].shape[0], told.get("eps", 1e-5)
    module: Any = kind(channels, eps=eps, affine=False, device="meta").eval()
    module._parameters.update(weight=tensors["weight"], bias=tensors["bias"])  # buffers, where they are frozen
    module.running_mean, module.running_var = tensors["running_mean"], tensors["running_var"]
    return module


def _with(gm: fx.GraphModule, chosen: Sequence[Site]) -> fx.GraphModule:
    """The graph, in which chosen convolutions are calls of our modules."""
    made = _copied(gm)
    nodes = {node.name: node for node in made.graph.nodes}

    def here(node: fx.Node) -> fx.Node:
        return nodes[node.meta.get(OF, node.name)]

    rewrite(
        made,
        [
            replace(site, nodes=[here(node) for node in site.nodes], adding=site.adding and here(site.adding))
            for site in chosen
        ],
    )
    return made


def _parameters_of(chosen: Sequence[Site], inputs: Sequence[Any]) -> list[tuple[int, torch.Tensor]]:
    """The inputs of the graph that chosen convolutions were packed from, and their places."""
    packed = {id(tensor) for site in chosen for tensor in site.module.sources()}
    return [(place, tensor) for place, tensor in enumerate(inputs) if id(tensor) in packed]


def _seconds(run: Compiled, inputs: Sequence[Any], place: torch.device) -> float:
    """The seconds of a call; on a copy of what is no parameter, as a graph may write to its input."""
    given = [each if isinstance(each, torch.nn.Parameter) else each.clone() for each in inputs]
    return seconds_of(lambda: run(*given), place)
