"""A run of a graph that records which nodes compute the same if their images have the other layout.

A convolution network mixes layers that compute images of any layout, such as a pooling, with operations that depend on
the layout, such as a `view`. No list of operations is needed: each node is executed on its inputs in both layouts. If
the results are the same, and images among them follow the layout of the inputs, the layout may change around the node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only

from tvmconv.torch.conv_site import TensorMetadata
from tvmconv.torch.conv_source import bind_conv_arguments
from tvmconv.torch.group_norm_layer import FusedNorm
from tvmconv.torch.partition import are_equal
from tvmconv.torch.shape_recorder import ShapeRecorder, find_storage
from tvmconv.torch.tensor_layout import find_layout, lay_out
from tvmconv.torch.torch_modules import CONVOLUTIONS, has_hooks, is_plain_instance
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST

OTHER_LAYOUT = {CHANNELS_FIRST: CHANNELS_LAST, CHANNELS_LAST: CHANNELS_FIRST}
OWN_MODULES = ("torch", "_operator", "operator", "builtins")  # top packages of functions that are executed twice
TimeCall = Callable[[str, Callable[[], object]], float]  # from a name and a call to the seconds of the call


@dataclass
class NodeLayout:
    """How a node of a graph depends on the layout of its images."""

    # Layout of the images of its result in the run; None if there are none, or they have both layouts.
    layout: str | None = None
    nbytes: int = 0  # bytes of these images
    # Whether the node computes the same in the other layout, and its images then have that one.
    follows_inputs: bool = False
    shared_inputs: frozenset[fx.Node] = frozenset()  # input nodes with whose results it shares memory
    is_view: bool = False  # whether its results are views of its inputs, which it does not write to
    seconds: dict[str, float] = field(default_factory=dict)  # seconds by layout; empty if they were not measured


@dataclass(frozen=True)
class _RecordedCall:
    """A node with the arguments of its call, in which metadata stands for images."""

    node: fx.Node
    arguments: tuple[Any, Any]

    def make_call(self, run: Callable[[fx.Node, Any, Any], object], layout: str) -> Callable[[], object]:
        """Return the call of the node on random images of a layout."""

        def make_image(metadata: TensorMetadata) -> torch.Tensor:
            return lay_out(metadata.make_random_like(), layout)

        args, kwargs = tree_map_only(TensorMetadata, make_image, self.arguments)
        return functools.partial(run, self.node, args, kwargs)

    def describe(self, module: object) -> str:
        """Return a text that is equal for equal calls; tensors other than images stand for all of their shape."""

        def describe_tensor(tensor: torch.Tensor) -> str:
            return f"{tuple(tensor.shape)} {tensor.dtype}"

        arguments = tree_map_only(torch.Tensor, describe_tensor, self.arguments)
        target = module if self.node.op == "call_module" else getattr(self.node.target, "__name__", self.node.target)
        return f"{target} {arguments}"


class LayoutRecorder(ShapeRecorder):
    """An interpreter that records, besides the metadata of the nodes, their dependence on layouts.

    Args:
        graph: The traced graph.
        image_ndims: Numbers of axes of tensors that count as images.
    """

    def __init__(self, graph: fx.GraphModule, image_ndims: Collection[int]) -> None:
        super().__init__(graph)
        self._image_ndims = image_ndims
        self.layouts: dict[fx.Node, NodeLayout] = {}
        self._calls: list[_RecordedCall] = []

    def is_image(self, value: object) -> bool:
        """Return whether a value is a tensor with a channel axis and spatial axes."""
        return isinstance(value, torch.Tensor) and value.dim() in self._image_ndims and value.is_floating_point()

    def is_convolution(self, n: fx.Node) -> bool:
        """Return whether a node calls a convolution."""
        if n.op == "call_module":
            return is_plain_instance(self.fetch_attr(str(n.target)), CONVOLUTIONS)
        return bind_conv_arguments(n) is not None

    def run_node(self, n: fx.Node) -> Any:
        """Run a node in its own layout, and before that on copies of its inputs in the other one."""
        if n.op == "output":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        images = [value for value in tree_leaves((args, kwargs)) if self.is_image(value)]
        own_layout = _find_common_layout(images)
        other_result = None
        if own_layout and self._may_run_twice(n):
            other_result = self._run_in_layout(n, (args, kwargs), OTHER_LAYOUT[own_layout])
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        versions = [tensor._version for tensor in tensors]
        result = super().run_node(n)
        leaves = tree_leaves(result)
        result_images = [value for value in leaves if self.is_image(value)]
        recorded = NodeLayout(_find_common_layout(result_images), sum(map(_count_bytes, result_images)))
        storages = {find_storage(value) for value in leaves if isinstance(value, torch.Tensor)}
        recorded.shared_inputs = frozenset(
            node
            for node in n.all_input_nodes
            if any(
                isinstance(value, torch.Tensor) and find_storage(value) in storages
                for value in tree_leaves(self.env[node])
            )
        )
        is_unchanged = versions == [tensor._version for tensor in tensors]
        recorded.is_view = is_unchanged and storages <= {find_storage(tensor) for tensor in tensors}
        if other_result is not None and own_layout:
            recorded.follows_inputs = self._follows(result, other_result[0], own_layout)
            if recorded.follows_inputs and not recorded.is_view:
                to_metadata = functools.partial(tree_map_only, torch.Tensor, self._replace_image)
                self._calls.append(_RecordedCall(n, (to_metadata(args), to_metadata(kwargs))))
        self.layouts[n] = recorded
        return result

    def time_nodes(self, nodes: Collection[fx.Node], time_call: TimeCall, has_time: Callable[[], bool]) -> None:
        """Measure those of some nodes that may run in either layout, while there is time for it.

        Views take no time of the device in any layout, and are not measured. `time_call` caches the times of equal
        calls.
        """
        modules = dict(self.module.named_modules())
        for call in (call for call in self._calls if call.node in nodes and has_time()):
            name = call.describe(modules.get(str(call.node.target)))
            self.layouts[call.node].seconds = {
                layout: time_call(f"PyTorch, {layout}: {name}", call.make_call(self._run, layout))
                for layout in OTHER_LAYOUT
            }

    def _run(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        return getattr(self, n.op)(n.target, args, kwargs)

    def _run_in_layout(self, n: fx.Node, arguments: tuple[Any, Any], layout: str) -> tuple[Any] | None:
        """Return the result of a node on copies of its arguments, with images in a layout; None if it fails."""

        def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
            copy = tensor.clone()
            return lay_out(copy, layout) if self.is_image(tensor) else copy

        args, kwargs = tree_map_only(torch.Tensor, copy_tensor, arguments)
        try:
            return (self._run(n, args, kwargs),)
        except RuntimeError:  # a `view`, for example, needs the own layout
            return None

    def _may_run_twice(self, n: fx.Node) -> bool:
        """Return whether a node is PyTorch's own code, which has no effect besides its result."""
        if self.is_convolution(n):  # most of these run by kernels, and they take longest
            return False
        if n.op == "call_method":
            return True
        if n.op == "call_function":
            return (getattr(n.target, "__module__", None) or "torch").partition(".")[0] in OWN_MODULES
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if module is None:
            return False
        is_known = isinstance(module, FusedNorm) or type(module).__module__.partition(".")[0] == "torch"
        return is_known and not has_hooks(module)

    def _follows(self, result: Any, other_result: Any, own_layout: str) -> bool:
        """Return whether results in both layouts are equal, and images among them have the layout of the inputs."""
        if not are_equal(other_result, result):
            return False
        for own, other in zip(tree_leaves(result), tree_leaves(other_result), strict=True):
            if not isinstance(own, torch.Tensor):
                if own != other:
                    return False
            elif not self.is_image(own):
                if own.stride() != other.stride():
                    return False
            elif (suggest_layout(own), suggest_layout(other)) not in (
                (own_layout, OTHER_LAYOUT[own_layout]),
                (None, None),
            ):
                return False
        return True

    def _replace_image(self, tensor: torch.Tensor) -> TensorMetadata | torch.Tensor:
        return TensorMetadata.from_tensor(tensor) if self.is_image(tensor) else tensor


def suggest_layout(tensor: torch.Tensor) -> str | None:
    """Return the layout of a tensor (N, C, space), also of a view of one; None if it has both layouts or neither."""
    layout = find_layout(tensor.shape, tensor.stride())
    space = [stride for size, stride in zip(tensor.shape[2:], tensor.stride()[2:], strict=True) if size > 1]
    if layout or tensor.shape[1] == 1 or not space:
        return layout
    if tensor.stride(1) > max(space):
        return CHANNELS_FIRST
    return CHANNELS_LAST if tensor.stride(1) < min(space) else None


def _find_common_layout(images: Sequence[torch.Tensor]) -> str | None:
    """Return the layout that all images have which do not have both; None if they differ, or there is none."""
    layouts = {layout for image in images if (layout := suggest_layout(image))}
    return layouts.pop() if len(layouts) == 1 else None


def _count_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
