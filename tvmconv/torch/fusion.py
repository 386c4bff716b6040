"""The convolutions of a traced model, each with the operations after it that one kernel can compute."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from tvmconv.errors import ModelError
from tvmconv.torch.layer import CONVOLUTIONS, NORMS, TunedConv
from tvmconv.torch.norms import match_functional_norm
from tvmconv.workloads.epilogues.operations import SLOPES

MODEL_NAME = "model"  # attribute of the graph module that holds the model
HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ADD_FUNCTIONS = (operator.add, operator.iadd, torch.add)
ADD_METHODS = ("add", "add_")
ACTIVATION_FUNCTIONS: dict[Any, str] = {
    torch.relu: "relu",
    torch.relu_: "relu",
    functional.relu: "relu",
    functional.relu_: "relu",
    functional.silu: "silu",
    functional.mish: "mish",
    torch.tanh: "tanh",
    torch.tanh_: "tanh",
    functional.tanh: "tanh",
    functional.relu6: "relu6",
    functional.hardswish: "hardswish",
    functional.hardsigmoid: "hardsigmoid",
    torch.sigmoid: "sigmoid",
    torch.sigmoid_: "sigmoid",
    functional.sigmoid: "sigmoid",
}
ACTIVATION_METHODS = {name + end: name for name in ("relu", "sigmoid", "tanh") for end in ("", "_")}
NO_OP_MODULES = (torch.nn.Identity, torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d)
NO_OP_FUNCTIONS = {"dropout": 2, "stochastic_depth": 3}  # index of the argument `training`, in PyTorch and torchvision
ACTIVATION_MODULES: dict[type, str] = {
    torch.nn.ReLU: "relu",
    torch.nn.SiLU: "silu",
    torch.nn.Mish: "mish",
    torch.nn.Tanh: "tanh",
    torch.nn.ReLU6: "relu6",
    torch.nn.Hardswish: "hardswish",
    torch.nn.Hardsigmoid: "hardsigmoid",
    torch.nn.Sigmoid: "sigmoid",
}


# Activations with parameters: their names here, and their parameters with PyTorch's defaults.
PARAMETRIC_FUNCTIONS: dict[Any, tuple[str, dict[str, Any]]] = {
    functional.leaky_relu: ("leaky_relu", {"negative_slope": 0.01}),
    functional.leaky_relu_: ("leaky_relu", {"negative_slope": 0.01}),
    functional.elu: ("elu", {"alpha": 1.0}),
    functional.elu_: ("elu", {"alpha": 1.0}),
    functional.softplus: ("softplus", {"beta": 1, "threshold": 20}),
    functional.gelu: ("gelu", {"approximate": "none"}),
}
PARAMETRIC_MODULES: dict[type, tuple[str, tuple[str, ...]]] = {
    torch.nn.LeakyReLU: ("leaky_relu", ("negative_slope",)),
    torch.nn.ELU: ("elu", ("alpha",)),
    torch.nn.Softplus: ("softplus", ("beta", "threshold")),
    torch.nn.GELU: ("gelu", ("approximate",)),
}
# Epilogue operations by name and parameters of the activation.
ACTIVATION_BY_PARAMETERS: dict[tuple[Any, ...], str] = {
    **{("leaky_relu", slope): name for name, slope in SLOPES.items()},
    ("elu", 1.0): "elu",
    ("softplus", 1, 20): "softplus",
    ("gelu", "none"): "gelu",
    ("gelu", "tanh"): "gelu_tanh",
}
CLAMP_FUNCTIONS: dict[Any, tuple[float | None, float | None]] = {  # with default limits
    **dict.fromkeys((torch.clamp, torch.clamp_, torch.clip, "clamp", "clamp_", "clip", "clip_"), (None, None)),
    **dict.fromkeys((functional.hardtanh, functional.hardtanh_), (-1, 1)),
}
# Activations and normalizations that a report names if they follow a convolution and no kernel computes them.
REPORTED_MODULES = {f"torch.nn.modules.{name}" for name in ("activation", "batchnorm", "instancenorm", "normalization")}
REPORTED_FUNCTIONS = {
    *("prelu", "leaky_relu", "rrelu", "elu", "selu", "celu", "softplus", "softsign", "gelu", "hardtanh", "logsigmoid"),
    *("batch_norm", "instance_norm", "group_norm", "layer_norm"),
}
UNKNOWN_METADATA = (None, None, None)
ACTIVATION_BY_LIMITS: dict[tuple[float | None, float | None], str] = {
    (0, None): "relu",
    (0, 1): "clamp",
    (0, 6): "relu6",
}


@dataclass
class FusionSite:
    """A convolution in a graph and the operations after it that one kernel computes with it.

    Attributes:
        path: Path of the convolution in the model.
        conv: The model's module.
        nodes: Nodes of all operations, the convolution first.
        norm: The batch normalization after it, if there is one.
        epilogue_names: Names of the other operations, with `add` at most once.
        add_node: Node that adds a residual, if there is one.
        followed_by: Name of the only reader of the last node, if no kernel computes it; "" otherwise.
        module: Module that computes the site in the tuned graph.
    """

    path: str
    conv: Any
    nodes: list[fx.Node]
    norm: Any = None
    epilogue_names: list[str] = field(default_factory=list)
    add_node: fx.Node | None = None
    followed_by: str = ""
    module: Any = None

    @property
    def residual(self) -> fx.Node | None:
        """Node of the added tensor in the current graph; None if there is none."""
        if self.add_node is None:
            return None
        return next(arg for arg in self.add_node.args if isinstance(arg, fx.Node) and arg not in self.nodes)


class _ModelHolder(torch.nn.Module):
    """A module that calls the model, so that a model that is a single convolution is a module in the graph, too."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        return self.model(x)


