"""Workloads as calls of PyTorch's convolutions, which PyTorch gives to cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tvmconv.workloads import Conv1d, Conv2d
from tvmconv.workloads.conv import Conv
from tvmconv.workloads.epilogues.leaky_relu import SLOPES
from tvmconv.workloads.filters import Filter
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST, LAYOUTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

Tensors = tuple[Any, ...]

# What PyTorch calls the layouts, by rank. Of one axis of space it has one, and computes an image of one row itself.
_MEMORY_FORMATS = {
    2: {CHANNELS_FIRST: "contiguous_format", CHANNELS_LAST: "channels_last"},
    3: {CHANNELS_FIRST: "contiguous_format", CHANNELS_LAST: "channels_last_3d"},
}

# Epilogues that cuDNN computes in the convolution, through functions of PyTorch's that are for NVIDIA GPUs alone.
FUSED = {
    ("relu",): "cudnn_convolution_relu",
    ("bias", "relu"): "cudnn_convolution_relu",
    ("add", "relu"): "cudnn_convolution_add_relu",
    ("bias", "add", "relu"): "cudnn_convolution_add_relu",
    ("add", "bias", "relu"): "cudnn_convolution_add_relu",
}


def tensor(array: NDArray[Any]) -> Any:
    """An array as a tensor of PyTorch that shares its memory; ml_dtypes' bfloat16 becomes PyTorch's."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def _as_they_are(*inputs: Any) -> Tensors:
    return inputs


def _as_it_is(y: Any) -> Any:
    return y


@dataclass(frozen=True)
class Call:
    """A way to compute a workload.

    Attributes:
        compute: from what `prepare` gives to what `finish` takes; this is what is timed.
        prepare: from the workload's inputs to what `compute` takes.
        finish: from what `compute` gives to Y, a dense tensor.
        notes: what is worth telling of it.
    """

    compute: Callable[..., Any]
    prepare: Callable[..., Tensors] = _as_they_are
    notes: tuple[str, ...] = ()
    finish: Callable[[Any], Any] = _as_it_is


def calls(w: Conv | Filter) -> list[Call]:
    """The ways to compute a workload among which only measuring finds the fastest; inputs and Y are dense tensors.

    Convolutions are tried in both layouts, whatever the workload's, with all tensors brought to it before: a library
    shall not be slow because its tensors do not lie as it likes them. Epilogues that cuDNN computes in the convolution
    are tried so, and by kernels of PyTorch's. A signal is an image of one row, which may have its channels last. A
    filter's tensors lie as they are.
    """
    if isinstance(w, Filter):
        return _filters(w)
    return [call for layout in LAYOUTS for call in calls_in(w, layout)]


def calls_in(w: Conv, layout: str) -> list[Call]:
    """The ways to compute a convolution on tensors of one layout: with PyTorch's kernels behind it, and fused."""
    if isinstance(w, Conv1d):
        return [_of_signals(w, call, layout) for call in calls_in(_one_row(w), layout)]
    ways = (False, True) if w.rank == 2 and w.epilogue in FUSED and w.before == w.behind else (False,)
    return [_convolution(w, layout, fused=fused) for fused in ways]


def _one_row(w: Conv1d) -> Conv2d:
    """A convolution of signals as one of images of one row."""
    (before,), (behind,) = w.before, w.behind
    return Conv2d(
        **{name: getattr(w, name) for name in ("N", "C", "W", "O", "S", "groups", "dtype", "layout", "epilogue")},
        H=1,
        R=1,
        stride=(1, *w.stride),
        padding=(0, before, 0, behind),
        dilation=(1, *w.dilation),
    )


def _of_signals(w: Conv1d, call: Call, layout: str) -> Call:
    """A call of images of one row as one of signals."""
    row = 1 if w.layout == CHANNELS_LAST else 2

    def prepare(*signals: Any) -> Tensors:
        return call.prepare(*(each.unsqueeze(row) if each.dim() > 1 else each for each in signals))

    notes = ("as images of one row", *call.notes) if layout == CHANNELS_LAST else call.notes
    return Call(call.compute, prepare, notes, lambda y: call.finish(y).squeeze(row))


