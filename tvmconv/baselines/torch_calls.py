"""Workloads as calls of PyTorch's convolutions, which PyTorch passes to cuDNN."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from tvmconv.workloads import Conv1d, Conv2d
from tvmconv.workloads.conv import Conv
from tvmconv.workloads.dtypes import DTYPES, FLOAT8_DTYPES, FLOAT16, INT8
from tvmconv.workloads.epilogues.operations import SLOPES
from tvmconv.workloads.filters import Filter
from tvmconv.workloads.layout import CHANNELS_LAST, MIXED_LAYOUTS, UNIFORM_LAYOUTS

Tensors = tuple[Any, ...]

CONVERSION_NOTE = "conversion in the time"  # part of the description of a call for a mixed layout

# PyTorch's functions, for NVIDIA GPUs only, of epilogues that cuDNN fuses with the convolution.
FUSED_FUNCTIONS = {
    ("relu",): "cudnn_convolution_relu",
    ("bias", "relu"): "cudnn_convolution_relu",
    ("add", "relu"): "cudnn_convolution_add_relu",
    ("bias", "add", "relu"): "cudnn_convolution_add_relu",
    ("add", "bias", "relu"): "cudnn_convolution_add_relu",
}


def to_tensor(array: NDArray[Any]) -> Any:
    """Return a PyTorch tensor that shares the memory of an array; dtypes of ml_dtypes become those of PyTorch."""
    import torch

    if array.dtype.name in ("bfloat16", *FLOAT8_DTYPES):
        bits = torch.from_numpy(array.view(f"int{8 * array.itemsize}"))
        return bits.view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


@functools.cache
def load_activations() -> dict[str, Callable[[Any], Any]]:
    """Return PyTorch's functions of the epilogue operations that take no argument, by name."""
    import torch
    from torch.nn import functional

    names = ("relu", "silu", "gelu", "relu6", "hardswish", "hardsigmoid", "mish", "elu", "softplus", "selu", "hardtanh")
    return {
        **{name: getattr(functional, name) for name in names},
        "clamp": lambda y: y.clamp(0, 1),
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "quick_gelu": lambda y: y * torch.sigmoid(1.702 * y),
        "hard_mish": lambda y: y * 0.5 * (y + 2).clamp(0, 2),
        "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
        **{name: functools.partial(functional.leaky_relu, negative_slope=slope) for name, slope in SLOPES.items()},
    }


def where_positive(y: Any, otherwise: Any) -> Any:
    """Return the elements of `y` that are positive, and those of another tensor elsewhere."""
    import torch

    return torch.where(y > 0, y, otherwise)


def apply_op(name: str, y: Any, argument: Any) -> Any:
    """Apply an operation of an epilogue to sums (N, C, space); `argument`: a residual, or (C), (2, C), (1) numbers."""
    import torch

    if name == "add":
        return y + argument
    if name == "drelu":
        return y * (argument > 0)
    if name == "stats":
        argument[1], argument[0] = torch.var_mean(y.float(), [0, *range(2, y.dim())], correction=0)
        return y
    if name in ("tensor_scale", "quantize"):
        return y * argument
    if name == "zero_point":
        return y.round() + argument
    if name in ("bias", "prelu", "scale"):
        per_channel = argument.view(-1, *(1,) * (y.dim() - 2))
        if name == "prelu":
            return where_positive(y, y * per_channel)
        return y + per_channel if name == "bias" else y * per_channel
    return load_activations()[name](y)


@dataclass(frozen=True)
class TorchConvCall:
    """A way to compute a workload: `prepare` its inputs, `compute` in the time, and `finish` to a dense Y."""

    compute: Callable[..., Any]
    prepare: Callable[..., Tensors] = lambda *inputs: inputs
    notes: tuple[str, ...] = ()  # remarks for the description of the baseline
    finish: Callable[[Any], Any] = lambda y: y
    is_verified: bool = True  # whether the result is Y, with which a reference can be compared


