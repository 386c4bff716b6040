"""The backend `tvmconv` of `torch.compile`: tvmconv's kernels run convolutions, another backend compiles the rest.

    >>> compiled = torch.compile(model, backend="tvmconv", options={"seconds": 60, "log": "my.jsonl"})  # doctest: +SKIP

A backend receives a graph whose inputs include the parameters, together with their current values. Kernels are selected
for these as `optimize` does, and run as long as the graph is called with the same parameters. The rest of the graph is
compiled with and without the kernels, and the faster version runs.

Source of the interface: PyTorch's documentation, "Custom Backends".
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tvmconv import compat
from tvmconv.deadline import Deadline
from tvmconv.errors import DeviceError, TuningError
from tvmconv.search.options import TuneOptions
from tvmconv.torch.device_match import find_device_for
from tvmconv.torch.fusion import (
    DEFAULT_EPS,
    NORM_ARGUMENTS,
    NORM_TENSORS,
    ConvSite,
    match_convolutions,
    replace_sites,
)
from tvmconv.torch.kernels import KernelProvider
from tvmconv.torch.model import Optimized
from tvmconv.torch.partition import MODEL_NAME, GraphPartition, remove_no_ops
from tvmconv.torch.report import Report
from tvmconv.torch.selection import KernelSelector, count_workloads, kernels_deadline, validate_choice
from tvmconv.torch.timing import TimingCache, time_call, use_cudnn_heuristics
from tvmconv.torch.training_backend import insert_operators, needs_gradients

CompiledFunction = Callable[..., Any]
OPTION_NAMES = ("seconds", "log", "choose", "fallback_backend")  # the last names the backend for the rest of the graph
DEFAULT_FALLBACK_BACKEND = "inductor"
REPLACED_NODE_KEY = "tvmconv"  # key of a node's metadata with the name of the node that it replaces
# The module of a convolution, and of a normalization after it.
CONVOLUTION_MODULES = {
    torch.conv1d: (torch.nn.Conv1d, torch.nn.BatchNorm1d),
    torch.conv2d: (torch.nn.Conv2d, torch.nn.BatchNorm2d),
    torch.conv3d: (torch.nn.Conv3d, torch.nn.BatchNorm3d),
}
CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast  # later nodes compute in other dtypes

_logger = logging.getLogger("tvmconv.torch")


def backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> CompiledFunction:
    """Compile a graph that `torch.compile` has captured.

    In graphs with gradients, kernels compute the products of convolutions, as `optimize` with `train=True` selects
    them. The other backend alone compiles graphs on devices other than one GPU or the CPU, with dynamic sizes, or,
    without gradients, with changes of autocast. The decisions are logged per layer by the logger `tvmconv.torch` at
    level INFO.

    Args:
        gm: The graph.
        example_inputs: Its inputs, parameters included.
        options: `seconds`, `log` and `choose` as of `optimize`, and `fallback_backend`, the name of the backend for the
            rest of the graph, by default "inductor". The time that the other backend takes counts towards `seconds`;
            it is estimated by its time for the graph without tvmconv's kernels. In graphs with gradients, it comes on
            top.

    Returns:
        The compiled function.

    Raises:
        TuningError: An option or the value of `choose` is unknown.
        Error: The log cannot be read or written.
    """
    option_values, started_at = compat.rename_options(options or {}, {"then": "fallback_backend"}), time.monotonic()
    for name in option_values:
        if name not in OPTION_NAMES:
            raise TuningError(f"option {name!r}: expected one of {', '.join(OPTION_NAMES)}")
    choose_mode = validate_choice(option_values.get("choose", "fastest"))
    seconds = option_values.get("seconds")
    TuneOptions(seconds=seconds)  # raises TuningError for an invalid limit
    deadline = None if seconds is None else Deadline.after(seconds, started_at)
    compile_rest = torch._dynamo.lookup_backend(option_values.get("fallback_backend", DEFAULT_FALLBACK_BACKEND))
    if needs_gradients(example_inputs):
        return compile_rest(_insert_operators(gm, example_inputs, option_values, deadline), example_inputs)
    fallback_run = compile_rest(fx.GraphModule(gm, copy.deepcopy(gm.graph)), example_inputs)
    fallback_compile_seconds = time.monotonic() - started_at  # the graph with tvmconv's kernels takes as long
    torch_device = _find_torch_device(example_inputs)
    targets = {node.target for node in gm.graph.nodes}
    if (
        torch_device is None
        or any(_is_norm(node) and _bind_arguments(node).get("training") for node in gm.graph.nodes)
        or ENTER_AUTOCAST in targets
        or targets.isdisjoint(CONVOLUTION_MODULES)
    ):
        return fallback_run
    try:
        with torch.no_grad():
            selection_deadline = deadline and deadline.reserve_seconds(fallback_compile_seconds)
            selected_sites, report = _select_sites(gm, example_inputs, torch_device, option_values, selection_deadline)
    except DeviceError as error:  # tvmconv has no device for PyTorch's
        _logger.warning("%s: PyTorch computes the convolutions", error)
        return fallback_run
    if not selected_sites:
        _logger.info("%s", report)
        return fallback_run
    replaced_graph = _replace_convolutions(gm, selected_sites)
    replaced_run = compile_rest(replaced_graph, example_inputs)
    pytorch_seconds, tvmconv_seconds = (
        _time_call(run, example_inputs, torch_device) for run in (fallback_run, replaced_run)
    )
    _logger.info("%s", replace(report, pytorch_seconds=pytorch_seconds, tvmconv_seconds=tvmconv_seconds))
    if tvmconv_seconds >= pytorch_seconds and choose_mode != "tuned":
        return fallback_run
    # The graph inputs from which weights were packed.
    packed_ids = {id(tensor) for site in selected_sites for tensor in site.module.weight_sources()}
    fixed_inputs = [(index, tensor) for index, tensor in enumerate(example_inputs) if id(tensor) in packed_ids]

    def dispatch(*args: Any) -> Any:
        _ = replaced_graph  # keeps its modules alive, which update packed weights
        if all(args[index] is tensor for index, tensor in fixed_inputs):
            return replaced_run(*args)
        return fallback_run(*args)  # no weights are packed for other parameters

    return dispatch


def _insert_operators(
    gm: fx.GraphModule, inputs: Sequence[Any], option_values: Mapping[str, Any], deadline: Deadline | None
) -> fx.GraphModule:
    """Return a graph with gradients in which kernels compute convolutions where they are faster."""
    options: dict[str, Any] = {"log": option_values.get("log"), "choose": option_values.get("choose", "fastest")}
    try:
        return insert_operators(gm, inputs, deadline=deadline, **options)
    except DeviceError as error:  # tvmconv has no device for PyTorch's
        _logger.warning("%s: PyTorch computes the convolutions", error)
        return gm


def _find_torch_device(inputs: Sequence[Any]) -> torch.device | None:
    """Return the device of all inputs; None if there are several, an input is not a tensor, or one needs a gradient."""
    if not all(isinstance(value, torch.Tensor) for value in inputs):
        return None
    if torch.is_grad_enabled() and any(value.requires_grad for value in inputs):
        return None
    found = {value.device for value in inputs}
    return found.pop() if len(found) == 1 and next(iter(found)).type in ("cpu", "cuda") else None


def _bind_arguments(node: fx.Node) -> dict[str, Any]:
    argument_names = CONVOLUTION_ARGUMENTS if node.target in CONVOLUTION_MODULES else NORM_ARGUMENTS
    return dict(zip(argument_names, node.args, strict=False)) | node.kwargs


def _is_norm(node: fx.Node) -> bool:
    return node.target is torch.nn.functional.batch_norm


def _copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph without the nodes that have no effect in evaluation mode."""
    copied_graph = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    remove_no_ops(copied_graph.graph, dict(copied_graph.named_modules()))
    return copied_graph


