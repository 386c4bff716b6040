"""PyTorch modules of the user's own as graphs: imported, called, and run once.

The run is on fake tensors, which have shapes and no elements, so that a large model costs nothing; where that fails, as
where a size depends on an element, on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tvmconv.errors import ModelError, as_model_error
from tvmconv.models.graph import Graph
from tvmconv.models.inputs import EXAMPLE, Input
from tvmconv.models.torch_graph import record


def trace(source: str, inputs: Sequence[Input]) -> Graph:
    """The operations of a module's forward pass, in evaluation mode.

    Args:
        source: `package.module:callable`: a module, or what gives one when it is called without arguments.
        inputs: what the forward pass is given: in order, or by keyword where they have names.

    Raises:
        ModelError: there is no such module, or it does not run on these inputs.
    """
    if not inputs:
        raise ModelError(f"{source}: a PyTorch module needs --input, such as --input {EXAMPLE}")
    with contextlib.redirect_stdout(sys.stderr):
        with as_model_error(source):
            found = _find(source)
        with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
            return _run(source, found, inputs)
        return _run(source, found, inputs)


def _find(source: str) -> Any:
    """What the text names; modules in the current folder are found as well."""
    package, _, path = source.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    found: Any = importlib.import_module(package)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def make(source: str, found: Any = None) -> torch.nn.Module:
    """The module that a text names, in evaluation mode.

    Args:
        source: `package.module:callable`, as for `trace`.
        found: what the text names, if that was found before.

    Raises:
        ModelError: there is none.
    """
    with as_model_error(source):
        found = _find(source) if found is None else found
        module = found if isinstance(found, torch.nn.Module) else found()
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"{source} gave {type(module).__name__}, expected a torch.nn.Module")
    return module.eval()


def _run(source: str, found: Any, inputs: Sequence[Input]) -> Graph:
    """Make the module, and run it once."""
    with torch.no_grad():
        module = make(source, found)
        tensors = _tensors(module, inputs)
        positional = [tensor for name, tensor in tensors if name is None]
        named = {name: tensor for name, tensor in tensors if name is not None}
        texts = ", ".join(f"{each.name}={each.text}" if each.name else each.text for each in inputs)
        with as_model_error(f"{source} on {texts}"):
            return record(module, positional, named)


def _tensors(module: torch.nn.Module, inputs: Sequence[Input]) -> list[tuple[str | None, torch.Tensor]]:
    """Inputs, all zero, where the module's weights are."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    made = []
    for each in inputs:
        dtype = getattr(torch, each.dtype or "float32")
        made.append((each.name, torch.zeros(each.shape, dtype=dtype, device=device)))
    return made
