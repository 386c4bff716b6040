"""The registration of the operators `tvmconv::NAME` with PyTorch.

They are defined through `torch.library.Library` instead of `torch.library.custom_op`, because the overhead of a call
matters for kernels of microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

NAMESPACE = "tvmconv"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` or a level of forward-mode derivatives is active.

    Operators without gradients would return results without derivatives there.
    """
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def define_operator(
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    vmap: Callable[..., Any] | None = None,
    needs_fixed_strides: bool = True,
) -> Any:
    """Define an operator, and return it.

    Args:
        schema: Name, arguments and results in PyTorch's notation, such as "conv(Tensor x, Tensor weight) -> Tensor".
        cpu: Function that computes the results on the CPU.
        cuda: Function that computes them on a GPU; `cpu` by default.
        fake: Function that returns results without elements, with the right shapes, strides and dtypes.
        backward: Function that computes the gradients, as `torch.library.register_autograd` takes it; None for an
            operator without gradients.
        setup_context: Function that keeps for `backward` what it reads.
        vmap: Function that computes a batch of calls, as `torch.library.register_vmap` takes it; None for none.
        needs_fixed_strides: Whether compilers have to pass tensors with the strides that they have in the eager model.
    """
    tags = [torch.Tag.pt2_compliant_tag, *([torch.Tag.needs_fixed_stride_order] if needs_fixed_strides else [])]
    _library.define(schema, tags=tags)
    name = schema.partition("(")[0]
    _library.impl(name, cpu, "CPU")
    _library.impl(name, cuda or cpu, "CUDA")
    qualified_name = f"{NAMESPACE}::{name}"
    torch.library.register_fake(qualified_name, fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(qualified_name, backward, setup_context=setup_context, lib=_library)
    if vmap is not None:
        torch.library.register_vmap(qualified_name, vmap, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