def _select_sites(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    torch_device: torch.device,
    option_values: Mapping[str, Any],
    deadline: Deadline | None,
) -> tuple[list[ConvSite], Report]:
    """Return the convolutions that tvmconv's kernels compute faster, and the report of all decisions."""
    lifted = _lift_to_modules(gm, inputs)
    own_ids = {
        id(tensor)
        for module in getattr(lifted, MODEL_NAME, lifted).children()
        for tensor in (*module.parameters(), *module.buffers())
    }
    inputs = [value if id(value) in own_ids else value.clone() for value in inputs]  # a graph may write to its inputs
    model = Optimized(gm, lifted)
    device = find_device_for(torch_device, None)
    provider = KernelProvider(device, torch_device, option_values.get("log"), lambda text: _logger.debug("%s", text))
    with use_cudnn_heuristics():
        sites = match_convolutions(model, [GraphPartition("", model)], inputs)
    counts = count_workloads(sites)
    provider.find_kernels(counts, deadline and kernels_deadline(len(counts), torch_device, deadline))
    timing_cache = TimingCache(model, inputs, torch_device, device.name)
    kernel_selector = KernelSelector(provider, timing_cache, option_values.get("choose", "fastest"), deadline)
    lines = kernel_selector.select_all(sites, counts)
    timing_cache.save()
    report = Report(lines, notes=tuple(kernel_selector.describe_omissions(len(counts))))
    return [site for site in sites if site.module and site.module.kernels], report


