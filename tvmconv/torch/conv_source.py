"""The convolutions of a traced graph: modules, calls of PyTorch's functions, and zero padding before them.

All of them have the attributes of PyTorch's modules that tvmconv reads: `weight`, `bias`, and the geometry. A weight
may be computed from parameters, as by weight normalization. It is then computed whenever a kernel's copy of it is
packed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.nn import functional
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from tvmconv.torch.graph_constants import ConstantFinder, GraphConstant
from tvmconv.torch.torch_modules import CONVOLUTIONS, has_hooks, is_plain_instance

TRANSPOSED_MODULES = (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d)
WEIGHT_HOOKS = (WeightNorm, SpectralNorm)  # hooks that compute a weight before each call
PAD_MODULES = tuple(getattr(torch.nn, f"{kind}Pad{ndim}d") for kind in ("Zero", "Constant") for ndim in (1, 2, 3))
CONV_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
PAD_ARGUMENTS = ("input", "pad", "mode", "value")
DEFAULTS = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
# PyTorch's functions, with their number of spatial axes.
CONV_FUNCTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
TRANSPOSED_FUNCTIONS = {torch.conv_transpose1d: 1, torch.conv_transpose2d: 2, torch.conv_transpose3d: 3}
COMPUTED_WEIGHT_REASON = "its weight is computed"


class FunctionalConv:
    """A call of one of PyTorch's functions with a weight that is computed from parameters.

    Args:
        function: PyTorch's function.
        weight: The weight.
        bias: The bias; None without one.
        options: Stride, padding, dilation, groups, and the output padding of a transposed convolution.
    """

    padding_mode = "zeros"

    def __init__(
        self, function: Any, weight: GraphConstant, bias: GraphConstant | None, options: Mapping[str, Any]
    ) -> None:
        self.function, self._weight, self._bias, self._options = function, weight, bias, dict(options)
        self.transposed = function in TRANSPOSED_FUNCTIONS
        self.spatial_ndim = (TRANSPOSED_FUNCTIONS if self.transposed else CONV_FUNCTIONS)[function]
        self.kernel_size = tuple(self.weight.shape[2:])
        self.groups = options["groups"]
        self.stride, self.dilation = (self._expand(options[name]) for name in ("stride", "dilation"))
        padding = options["padding"]
        self.padding = padding if isinstance(padding, str) else self._expand(padding)
        self.output_padding = self._expand(options.get("output_padding", 0))

    def _expand(self, sizes: Any) -> tuple[int, ...]:
        numbers = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        return numbers * self.spatial_ndim if len(numbers) == 1 else numbers

    @property
    def weight(self) -> torch.Tensor:
        """The current weight; a parameter itself if it is not computed."""
        value = self._weight.compute()
        assert isinstance(value, torch.Tensor)
        return value

    @property
    def bias(self) -> torch.Tensor | None:
        """The current bias."""
        return None if self._bias is None else self._bias.compute()

    def list_sources(self) -> list[torch.Tensor]:
        """Return the tensors that weight and bias are computed from."""
        return [tensor for each in (self._weight, self._bias) if each for tensor in each.list_sources()]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the convolution by PyTorch."""
        y = self.function(x, self.weight, self.bias, **self._options)
        assert isinstance(y, torch.Tensor)
        return y


class WeightNormConv:
    """A module whose weight is computed by a hook of `torch.nn.utils.weight_norm`.

    Args:
        module: The convolution.
        hook: The hook, which runs before each call of the module.
    """

    def __init__(self, module: Any, hook: WeightNorm) -> None:
        self.module, self._hook = module, hook
        self.padding_mode, self.padding, self.output_padding = (
            module.padding_mode,
            module.padding,
            module.output_padding,
        )
        self.stride, self.dilation, self.groups = module.stride, module.dilation, module.groups
        self.kernel_size, self.transposed = module.kernel_size, module.transposed
        self.spatial_ndim = len(module.kernel_size)

    @property
    def weight(self) -> torch.Tensor:
        """The weight for the current direction and length."""
        weight = self._hook.compute_weight(self.module)
        assert isinstance(weight, torch.Tensor)
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The current bias."""
        bias = self.module.bias
        assert bias is None or isinstance(bias, torch.Tensor)
        return bias

    def list_sources(self) -> list[torch.Tensor]:
        """Return the tensors that weight and bias are computed from."""
        return [tensor for tensor in self.module._parameters.values() if tensor is not None]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the convolution by PyTorch."""
        y = self.module(x)
        assert isinstance(y, torch.Tensor)
        return y


def find_weight_norm(module: torch.nn.Module) -> WeightNorm | None:
    """Return the hook that computes a convolution's weight; None if there is another hook, or none."""
    hooks = [*module._forward_pre_hooks.values()]
    if len(hooks) != 1 or not isinstance(hooks[0], WeightNorm) or hooks[0].name != "weight":
        return None
    return None if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks else hooks[0]