def list_calls(w: Conv | Filter) -> list[TorchConvCall]:
    """Return the calls that can compute a workload, of which measurements find the fastest; tensors are dense.

    Convolutions are computed in both layouts, with all tensors converted before the timing, so that the layout of the
    workload does not slow the library down. For a mixed layout, which cuDNN does not have, X and residuals are as they
    lie, and the conversions to the layout of the call and of its output are in the time. Epilogues are computed by
    PyTorch's kernels, and in the convolution if cuDNN supports it. A signal is an image with one row. The layout of
    filters stays unchanged.
    """
    if isinstance(w, Filter):
        return _list_filter_calls(w)
    if DTYPES[w.dtype].has_8_bits:
        return list_float16_calls(w)
    return [call for layout in UNIFORM_LAYOUTS for call in list_calls_in_layout(w, layout)]


def list_float16_calls(w: Conv) -> list[TorchConvCall]:
    """Return the calls that compute a convolution of 8-bit operands in float16, without its epilogue.

    PyTorch has no convolution of 8-bit operands on NVIDIA GPUs. The operands are converted before the timing. Sums of
    integers may exceed float16, so operands are divided by a power of two, and the results are not verified.
    """
    half = w.with_fields(dtype=FLOAT16.name, out_dtype="", weight_dtype="", epilogue=())
    divisor = 64 if w.dtype == INT8.name else 1

    def make_call(call: TorchConvCall) -> TorchConvCall:
        def prepare(x: Any, k: Any, *others: Any) -> Tensors:
            return call.prepare(x.half() / divisor, k.half() / divisor)

        notes = ("operands and result in float16, without the epilogue", *call.notes)
        return replace(call, prepare=prepare, notes=notes, is_verified=False)

    return [make_call(call) for call in list_calls(half)]


def list_calls_in_layout(w: Conv, layout: str) -> list[TorchConvCall]:
    """Return the calls that compute a convolution in one layout: unfused, and fused if supported."""
    if isinstance(w, Conv1d):
        return [_make_signal_call(w, call, layout) for call in list_calls_in_layout(_make_one_row_conv(w), layout)]
    can_fuse = w.spatial_ndim == 2 and w.epilogue in FUSED_FUNCTIONS and w.pad_low == w.pad_high and w.reads_x_only
    return [_ConvCall(w, layout, fused).make_call() for fused in ((False, True) if can_fuse else (False,))]


def _make_one_row_conv(w: Conv1d) -> Conv2d:
    """Return a 1-D convolution as a 2-D convolution of images with one row."""
    (pad_low,), (pad_high,) = w.pad_low, w.pad_high
    return Conv2d(
        **{name: getattr(w, name) for name in ("N", "C", "W", "O", "S", "groups", "dtype", "layout", "epilogue")},
        H=1,
        R=1,
        stride=(1, *w.stride),
        padding=(0, pad_low, 0, pad_high),
        dilation=(1, *w.dilation),
        upsample=(1, *w.upsampling),
    )


def _make_signal_call(w: Conv1d, call: TorchConvCall, layout: str) -> TorchConvCall:
    """Return a call on signals from a call on images with one row."""
    input_axis, output_axis = (1 if each == CHANNELS_LAST else 2 for each in (w.input_layout, w.output_layout))

    def prepare(x: Any, k: Any, *others: Any) -> Tensors:
        images = (other.unsqueeze(output_axis) if other.dim() > 1 else other for other in others)
        return call.prepare(x.unsqueeze(input_axis), k.unsqueeze(input_axis), *images)

    notes = ("as images of one row", *call.notes) if layout == CHANNELS_LAST else call.notes
    return TorchConvCall(call.compute, prepare, notes, lambda y: call.finish(y).squeeze(output_axis))


