"""Gradients and transposed convolutions as calls of PyTorch, which passes them to cuDNN."""

from __future__ import annotations

from typing import Any

from tvmconv.baselines.torch_calls import Tensors, TorchConvCall, apply_op
from tvmconv.workloads import dtypes
from tvmconv.workloads.conv_gradient import DerivedConv, TransposedConv, WeightGradient
from tvmconv.workloads.layout import CHANNELS_LAST, UNIFORM_LAYOUTS


def list_gradient_calls(w: DerivedConv) -> list[TorchConvCall]:
    """Return the calls that can compute a gradient or a transposed convolution, in both layouts.

    All tensors are converted before the timing. Epilogues, and padding that is not symmetric, take kernels of their
    own. PyTorch has no channels-last format of signals, so those are channels first.
    """
    return [_make_call(w, layout) for layout in (UNIFORM_LAYOUTS[:1] if w.spatial_ndim == 1 else UNIFORM_LAYOUTS)]


def _make_call(w: DerivedConv, layout: str) -> TorchConvCall:
    import torch
    from torch.nn import functional

    forward = w.forward
    is_symmetric = w.pad_low == w.pad_high
    padding = list(w.pad_low) if is_symmetric else [0] * w.spatial_ndim
    sides = [side for pair in zip(reversed(w.pad_low), reversed(w.pad_high), strict=True) for side in pair]
    bounds = zip(w.pad_low, forward.input_size, strict=True)
    interior = slice(None), slice(None), *(slice(low, low + n) for low, n in bounds)
    padded_size = forward.padded_shape[2:]
    input_size = forward.input_size if is_symmetric else padded_size
    names = w.argument_names[2:-1]
    format_name = {CHANNELS_LAST: {2: "channels_last", 3: "channels_last_3d"}.get(w.spatial_ndim)}.get(layout)
    memory_format = getattr(torch, format_name or "contiguous_format")

    def to_layout(tensor: Any) -> Any:
        if tensor.dim() == 1:
            return tensor
        view = tensor.movedim(-1, 1) if w.layout == CHANNELS_LAST else tensor
        copy = torch.empty(view.shape, dtype=view.dtype, device=view.device, memory_format=memory_format)
        return copy.copy_(view)

    def prepare(*tensors: Any) -> Tensors:
        # Only the shapes and strides of this operand's stand-in are read.
        if isinstance(w, TransposedConv):
            operands = tuple(map(to_layout, tensors[:2]))
        else:
            shape = forward.weight_shape if isinstance(w, WeightGradient) else (w.N, w.C, *input_size)
            like = tensors[0]
            unread = torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=memory_format)
            operands = (*map(to_layout, tensors[:2]), unread)
        others = [value.to(tensors[0].dtype) if value.dim() == 1 else to_layout(value) for value in tensors[2:]]
        return *operands, *others

    def compute_gradient(dy: Any, operand: Any, unread: Any) -> Any:
        if isinstance(w, WeightGradient):
            x = operand if is_symmetric else functional.pad(operand, sides)
            arguments, mask = (dy, x, unread), [False, True, False]
        else:
            arguments, mask = (dy, unread, operand), [True, False, False]
        options = list(w.stride), padding, list(w.dilation), False, [0] * w.spatial_ndim, w.groups, mask
        gradients = torch.ops.aten.convolution_backward(*arguments, None, *options)
        if isinstance(w, WeightGradient):
            return gradients[1]
        return gradients[0] if is_symmetric else gradients[0][interior]

    def compute_transposed(x: Any, k: Any, bias: Any) -> Any:
        assert isinstance(w, TransposedConv)
        transpose = getattr(functional, f"conv_transpose{w.spatial_ndim}d")
        y = transpose(x, k, bias, w.stride, padding, w.output_padding, w.groups, w.dilation)
        return y if is_symmetric else y[interior]

    leading_bias = isinstance(w, TransposedConv) and w.epilogue[:1] == ("bias",)

    def compute(*tensors: Any) -> Any:
        count = 2 if isinstance(w, TransposedConv) else 3
        values = dict(zip(names, tensors[count:], strict=True))
        if isinstance(w, TransposedConv):
            y = compute_transposed(tensors[0], tensors[1], values["bias"] if leading_bias else None)
        else:
            y = compute_gradient(*tensors[:3])
            y = y.float() if w.argument_dtypes[-1] == dtypes.ACCUMULATOR else y
        for name in w.epilogue[1:] if leading_bias else w.epilogue:
            y = apply_op(name, y, values.get(name))
        return y

    def finish(y: Any) -> Any:
        return (y.movedim(1, -1) if w.layout == CHANNELS_LAST else y).contiguous()

    notes = [] if is_symmetric else ["padding by a kernel of its own"]
    if w.epilogue[1:] if leading_bias else w.epilogue:
        notes.append(f"{'+'.join(w.epilogue[1:] if leading_bias else w.epilogue)} by kernels of PyTorch's")
    if w.argument_dtypes[-1] != w.storage:
        notes.append("a conversion to float32")
    if CHANNELS_LAST in (layout, w.layout):
        notes.append(f"in {layout.upper()}")
    return TorchConvCall(compute, prepare, tuple(notes), finish)
