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

from tvmconv import compat
from tvmconv.deadline import Deadline
from tvmconv.errors import DeviceError, TuningError
from tvmconv.search.options import TuneOptions
from tvmconv.torch.fusion import MODEL_NAME, FusionSite, remove_no_ops, replace_sites
from tvmconv.torch.kernels import KernelProvider
from tvmconv.torch.layer import CONVOLUTIONS
from tvmconv.torch.match import match_convolutions
from tvmconv.torch.model import Optimized
from tvmconv.torch.optimize import describe_omissions, find_device_for, select_kernels
from tvmconv.torch.partition import GraphPartition
from tvmconv.torch.report import Report
from tvmconv.torch.selection import KernelSelector, kernels_deadline, validate_choice
from tvmconv.torch.timing import time_call
from tvmconv.torch.timing_cache import TimingCache, use_cudnn_heuristics

CompiledFunction = Callable[..., Any]
OPTION_NAMES = ("seconds", "log", "choose", "fallback_backend")  # as of `optimize`; and the backend for all else
DEFAULT_FALLBACK_BACKEND = "inductor"
REPLACED_NODE_KEY = "tvmconv"  # under which a node keeps the name of the one that it stands for
CONVOLUTION_MODULES = {torch.conv1d: torch.nn.Conv1d, torch.conv2d: torch.nn.Conv2d, torch.conv3d: torch.nn.Conv3d}
BATCH_NORMS = {
    torch.nn.Conv1d: torch.nn.BatchNorm1d,
    torch.nn.Conv2d: torch.nn.BatchNorm2d,
    torch.nn.Conv3d: torch.nn.BatchNorm3d,
}
CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
NORM_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
ENTER_AUTOCAST = (
    torch.amp.autocast_mode._enter_autocast
)  # what comes behind computes in other dtypes, and is timed alone

_logger = logging.getLogger("tvmconv.torch")


def backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> CompiledFunction:
    """Compile a graph that `torch.compile` has captured.

    Graphs with gradients, of other devices than one GPU or the CPU, of sizes that change, or in which autocast changes
    are the other backend's.
    What was decided is logged, layer by layer, under the name `tvmconv.torch` at the level INFO.

    Args:
        gm: the graph.
        example_inputs: its inputs, with the parameters among them.
        options: `seconds`, `log` and `choose` as of `optimize`, where the time that the other backend takes counts, as
            it was for the graph without our kernels; `fallback_backend` names the backend for all else, by default
            "inductor".

    Raises:
        TuningError: there is no such option, or no such choice.
        Error: the log cannot be read or written.
    """
    option_values, started_at = compat.rename_options(options or {}, {"then": "fallback_backend"}), time.monotonic()
    for name in option_values:
        if name not in OPTION_NAMES:
            raise TuningError(f"option {name!r}: expected one of {', '.join(OPTION_NAMES)}")
    choose_mode = validate_choice(option_values.get("choose", "fastest"))
    seconds = option_values.get("seconds")
    TuneOptions(seconds=seconds)  # which refuses what is no limit
    deadline = None if seconds is None else Deadline.after(seconds, started_at)
    compile_rest = torch._dynamo.lookup_backend(option_values.get("fallback_backend", DEFAULT_FALLBACK_BACKEND))
    fallback_run = compile_rest(fx.GraphModule(gm, copy.deepcopy(gm.graph)), example_inputs)
    fallback_compile_seconds = time.monotonic() - started_at  # which the graph with our kernels takes as well
    torch_device = _find_torch_device(example_inputs)
    targets = {node.target for node in gm.graph.nodes}
    if (
        torch_device is None
        or _has_training_norm(gm)
        or ENTER_AUTOCAST in targets
        or targets.isdisjoint(CONVOLUTION_MODULES)
    ):
        return fallback_run
    try:
        with torch.no_grad():
            selected_sites, report = _select_sites(
                gm,
                example_inputs,
                torch_device,
                option_values,
                deadline and deadline.reserve_seconds(fallback_compile_seconds),
            )
    except DeviceError as error:  # there is none of ours for PyTorch's
        _logger.warning("%s: convolutions are left as they are", error)
        return fallback_run
    if not selected_sites:
        _logger.info("%s", report)
        return fallback_run
    replaced_graph = _replace_convolutions(gm, selected_sites)
    replaced_run = compile_rest(replaced_graph, example_inputs)
    pytorch_seconds, tvmconv_seconds = (
        _time_call(dispatch, example_inputs, torch_device) for dispatch in (fallback_run, replaced_run)
    )
    _logger.info("%s", replace(report, pytorch_seconds=pytorch_seconds, tvmconv_seconds=tvmconv_seconds))
    if tvmconv_seconds >= pytorch_seconds and choose_mode != "tuned":
        return fallback_run
    fixed_inputs = _find_packed_inputs(selected_sites, example_inputs)

    def dispatch(*args: Any) -> Any:
        _ = replaced_graph  # its modules bring weights up to date, as long as they are there
        if all(args[input_index] is tensor for input_index, tensor in fixed_inputs):
            return replaced_run(*args)
        return fallback_run(*args)  # of other parameters nothing is packed

    return dispatch


