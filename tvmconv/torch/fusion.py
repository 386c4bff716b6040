"""The convolutions of a traced model, with the operations after each that one kernel can compute, and the workloads."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import fx
from torch.nn import functional

from tvmconv.errors import ModelError, WorkloadError
from tvmconv.models.model_graph import make_convolution
from tvmconv.torch.layer import CONVOLUTIONS, NORMS, InputKey, TunedConv, make_input_key
from tvmconv.torch.model import Optimized
from tvmconv.torch.partition import GraphPartition, has_hooks
from tvmconv.torch.signature import ACTIVATIONS, find_layout
from tvmconv.workloads import Conv
from tvmconv.workloads.layout import CHANNELS_FIRST

ADD_FUNCTIONS = (operator.add, operator.iadd, torch.add)
ADD_METHODS = ("add", "add_")

# PyTorch's functions and modules that compute a kernel's activation if their parameters are right. Modules have the
# same names without underscore, and functions that write to their input end in one.
ACTIVATION_MODULE = "torch.nn.modules.activation"
ACTIVATION_NAMES = {
    *("relu", "relu6", "silu", "mish", "tanh", "sigmoid", "hardswish", "hardsigmoid", "leaky_relu", "elu"),
    *("softplus", "gelu", "hardtanh", "clamp", "clip"),
}
_LARGE = torch.logspace(1, 30, 60, dtype=torch.float64, device="cpu")  # tells limits apart
SAMPLES = torch.cat([torch.linspace(-8, 8, 257, dtype=torch.float64, device="cpu"), _LARGE, -_LARGE])

# Activations and normalizations that a report names if they follow a convolution and no kernel computes them.
REPORTED_MODULES = {f"torch.nn.modules.{name}" for name in ("activation", "batchnorm", "instancenorm", "normalization")}
REPORTED_FUNCTIONS = {
    *("prelu", "leaky_relu", "rrelu", "elu", "selu", "celu", "softplus", "softsign", "gelu", "hardtanh", "logsigmoid"),
    *("batch_norm", "instance_norm", "group_norm", "layer_norm"),
}
IN_PLACE_OPERATORS = {name for name in dir(operator) if name.startswith("i") and name[1:] in dir(operator)}
IN_PLACE_OPERATORS.add("setitem")

NORM_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
NORM_TENSORS = NORM_ARGUMENTS[1:5]
DEFAULT_EPS = 1e-5  # PyTorch's default


DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
TF32_DTYPE = "tf32"
ROOT_PATH = "(itself)"  # path of a model that is itself a convolution
NOT_RUN_REASON = "it did not run on the example, or it is in a module with hooks or a subclass of a convolution"


@dataclass(frozen=True)
class TensorMetadata:
    """Shape, strides in elements and dtype of the tensor that a graph node produced."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    key: InputKey  # of kernels that can take the tensor as input

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> TensorMetadata:
        """Return the metadata of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, make_input_key(tensor))

    def make_random_like(self) -> torch.Tensor:
        """Return random numbers with this shape, dtype and these strides; expanded axes repeat their numbers."""
        num_elements = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        random_numbers = torch.randn(num_elements, dtype=torch.float32, device=self.key[2])
        return random_numbers.to(self.dtype).as_strided(self.shape, self.stride)

    @property
    def layout(self) -> str | None:
        """Layout of the tensor; None if it has both layouts or neither."""
        return find_layout(self.shape, self.stride)


@dataclass
class ConvSite:
    """A convolution of a model, with the operations after it in the graph that one kernel computes with it."""

    path: str  # path of the convolution's module in the model
    conv: Any = None  # the model's module
    nodes: list[fx.Node] = field(default_factory=list)  # nodes of all operations, the convolution first
    norm: Any = None  # the batch normalization after it, if there is one
    epilogue_names: list[str] = field(default_factory=list)  # names of the other operations, with `add` at most once
    add_node: fx.Node | None = None  # node that adds a residual, if there is one
    followed_by: str = ""  # name of the only reader of the last node, if it is reported and no kernel computes it
    workload_text: str = ""  # text of its workload with the epilogue; "" if tvmconv's kernels cannot compute it
    reason: str = ""  # reason why they cannot
    output_layout: str | None = None  # layout that its output has to have; None if that is not decided
    module: Any = None  # module that computes the site in the optimized model; None if PyTorch does
    input_metadata: Any = None  # `TensorMetadata` of its input
    residual_metadata: Any = None  # `TensorMetadata` of the residual, if there is one

    @property
    def residual(self) -> fx.Node | None:
        """Node of the added tensor in the current graph; None if there is none."""
        if self.add_node is None:
            return None
        return next(arg for arg in self.add_node.args if isinstance(arg, fx.Node) and arg not in self.nodes)


class FunctionalNorm:
    """A call of `functional.batch_norm` with constant statistics, in place of a module such as `nn.BatchNorm2d`.

    It has the attributes that `TunedConv` reads. It owns no tensor, so that a tensor that the model replaces is seen.

    Args:
        owner: Module that owns the tensors.
        names: Attribute of each of `NORM_TENSORS` in the owner; None for a weight or bias that the call leaves out.
        eps: Summand of the variance.
    """

    def __init__(self, owner: torch.nn.Module, names: dict[str, str | None], eps: float) -> None:
        self.owner, self.names, self.eps = owner, names, eps

    def __getattr__(self, name: str) -> Any:
        """Return a tensor of the call, or another attribute of the owner, such as its mode and hooks."""
        if name.startswith("__"):
            raise AttributeError(name)
        attribute_name = self.names.get(name, name)
        return None if attribute_name is None else getattr(self.owner, attribute_name)

    @property
    def _parameters(self) -> dict[str, torch.Tensor | None]:
        return {"weight": self.weight, "bias": self.bias}

    @property
    def _buffers(self) -> dict[str, torch.Tensor]:
        return {"running_mean": self.running_mean, "running_var": self.running_var}

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        """Normalize a tensor by PyTorch."""
        return functional.batch_norm(y, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def match_functional_norm(node: fx.Node, modules: dict[str, Any]) -> FunctionalNorm | None:
    """Return the normalization with constant statistics that a graph node calls; None if there is none."""
    if node.op != "call_function" or node.target is not functional.batch_norm:
        return None
    arguments = dict(zip(NORM_ARGUMENTS, node.args, strict=False)) | node.kwargs
    eps = arguments.get("eps", DEFAULT_EPS)
    if arguments.get("training", False) or not isinstance(eps, float):
        return None
    tensors = {name: arguments.get(name) for name in NORM_TENSORS}
    given_tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if not {"running_mean", "running_var"} <= given_tensors.keys():
        return None
    if not all(isinstance(tensor, fx.Node) and tensor.op == "get_attr" for tensor in given_tensors.values()):
        return None  # a tensor is computed at each call
    paths = {name: str(tensor.target).rpartition(".") for name, tensor in given_tensors.items()}
    owners = {path[0] for path in paths.values()}
    owner = modules.get(owners.pop()) if len(owners) == 1 else None
    if owner is None or owner.training:
        return None
    return FunctionalNorm(owner, {name: paths[name][2] if name in paths else None for name in NORM_TENSORS}, eps)


def find_fusion_sites(graph: fx.GraphModule, metadata: Mapping[fx.Node, TensorMetadata]) -> Iterator[ConvSite]:
    """Yield the convolutions of a graph, each with the operations after it that one kernel can compute.

    `metadata` describes the results of the nodes in a run of the model.
    """
    modules = dict(graph.named_modules())
    order = {node: number for number, node in enumerate(graph.graph.nodes)}
    fused_nodes: set[fx.Node] = set()
    for node in order:
        conv = modules.get(str(node.target)) if node.op == "call_module" else None
        if type(conv) not in CONVOLUTIONS or len(node.args) != 1 or node.kwargs:
            continue
        site = ConvSite(str(node.target).partition(".")[2], conv, [node])
        while next_fusible := _next_fusible(site, modules, order, metadata):
            user, operation = next_fusible
            if user in fused_nodes:
                break
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


def _name_unfused(site: ConvSite, modules: dict[str, Any]) -> str:
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
    site: ConvSite, modules: dict[str, Any], order: dict[fx.Node, int], metadata: Mapping[fx.Node, TensorMetadata]
) -> tuple[fx.Node, str] | None:
    """Return the next node that a site's kernel can compute and its operation; None if there is none."""
    last_node = site.nodes[-1]
    if len(last_node.users) != 1:
        return None
    (user,) = last_node.users
    operation = _classify_node(user, last_node, modules)
    if operation is None or operation in site.epilogue_names:
        return None
    if operation == "norm" and (site.norm or site.epilogue_names):
        return None
    last, result = metadata.get(last_node), metadata.get(user)
    if operation == "add":
        other_arguments = [arg for arg in user.args if arg is not last_node]
        if len(other_arguments) != 1 or not isinstance(other_arguments[0], fx.Node):
            return None
        other = metadata.get(other_arguments[0])
        if (other and (other.shape, other.dtype)) != (last and (last.shape, last.dtype)):
            return None
    if (result and (result.layout, result.shape, result.dtype)) != (last and (last.layout, last.shape, last.dtype)):
        return None  # later nodes may depend on the memory format, such as a `view`
    between = [node for node in order if order[site.nodes[0]] < order[node] < order[user] and node not in site.nodes]
    if any(_is_in_place_write(node, modules) for node in between):
        return None  # the kernel runs at the last node, and its input could be overwritten before that
    return user, operation