class _FusionTracer(fx.Tracer):
    """A tracer that enters all modules except PyTorch's own and those with hooks, which must be called."""

    proxy_buffer_attributes = True  # computations on buffers run at each call

    def __init__(self) -> None:
        super().__init__()
        self._autocast = _get_autocast_dtypes()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node; raise ModelError if the model has changed autocast, which a graph does not reproduce."""
        if _get_autocast_dtypes() != self._autocast:
            raise ModelError("it changes autocast")
        return super().create_node(*args, **kwargs)

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module becomes one node."""
        return has_hooks(m) or super().is_leaf_module(m, module_qualified_name)


def _get_autocast_dtypes() -> list[torch.dtype | None]:
    """Return the autocast dtypes on the CPU and on GPUs; None where autocast is off."""
    return [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cpu", "cuda")]


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether hooks are registered that run when the module is called."""
    return any(getattr(module, name) for name in HOOK_ATTRIBUTES)


def trace_model(model: torch.nn.Module, fixed_arguments: Mapping[str, Any] | None = None) -> fx.GraphModule:
    """Trace a model as a graph that shares the model's modules and parameters; the model is its attribute `MODEL_NAME`.

    Args:
        model: Model to trace.
        fixed_arguments: Arguments that keep one value in the graph whatever it is called with.

    Raises:
        Exception: Any exception of a model that cannot be traced.
    """
    holder, tracer = _ModelHolder(model), _FusionTracer()
    if type(model) in CONVOLUTIONS or has_hooks(model):
        graph = tracer.trace(holder)
    else:
        graph = tracer.trace(model, dict(fixed_arguments or {}))
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr"):
                node.target = f"{MODEL_NAME}.{node.target}"
        _remove_guards(graph, fixed_arguments or {})
    remove_no_ops(graph, dict(holder.named_modules()))
    traced = fx.GraphModule(holder, graph, type(model).__name__)
    traced.model = model  # `GraphModule` has put empty modules in place of parents
    return traced


def _remove_guards(graph: fx.Graph, fixed_arguments: Mapping[str, Any]) -> None:
    """Restore the names of the placeholders of fixed arguments, and remove the guards on their values."""
    names = {f"{name}_1": name for name in fixed_arguments}  # the tracer appends _1
    for node in [node for node in graph.nodes if node.op == "placeholder" and node.target in names]:
        node.target = names[node.target]
        for user in list(node.users):
            for guard_node in list(user.users):
                graph.erase_node(guard_node)
            graph.erase_node(user)


def remove_no_ops(graph: fx.Graph, modules: dict[str, Any]) -> None:
    """Remove nodes that return their input in evaluation mode."""
    for node in graph.nodes:
        is_no_op = False
        if node.op == "call_module":
            module = modules.get(str(node.target))
            is_no_op = isinstance(module, NO_OP_MODULES) and not has_hooks(module)
        elif node.op == "call_function" and (
            training_index := NO_OP_FUNCTIONS.get(getattr(node.target, "__name__", ""))
        ):
            is_no_op = node.kwargs.get("training", (*node.args, *[True] * training_index)[training_index]) is False
        if is_no_op and node.args:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def find_fusion_sites(graph: fx.GraphModule, node_metadata: Mapping[fx.Node, tuple[Any, ...]]) -> Iterator[FusionSite]:
    """Yield the convolutions of a graph, each with the operations after it that one kernel can compute.

    Args:
        graph: Graph of the model.
        node_metadata: Layout, shape and dtype of the result of each node in a run of the model.
    """
    modules = dict(graph.named_modules())
    order = {node: number for number, node in enumerate(graph.graph.nodes)}
    fused_nodes: set[fx.Node] = set()
    for node in order:
        conv = modules.get(str(node.target)) if node.op == "call_module" else None
        if type(conv) not in CONVOLUTIONS or len(node.args) != 1 or node.kwargs:
            continue
        site = FusionSite(str(node.target).partition(".")[2], conv, [node])
        while (next_fusible := _next_fusible(site, modules, order, node_metadata)) is not None and next_fusible[
            0
        ] not in fused_nodes:
            user, operation = next_fusible
            if operation == "norm":
                site.norm = match_functional_norm(user, modules) or modules[str(user.target)]
            else:
                site.epilogue_names.append(operation)
            if operation == "add":
                site.add_node = user
            site.nodes.append(user)
        fused_nodes.update(site.nodes)
        site.followed_by = _name_unfused(site, modules)
        yield site


def _name_unfused(site: FusionSite, modules: dict[str, Any]) -> str:
    """Return PyTorch's name of the only operation after a site if it is an activation or a normalization, else ""."""
    users = list(site.nodes[-1].users)
    if len(users) != 1 or users[0].op not in ("call_module", "call_function"):
        return ""
    if users[0].op == "call_module":
        module_type = type(modules[str(users[0].target)])
        return module_type.__name__ if module_type.__module__ in REPORTED_MODULES else ""
    name = getattr(users[0].target, "__name__", "")
    return name if name in REPORTED_FUNCTIONS else ""


def _next_fusible(
    site: FusionSite,
    modules: dict[str, Any],
    order: dict[fx.Node, int],
    node_metadata: Mapping[fx.Node, tuple[Any, ...]],
) -> tuple[fx.Node, str] | None:
    """Return the next node that a site's kernel can compute and its operation; None if there is none."""
    last_node = site.nodes[-1]
    if len(last_node.users) != 1:
        return None
    (user,) = last_node.users
    operation = _classify_node(user, last_node, modules)
    if (
        operation is None
        or operation in site.epilogue_names
        or (operation == "norm" and (site.norm or site.epilogue_names))
    ):
        return None
    if operation == "add":
        other_arguments = [arg for arg in user.args if arg is not last_node]
        if len(other_arguments) != 1 or not isinstance(other_arguments[0], fx.Node):
            return None
        if (
            node_metadata.get(other_arguments[0], UNKNOWN_METADATA)[1:]
            != node_metadata.get(last_node, UNKNOWN_METADATA)[1:]
        ):
            return None
    if node_metadata.get(user, UNKNOWN_METADATA) != node_metadata.get(last_node, UNKNOWN_METADATA):
        return None  # later nodes may depend on the memory format, such as a `view`
    first_order, site_nodes = order[site.nodes[0]], {*site.nodes}
    if any(
        _is_in_place_write(node, modules)
        for node in order
        if first_order < order[node] < order[user] and node not in site_nodes
    ):
        return None  # the kernel runs at the last node, and its input could be overwritten before that
    return user, operation


def _classify_node(node: fx.Node, input_node: fx.Node, modules: dict[str, Any]) -> str | None:
    """Return the operation of a node: `norm`, `add`, the name of an activation, or None for anything else."""
    is_first_argument = bool(node.args) and node.args[0] is input_node
    match node.op:
        case "call_module" if is_first_argument and len(node.args) == 1 and not node.kwargs:
            module = modules[str(node.target)]
            if has_hooks(module):
                return None
            if type(module) in NORMS:
                return "norm" if module.track_running_stats and module.running_mean is not None else None
            if type(module) is torch.nn.Hardtanh:
                return ACTIVATION_BY_LIMITS.get((module.min_val, module.max_val))
            if type(module) in PARAMETRIC_MODULES:
                name, parameters = PARAMETRIC_MODULES[type(module)]
                return ACTIVATION_BY_PARAMETERS.get((name, *(getattr(module, parameter) for parameter in parameters)))
            return ACTIVATION_MODULES.get(type(module))
        case "call_function" if node.target in ADD_FUNCTIONS:
            return (
                "add"
                if len(node.args) == 2 and not node.kwargs and (is_first_argument or node.target is not operator.iadd)
                else None
            )
        case "call_function" | "call_method" if is_first_argument and node.target in CLAMP_FUNCTIONS:
            return _match_clamp(node, *CLAMP_FUNCTIONS[node.target])
        case "call_function" if is_first_argument and node.target in PARAMETRIC_FUNCTIONS:
            return _match_parametric(node)
        case "call_function" if is_first_argument and match_functional_norm(node, modules):
            return "norm"
        case "call_function" if is_first_argument and len(node.args) == 1:
            has_no_options = not {
                name for name, option_value in node.kwargs.items() if option_value and name != "inplace"
            }
            return ACTIVATION_FUNCTIONS.get(node.target) if has_no_options else None
        case "call_method" if is_first_argument and node.target in ADD_METHODS:
            return "add" if len(node.args) == 2 and not node.kwargs else None
        case "call_method" if is_first_argument and len(node.args) == 1 and not node.kwargs:
            return ACTIVATION_METHODS.get(str(node.target))
    return None


def _match_parametric(node: fx.Node) -> str | None:
    """Return the epilogue operation of a call of an activation with parameters; None if there is none."""
    name, defaults = PARAMETRIC_FUNCTIONS[node.target]
    arguments = {**dict(zip(defaults, node.args[1:], strict=False)), **node.kwargs}
    arguments.pop("inplace", None)
    if not arguments.keys() <= defaults.keys():
        return None
    values = (defaults | arguments).values()
    return (
        ACTIVATION_BY_PARAMETERS.get((name, *values))
        if not any(isinstance(value, fx.Node) for value in values)
        else None
    )


def _match_clamp(node: fx.Node, low: float | None, high: float | None) -> str | None:
    """Return the activation of a call with limits, given their defaults; None if there is none."""
    given_limits = dict(zip(("low", "high"), node.args[1:], strict=False))
    low, high = given_limits.get("low", low), given_limits.get("high", high)
    for name, value in node.kwargs.items():
        if name in ("min", "min_val"):
            low = value
        elif name in ("max", "max_val"):
            high = value
        elif name != "inplace":
            return None
    numbers = all(limit is None or isinstance(limit, (int, float)) for limit in (low, high))
    return ACTIVATION_BY_LIMITS.get((low, high)) if numbers else None


def _is_in_place_write(node: fx.Node, modules: dict[str, Any]) -> bool:
    """Return whether a node may write to an existing tensor."""
    match node.op:
        case "call_module":
            module = modules[str(node.target)]
            return bool(getattr(module, "inplace", False)) or not type(module).__module__.startswith("torch.nn")
        case "call_method":
            return str(node.target).endswith("_")
        case "call_function":
            name = getattr(node.target, "__name__", "")
            return (
                bool(node.kwargs.get("inplace"))
                or name.endswith("_")
                or name in _IN_PLACE_OPERATORS
                or "out" in node.kwargs
            )
    return False


_IN_PLACE_OPERATORS = {name for name in dir(operator) if name.startswith("i") and name[1:] in dir(operator)} | {
    "setitem"
}


def replace_sites(graph: fx.GraphModule, sites: list[FusionSite]) -> None:
    """Replace the sites of a graph by tuned modules: their own, or new ones."""
    for number, site in enumerate(sites):
        name = f"conv{number}"
        site.module = site.module or TunedConv(site.conv, site.norm, site.epilogue_names)
        graph.add_submodule(name, site.module)
        first_node, last_node = site.nodes[0], site.nodes[-1]
        with graph.graph.inserting_after(last_node):
            input_node = first_node.args[0] if first_node.args else first_node.kwargs["input"]
            args = (input_node, *([site.residual] if site.add_node else []))
            call_node = graph.graph.call_module(name, args)
        last_node.replace_all_uses_with(call_node)
        for node in reversed(site.nodes):
            graph.graph.erase_node(node)
    graph.recompile()