def copy_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return a deep copy of a model, also if hooks have computed weights with a gradient history.

    Such a weight is computed again at each call, so that its copy needs no history.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            weight = module.__dict__.get(getattr(hook, "name", "")) if isinstance(hook, WEIGHT_HOOKS) else None
            if isinstance(weight, torch.Tensor):
                memo[id(weight)] = weight.detach().clone()
    return copy.deepcopy(model, memo)


def list_watched_modules(conv: Any) -> list[torch.nn.Module]:
    """Return the modules whose hooks a convolution runs."""
    module = getattr(conv, "module", conv)
    return [module] if isinstance(module, torch.nn.Module) else []


def list_conv_sources(conv: Any) -> list[torch.Tensor]:
    """Return the tensors from which weight and bias of a convolution are computed."""
    if isinstance(conv, torch.nn.Module):
        return [tensor for tensor in conv._parameters.values() if tensor is not None]
    sources: list[torch.Tensor] = conv.list_sources()
    return sources


def bind_conv_arguments(node: fx.Node) -> dict[str, Any] | None:
    """Return the arguments of a call of one of PyTorch's convolution functions by name; None for other nodes."""
    if node.op != "call_function" or node.target not in (*CONV_FUNCTIONS, *TRANSPOSED_FUNCTIONS):
        return None
    names = TRANSPOSED_ARGUMENTS if node.target in TRANSPOSED_FUNCTIONS else CONV_ARGUMENTS
    return {"bias": None, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def find_conv(node: fx.Node, modules: Mapping[str, Any], constants: ConstantFinder) -> Any:
    """Return the convolution that a node computes; None if it computes none, and a reason if it cannot be read."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        if not is_plain_instance(module, CONVOLUTIONS) or len(node.args) != 1 or node.kwargs:
            return None
        hook = find_weight_norm(module)
        return module if hook is None else WeightNormConv(module, hook)
    arguments = bind_conv_arguments(node)
    if arguments is None:
        return None
    weight, bias = constants.find(arguments["weight"]), constants.find(arguments["bias"])
    if weight is None or (bias is None) != (arguments["bias"] is None):
        return COMPUTED_WEIGHT_REASON
    names = [name for name in DEFAULTS if name != "output_padding" or node.target in TRANSPOSED_FUNCTIONS]
    options = {name: arguments.get(name, DEFAULTS[name]) for name in names}
    if any(isinstance(each, fx.Node) for value in options.values() for each in _flatten(value)):
        return "its geometry is computed"
    return FunctionalConv(node.target, weight, bias, options)


def find_zero_padding(node: Any, modules: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the numbers of `functional.pad` of a node that pads with zeros; None for other nodes.

    The numbers are those before and after the last axis, then of the axis before it, and so on. None of them is
    negative.
    """
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_module":
        module = modules[str(node.target)]
        if type(module) not in PAD_MODULES or has_hooks(module) or getattr(module, "value", 0) != 0:
            return None
        pads: Any = module.padding
    elif node.op == "call_function" and node.target is functional.pad:
        arguments = {**dict(zip(PAD_ARGUMENTS, node.args, strict=False)), **node.kwargs}
        if arguments.get("mode", "constant") != "constant" or arguments.get("value") not in (None, 0, 0.0):
            return None
        pads = arguments.get("pad")
    else:
        return None
    is_plain = isinstance(pads, (tuple, list)) and all(type(size) is int and size >= 0 for size in pads)
    return tuple(pads) if is_plain else None


def expand_padding_modes(graph: fx.Graph, modules: Mapping[str, Any]) -> None:
    """Write convolutions with `padding_mode` reflect, replicate or circular as a padding and a convolution without."""
    functions = {ndim: function for function, ndim in CONV_FUNCTIONS.items()}
    for node in list(graph.nodes):
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if not is_plain_instance(module, CONVOLUTIONS) or isinstance(module, TRANSPOSED_MODULES):
            continue
        if module.padding_mode == "zeros" or has_hooks(module) or len(node.args) != 1 or node.kwargs:
            continue
        with graph.inserting_before(node):
            sides = tuple(module._reversed_padding_repeated_twice)
            padded = graph.call_function(functional.pad, (node.args[0], sides), {"mode": module.padding_mode})
            weight = graph.get_attr(f"{node.target}.weight")
            bias = None if module.bias is None else graph.get_attr(f"{node.target}.bias")
            args = (padded, weight, bias, module.stride, (0,) * len(module.stride), module.dilation, module.groups)
            call_node = graph.call_function(functions[len(module.stride)], args)
        call_node.meta.update(node.meta)
        node.replace_all_uses_with(call_node)
        graph.erase_node(node)


def _flatten(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
