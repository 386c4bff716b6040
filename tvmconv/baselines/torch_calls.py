"""Workloads as calls of `torch.nn.functional.conv2d`, which PyTorch gives to cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tvmconv.workloads.filters import Filter

if TYPE_CHECKING:
    from tvmconv.workloads.operators.conv2d import Conv2d


def _as_they_are(x: Any, k: Any) -> tuple[Any, Any]:
    return x, k


@dataclass(frozen=True)
class Call:
    """A way to compute a workload.

    Attributes:
        compute: from image and weight, as `prepare` gives them, to Y.
        prepare: from X and K to the image, which shares X's memory, and the weight; it is done before timing.
        notes: what is worth telling of it.
    """

    compute: Callable[[Any, Any], Any]
    prepare: Callable[[Any, Any], tuple[Any, Any]] = _as_they_are
    notes: tuple[str, ...] = ()


def calls(w: Conv2d | Filter) -> list[Call]:
    """The ways to compute a workload among which only measuring finds the fastest; their X, K, Y are dense tensors."""
    return _filters(w) if isinstance(w, Filter) else [_convolution(w)]


def _convolution(w: Conv2d) -> Call:
    from torch.nn import functional

    options: dict[str, Any] = {"stride": w.stride, "dilation": w.dilation, "groups": w.groups}
    notes = ("depthwise, for which PyTorch may choose a kernel of its own",) if w.depthwise else ()
    top, left, bottom, right = w.padding
    if (top, left) == (bottom, right):
        return Call(lambda x, k: functional.conv2d(x, k, padding=(top, left), **options), notes=notes)
    return Call(  # cuDNN pads both sides of an axis alike
        lambda x, k: functional.conv2d(functional.pad(x, (left, right, top, bottom)), k, **options),
        notes=("padded by a kernel of its own", *notes),
    )


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