def _lift_to_modules(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """Return the graph with convolutions and normalizations of parameters as modules, called like their nodes."""
    lifted = _copy_graph(gm)
    placeholders = (node for node in lifted.graph.nodes if node.op == "placeholder")
    values = dict(zip(placeholders, inputs, strict=True))
    norm_types: dict[fx.Node, type] = {}  # module of a normalization after each convolution
    for node in list(lifted.graph.nodes):
        module: torch.nn.Module | None = None
        conv_type, norm_type = CONVOLUTION_MODULES.get(node.target, (None, None))
        if conv_type is not None:
            module = _make_convolution(conv_type, node, values)
        elif _is_norm(node) and (input_norm_type := norm_types.get(_bind_arguments(node)["input"])):
            module = _make_norm(input_norm_type, node, values)
        if module is None:
            continue
        name = f"{MODEL_NAME}.{node.name}"
        lifted.add_submodule(name, module)
        with lifted.graph.inserting_before(node):
            call_node = lifted.graph.call_module(name, (_bind_arguments(node)["input"],))
        call_node.meta[REPLACED_NODE_KEY] = node.name
        node.replace_all_uses_with(call_node)
        lifted.graph.erase_node(node)
        if norm_type is not None:
            norm_types[call_node] = norm_type
    lifted.recompile()
    return lifted


def _find_tensors(node: fx.Node, values: Mapping[fx.Node, Any]) -> dict[str, Any] | None:
    """Return the tensors of a node by name, None for those left out; None if one of them is no graph input."""
    arguments = _bind_arguments(node)
    given = {name: arguments[name] for name in NORM_TENSORS if arguments.get(name) is not None}
    if not values.keys() >= set(given.values()):
        return None
    return dict.fromkeys(NORM_TENSORS) | {name: values[tensor_node] for name, tensor_node in given.items()}


def _make_convolution(conv_type: type, node: fx.Node, values: Mapping[fx.Node, Any]) -> torch.nn.Module | None:
    """Return a module that computes a node as a convolution of a parameter; None if its weight is none."""
    tensors, arguments = _find_tensors(node, values), _bind_arguments(node)
    if tensors is None or not isinstance(tensors["weight"], torch.nn.Parameter):
        return None
    weight, groups = tensors["weight"], arguments.get("groups", 1)
    geometry = {name: arguments[name] for name in ("stride", "padding", "dilation") if name in arguments}
    sizes = (weight.shape[1] * groups, weight.shape[0], tuple(weight.shape[2:]))
    module: Any = conv_type(*sizes, groups=groups, bias=False, device="meta", **geometry)
    module._parameters.update(weight=weight, bias=tensors["bias"])
    return module


def _make_norm(norm_type: type, node: fx.Node, values: Mapping[fx.Node, Any]) -> torch.nn.Module | None:
    """Return a module that computes a node as a normalization by constant statistics; None if it has none."""
    tensors, arguments = _find_tensors(node, values), _bind_arguments(node)
    if arguments.get("training") or tensors is None or any(tensors[name] is None for name in NORM_TENSORS[:2]):
        return None
    channels, eps = len(tensors["running_mean"]), arguments.get("eps", DEFAULT_EPS)
    module: Any = norm_type(channels, eps=eps, affine=False, device="meta").eval()
    module._parameters.update(weight=tensors["weight"], bias=tensors["bias"])  # frozen parameters are buffers
    module.running_mean, module.running_var = tensors["running_mean"], tensors["running_var"]
    return module


def _replace_convolutions(gm: fx.GraphModule, selected_sites: Sequence[ConvSite]) -> fx.GraphModule:
    """Return the graph with the selected convolutions replaced by calls of tuned modules."""
    replaced_graph = _copy_graph(gm)
    nodes = {node.name: node for node in replaced_graph.graph.nodes}

    def find_node(node: fx.Node) -> fx.Node:
        return nodes[node.meta.get(REPLACED_NODE_KEY, node.name)]

    sites = [
        replace(site, nodes=list(map(find_node, site.nodes)), add_node=site.add_node and find_node(site.add_node))
        for site in selected_sites
    ]
    replace_sites(replaced_graph, sites)
    return replaced_graph


def _time_call(run: CompiledFunction, inputs: Sequence[Any], torch_device: torch.device) -> float:
    """Return the seconds of a call; inputs other than parameters are copied because a graph may write to them."""
    arguments = [value if isinstance(value, torch.nn.Parameter) else value.clone() for value in inputs]
    return time_call(lambda: run(*arguments), torch_device)