@dataclass(frozen=True)
class _ConvCall:
    """The steps of a call of PyTorch's convolution, with tensors in one layout.

    The leading bias is an argument of the convolution. The other operations of the epilogue are fused with it, or
    computed by other kernels.
    """

    w: Conv
    layout: str  # layout of the weight, and of the convolution's tensors
    fused: bool  # whether cuDNN fuses the epilogue

    @property
    def is_symmetric(self) -> bool:
        """Whether the convolution pads by itself, because cuDNN supports only symmetric padding."""
        return self.w.pad_low == self.w.pad_high

    @property
    def is_mixed(self) -> bool:
        """Whether the input and the output have different layouts, which are then converted in the time."""
        return self.w.layout in MIXED_LAYOUTS

    @property
    def output_layout(self) -> str:
        """Layout of the output and of residuals outside the call."""
        return self.w.output_layout if self.is_mixed else self.layout

    @functools.cached_property
    def input_names(self) -> tuple[str, ...]:
        """Names of the arguments between the weight and the output."""
        return tuple(self.w.argument_names[2:-1])

    @property
    def has_leading_bias(self) -> bool:
        """Whether the epilogue begins with the bias."""
        return self.w.epilogue[:1] == ("bias",)

    @functools.cached_property
    def remaining_ops(self) -> tuple[str, ...]:
        """Operations of the epilogue after the leading bias."""
        return self.w.epilogue[1:] if self.has_leading_bias else self.w.epilogue

    @property
    def needs_zero_bias(self) -> bool:
        """Whether the fused function gets zeros as its bias, which it would otherwise allocate in each call."""
        return self.fused and "bias" not in self.input_names

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the convolution."""
        padding = {"padding": self.w.pad_low} if self.is_symmetric else {}
        return {"stride": self.w.stride, "dilation": self.w.dilation, "groups": self.w.groups, **padding}

    def prepare(self, x: Any, k: Any, *others: Any) -> Tensors:
        """Copy the arguments to the layouts in which they are at the start of the time."""
        w = self.w
        input_layout = w.input_layout if self.is_mixed else self.layout

        def prepare_argument(name: str, value: Any) -> Any:
            if name == w.CACHE:
                return self._copy_to_layout(_move_channels_second(w.input_layout, value), input_layout)
            if value.dim() > 1:  # a residual
                return self._copy_to_layout(_move_channels_second(w.output_layout, value), self.output_layout)
            return value.to(x.dtype) if name == "bias" else value

        return (
            self._copy_to_layout(_move_channels_second(w.input_layout, x), input_layout),
            self._copy_to_layout(_move_channels_second(w.input_layout, k), self.layout),
            *(prepare_argument(name, value) for name, value in zip(self.input_names, others, strict=True)),
            *([x.new_zeros(w.O)] if self.needs_zero_bias else []),
        )

    def compute(self, x: Any, k: Any, *others: Any) -> Any:
        """Compute the convolution, and the epilogue by kernels of its own."""
        import torch
        from torch.nn import functional

        w = self.w
        values_by_name = dict(zip(self.input_names, others, strict=True))
        if w.cached_frames:
            x = torch.cat([values_by_name[w.CACHE], x], dim=2)
        if max(w.upsampling) > 1:
            x = functional.interpolate(x, scale_factor=tuple(map(float, w.upsampling)), mode="nearest")
        if not self.is_symmetric:
            pairs = zip(reversed(w.pad_low), reversed(w.pad_high), strict=True)
            x = functional.pad(x, [side for pair in pairs for side in pair])
        bias = values_by_name["bias"] if self.has_leading_bias else None
        y = getattr(functional, f"conv{w.spatial_ndim}d")(x, k, bias, **self.options)
        for name in self.remaining_ops:
            y = apply_op(name, y, values_by_name.get(name))
        return y

    def compute_fused(self, x: Any, k: Any, *others: Any) -> Any:
        """Compute the convolution and the epilogue by one function of cuDNN."""
        import torch

        w = self.w
        names = [*self.input_names, "bias"] if self.needs_zero_bias else self.input_names
        values_by_name = dict(zip(names, others, strict=True))
        residual_arguments = (values_by_name["add"], 1) if "add" in values_by_name else ()
        conv_arguments = (values_by_name["bias"], w.stride, w.pad_low, w.dilation, w.groups)
        return getattr(torch, FUSED_FUNCTIONS[w.epilogue])(x, k, *residual_arguments, *conv_arguments)

    def compute_with_conversions(self, x: Any, k: Any, *others: Any) -> Any:
        """Convert the arguments to the call's layout, compute, and convert the result to the output's layout."""
        own_format = self._find_memory_format(self.layout)
        converted = (
            other.contiguous(memory_format=own_format) if other.dim() > 1 else other for other in (x, k, *others)
        )
        y = (self.compute_fused if self.fused else self.compute)(*converted)
        return y.contiguous(memory_format=self._find_memory_format(self.output_layout))

    def finish(self, y: Any) -> Any:
        """Return the result as the workload's dense Y."""
        return (y.movedim(1, -1) if self.w.output_layout == CHANNELS_LAST else y).contiguous()

    def list_notes(self) -> tuple[str, ...]:
        """Return remarks for the description of the baseline."""
        w = self.w
        notes = [] if self.is_symmetric else ["padded by a kernel of its own"]
        if w.cached_frames:
            notes.append("concatenated with cached frames by a kernel of its own")
        if max(w.upsampling) > 1:
            notes.append("upsampled by a kernel of its own")
        if w.is_depthwise:
            notes.append("depthwise, for which PyTorch may choose a kernel of its own")
        if self.fused:
            notes.append(f"{'+'.join(w.epilogue)} fused")
        elif self.remaining_ops:
            notes.append(f"{'+'.join(self.remaining_ops)} by kernels of PyTorch's")
        if CHANNELS_LAST in (self.layout, w.input_layout, w.output_layout):
            notes.append(f"in {self.layout.upper()}")
        return (*notes, CONVERSION_NOTE) if self.is_mixed else tuple(notes)

    def make_call(self) -> TorchConvCall:
        """Return the call."""
        compute = self.compute_fused if self.fused else self.compute
        if self.is_mixed:
            compute = self.compute_with_conversions
        return TorchConvCall(compute, self.prepare, self.list_notes(), self.finish)

    def _find_memory_format(self, layout: str) -> Any:
        import torch

        channels_last = torch.channels_last if self.w.spatial_ndim == 2 else torch.channels_last_3d
        return channels_last if layout == CHANNELS_LAST else torch.contiguous_format

    def _copy_to_layout(self, tensor: Any, layout: str) -> Any:
        """Copy a tensor; `contiguous` would keep ambiguous strides of axes with size 1, as of the other layout."""
        import torch

        memory_format = self._find_memory_format(layout)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=memory_format)
        return copy.copy_(tensor)