def _classify_node(node: fx.Node, input_node: fx.Node, modules: dict[str, Any]) -> str | None:
    """Return the operation of a node: `norm`, `add`, the name of an activation, or None for anything else."""
    is_first_argument = bool(node.args) and node.args[0] is input_node
    is_method = node.op == "call_method"
    if node.op in ("call_function", "call_method") and node.target in (ADD_METHODS if is_method else ADD_FUNCTIONS):
        is_symmetric = not is_method and node.target is not operator.iadd
        is_plain = len(node.args) == 2 and not node.kwargs
        return "add" if is_plain and (is_first_argument or is_symmetric) else None
    if not is_first_argument:
        return None
    if node.op == "call_module":
        module = modules[str(node.target)]
        if has_hooks(module) or len(node.args) > 1 or node.kwargs:
            return None
        if type(module) in NORMS:
            return "norm" if module.track_running_stats and module.running_mean is not None else None
        names = {name.replace("_", "") for name in ACTIVATION_NAMES}
        is_candidate = type(module).__module__ == ACTIVATION_MODULE and type(module).__name__.lower() in names
        return _match_activation(module) if is_candidate else None
    if match_functional_norm(node, modules):
        return "norm"
    name = str(node.target) if is_method else getattr(node.target, "__name__", "")
    if name.removesuffix("_") not in ACTIVATION_NAMES or node.all_input_nodes != [input_node]:
        return None
    function = getattr(torch.Tensor, name) if is_method else node.target
    if (getattr(function, "__module__", None) or "torch").partition(".")[0] != "torch":
        return None  # a function of the user's own
    return _match_activation(lambda y: function(y, *node.args[1:], **node.kwargs))


