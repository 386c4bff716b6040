"""Lazy modules, such as `torch.nn.LazyConv2d`, whose parameters have no shape before the first call."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from tvmconv.errors import translate_to_model_error


def initialize_lazy_modules(model: torch.nn.Module, example: Any) -> None:
    """Give the lazy modules of a model their parameters by a forward pass on the example, in evaluation mode.

    This is what PyTorch does in the first call of such a model. Raises ModelError if the model does not run.
    """
    if not any(map(is_lazy, itertools.chain(model.parameters(), model.buffers()))):
        return
    modes = [(module, module.training) for module in model.modules()]
    arguments = example if isinstance(example, tuple) else (example,)
    try:
        with translate_to_model_error("the model does not run on the example"), torch.no_grad():
            model.eval()(*arguments)
    finally:
        for module, is_training in modes:
            module.training = is_training
