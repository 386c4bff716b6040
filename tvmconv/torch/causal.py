"""Causal 3-D convolutions of videos, in whole or in chunks of frames, without copies of their inputs.

    >>> conv = tvmconv.torch.CausalConv3d(96, 96, 3, padding=1, activation="silu")  # doctest: +SKIP
    >>> cache = None
    >>> for chunk in chunks:  # doctest: +SKIP
    ...     y, cache = conv.stream(chunk, cache)

On an NVIDIA GPU, a kernel reads the cached frames and the new ones where they lie. PyTorch would concatenate and pad
them before the convolution, and apply residual and activation behind it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from tvmconv.baselines.torch_calls import load_activations
from tvmconv.errors import DeviceError, Error, ModelError
from tvmconv.torch.layer import TensorStamp, are_current, stamp_tensors
from tvmconv.torch.operator_library import is_transformed
from tvmconv.workloads import Conv3d
from tvmconv.workloads.epilogue import load_ops

KERNEL_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
MIN_CAPABILITY = (8, 0)  # of GPUs whose kernels read cached frames on tensor cores
DEFAULT_LOG = "tuning.jsonl"

_kernels: dict[tuple[str, str], Any] = {}  # kernel, or None if there is none, by workload text and device


class CausalConv3d(torch.nn.Conv3d):
    """A convolution of volumes whose outputs read no later frames, with optional cached frames before the input.

    Output frame z reads the input frames up to z · stride. Frames before the first one are those of the cache, and
    zeros before these. Kernels compute float16 and bfloat16 in inference on GPUs since sm_80; the first call of a shape
    builds one, unless `tune` has found the fastest. PyTorch computes everything else.

    Args:
        in_channels: Number of input channels.
        out_channels: Number of output channels.
        kernel_size: Taps along depth, height and width, or one number for all.
        stride: Distance between windows along each axis, or one number for all.
        padding: Zeros on both sides of height and width, or one number for both. The front of the depth has as many
            as the kernel reads before the first frame, and its end has none.
        dilation: Distance between taps along each axis, or one number for all.
        groups: Number of groups of channels.
        bias: Whether each output channel has a bias.
        activation: Name of an operation behind bias and residual, such as "silu"; None for none.
        upsample: Factor by which height and width are repeated before the convolution.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ModelError: The activation is unknown, or has an argument.

    Examples:
        >>> import torch, tvmconv.torch
        >>> conv = tvmconv.torch.CausalConv3d(4, 6, 3, padding=1)
        >>> video = torch.randn(1, 4, 5, 8, 8)
        >>> first, cache = conv.stream(video[:, :, :2])
        >>> second, cache = conv.stream(video[:, :, 2:], cache)
        >>> torch.allclose(torch.cat([first, second], dim=2), conv(video), atol=1e-5)
        True
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        activation: str | None = None,
        upsample: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        height, width = (padding, padding) if isinstance(padding, int) else padding
        taps, strides, dilations = (_repeat(sizes) for sizes in (kernel_size, stride, dilation))
        super().__init__(
            in_channels,
            out_channels,
            taps,
            strides,
            (0, height, width),
            dilations,
            groups,
            bias,
            device=device,
            dtype=dtype,
        )
        if activation is not None and (activation not in load_ops() or load_ops()[activation].argument_kind):
            raise ModelError(f"activation={activation!r}: expected an operation without an argument, such as 'silu'")
        self.activation, self.upsample = activation, upsample
        self._packed: tuple[list[TensorStamp], torch.Tensor] | None = None  # weight, channels last, with its stamp

    @property
    def num_cached_frames(self) -> int:
        """Number of frames before an input that its outputs read."""
        return (self.kernel_size[0] - 1) * self.dilation[0]

    def forward(
        self, x: torch.Tensor, cache: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the convolution.

        Args:
            x: Volumes of shape (N, C, D, H, W).
            cache: The last frames before them, at most `num_cached_frames`, of shape (N, C, frames, H, W); None for
                none. Missing frames are zeros.
            residual: Summand of the shape of the result, which is added before the activation; None for none.

        Returns:
            Volumes of shape (N, O, out), in the dtype of the input.

        Raises:
            RuntimeError: The tensors do not fit; the message is PyTorch's.

        Examples:
            >>> import torch, tvmconv.torch
            >>> conv = tvmconv.torch.CausalConv3d(4, 6, (3, 1, 1))
            >>> conv(torch.randn(1, 4, 5, 8, 8), cache=torch.randn(1, 4, 2, 8, 8)).shape
            torch.Size([1, 6, 5, 8, 8])
        """
        kernel = self._find_kernel(x, cache, residual)
        if kernel is None:
            return self._compute_by_pytorch(x, cache, residual)
        y = self._run(kernel, x, cache, residual)
        return y.permute(0, 4, 1, 2, 3)

    def stream(
        self, x: torch.Tensor, cache: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the convolution of the next frames of a video.

        The results of all chunks are those of the whole video. Strides of the depth are 1.

        Args:
            x: The next frames, of shape (N, C, D, H, W).
            cache: What the call for the frames before them returned; None for the first frames.
            residual: Summand of the shape of the result; None for none.

        Returns:
            The result, and the cache for the next call, which shares no memory with `x`.

        Raises:
            ModelError: The stride of the depth is not 1.

        Examples:
            >>> import torch, tvmconv.torch
            >>> y, cache = tvmconv.torch.CausalConv3d(4, 6, 3).stream(torch.randn(1, 4, 5, 8, 8))
            >>> cache.shape
            torch.Size([1, 4, 2, 8, 8])
        """
        if self.stride[0] != 1:
            raise ModelError(f"stride={self.stride[0]} along the depth: a video in chunks needs a stride of 1")
        y, count = self(x, cache, residual), self.num_cached_frames
        if count == 0:
            return y, None
        if cache is None or x.shape[2] >= count:
            return y, x[:, :, -count:].clone()
        return y, torch.cat([cache, x], dim=2)[:, :, -count:].clone()

    def workload(
        self, x: torch.Tensor, cache: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> Conv3d:
        """Return the workload of a call, channels last, whose kernel computes it.

        Args:
            x: The input, of which only shape and dtype matter.
            cache: The cached frames.
            residual: The residual.

        Raises:
            WorkloadError: The sizes contradict each other.

        Examples:
            >>> import torch, tvmconv.torch
            >>> conv = tvmconv.torch.CausalConv3d(4, 6, 3, padding=1)
            >>> conv.workload(torch.empty(1, 4, 5, 8, 8), cache=torch.empty(1, 4, 2, 8, 8)).text
            'conv3d:1x4x5x8x8,6x4x3x3x3,s1,p0x1x1,c2,nhwc,bias'
        """
        images, channels, *sizes = x.shape
        cached_frames, (_, height, width) = 0 if cache is None else cache.shape[2], self.padding
        operations = [("bias", self.bias is not None), ("add", residual is not None)]
        names = ("N", "C", "D", "H", "W", "O", "T", "R", "S")
        values = (images, channels, *sizes, self.out_channels, *self.kernel_size)
        fields: dict[str, Any] = dict(zip(names, values, strict=True))
        return Conv3d(
            **fields,
            stride=self.stride,
            padding=(self.num_cached_frames - cached_frames, height, width, 0, height, width),
            dilation=self.dilation,
            groups=self.groups,
            dtype=KERNEL_DTYPES.get(x.dtype, "float32"),
            layout="nhwc",
            epilogue=(*(name for name, is_used in operations if is_used), *filter(None, [self.activation])),
            cached_frames=cached_frames,
            upsample=(1, self.upsample, self.upsample),
        )

    def tune(
        self,
        x: torch.Tensor,
        cache: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        *,
        seconds: float = 8.0,
        log: str | os.PathLike[str] = DEFAULT_LOG,
    ) -> str:
        """Search the fastest kernel for calls with tensors like these, which all modules then use.

        Args:
            x: An input.
            cache: Cached frames.
            residual: A residual.
            seconds: Time limit of the search in seconds.
            log: Log that has earlier measurements, and that is appended to.

        Returns:
            One line with the kernel and its time.

        Raises:
            DeviceError: The tensors are not on an NVIDIA GPU with tensor cores, or have another dtype.
            ScheduleError: No schedule computes the workload.

        Examples:
            >>> conv.tune(x, cache, seconds=8)  # doctest: +SKIP
        """
        from tvmconv.logs.build import build
        from tvmconv.search.tune import tune

        if not self._has_kernels(x):
            raise DeviceError("expected float16 or bfloat16 on an NVIDIA GPU since sm_80")
        workload, device = self.workload(x, cache, residual), f"cuda:{x.device.index}"
        result = tune(workload, device=device, seconds=seconds, log=log)
        kernel = build(workload, device=device, log=log)
        _kernels[workload.text, device] = kernel
        return f"{workload}: {kernel.schedule.name}, {result.cost * 1e6:.1f} µs"

    def _has_kernels(self, x: torch.Tensor) -> bool:
        """Return whether kernels compute inputs of this device and dtype."""
        if x.device.type != "cuda" or x.dtype not in KERNEL_DTYPES or x.dtype != self.weight.dtype:
            return False
        return torch.cuda.get_device_capability(x.device) >= MIN_CAPABILITY

    def _find_kernel(self, x: torch.Tensor, cache: torch.Tensor | None, residual: torch.Tensor | None) -> Any:
        """Return the kernel of a call; None if PyTorch computes it."""
        tensors = [tensor for tensor in (x, cache, residual, self.weight) if tensor is not None]
        needs_gradient = any(tensor is not None and tensor.requires_grad for tensor in (*tensors, self.bias))
        if (needs_gradient and torch.is_grad_enabled()) or torch.compiler.is_compiling() or is_transformed():
            return None
        if x.dim() != 5 or not self._has_kernels(x):
            return None
        if any(tensor.dtype != x.dtype or tensor.device != x.device for tensor in tensors):
            return None
        device = f"cuda:{x.device.index}"
        try:
            workload = self.workload(x, cache, residual)
        except Error:  # PyTorch says what does not fit
            return None
        key = workload.text, device
        if key not in _kernels:
            _kernels[key] = _build_kernel(workload, device)
        return _kernels[key]

    def _run(
        self, kernel: Any, x: torch.Tensor, cache: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Run a kernel on tensors, which are copied only if they are not channels last."""
        named = {"X": _move_channels_last(x), "K": self._pack_weight()}
        if cache is not None:
            named["cache"] = _move_channels_last(cache)
        if self.bias is not None:
            named["bias"] = self.bias.detach().float()
        if residual is not None:
            named["add"] = _move_channels_last(residual)
        return kernel(*(named[name] for name in kernel.workload.argument_names[:-1]))

    def _pack_weight(self) -> torch.Tensor:
        """Return the weight, channels last; it is copied once for each of its versions.

        Tensors of inference mode have none, and are copied in each call unless they are channels last.
        """
        if self.weight.is_inference():
            return _move_channels_last(self.weight)
        if self._packed is None or not are_current(self._packed[0], [self.weight]):
            self._packed = stamp_tensors([self.weight]), _move_channels_last(self.weight)
        return self._packed[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}  # copies have weights of their own

    def _compute_by_pytorch(
        self, x: torch.Tensor, cache: torch.Tensor | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the convolution by PyTorch's kernels."""
        cached_frames, (_, height, width) = 0 if cache is None else cache.shape[2], self.padding
        if cache is not None:
            x = torch.cat([cache, x], dim=2)
        if self.upsample > 1:
            x = functional.interpolate(x, scale_factor=(1.0, float(self.upsample), float(self.upsample)))
        x = functional.pad(x, (width, width, height, height, self.num_cached_frames - cached_frames, 0))
        y = functional.conv3d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)
        if residual is not None:
            y = y + residual
        return y if self.activation is None else load_activations()[self.activation](y)


def _repeat(sizes: int | Sequence[int]) -> tuple[int, int, int]:
    """Return one number for each axis."""
    depth, height, width = (sizes,) * 3 if isinstance(sizes, int) else sizes
    return depth, height, width


def _move_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor (N, C, D, H, W) as a contiguous one (N, D, H, W, C)."""
    return tensor.detach().permute(0, 2, 3, 4, 1).contiguous()


def _build_kernel(workload: Conv3d, device: str) -> Any:
    """Return the kernel that the packaged logs or the cost model recommend; None if no schedule computes it."""
    from tvmconv.logs.build import build

    try:
        return build(workload, device=device, check=False)
    except Error:
        return None