def _convolution(w: Conv, layout: str, *, fused: bool) -> Call:
    """The convolution, with a bias where the epilogue begins with one, and kernels of PyTorch's for all else.

    Args:
        w: the workload.
        layout: how the tensors lie.
        fused: compute the epilogue by a function of `FUSED`.
    """
    import torch
    from torch.nn import functional

    convolve = getattr(functional, f"conv{w.rank}d")
    options: dict[str, Any] = {"stride": w.stride, "dilation": w.dilation, "groups": w.groups}
    alike = w.before == w.behind  # cuDNN pads both sides of an axis alike
    if alike:
        options["padding"] = w.before
    sides = [side for pair in zip(reversed(w.before), reversed(w.behind), strict=True) for side in pair]
    with_bias, rest = (w.epilogue[:1], w.epilogue[1:]) if w.epilogue[:1] == ("bias",) else ((), w.epilogue)
    read = w.argument_names[2:-1]
    zeros = fused and "bias" not in read  # which the function would make itself each time
    memory_format = getattr(torch, _MEMORY_FORMATS[w.rank][layout])

    def lay(tensor: Any) -> Any:
        # A copy, as `contiguous` leaves what has no size along some axes with strides that look like the other layout.
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=memory_format)
        return copy.copy_(tensor)

    def prepare(x: Any, k: Any, *others: Any) -> Tensors:
        named = dict(zip(read, others, strict=True))
        if "bias" in named:
            named["bias"] = named["bias"].to(x.dtype)
        return (
            lay(_channels_second(w, x)),
            lay(_channels_second(w, k)),
            *(lay(_channels_second(w, each)) if each.dim() > 1 else each for each in named.values()),
            *([x.new_zeros(w.O)] if zeros else []),
        )

    def compute(x: Any, k: Any, *others: Any) -> Any:
        named = dict(zip(read, others, strict=True))
        if not alike:
            x = functional.pad(x, sides)
        y = convolve(x, k, named["bias"] if with_bias else None, **options)
        for name in rest:
            y = _OPERATIONS[name](y, named.get(name))
        return y

    def compute_fused(x: Any, k: Any, *others: Any) -> Any:
        named = dict(zip([*read, "bias"] if zeros else read, others, strict=True))
        added = (named["add"], 1) if "add" in named else ()
        how = (named["bias"], w.stride, w.before, w.dilation, w.groups)
        return getattr(torch, FUSED[w.epilogue])(x, k, *added, *how)

    def finish(y: Any) -> Any:
        return (y.movedim(1, -1) if w.layout == CHANNELS_LAST else y).contiguous()

    notes = [] if alike else ["padded by a kernel of its own"]
    if w.depthwise:
        notes.append("depthwise, for which PyTorch may choose a kernel of its own")
    if fused:
        notes.append(f"{'+'.join(w.epilogue)} fused")
    elif rest:
        notes.append(f"{'+'.join(rest)} by kernels of PyTorch's")
    if CHANNELS_LAST in (layout, w.layout):
        notes.append(f"in {layout.upper()}")
    return Call(compute_fused if fused else compute, prepare, tuple(notes), finish)


def _channels_second(w: Conv, tensor: Any) -> Any:
    """X, K, Y or a residual as (N, C, space), a view whose memory stays as it lies."""
    return tensor.movedim(-1, 1) if w.layout == CHANNELS_LAST else tensor


def _bias(y: Any, bias: Any) -> Any:
    return y + bias.view(-1, *(1,) * (y.dim() - 2))


def _functional(name: str, **options: Any) -> Callable[[Any, Any], Any]:
    def apply(y: Any, _: Any) -> Any:
        from torch.nn import functional

        return getattr(functional, name)(y, **options)

    return apply


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "bias": _bias,
    "add": lambda y, residual: y + residual,
    "clamp": lambda y, _: y.clamp(0, 1),
    **{name: _functional(name) for name in ("relu", "silu", "gelu", "relu6", "hardswish", "hardsigmoid", "sigmoid")},
    **{name: _functional(name) for name in ("tanh", "mish", "elu", "softplus")},
    "gelu_tanh": _functional("gelu", approximate="tanh"),
    **{name: _functional("leaky_relu", negative_slope=slope) for name, slope in SLOPES.items()},
}


def _filters(w: Filter) -> list[Call]:
    ways = [_one_plane(w)] if w.image[-1] == 1 else [_one_plane(w), _groups(w), _batch(w)]
    return [_clamped(way) for way in ways] if w.clamp else ways


def _one_plane(w: Filter) -> Call:
    """Interleaved channels as one plane, in which the next sample of a channel is as many columns away as there are."""
    from torch.nn import functional

    (height, width, channels), (above, beside) = w.image, w.radius
    options: dict[str, Any] = {"padding": (above, beside * channels), "dilation": (1, channels)}
    return Call(
        lambda image, weight: functional.conv2d(image, weight, **options).view(w.signal_shape),
        lambda x, k: (x.view(1, 1, height, width * channels), k.view(1, 1, *w.mask)),
        ("channels as columns of one plane, which the mask strides over",) if channels > 1 else (),
    )


def _groups(w: Filter) -> Call:
    """Channels as those of a depthwise convolution, in the memory format `channels_last`."""
    from torch.nn import functional

    channels = w.image[-1]
    return Call(
        lambda image, weight: _interleaved(functional.conv2d(image, weight, padding=w.radius, groups=channels)[0]),
        lambda x, k: (x.permute(2, 0, 1)[None], k.expand(channels, 1, *w.mask).contiguous()),
        ("depthwise with the channels last",),
    )


def _batch(w: Filter) -> Call:
    """Channels as a batch of images, which are no dense planes before and after."""
    from torch.nn import functional

    return Call(
        lambda image, weight: _interleaved(functional.conv2d(image, weight, padding=w.radius)[:, 0]),
        lambda x, k: (x.permute(2, 0, 1)[:, None], k.view(1, 1, *w.mask)),
        ("channels as a batch, the transpositions in the time",),
    )


def _interleaved(planes: Any) -> Any:
    """The image (H, W, C) of a tensor (C, H, W), copied unless its memory already has that order."""
    return planes.permute(1, 2, 0).contiguous()


def _clamped(call: Call) -> Call:
    return replace(
        call,
        compute=lambda image, weight: call.compute(image, weight).clamp_(0, 1),
        notes=(*call.notes, "clamped by a kernel of its own"),
    )