def _move_channels_second(layout: str, tensor: Any) -> Any:
    """Return a view of X, K, Y or a residual with the axes (N, C, space)."""
    return tensor.movedim(-1, 1) if layout == CHANNELS_LAST else tensor


def _list_filter_calls(w: Filter) -> list[TorchConvCall]:
    """Return the calls of a filter: on a plane, and with several channels depthwise and as a batch of images."""
    from torch.nn.functional import conv2d

    (height, width, channels), (row_radius, column_radius) = w.image, w.radius
    plane_options: dict[str, Any] = {"padding": (row_radius, column_radius * channels), "dilation": (1, channels)}

    def to_interleaved(planes: Any) -> Any:  # (C, H, W) as (H, W, C), copied unless the memory has that order already
        return planes.permute(1, 2, 0).contiguous()

    calls = [
        TorchConvCall(
            lambda image, weight: conv2d(image, weight, **plane_options).view(w.signal_shape),
            lambda x, k: (x.view(1, 1, height, width * channels), k.view(1, 1, *w.mask)),
            ("channels as columns of one plane, which the mask strides over",) if channels > 1 else (),
        )
    ]
    if channels > 1:
        calls += [
            TorchConvCall(
                lambda image, weight: to_interleaved(conv2d(image, weight, padding=w.radius, groups=channels)[0]),
                lambda x, k: (x.permute(2, 0, 1)[None], k.expand(channels, 1, *w.mask).contiguous()),
                ("depthwise with the channels last",),
            ),
            TorchConvCall(
                lambda image, weight: to_interleaved(conv2d(image, weight, padding=w.radius)[:, 0]),
                lambda x, k: (x.permute(2, 0, 1)[:, None], k.view(1, 1, *w.mask)),
                ("channels as a batch, the transpositions in the time",),
            ),
        ]
    return [_add_clamp(call) for call in calls] if w.clamp else calls


def _add_clamp(call: TorchConvCall) -> TorchConvCall:
    notes = (*call.notes, "clamped by a kernel of its own")
    return replace(call, compute=lambda image, weight: call.compute(image, weight).clamp_(0, 1), notes=notes)