def _find_torch_device(inputs: Sequence[Any]) -> torch.device | None:
    """The device of all inputs; None if they are on several, or not all are tensors that ask for no gradients."""
    if not all(isinstance(value, torch.Tensor) for value in inputs):
        return None
    if torch.is_grad_enabled() and any(value.requires_grad for value in inputs):
        return None
    torch_devices = {value.device for value in inputs}
    return (
        torch_devices.pop() if len(torch_devices) == 1 and next(iter(torch_devices)).type in ("cpu", "cuda") else None
    )


def _has_training_norm(gm: fx.GraphModule) -> bool:
    """Whether a normalisation takes statistics of what it is given, and writes them down."""
    norm_nodes = [node for node in gm.graph.nodes if node.target is torch.nn.functional.batch_norm]
    return any(_bind_arguments(node).get("training") for node in norm_nodes)


def _bind_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a convolution or a normalisation, by name."""
    argument_names = CONVOLUTION_ARGUMENTS if node.target in CONVOLUTION_MODULES else NORM_ARGUMENTS
    return dict(zip(argument_names, node.args, strict=False)) | node.kwargs


def _copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph, without what does nothing in evaluation mode."""
    copied_graph = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    remove_no_ops(copied_graph.graph, dict(copied_graph.named_modules()))
    return copied_graph


def _select_sites(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    torch_device: torch.device,
    option_values: Mapping[str, Any],
    deadline: Deadline | None,
) -> tuple[list[FusionSite], Report]:
    """The convolutions that are faster by our kernels, and what was decided by the deadline."""
    lifted = _lift_to_modules(gm, inputs)
    own_ids = {
        id(tensor)
        for module in getattr(lifted, MODEL_NAME, lifted).children()
        for tensor in (*module.parameters(), *module.buffers())
    }
    inputs = [value if id(value) in own_ids else value.clone() for value in inputs]  # it may be written to
    model = Optimized(gm, lifted)
    device = find_device_for(torch_device, None)
    provider = KernelProvider(device, torch_device, option_values.get("log"), lambda text: _logger.debug("%s", text))
    with use_cudnn_heuristics():
        matches = match_convolutions(model, [GraphPartition("", model)], inputs)
    counts = Counter(conv_match.workload_text for conv_match in matches if conv_match.workload_text)
    provider.find_kernels(counts, deadline and kernels_deadline(len(counts), torch_device, deadline))
    timing_cache = TimingCache(model, inputs, torch_device, device.name)
    kernel_selector = KernelSelector(provider, timing_cache, option_values.get("choose", "fastest"), deadline)
    lines = select_kernels(kernel_selector, matches, counts, device)
    timing_cache.save()
    notes = describe_omissions(len(provider.unsearched_workloads), len(counts), kernel_selector.num_omitted)
    return [conv_match.site for conv_match in matches if conv_match.site and conv_match.module.kernels], Report(
        lines, notes=tuple(notes)
    )


