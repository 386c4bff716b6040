"""The user's PyTorch modules as graphs: they are imported, constructed, and run once.

The run uses fake tensors, which have shapes but no elements, so that a large model costs nothing. If it fails, for
example because a size depends on an element, the module runs on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tvmconv.errors import ModelError, translate_to_model_error
from tvmconv.models.input_spec import EXAMPLE_TEXT, InputSpec
from tvmconv.models.model_graph import ModelGraph
from tvmconv.models.torch_graph import record_module


def trace_module(source: str, inputs: Sequence[InputSpec]) -> ModelGraph:
    """Record the operations of a module's forward pass in evaluation mode.

    Args:
        source: `package.module:callable`, a module or a function without arguments that returns one.
        inputs: Inputs of the forward pass: positional, or by keyword if they have names.

    Raises:
        ModelError: The module does not exist, or does not run on these inputs.
    """
    if not inputs:
        raise ModelError(f"{source}: a PyTorch module needs --input, such as --input {EXAMPLE_TEXT}")
    with contextlib.redirect_stdout(sys.stderr):
        with translate_to_model_error(source):
            target = _import_target(source)
        with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
            return _run_module(source, target, inputs)
        return _run_module(source, target, inputs)


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
    """Return the module that a text names, in evaluation mode.

    Args:
        source: `package.module:callable`, as for `trace_module`.
        target: The object that the text names, if it was imported already.

    Raises:
        ModelError: The module does not exist.
    """
    with translate_to_model_error(source):
        target = _import_target(source) if target is None else target
        module = target if isinstance(target, torch.nn.Module) else target()
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"{source} returned {type(module).__name__}, expected a torch.nn.Module")
    return module.eval()


def _run_module(source: str, target: Any, inputs: Sequence[InputSpec]) -> ModelGraph:
    """Construct the module and run it once."""
    with torch.no_grad():
        module = make_module(source, target)
        tensors = _make_zero_tensors(module, inputs)
        positional = [tensor for name, tensor in tensors if name is None]
        keyword = {name: tensor for name, tensor in tensors if name is not None}
        input_texts = ", ".join(f"{spec.name}={spec.text}" if spec.name else spec.text for spec in inputs)
        with translate_to_model_error(f"{source} on {input_texts}"):
            return record_module(module, positional, keyword)


def _make_zero_tensors(module: torch.nn.Module, inputs: Sequence[InputSpec]) -> list[tuple[str | None, torch.Tensor]]:
    """Return zero-filled inputs on the device of the module's weights."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    tensors = []
    for spec in inputs:
        dtype = getattr(torch, spec.dtype or "float32")
        tensors.append((spec.name, torch.zeros(spec.shape, dtype=dtype, device=device)))
    return tensors
