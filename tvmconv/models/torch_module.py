"""The user's PyTorch modules as graphs: they are imported, constructed, and run once.

The run uses fake tensors, which have shapes but no elements, so that a large model costs nothing. If it fails, for
example because a size depends on an element, the module runs on the CPU. Operations of modules and functions are both
recorded.

Source: `torch.utils._python_dispatch.TorchDispatchMode`, and ATen's operators in native_functions.yaml.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from tvmconv.errors import ModelError, WorkloadError, translate_to_model_error
from tvmconv.models.input_spec import EXAMPLE_TEXT, InputSpec
from tvmconv.models.model_graph import ModelGraph, ModelOp, make_convolution
from tvmconv.workloads.conv_operator import ConvOperator

UNARY_OPS = ("neg", "exp", "erf", "tanh", "mish", "sigmoid", "relu", "relu6", "silu", "hardswish", "hardsigmoid")
BINARY_OPS = {"add": "add", "sub": "sub", "mul": "mul", "div": "div", "minimum": "min", "maximum": "max"}
IDENTITY_OPS = ("clone", "alias", "detach", "lift_fresh", "_to_copy")
NORM_OPS = ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm")
LIMIT_ARGUMENTS = {
    "hardtanh": {"min_val": "low", "max_val": "high"},
    "clamp": {"min": "low", "max": "high"},
    "clamp_min": {"min": "low"},
    "clamp_max": {"max": "high"},
}
# The option, the argument with its value, and a condition on the other arguments.
PARAMETRIC_OPS: dict[str, tuple[str, str, Callable[[Mapping[str, Any]], bool]]] = {
    "leaky_relu": ("slope", "negative_slope", lambda arguments: True),
    "elu": ("alpha", "alpha", lambda arguments: arguments["scale"] == arguments["input_scale"] == 1),
    "softplus": ("beta", "beta", lambda arguments: arguments["threshold"] >= 20),
}
OTHER_CONVOLUTION_PATTERN = re.compile(r"conv(?!ert)")


def trace_module(source: str, inputs: Sequence[InputSpec]) -> ModelGraph:
    """Record the operations of the forward pass in evaluation mode of `package.module:callable`.

    The callable is a module or a function without arguments that returns one; it gets inputs with names by keyword.
    Raises ModelError if the module does not exist, or does not run on the inputs.
    """
    if not inputs:
        raise ModelError(f"{source}: a PyTorch module needs --input, such as --input {EXAMPLE_TEXT}")
    with contextlib.redirect_stdout(sys.stderr):
        with translate_to_model_error(source):
            target = _import_target(source)
        with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
            return _record_module(source, target, inputs)
        return _record_module(source, target, inputs)


def _import_target(source: str) -> Any:
    """Return the object that a text names; the current folder is searched for modules, too."""
    package, _, path = source.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    target: Any = importlib.import_module(package)
    for name in path.split("."):
        target = getattr(target, name)
    return target


def make_module(source: str, target: Any = None) -> torch.nn.Module:
    """Return the module that a text names, in evaluation mode; raise ModelError if there is none.

    `target` is the object that the text names, if it was imported already.
    """
    with translate_to_model_error(source):
        target = _import_target(source) if target is None else target
        module = target if isinstance(target, torch.nn.Module) else target()
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"{source} returned {type(module).__name__}, expected a torch.nn.Module")
    return module.eval()


def _record_module(source: str, target: Any, inputs: Sequence[InputSpec]) -> ModelGraph:
    """Construct a module, run it on zeros, and record the operations that it executes.

    The module's results, and all other tensors that are alive when it has returned, are outputs of the graph.
    """
    with torch.no_grad():
        module = make_module(source, target)
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        tensors = [torch.zeros(s.shape, dtype=getattr(torch, s.dtype or "float32"), device=device) for s in inputs]
        positional = [tensor for spec, tensor in zip(inputs, tensors, strict=True) if spec.name is None]
        keyword = {spec.name: tensor for spec, tensor in zip(inputs, tensors, strict=True) if spec.name is not None}
        recorder = _GraphRecorder()
        for tensor in tensors:
            recorder.name_tensor(tensor)
        input_texts = ", ".join(f"{spec.name}={spec.text}" if spec.name else spec.text for spec in inputs)
        with translate_to_model_error(f"{source} on {input_texts}"), recorder.track_modules(module), recorder:
            result = module(*positional, **keyword)
        recorder.graph.outputs.update(recorder.list_live_tensors())
        del result
        return recorder.graph


class _GraphRecorder(TorchDispatchMode):
    """A dispatch mode that records each operation; a tensor gets a new numbered name whenever it is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = ModelGraph()
        self._values: Any = WeakTensorKeyDictionary()
        self._count = 0
        self._path = [""]

    def name_tensor(self, tensor: torch.Tensor) -> str:
        """Give a tensor a new name and return it."""
        self._count += 1
        value = str(self._count)
        self._values[tensor] = value
        self.graph.shapes[value] = tuple(tensor.shape)
        return value

    def list_live_tensors(self) -> list[str]:
        """Return the names of all tensors that are alive."""
        return list(self._values.values())

    @contextlib.contextmanager
    def track_modules(self, root: torch.nn.Module) -> Iterator[None]:
        """Track inside the context which module is executing."""
        with contextlib.ExitStack() as hooks:
            for path, module in root.named_modules():
                if isinstance(module, torch.jit.ScriptModule):  # accepts no hooks
                    continue
                pre_hook = module.register_forward_pre_hook(partial(self._enter_module, path))
                post_hook = module.register_forward_hook(self._exit_module, always_call=True)
                hooks.callback(pre_hook.remove)
                hooks.callback(post_hook.remove)
            yield

    def _enter_module(self, path: str, *_: object) -> None:
        self._path.append(path)

    def _exit_module(self, *_: object) -> None:
        self._path.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute and record an operation, or the operations of which it is composed."""
        kwargs = kwargs or {}
        with self:  # in inference mode, composite operations arrive here
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        reads = tuple(
            self._get_value_name(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        )
        result = func(*args, **kwargs)
        if func.namespace != "prim":  # prim operations read properties, not elements
            writes = tuple(self.name_tensor(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
            self._record_operation(func, _bind_arguments(func, args, kwargs), reads, writes)
        return result

    def _get_value_name(self, tensor: torch.Tensor) -> str:
        """Return a tensor's name; a tensor that no operation wrote and that is not an input is a constant."""
        value = self._values.get(tensor)
        if value is None:
            value = self.name_tensor(tensor)
            self.graph.constants.add(value)
            if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
                self.graph.parameters.add(value)
        return value

    def _record_operation(
        self, func: Any, arguments: dict[str, Any], reads: tuple[str, ...], writes: tuple[str, ...]
    ) -> None:
        kind = func._schema.name.partition("::")[2].removesuffix("_")
        layer_name = self._path[-1] or "conv"  # path of the executing module
        if func.namespace == "aten" and kind == "convolution":
            self.graph.add_conv(layer_name, reads, writes, lambda: _make_workload(arguments))
        elif func.namespace == "aten" and kind in NORM_OPS and not arguments.get("training", False):
            self.graph.add(ModelOp("norm", reads, writes))
        elif func.namespace == "aten" and writes and (match := _match_pointwise(kind, arguments)):
            name, operands, options = match
            remaining_reads = iter(reads)
            values = [
                next(remaining_reads) if isinstance(operand, torch.Tensor) else float(operand) for operand in operands
            ]
            self.graph.add_pointwise(name, values, writes, **options)
        else:
            if OTHER_CONVOLUTION_PATTERN.search(kind):
                self.graph.skip_layer(layer_name, f"tvmconv has no workload for {func._schema.name}")
            self.graph.add(ModelOp("", reads, writes))


