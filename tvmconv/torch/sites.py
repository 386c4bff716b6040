"""The convolutions of a model and what follows each, found in the graph that `torch.fx` makes of it."""

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
from tvmconv.torch.norms import functional_norm
from tvmconv.workloads.epilogues.leaky_relu import SLOPES

MODEL = "model"  # what the model is called in the graph
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ADDITIONS = (operator.add, operator.iadd, torch.add)
ADDING_METHODS = ("add", "add_")
FUNCTIONS: dict[Any, str] = {
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
METHODS = {name + end: name for name in ("relu", "sigmoid", "tanh") for end in ("", "_")}
SAME = (torch.nn.Identity, torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d)
SAME_FUNCTIONS = {"dropout": 2, "stochastic_depth": 3}  # PyTorch's and torchvision's, and where they take `training`
MODULES: dict[type, str] = {
    torch.nn.ReLU: "relu",
    torch.nn.SiLU: "silu",
    torch.nn.Mish: "mish",
    torch.nn.Tanh: "tanh",
    torch.nn.ReLU6: "relu6",
    torch.nn.Hardswish: "hardswish",
    torch.nn.Hardsigmoid: "hardsigmoid",
    torch.nn.Sigmoid: "sigmoid",
}


# Activations with parameters: what they are called here, and their parameters with PyTorch's defaults.
PARAMETRIC: dict[Any, tuple[str, dict[str, Any]]] = {
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
WITH_PARAMETERS: dict[tuple[Any, ...], str] = {  # the operations of epilogues that these are, by their parameters
    **{("leaky_relu", slope): name for name, slope in SLOPES.items()},
    ("elu", 1.0): "elu",
    ("softplus", 1, 20): "softplus",
    ("gelu", "none"): "gelu",
    ("gelu", "tanh"): "gelu_tanh",
}
CLAMPS: dict[Any, tuple[float | None, float | None]] = {  # and their limits, if none are given
    **dict.fromkeys((torch.clamp, torch.clamp_, torch.clip, "clamp", "clamp_", "clip", "clip_"), (None, None)),
    **dict.fromkeys((functional.hardtanh, functional.hardtanh_), (-1, 1)),
}
# What a report names where it follows a convolution and no kernel does it: activations and normalisations.
NAMED_MODULES = {f"torch.nn.modules.{name}" for name in ("activation", "batchnorm", "instancenorm", "normalization")}
NAMED_FUNCTIONS = {
    *("prelu", "leaky_relu", "rrelu", "elu", "selu", "celu", "softplus", "softsign", "gelu", "hardtanh", "logsigmoid"),
    *("batch_norm", "instance_norm", "group_norm", "layer_norm"),
}
UNKNOWN = (None, None, None)
LIMITS: dict[tuple[float | None, float | None], str] = {(0, None): "relu", (0, 1): "clamp", (0, 6): "relu6"}


@dataclass
class Site:
    """A convolution in a graph, and the operations behind it that one kernel does with it.

    Attributes:
        path: of the convolution in the model.
        conv: the model's module.
        norm: the batch normalisation behind it, if there is one.
        names: of the other operations, `add` among them at most once.
        nodes: of all of them, the convolution's first.
        adding: the one that adds a residual, if there is one.
        followed_by: what alone reads the last one's value, and no kernel does; "" if there is no such operation.
        module: what computes the site in the tuned graph.
    """

    path: str
    conv: Any
    nodes: list[fx.Node]
    norm: Any = None
    names: list[str] = field(default_factory=list)
    adding: fx.Node | None = None
    followed_by: str = ""
    module: Any = None

    @property
    def residual(self) -> fx.Node | None:
        """What is added, as the graph has it now."""
        if self.adding is None:
            return None
        return next(arg for arg in self.adding.args if isinstance(arg, fx.Node) and arg not in self.nodes)


class _Holder(torch.nn.Module):
    """Calls the model: a model that is a single convolution is a module in the graph like any other."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        return self.model(x)


class _Tracer(fx.Tracer):
    """Goes into all modules but PyTorch's own, and those that have hooks, which shall be called."""

    proxy_buffer_attributes = True  # what is computed from buffers is computed at each call

    def __init__(self) -> None:
        super().__init__()
        self._autocast = _autocast()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node; raises ModelError where the model has changed autocast, as a graph would not."""
        if _autocast() != self._autocast:
            raise ModelError("it changes autocast")
        return super().create_node(*args, **kwargs)

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is one node."""
        return hooked(m) or super().is_leaf_module(m, module_qualified_name)


def _autocast() -> list[torch.dtype | None]:
    """The dtypes of autocast on the CPU and on GPUs, where it is on."""
    return [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cpu", "cuda")]


def hooked(module: torch.nn.Module) -> bool:
    """Whether somebody else does something when a module is called."""
    return any(getattr(module, name) for name in HOOKS)


def trace(model: torch.nn.Module, fixed: Mapping[str, Any] | None = None) -> fx.GraphModule:
    """The model as a graph, in which it is called `MODEL`; it shares the model's modules and parameters.

    Args:
        model: to be traced.
        fixed: arguments that have one value in the graph, whatever it is called with.

    Raises:
        Exception: whatever a model raises that cannot be traced.
    """
    holder, tracer = _Holder(model), _Tracer()
    if type(model) in CONVOLUTIONS or hooked(model):
        graph = tracer.trace(holder)
    else:
        graph = tracer.trace(model, dict(fixed or {}))
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr"):
                node.target = f"{MODEL}.{node.target}"
        _unguard(graph, fixed or {})
    strip(graph, dict(holder.named_modules()))
    traced = fx.GraphModule(holder, graph, type(model).__name__)
    traced.model = model  # itself, in place of the shells that `GraphModule` makes of modules on the way to others
    return traced


def _unguard(graph: fx.Graph, fixed: Mapping[str, Any]) -> None:
    """Let the placeholders of fixed arguments have their names, and nobody look at what is given for them."""
    names = {f"{name}_1": name for name in fixed}  # as the tracer calls them
    for node in [node for node in graph.nodes if node.op == "placeholder" and node.target in names]:
        node.target = names[node.target]
        for user in list(node.users):
            for behind in list(user.users):
                graph.erase_node(behind)
            graph.erase_node(user)


def strip(graph: fx.Graph, modules: dict[str, Any]) -> None:
    """Take out what gives what it is given in evaluation mode."""
    for node in graph.nodes:
        same = False
        if node.op == "call_module":
            module = modules.get(str(node.target))
            same = isinstance(module, SAME) and not hooked(module)
        elif node.op == "call_function" and (place := SAME_FUNCTIONS.get(getattr(node.target, "__name__", ""))):
            same = node.kwargs.get("training", (*node.args, *[True] * place)[place]) is False
        if same and node.args:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def find_sites(graph: fx.GraphModule, kinds: Mapping[fx.Node, tuple[Any, ...]]) -> Iterator[Site]:
    """The convolutions of a graph, each with as much of what follows it as one kernel can do.

    Args:
        graph: of the model.
        kinds: what each node gave when the model was run: the memory format, and shape and dtype.
    """
    modules = dict(graph.named_modules())
    order = {node: number for number, node in enumerate(graph.graph.nodes)}
    taken: set[fx.Node] = set()
    for node in order:
        conv = modules.get(str(node.target)) if node.op == "call_module" else None
        if type(conv) not in CONVOLUTIONS or len(node.args) != 1 or node.kwargs:
            continue
        site = Site(str(node.target).partition(".")[2], conv, [node])
        while (following := _following(site, modules, order, kinds)) is not None and following[0] not in taken:
            user, kind = following
            if kind == "norm":
                site.norm = functional_norm(user, modules) or modules[str(user.target)]
            else:
                site.names.append(kind)
            if kind == "add":
                site.adding = user
            site.nodes.append(user)
        taken.update(site.nodes)
        site.followed_by = _unfused(site, modules)
        yield site


def _unfused(site: Site, modules: dict[str, Any]) -> str:
    """What PyTorch calls the one operation behind a site, if it is an activation or a normalisation."""
    users = list(site.nodes[-1].users)
    if len(users) != 1 or users[0].op not in ("call_module", "call_function"):
        return ""
    if users[0].op == "call_module":
        kind = type(modules[str(users[0].target)])
        return kind.__name__ if kind.__module__ in NAMED_MODULES else ""
    name = getattr(users[0].target, "__name__", "")
    return name if name in NAMED_FUNCTIONS else ""


def _following(
    site: Site, modules: dict[str, Any], order: dict[fx.Node, int], kinds: Mapping[fx.Node, tuple[Any, ...]]
) -> tuple[fx.Node, str] | None:
    """The next node that a site's kernel can do as well, and what it does; None if there is none."""
    last = site.nodes[-1]
    if len(last.users) != 1:
        return None
    (user,) = last.users
    kind = _kind(user, last, modules)
    if kind is None or kind in site.names or (kind == "norm" and (site.norm or site.names)):
        return None
    if kind == "add":
        others = [arg for arg in user.args if arg is not last]
        if len(others) != 1 or not isinstance(others[0], fx.Node):
            return None
        if kinds.get(others[0], UNKNOWN)[1:] != kinds.get(last, UNKNOWN)[1:]:
            return None
    if kinds.get(user, UNKNOWN) != kinds.get(last, UNKNOWN):
        return None  # what is behind may need it to lie as it does, as a `view`
    first, inside = order[site.nodes[0]], {*site.nodes}
    if any(_writes(node, modules) for node in order if first < order[node] < order[user] and node not in inside):
        return None  # computed later, the convolution might read what was written over its input meanwhile
    return user, kind


def _kind(node: fx.Node, value: fx.Node, modules: dict[str, Any]) -> str | None:
    """What a node does to a value: `norm`, `add`, the name of an activation, or None for anything else."""
    first = bool(node.args) and node.args[0] is value
    match node.op:
        case "call_module" if first and len(node.args) == 1 and not node.kwargs:
            module = modules[str(node.target)]
            if hooked(module):
                return None
            if type(module) in NORMS:
                return "norm" if module.track_running_stats and module.running_mean is not None else None
            if type(module) is torch.nn.Hardtanh:
                return LIMITS.get((module.min_val, module.max_val))
            if type(module) in PARAMETRIC_MODULES:
                name, parameters = PARAMETRIC_MODULES[type(module)]
                return WITH_PARAMETERS.get((name, *(getattr(module, parameter) for parameter in parameters)))
            return MODULES.get(type(module))
        case "call_function" if node.target in ADDITIONS:
            return (
                "add"
                if len(node.args) == 2 and not node.kwargs and (first or node.target is not operator.iadd)
                else None
            )
        case "call_function" | "call_method" if first and node.target in CLAMPS:
            return _limited(node, *CLAMPS[node.target])
        case "call_function" if first and node.target in PARAMETRIC:
            return _with_parameters(node)
        case "call_function" if first and functional_norm(node, modules):
            return "norm"
        case "call_function" if first and len(node.args) == 1:
            plain = not {name for name, given in node.kwargs.items() if given and name != "inplace"}
            return FUNCTIONS.get(node.target) if plain else None
        case "call_method" if first and node.target in ADDING_METHODS:
            return "add" if len(node.args) == 2 and not node.kwargs else None
        case "call_method" if first and len(node.args) == 1 and not node.kwargs:
            return METHODS.get(str(node.target))
    return None


def _with_parameters(node: fx.Node) -> str | None:
    """The operation of an epilogue that a call of an activation with parameters is; None if it is none."""
    name, defaults = PARAMETRIC[node.target]
    given = {**dict(zip(defaults, node.args[1:], strict=False)), **node.kwargs}
    given.pop("inplace", None)
    if not given.keys() <= defaults.keys():
        return None
    values = (defaults | given).values()
    return WITH_PARAMETERS.get((name, *values)) if not any(isinstance(value, fx.Node) for value in values) else None


def _limited(node: fx.Node, low: float | None, high: float | None) -> str | None:
    """The activation that a call with limits is, by their defaults."""
    given = dict(zip(("low", "high"), node.args[1:], strict=False))
    low, high = given.get("low", low), given.get("high", high)
    for name, value in node.kwargs.items():
        if name in ("min", "min_val"):
            low = value
        elif name in ("max", "max_val"):
            high = value
        elif name != "inplace":
            return None
    numbers = all(limit is None or isinstance(limit, (int, float)) for limit in (low, high))
    return LIMITS.get((low, high)) if numbers else None


def _writes(node: fx.Node, modules: dict[str, Any]) -> bool:
    """Whether a node may write to a value that is there already."""
    match node.op:
        case "call_module":
            module = modules[str(node.target)]
            return bool(getattr(module, "inplace", False)) or not type(module).__module__.startswith("torch.nn")
        case "call_method":
            return str(node.target).endswith("_")
        case "call_function":
            name = getattr(node.target, "__name__", "")
            return bool(node.kwargs.get("inplace")) or name.endswith("_") or name in _IN_PLACE or "out" in node.kwargs
    return False


_IN_PLACE = {name for name in dir(operator) if name.startswith("i") and name[1:] in dir(operator)} | {"setitem"}


def rewrite(graph: fx.GraphModule, sites: list[Site]) -> None:
    """Have modules of our own compute the sites: those that they have, or new ones."""
    for number, site in enumerate(sites):
        name = f"conv{number}"
        site.module = site.module or TunedConv(site.conv, site.norm, site.names)
        graph.add_submodule(name, site.module)
        first, last = site.nodes[0], site.nodes[-1]
        with graph.graph.inserting_after(last):
            given = first.args[0] if first.args else first.kwargs["input"]
            args = (given, *([site.residual] if site.adding else []))
            made = graph.graph.call_module(name, args)
        last.replace_all_uses_with(made)
        for node in reversed(site.nodes):
            graph.graph.erase_node(node)
    graph.recompile()
