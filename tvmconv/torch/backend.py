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
from torch.utils._pytree import tree_leaves

from tvmconv import compat
from tvmconv.deadline import Deadline
from tvmconv.errors import DeviceError, TuningError
from tvmconv.search.options import TuneOptions
from tvmconv.torch.channel_affine import NORM_ARGUMENTS
from tvmconv.torch.conv_site import ConvSite
from tvmconv.torch.conv_source import CONV_FUNCTIONS, TRANSPOSED_FUNCTIONS, bind_conv_arguments
from tvmconv.torch.device_match import find_device_for
from tvmconv.torch.fusion import match_graph, replace_sites
from tvmconv.torch.inference import list_strides, make_planner
from tvmconv.torch.kernels import KernelProvider
from tvmconv.torch.layer_search import find_layer_kernels
from tvmconv.torch.layout_plan import LayoutPlanner
from tvmconv.torch.metadata_readers import remove_shape_assertions
from tvmconv.torch.model import Optimized
from tvmconv.torch.partition import remove_no_ops
from tvmconv.torch.report import Report
from tvmconv.torch.selection import KernelSelector, count_workloads, kernels_deadline, validate_choice
from tvmconv.torch.shape_recorder import ShapeRecorder
from tvmconv.torch.timing import TimingCache, time_call, use_cudnn_heuristics
from tvmconv.torch.training_backend import insert_operators, needs_gradients

CompiledFunction = Callable[..., Any]
OPTION_NAMES = ("seconds", "log", "choose", "fallback_backend")  # the last names the backend for the rest of the graph
DEFAULT_FALLBACK_BACKEND = "inductor"
EAGER_BACKENDS = ("eager", "aot_eager")  # run the operations of a graph one by one
CONVOLUTION_NDIMS = {**CONV_FUNCTIONS, **TRANSPOSED_FUNCTIONS}
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
    started_at = time.monotonic()
    option_values = compat.rename_options(options or {}, {"then": "fallback_backend"})
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
    if torch_device is None or not _can_have_kernels(gm.graph):
        return fallback_run
    try:
        with torch.no_grad():
            selection_deadline = deadline and deadline.reserve_seconds(fallback_compile_seconds)
            replaced_graph, selected_sites, report = _select_sites(
                gm, example_inputs, torch_device, option_values, selection_deadline
            )
    except DeviceError as error:  # tvmconv has no device for PyTorch's
        _logger.warning("%s: PyTorch computes the convolutions", error)
        return fallback_run
    if not selected_sites:
        _logger.info("%s", report)
        return fallback_run
    replaced_run = compile_rest(replaced_graph, example_inputs)
    pytorch_seconds, tvmconv_seconds = (
        _time_call(run, example_inputs, torch_device) for run in (fallback_run, replaced_run)
    )
    _logger.info("%s", replace(report, pytorch_seconds=pytorch_seconds, tvmconv_seconds=tvmconv_seconds))
    if tvmconv_seconds >= pytorch_seconds and choose_mode != "tuned":
        return fallback_run
    return _dispatch_by_weights(replaced_graph, replaced_run, fallback_run, selected_sites, example_inputs)


def _can_have_kernels(graph: fx.Graph) -> bool:
    """Return whether a graph without gradients has convolutions, and nothing that excludes tvmconv's kernels."""
    targets = {node.target for node in graph.nodes}
    trains_norms = any(_is_norm(node) and _bind_norm(node).get("training") for node in graph.nodes)
    return not trains_norms and ENTER_AUTOCAST not in targets and not targets.isdisjoint(CONVOLUTION_NDIMS)


def _dispatch_by_weights(
    replaced_graph: fx.GraphModule,
    replaced_run: CompiledFunction,
    fallback_run: CompiledFunction,
    sites: Sequence[ConvSite],
    inputs: Sequence[Any],
) -> CompiledFunction:
    """Return a function that runs the graph with kernels for calls with the parameters whose weights are packed.

    Args:
        replaced_graph: The graph with kernels, whose modules update packed weights.
        replaced_run: Its compiled function.
        fallback_run: The compiled function of the graph without kernels, for calls with other parameters.
        sites: The convolutions with kernels.
        inputs: Inputs of the graph, among which are the parameters from which weights were packed.
    """
    packed_ids = {id(tensor) for site in sites for tensor in site.module.weight_sources()}
    fixed_inputs = [(index, tensor) for index, tensor in enumerate(inputs) if id(tensor) in packed_ids]

    def dispatch(*args: Any) -> Any:
        _ = replaced_graph  # keeps its modules alive
        if all(args[index] is tensor for index, tensor in fixed_inputs):
            return replaced_run(*args)
        return fallback_run(*args)

    return dispatch


def _insert_operators(
    gm: fx.GraphModule, inputs: Sequence[Any], option_values: Mapping[str, Any], deadline: Deadline | None
) -> fx.GraphModule:
    """Return a graph with gradients in which kernels compute convolutions where they are faster."""
    options: dict[str, Any] = {"log": option_values.get("log"), "choose": option_values.get("choose", "fastest")}
    options["is_eager"] = option_values.get("fallback_backend") in EAGER_BACKENDS
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
    devices = {value.device for value in inputs}
    return devices.pop() if len(devices) == 1 and next(iter(devices)).type in ("cpu", "cuda") else None