def _lift_to_modules(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """The same graph, in which convolutions and normalisations of parameters are modules, called as their nodes are."""
    lifted = _copy_graph(gm)
    values = _example_values(lifted.graph, inputs)
    conv_types: dict[fx.Node, type] = {}
    for node in list(lifted.graph.nodes):
        module = _match_module(node, values, conv_types) if node.op == "call_function" else None
        if module is None:
            continue
        name = f"{MODEL_NAME}.{node.name}"
        lifted.add_submodule(name, module)
        with lifted.graph.inserting_before(node):
            call_node = lifted.graph.call_module(name, (_bind_arguments(node)["input"],))
        call_node.meta[REPLACED_NODE_KEY] = node.name
        node.replace_all_uses_with(call_node)
        lifted.graph.erase_node(node)
        if type(module) in CONVOLUTIONS:
            conv_types[call_node] = type(module)
    lifted.recompile()
    return lifted


def _example_values(graph: fx.Graph, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    return dict(zip((node for node in graph.nodes if node.op == "placeholder"), inputs, strict=True))


def _match_module(
    node: fx.Node, values: Mapping[fx.Node, Any], conv_types: Mapping[fx.Node, type]
) -> torch.nn.Module | None:
    """The module that a call is one of; None if it is none, or its parameters are no inputs of the graph."""
    conv_type = CONVOLUTION_MODULES.get(node.target)
    is_norm = node.target is torch.nn.functional.batch_norm
    if conv_type is None and not is_norm:
        return None
    arguments = _bind_arguments(node)
    if is_norm and arguments["input"] not in conv_types:
        return None
    tensors = {
        name: values.get(arguments[name]) if arguments.get(name) is not None else None
        for name in ("weight", "bias", "running_mean", "running_var")
    }
    if any(arguments.get(name) is not None and tensors[name] is None for name in tensors):
        return None
    if is_norm:
        return (
            None
            if arguments.get("training")
            else _make_norm(BATCH_NORMS[conv_types[arguments["input"]]], tensors, arguments)
        )
    return _make_convolution(conv_type, tensors, arguments)  # type: ignore[arg-type]


def _make_convolution(
    conv_type: type, tensors: Mapping[str, Any], arguments: Mapping[str, Any]
) -> torch.nn.Module | None:
    weight, groups = tensors["weight"], arguments.get("groups", 1)
    if not isinstance(weight, torch.nn.Parameter):
        return None
    geometry = {name: arguments[name] for name in ("stride", "padding", "dilation") if name in arguments}
    module: Any = conv_type(
        weight.shape[1] * groups,
        weight.shape[0],
        tuple(weight.shape[2:]),
        groups=groups,
        bias=False,
        device="meta",
        **geometry,
    )
    module._parameters.update(weight=weight, bias=tensors["bias"])
    return module


def _make_norm(norm_type: type, tensors: Mapping[str, Any], arguments: Mapping[str, Any]) -> torch.nn.Module | None:
    if tensors["running_mean"] is None or tensors["running_var"] is None:
        return None
    channels, eps = tensors["running_mean"].shape[0], arguments.get("eps", 1e-5)
    module: Any = norm_type(channels, eps=eps, affine=False, device="meta").eval()
    module._parameters.update(weight=tensors["weight"], bias=tensors["bias"])  # buffers, where they are frozen
    module.running_mean, module.running_var = tensors["running_mean"], tensors["running_var"]
    return module


def _replace_convolutions(gm: fx.GraphModule, selected_sites: Sequence[FusionSite]) -> fx.GraphModule:
    """The graph, in which chosen convolutions are calls of our modules."""
    replaced_graph = _copy_graph(gm)
    nodes = {node.name: node for node in replaced_graph.graph.nodes}

    def find_node(node: fx.Node) -> fx.Node:
        return nodes[node.meta.get(REPLACED_NODE_KEY, node.name)]

    replace_sites(
        replaced_graph,
        [
            replace(
                site,
                nodes=[find_node(node) for node in site.nodes],
                add_node=site.add_node and find_node(site.add_node),
            )
            for site in selected_sites
        ],
    )
    return replaced_graph


def _find_packed_inputs(selected_sites: Sequence[FusionSite], inputs: Sequence[Any]) -> list[tuple[int, torch.Tensor]]:
    """The inputs of the graph that chosen convolutions were packed from, and their places."""
    packed_ids = {id(tensor) for site in selected_sites for tensor in site.module.sources()}
    return [(input_index, tensor) for input_index, tensor in enumerate(inputs) if id(tensor) in packed_ids]


def _time_call(run: CompiledFunction, inputs: Sequence[Any], torch_device: torch.device) -> float:
    """The seconds of a call; on a copy of what is no parameter, as a graph may write to its input."""
    arguments = [value if isinstance(value, torch.nn.Parameter) else value.clone() for value in inputs]
    return time_call(lambda: run(*arguments), torch_device)
