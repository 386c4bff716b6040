"""The operations after a convolution in a traced graph, one after another, as far as one kernel can compute them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tvmconv.torch.activation_match import list_value_readers, match_activation
from tvmconv.torch.channel_affine import match_affine
from tvmconv.torch.conv_site import ConvSite, Metadata
from tvmconv.torch.graph_constants import ConstantFinder, GraphConstant
from tvmconv.torch.group_norm_layer import FusedNorm
from tvmconv.torch.metadata_readers import is_metadata_reader
from tvmconv.torch.report import NO_KERNEL

ADD_FUNCTIONS = (operator.add, operator.iadd, torch.add)
ADD_METHODS = ("add", "add_")
MULTIPLY_FUNCTIONS = (operator.mul, torch.mul, torch.multiply)
IN_PLACE_ADDS = (operator.iadd, "add_")
ADD = "add"

# Activations and normalizations that a report names if they follow a convolution and no kernel computes them.
REPORTED_MODULES = {f"torch.nn.modules.{name}" for name in ("activation", "batchnorm", "instancenorm", "normalization")}
REPORTED_FUNCTIONS = {
    *("prelu", "leaky_relu", "rrelu", "elu", "selu", "celu", "softplus", "softsign", "gelu", "hardtanh", "logsigmoid"),
    *("batch_norm", "instance_norm", "group_norm", "layer_norm", "relu", "silu", "sigmoid", "tanh", "add", "iadd"),
}
IN_PLACE_OPERATORS = {name for name in dir(operator) if name.startswith("i") and name[1:] in dir(operator)}
IN_PLACE_OPERATORS.add("setitem")

SEVERAL_READERS = "the result before it has several readers"
OVERWRITTEN = "an operation in between may write to a tensor that the kernel reads"
OTHER_FORMAT = "its result has another shape, dtype or memory format"
OTHER_RESIDUAL = "the tensors have different shapes or dtypes"
WRITES_RESIDUAL = "it writes to a tensor that is read elsewhere"
AFTER_ACTIVATION = "it follows an activation or a sum"
TWICE = "a kernel computes each operation at most once"


@dataclass(frozen=True)
class FusionStep:
    """An operation after a convolution: its nodes, and either an affine operation or the name of an epilogue one."""

    nodes: tuple[fx.Node, ...]
    affine: Any = None
    name: str = ""
    slope: GraphConstant | None = None


class GraphView:
    """A traced graph with what the fusion needs to know about it.

    Args:
        graph: The graph.
        metadata: Metadata of the results of its nodes in a run; empty without a run.
        constants: Finder of its constants.
    """

    def __init__(self, graph: fx.GraphModule, metadata: Metadata, constants: ConstantFinder) -> None:
        self.graph, self.metadata, self.constants = graph, metadata, constants
        self.modules: Mapping[str, Any] = dict(graph.named_modules())
        self.order = {node: number for number, node in enumerate(graph.graph.nodes)}
        self._writes = [node for node in self.order if is_in_place_write(node, self.modules)]

    def find_next_step(self, site: ConvSite, used_nodes: Collection[fx.Node]) -> FusionStep | str:
        """Return the next operation that a site's kernel can compute, or else the reason why there is none.

        The reason is "" if nothing that a report names follows.
        """
        last_node = site.nodes[-1]
        readers = list_value_readers(last_node)
        step = self._match_step(site, last_node)
        if isinstance(step, str):
            if len(readers) > 1 and any(map(self.name_reported, readers)):
                return SEVERAL_READERS
            return step
        if not {*step.nodes}.isdisjoint(used_nodes):
            return ""  # another convolution's kernel computes it
        return self._find_obstacle(site, step) or step

    def _match_step(self, site: ConvSite, last_node: fx.Node) -> FusionStep | str:
        if match := match_activation(last_node, self.order, self.modules, self.constants):
            if match.name in site.epilogue_names:
                return TWICE
            return FusionStep(match.nodes, name=match.name, slope=match.slope)
        readers = list_value_readers(last_node)
        if len(readers) != 1:
            return SEVERAL_READERS if readers else ""
        (reader,) = readers
        if affine := match_affine(reader, last_node, self.modules, self.constants, site.conv):
            return AFTER_ACTIVATION if site.epilogue_names else FusionStep((reader,), affine=affine)
        if not is_sum(reader):
            return NO_KERNEL
        if ADD in site.epilogue_names:
            return TWICE
        return self._match_residual(reader, last_node) or FusionStep((reader,), name=ADD)

    def _match_residual(self, node: fx.Node, last_node: fx.Node) -> str:
        """Return why a sum is not one with a residual; "" if it is."""
        others = [arg for arg in node.args if arg is not last_node]
        if len(others) != 1 or not isinstance(others[0], fx.Node):
            return NO_KERNEL
        (other,) = others
        first, second = self.metadata.get(other), self.metadata.get(last_node)
        if (first and (first.shape, first.dtype)) != (second and (second.shape, second.dtype)):
            return OTHER_RESIDUAL
        if node.target in IN_PLACE_ADDS and node.args[0] is other and not self._is_private(other, node):
            return WRITES_RESIDUAL
        return ""

    def _is_private(self, node: fx.Node, reader: fx.Node) -> bool:
        """Return whether a node's tensor has memory of its own, which nothing but one reader reads from then on."""
        own = self.metadata.get(node)
        if own is None:
            return False
        for other, metadata in self.metadata.items():
            if metadata.memory != own.memory or self.order[other] >= self.order[reader]:
                continue
            is_read_later = any(self.order[user] > self.order[reader] for user in other.users)
            if is_read_later or other.op in ("placeholder", "get_attr"):
                return False
        return True

    def _find_obstacle(self, site: ConvSite, step: FusionStep) -> str:
        """Return the reason why a site cannot include a matched operation; "" if it can."""
        last, result = self.metadata.get(site.nodes[-1]), self.metadata.get(step.nodes[-1])
        if (result and (result.layout, result.shape, result.dtype)) != (last and (last.layout, last.shape, last.dtype)):
            return OTHER_FORMAT  # later nodes may depend on the memory format, such as a `view`
        end = self.order[step.nodes[-1]]
        inner_nodes = [*site.nodes, *step.nodes[:-1]]
        for node in inner_nodes:  # the shape of an inner result is read from the kernel's result, after the kernel
            for reader in filter(is_metadata_reader, node.users):
                if any(self.order[user] <= end for user in reader.users):
                    return SEVERAL_READERS
        # The kernel runs at the last node, and its inputs could be overwritten before that.
        inputs = [site.input_node, site.residual]
        if step.name == ADD:
            inputs += [arg for arg in step.nodes[0].args if arg is not site.nodes[-1]]
        start = self.order[site.pad_nodes[-1] if site.pad_nodes else site.nodes[0]]
        for write in self._writes:
            is_between = start < self.order[write] < end and write not in inner_nodes
            if is_between and any(self._may_share_memory(write, each) for each in inputs if isinstance(each, fx.Node)):
                return OVERWRITTEN
        return ""

    def _may_share_memory(self, write: fx.Node, node: fx.Node) -> bool:
        """Return whether an in-place operation may write to a node's tensor, as far as the run tells."""
        target = write.args[0] if write.args and write.op != "call_module" else None
        if write.op == "call_module" and len(write.args) == 1 and getattr(self._module(write), "inplace", False):
            target = write.args[0]
        written = self.metadata.get(target) if isinstance(target, fx.Node) else None
        read = self.metadata.get(node)
        return written is None or read is None or "out" in write.kwargs or written.memory == read.memory

    def _module(self, node: fx.Node) -> Any:
        return self.modules[str(node.target)]

    def name_reported(self, node: fx.Node) -> str:
        """Return PyTorch's name of an activation, a normalization or a sum; "" for other operations."""
        if node.op == "call_module":
            module_type = type(self._module(node))
            bases = [each for each in module_type.__mro__ if each.__module__ in REPORTED_MODULES]
            return module_type.__name__ if bases else ""
        name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
        return name if node.op in ("call_function", "call_method") and name.strip("_") in REPORTED_FUNCTIONS else ""

    def describe_operation(self, node: fx.Node) -> str:
        """Return the name of a node's operation in the model: a class, or a function."""
        if node.op == "call_module":
            return type(self._module(node)).__name__
        return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))


def is_sum(node: fx.Node) -> bool:
    """Return whether a node adds two values, without a factor."""
    targets: tuple[Any, ...] = ADD_METHODS if node.op == "call_method" else ADD_FUNCTIONS
    is_call = node.op in ("call_function", "call_method")
    return is_call and node.target in targets and len(node.args) == 2 and node.kwargs in ({}, {"alpha": 1})


def is_product(node: fx.Node) -> bool:
    """Return whether a node multiplies two values, not in place."""
    is_call = node.op == "call_function" and node.target in MULTIPLY_FUNCTIONS
    is_call = is_call or (node.op == "call_method" and node.target == "mul")
    return is_call and len(node.args) == 2 and not node.kwargs


def is_in_place_write(node: fx.Node, modules: Mapping[str, Any]) -> bool:
    """Return whether a node may write to an existing tensor."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        is_known = isinstance(module, FusedNorm) or type(module).__module__.startswith("torch.nn")
        return bool(getattr(module, "inplace", False)) or not is_known
    if node.op == "call_method":
        return str(node.target).endswith("_")
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    is_named_so = name.endswith("_") or name in IN_PLACE_OPERATORS
    return is_named_so or bool(node.kwargs.get("inplace")) or "out" in node.kwargs