def _bind_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    schema = func._schema.arguments
    defaults = {parameter.name: parameter.default_value for parameter in schema if parameter.has_default_value()}
    return {**defaults, **dict(zip((parameter.name for parameter in schema), args, strict=False)), **kwargs}


def _make_workload(arguments: Mapping[str, Any]) -> ConvOperator:
    x, weight = arguments["input"], arguments["weight"]
    if weight.dtype != x.dtype:
        raise WorkloadError(f"its input has dtype {x.dtype} and its weight {weight.dtype}: expected one dtype")
    return make_convolution(
        tuple(x.shape),
        tuple(weight.shape),
        stride=tuple(arguments["stride"]),
        padding=tuple(arguments["padding"]),
        dilation=tuple(arguments["dilation"]),
        groups=arguments["groups"],
        dtype=str(x.dtype).removeprefix("torch."),
        bias=arguments["bias"] is not None,
        output_padding=tuple(arguments["output_padding"]) if arguments["transposed"] else None,
    )


def _match_pointwise(kind: str, arguments: Mapping[str, Any]) -> tuple[str, list[Any], dict[str, Any]] | None:
    """Return the kind, operands and options of a pointwise operation; None for other operations."""
    x, other = arguments.get("self"), arguments.get("other")
    if kind in UNARY_OPS:
        return kind, [x], {}
    if kind in IDENTITY_OPS:
        return ("same", [x], {}) if arguments.get("dtype") in (None, arguments["self"].dtype) else None
    if kind == "gelu":
        return kind, [x], {"by_tanh": arguments["approximate"] == "tanh"}
    if kind in PARAMETRIC_OPS:
        option, argument, is_supported = PARAMETRIC_OPS[kind]
        return (kind, [x], {option: arguments[argument]}) if is_supported(arguments) else None
    if kind in BINARY_OPS or kind == "rsub":
        has_default_options = arguments.get("alpha", 1) == 1 and arguments.get("rounding_mode") is None
        if not has_default_options or not isinstance(other, (int, float, torch.Tensor)):
            return None
        return ("sub", [other, x], {}) if kind == "rsub" else (BINARY_OPS[kind], [x, other], {})
    if kind in LIMIT_ARGUMENTS:
        limits = {
            limit: arguments[name] for name, limit in LIMIT_ARGUMENTS[kind].items() if arguments[name] is not None
        }
        return None if any(isinstance(limit, torch.Tensor) for limit in limits.values()) else ("clip", [x], limits)
    return None