def _bind_norm(node: fx.Node) -> dict[str, Any]:
    return dict(zip(NORM_ARGUMENTS, node.args, strict=False)) | node.kwargs


def _is_norm(node: fx.Node) -> bool:
    return node.target is torch.nn.functional.batch_norm


def _find_model_tensors(graph: fx.Graph, inputs: Sequence[Any]) -> dict[fx.Node, torch.Tensor]:
    """Return the placeholders of parameters and buffers, with their values.

    PyTorch names buffers by their place in the model. What only convolutions and normalizations read besides their
    input is one, too.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return {
        node: value
        for node, value in zip(placeholders, inputs, strict=True)
        if isinstance(value, torch.nn.Parameter) or "buffers" in str(node.target) or _is_layer_argument(node)
    }


def _is_layer_argument(node: fx.Node) -> bool:
    """Return whether all readers of a node are convolutions and normalizations, of which it is not the input."""
    arguments = [bind_conv_arguments(user) or (_bind_norm(user) if _is_norm(user) else None) for user in node.users]
    return bool(arguments) and all(each is not None and each["input"] is not node for each in arguments)


def _select_sites(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    torch_device: torch.device,
    option_values: Mapping[str, Any],
    deadline: Deadline | None,
) -> tuple[fx.GraphModule, list[ConvSite], Report]:
    """Return a graph in which tuned modules compute convolutions, those convolutions, and the report of all decisions.

    The layouts inside the graph are planned as by `optimize`.
    """
    device = find_device_for(torch_device, None)
    provider = KernelProvider(device, torch_device, option_values.get("log"), lambda text: _logger.debug("%s", text))
    model = Optimized(gm, fx.GraphModule(gm, copy.deepcopy(gm.graph)))
    timing_cache = TimingCache(model, _copy_inputs(gm.graph, inputs), torch_device, device.name)
    planner = make_planner(provider, timing_cache, deadline)
    planner.converts_weights = False  # they are inputs of a graph that was compiled for their strides
    with use_cudnn_heuristics():
        graph, sites = _match(gm, inputs, planner)
        if planner.num_moved and not _keeps_strides(gm, graph, sites, inputs):
            planner.drop()
            graph, sites = _match(gm, inputs, None)
    counts = count_workloads(sites)
    kernel_selector = KernelSelector(provider, timing_cache, option_values.get("choose", "fastest"), deadline)
    find_layer_kernels(
        *(provider, counts, deadline and kernels_deadline(len(counts), torch_device, deadline)),
        kernel_selector.iterate_pytorch_timings(sites, counts),
        kernel_selector.pytorch_seconds,
    )
    lines = kernel_selector.select_all(sites, counts)
    timing_cache.save()
    selected_sites = [site for site in sites if site.module and site.module.kernels]
    replace_sites(graph, selected_sites)
    notes = [*planner.describe(), *kernel_selector.describe_omissions(len(counts))]
    return graph, selected_sites, Report(lines, notes=tuple(notes))


def _match(
    gm: fx.GraphModule, inputs: Sequence[Any], planner: LayoutPlanner | None
) -> tuple[fx.GraphModule, list[ConvSite]]:
    """Return a copy of the graph with planned layouts, and its convolutions with modules that can compute them."""
    graph = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    remove_no_ops(graph.graph, dict(graph.named_modules()))
    remove_shape_assertions(graph.graph)
    ndims = {CONVOLUTION_NDIMS[node.target] + 2 for node in graph.graph.nodes if node.target in CONVOLUTION_NDIMS}
    recorder = planner.make_recorder(graph, ndims) if planner else ShapeRecorder(graph)
    with torch.no_grad():
        recorder.run(*_copy_inputs(graph.graph, inputs))
    sites = match_graph(graph, recorder, planner, _find_model_tensors(graph.graph, inputs))
    for site in sites:
        if site.workload_text:
            site.module = site.make_module()
    graph.recompile()
    return graph, sites


def _copy_inputs(graph: fx.Graph, inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs of a graph, with copies of those to which it may write."""
    model_tensors = {id(tensor) for tensor in _find_model_tensors(graph, inputs).values()}
    return [value if id(value) in model_tensors else value.clone() for value in inputs]


def _keeps_strides(gm: fx.GraphModule, graph: fx.GraphModule, sites: Sequence[ConvSite], inputs: Sequence[Any]) -> bool:
    """Return whether a graph with planned layouts runs, and returns tensors with the strides of the original one."""
    planned = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    nodes = {node.name: node for node in planned.graph.nodes}
    copies = [
        replace(
            site,
            nodes=[nodes[node.name] for node in site.nodes],
            pad_nodes=[nodes[node.name] for node in site.pad_nodes],
            add_node=site.add_node and nodes[site.add_node.name],
        )
        for site in sites
        if site.module
    ]
    replace_sites(planned, copies)
    try:
        results, expected = (tree_leaves(each(*_copy_inputs(gm.graph, inputs))) for each in (planned, gm))
    except RuntimeError:  # a `view`, for example, needs the own layout
        return False
    return list_strides(results) == list_strides(expected)


def _time_call(run: CompiledFunction, inputs: Sequence[Any], torch_device: torch.device) -> float:
    """Return the seconds of a call; inputs other than parameters are copied because a graph may write to them."""
    arguments = [value if isinstance(value, torch.nn.Parameter) else value.clone() for value in inputs]
    return time_call(lambda: run(*arguments), torch_device)