def _match_activation(function: Callable[[torch.Tensor], Any]) -> str | None:
    """Return the epilogue operation that has a function's values at `SAMPLES`; None if there is none."""
    try:
        y = function(SAMPLES.clone())
    except Exception:  # of any type, for arguments that the function does not take
        return None
    for name, reference in ACTIVATIONS.items():
        if torch.allclose(y, reference(SAMPLES), rtol=1e-6, atol=1e-9):
            return name
    return None


def _is_in_place_write(node: fx.Node, modules: dict[str, Any]) -> bool:
    """Return whether a node may write to an existing tensor."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        return bool(getattr(module, "inplace", False)) or not type(module).__module__.startswith("torch.nn")
    if node.op == "call_method":
        return str(node.target).endswith("_")
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    is_named_so = name.endswith("_") or name in IN_PLACE_OPERATORS
    return is_named_so or bool(node.kwargs.get("inplace")) or "out" in node.kwargs


def replace_sites(graph: fx.GraphModule, sites: list[ConvSite]) -> None:
    """Replace the sites of a graph by tuned modules: their own, or new ones."""
    for number, site in enumerate(sites):
        name = f"conv{number}"
        site.module = site.module or TunedConv(site.conv, site.norm, site.epilogue_names, site.output_layout)
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


class ShapeRecorder(fx.Interpreter):
    """An interpreter that runs a graph and records the metadata of its nodes."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.metadata: dict[fx.Node, TensorMetadata] = {}

    def run_with_arguments(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on positional and keyword arguments."""
        arguments = inspect.signature(self.module.forward).bind(*args, **kwargs)
        arguments.apply_defaults()
        return self.run(*arguments.args)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and record the metadata of its result."""
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.metadata[n] = TensorMetadata.from_tensor(result)
        return result


class GraphPlanner(Protocol):
    """What decides about the layouts inside a graph; see `tvmconv.torch.layout_plan`."""

    def make_recorder(self, graph: fx.GraphModule, image_ndims: Collection[int]) -> Any:
        """Return the `ShapeRecorder` with which the graph has to be run; images have one of these numbers of axes."""

    def plan(self, graph: fx.GraphModule, sites: Sequence[ConvSite], recorder: Any) -> None:
        """Set the layouts of the sites, and insert conversions into the graph."""


def match_convolutions(
    model: Optimized,
    partitions: Sequence[GraphPartition],
    arguments: Sequence[Any],
    planner: GraphPlanner | None = None,
) -> list[ConvSite]:
    """Match the convolutions of a model in a run on the example; replace those that have a workload.

    Without a planner, all images keep the layouts that they have in PyTorch. Returns all convolutions of the model, in
    the order of the graphs of its traced parts.
    """
    image_ndims = {CONVOLUTIONS[type(module)] + 2 for module in model.modules() if type(module) in CONVOLUTIONS}
    recorders: list[ShapeRecorder] = [
        planner.make_recorder(partition.module.graph, image_ndims) if planner else ShapeRecorder(partition.module.graph)
        for partition in partitions
    ]
    for partition, recorder in zip(partitions, recorders, strict=True):
        partition.module.interpreter = recorder.run_with_arguments
    with torch.no_grad():
        model(*arguments)
    sites: list[ConvSite] = []
    for partition, recorder in zip(partitions, recorders, strict=True):
        partition.module.interpreter = None
        sites += _replace_convolutions(partition, recorder, planner)
    matched_paths = {site.path for site in sites}
    for path, module in model.named_modules():
        if isinstance(module, tuple(CONVOLUTIONS)) and (path or ROOT_PATH) not in matched_paths:
            sites.append(ConvSite(path, reason=NOT_RUN_REASON))
    return sites


def _replace_convolutions(
    partition: GraphPartition, recorder: ShapeRecorder, planner: GraphPlanner | None
) -> list[ConvSite]:
    """Match the convolutions of one part and replace those that have a workload."""
    metadata = recorder.metadata
    sites = list(find_fusion_sites(partition.module.graph, metadata))
    layouts = [metadata[site.nodes[0]].layout for site in sites if site.nodes[0] in metadata]
    known_layouts = [layout for layout in layouts if layout]
    default_layout = max(known_layouts, key=known_layouts.count, default=CHANNELS_FIRST)
    for site in sites:
        site.path = f"{partition.path}.{site.path}".strip(".") or ROOT_PATH
        try:
            site.workload_text = _make_workload(site, metadata, default_layout).text
        except (WorkloadError, ModelError) as error:
            site.reason = str(error)
        else:
            site.input_metadata = metadata[site.nodes[0].args[0]]
            site.residual_metadata = None if site.residual is None else metadata[site.residual]
    supported_sites = [site for site in sites if site.workload_text]
    if planner:
        planner.plan(partition.module.graph, supported_sites, recorder)
    replace_sites(partition.module.graph, supported_sites)
    return sites


def _make_workload(site: ConvSite, metadata: dict[fx.Node, TensorMetadata], default_layout: str) -> Conv:
    """Return the workload of a site; raise ModelError with the reason if tvmconv's kernels cannot compute it."""
    conv = site.conv
    input_node = site.nodes[0].args[0]
    input_metadata = metadata.get(input_node) if isinstance(input_node, fx.Node) else None
    output_metadata = metadata.get(site.nodes[0])
    if input_metadata is None or output_metadata is None:
        raise ModelError("it did not run on the example")
    if reason := _find_obstacle(conv, input_metadata, output_metadata):
        raise ModelError(reason)
    padding = conv.padding
    if padding == "same":
        totals = [dilation * (size - 1) for dilation, size in zip(conv.dilation, conv.kernel_size, strict=True)]
        padding = (*(total // 2 for total in totals), *(total - total // 2 for total in totals))
    elif padding == "valid":
        padding = (0,) * len(conv.kernel_size)
    uses_tf32 = input_metadata.key[3] and output_metadata.dtype is torch.float32
    workload: Any = make_convolution(
        input_metadata.shape,
        tuple(conv.weight.shape),
        stride=tuple(conv.stride),
        padding=tuple(padding),
        dilation=tuple(conv.dilation),
        groups=conv.groups,
        dtype=TF32_DTYPE if uses_tf32 else DTYPES[output_metadata.dtype],
        bias=conv.bias is not None or site.norm is not None,
    )
    return replace(
        workload, layout=output_metadata.layout or default_layout, epilogue=(*workload.epilogue, *site.epilogue_names)
    )


def _find_obstacle(conv: Any, input_metadata: TensorMetadata, output_metadata: TensorMetadata) -> str:
    """Return the reason why tvmconv's kernels cannot compute a convolution; "" if they can."""
    if has_hooks(conv):
        return "the module has hooks"
    if "weight" not in conv._parameters:
        return "its weight is computed"
    if conv.padding_mode != "zeros":
        return f"it pads by {conv.padding_mode}"
    weight = conv.weight
    if type(weight) is not torch.nn.Parameter or weight.layout is not torch.strided:
        return f"its weight is {type(weight).__name__} of {str(weight.layout).removeprefix('torch.')}"
    if weight.is_inference():
        return "its weight is an inference tensor, whose changes cannot be detected"
    if output_metadata.dtype not in DTYPES:
        return f"its dtype is {str(output_metadata.dtype).removeprefix('torch.')}"
    if len(input_metadata.shape) != CONVOLUTIONS[type(conv)] + 2:
        return "its input has no batch axis"
    return ""
