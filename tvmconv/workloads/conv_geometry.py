"""The sizes of convolutions and the quantities that follow from them: shapes, operations and bytes."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tvmconv.errors import WorkloadError
from tvmconv.workloads import dtypes, epilogue, features, layout
from tvmconv.workloads.base import Workload
from tvmconv.workloads.text import MAX_INT32_ELEMENTS, MAX_PIXELS, check_elements, join_sizes, validate_integers

if TYPE_CHECKING:
    from tvmconv.workloads.epilogue import EpilogueOp

Sizes = tuple[int, ...]

SCALAR_OPTIONS = ("groups", "cached_frames")  # options of one integer


class ConvGeometry(Workload):
    """The geometry of a convolution Y of images X with kernels K over `spatial_ndim` spatial axes.

    Y[n, o, p] is the sum over c and r of X[n, c, p·stride + r·dilation - before] · K[o, c, r], followed by the
    epilogue. The indices p and r, and stride, dilation and padding, have one number for each spatial axis; X is zero
    outside its bounds. As in all deep-learning libraries this is a correlation: K is not flipped. With groups, the C
    input and the O output channels are split into equal parts, and each part of the output reads only its own part of
    the input.

    Subclasses are frozen dataclasses with the fields N, C, those of `SPACE`, O, those of `KERNEL`, and the options
    below. Properties such as `input_shape` are in the order N, C, space; `argument_shapes` are in memory order.

    Raises:
        WorkloadError: A number is not an integer or out of range, or the numbers contradict each other.
    """

    SPACE: ClassVar[tuple[str, ...]]  # field names of the input's spatial sizes
    KERNEL: ClassVar[tuple[str, ...]]  # field names of the kernel's sizes
    OPTION_NAMES: ClassVar[tuple[str, ...]] = ("stride", "padding", "dilation", "groups")
    # In a text, these letters stand before an option's integers.
    OPTION_TEXTS: ClassVar[dict[str, str]] = {"stride": "s", "padding": "p", "dilation": "d", "groups": "g"}
    OPERANDS: ClassVar[tuple[str, str]] = ("X", "K")  # names of the arguments that are multiplied
    RESULT: ClassVar[str] = "Y"  # name of the argument that is computed
    CACHE: ClassVar[str] = "cache"  # name of the argument with cached frames
    MAX_ELEMENTS: ClassVar[int] = MAX_INT32_ELEMENTS  # limit of X, of Y and of the arguments of the epilogue
    LAYOUTS: ClassVar[tuple[str, ...]] = layout.LAYOUTS  # layouts that the operator accepts
    WEIGHT_AXES: ClassVar[tuple[str, str]] = ("O", "C")  # channels of the weight's first axis, and of its second

    N: int  # batch size
    C: int  # number of input channels
    # Number of output channels.
    O: int  # noqa: E741  the field's own letter
    stride: Sizes  # stride along each spatial axis; the constructor also takes one int for all axes
    # Zeros before the input along each axis, then zeros after it along each axis. The constructor also takes one int
    # for all sides, or one number for both sides of each axis.
    padding: Sizes
    dilation: Sizes  # distance between kernel taps along each axis; the constructor also takes one int for all axes
    groups: int  # number of groups; it divides C and O
    # Type in which elements are stored and multiplied, one of `dtypes.DTYPES`; sums are accumulated in float32.
    dtype: str
    # One of `LAYOUTS`: channels of all tensors are before the spatial axes ("nchw") or last ("nhwc"), or X and K have
    # the first and Y and residuals the second of two layouts ("nchw-nhwc", "nhwc-nchw").
    layout: str
    # Names of the operations on each sum before it is stored, in order; the constructor also takes one name.
    epilogue: tuple[str, ...]
    # Frames before those of X along the first spatial axis, which are in the argument `cache`; 0 without it.
    cached_frames: int = 0
    # Factor of the nearest-neighbor upsampling of the input along each spatial axis; empty for operators without it.
    upsample: Sizes = ()

    def __post_init__(self) -> None:
        for name in ("N", "C", *self.SPACE, "O", *self.KERNEL):
            self._normalize_field(name, lengths=(1,))
        for name in self.OPTION_NAMES:
            self._normalize_field(name, self.allowed_lengths(name))
        dtypes.validate_dtype(self.dtype)
        layout.validate_layout(self.layout, self.LAYOUTS)
        object.__setattr__(self, "epilogue", epilogue.validate_epilogue(self.epilogue))
        if self.returns_stats and self.output_layout != layout.CHANNELS_LAST:
            raise WorkloadError(f"epilogue={epilogue.STATS!r} needs channels last, not layout {self.layout!r}")
        if self.C % self.groups or self.O % self.groups:
            raise WorkloadError(
                f"groups={self.groups} must divide both the {self.C} input and the {self.O} output channels"
            )
        self._check_sizes()
        for name, shape in zip(self.argument_names, self.argument_shapes, strict=True):
            check_elements(name, shape, MAX_INT32_ELEMENTS if name == self.OPERANDS[1] else self.MAX_ELEMENTS)
        self._check_views()

    def _check_sizes(self) -> None:
        """Raise WorkloadError if the spatial sizes contradict each other."""
        if min(self.output_size) < 1:
            raise WorkloadError(
                f"the kernel, {join_sizes(self.window)} with its dilation, is larger than the padded image, "
                f"{join_sizes(self.padded_shape[2:])}: expected more padding or a smaller kernel"
            )

    def _check_views(self) -> None:
        """Raise WorkloadError if a tensor that the declaration derives from an argument is too large."""
        check_elements("the padded X", self.padded_shape, self.MAX_ELEMENTS)
        for name, (images, _, *space) in (("the padded X", self.padded_shape), ("Y", self.output_shape)):
            if math.prod((images, *space)) > MAX_PIXELS:
                raise WorkloadError(
                    f"{name} has {math.prod((images, *space))} pixels: expected at most {MAX_PIXELS}, so that they "
                    "have 32-bit numbers"
                )

    @classmethod
    def allowed_lengths(cls, option: str) -> tuple[int, ...]:
        """Return the numbers of integers that an option accepts, in ascending order.

        Args:
            option: One of "stride", "padding", "dilation" and "groups".

        Examples:
            >>> from tvmconv import Conv2d
            >>> Conv2d.allowed_lengths("padding")
            (1, 2, 4)
        """
        spatial_ndim = len(cls.SPACE)
        if option in SCALAR_OPTIONS:
            return (1,)
        return tuple(dict.fromkeys((1, spatial_ndim, 2 * spatial_ndim) if option == "padding" else (1, spatial_ndim)))

    def _normalize_field(self, name: str, lengths: tuple[int, ...]) -> None:
        """Check a field's integers and repeat a short form such as `padding=1` up to the longest allowed length."""
        minimum = 0 if "padding" in name or name == "cached_frames" else 1
        values = validate_integers(name, getattr(self, name), lengths, minimum)
        numbers = values * (lengths[-1] // len(values))
        is_scalar = name not in self.OPTION_NAMES or name in SCALAR_OPTIONS
        object.__setattr__(self, name, numbers[0] if is_scalar else numbers)

    @property
    def operand_dtypes(self) -> tuple[str, str]:
        """Types in which X and K are multiplied, two of `dtypes.DTYPES`."""
        return self.dtype, self.dtype

    @property
    def weight_storage(self) -> str:
        """Element type of K in memory."""
        return dtypes.DTYPES[self.operand_dtypes[1]].storage

    @property
    def spatial_ndim(self) -> int:
        """Number of spatial axes."""
        return len(self.SPACE)

    @property
    def x_size(self) -> Sizes:
        """Sizes of X along the spatial axes."""
        return tuple(getattr(self, name) for name in self.SPACE)

    @property
    def stored_size(self) -> Sizes:
        """Sizes of the input in memory along the spatial axes: cached frames, then X."""
        first, *others = self.x_size
        return first + self.cached_frames, *others

    @property
    def upsampling(self) -> Sizes:
        """Factor of the upsampling along each spatial axis, 1 without it."""
        return self.upsample or (1,) * self.spatial_ndim

    @property
    def input_size(self) -> Sizes:
        """Sizes of the input that windows read along the spatial axes: cached frames and X, upsampled."""
        return tuple(size * factor for size, factor in zip(self.stored_size, self.upsampling, strict=True))

    @property
    def kernel(self) -> Sizes:
        """Sizes of the kernel along the spatial axes."""
        return tuple(getattr(self, name) for name in self.KERNEL)

    @property
    def pad_low(self) -> Sizes:
        """Number of zeros before the input along each spatial axis."""
        return self.padding[: self.spatial_ndim]

    @property
    def pad_high(self) -> Sizes:
        """Number of zeros after the input along each spatial axis."""
        return self.padding[self.spatial_ndim :]

    @property
    def window(self) -> Sizes:
        """Sizes of the input window of one output: the extent of the dilated kernel."""
        return tuple((taps - 1) * dilation + 1 for taps, dilation in zip(self.kernel, self.dilation, strict=True))

    @property
    def output_size(self) -> Sizes:
        """Sizes of the output along the spatial axes."""
        padded = self.padded_shape[2:]
        return tuple(
            (n - window) // stride + 1 for n, window, stride in zip(padded, self.window, self.stride, strict=True)
        )

    @property
    def P(self) -> int:  # noqa: N802  the field's own letter
        """Output height."""
        return self.output_size[-2]

    @property
    def Q(self) -> int:  # noqa: N802  the field's own letter
        """Output width, or number of output samples."""
        return self.output_size[-1]

    @property
    def x_shape(self) -> Sizes:
        """Shape of X: (N, C, space)."""
        return self.N, self.C, *self.x_size

    @property
    def cache_shape(self) -> Sizes:
        """Shape of the cached frames: (N, C, space)."""
        return self.N, self.C, self.cached_frames, *self.x_size[1:]

    @property
    def input_shape(self) -> Sizes:
        """Shape of the input that windows read, (N, C, space): X, unless there are cached frames or upsampling."""
        return self.N, self.C, *self.input_size

    @property
    def required_features(self) -> tuple[str, ...]:
        """Properties that a schedule has to support explicitly, among `tvmconv.workloads.features.ALL_FEATURES`."""
        return tuple(
            name
            for name, is_required in (
                (features.LARGE_TENSORS, self.has_large_tensors),
                (features.CACHED_FRAMES, self.cached_frames > 0),
                (features.UPSAMPLING, max(self.upsampling) > 1),
            )
            if is_required
        )

    @property
    def reads_x_only(self) -> bool:
        """Whether windows read X as it is, without cached frames before it and without upsampling."""
        return not self.cached_frames and max(self.upsampling) == 1

    @property
    def has_large_tensors(self) -> bool:
        """Whether offsets in an argument, or in the padded input, need 64 bits."""
        return any(math.prod(shape) > MAX_INT32_ELEMENTS for shape in (*self.argument_shapes, self.padded_shape))

    @property
    def padded_shape(self) -> Sizes:
        """Shape of X with its padding: (N, C, before + space + after)."""
        return self.N, self.C, *map(sum, zip(self.pad_low, self.input_size, self.pad_high, strict=True))

    @property
    def weight_shape(self) -> Sizes:
        """Shape of K: (O, C / groups, kernel)."""
        return self.O, self.C // self.groups, *self.kernel

    @property
    def output_shape(self) -> Sizes:
        """Shape of Y: (N, O, out)."""
        return self.N, self.O, *self.output_size

    @property
    def input_layout(self) -> str:
        """Uniform layout of X and K."""
        return layout.get_input_layout(self.layout)

    @property
    def output_layout(self) -> str:
        """Uniform layout of Y and of residuals."""
        return layout.get_output_layout(self.layout)

    @property
    def argument_ops(self) -> list[EpilogueOp]:
        """Operations of the epilogue that have an argument."""
        return [op for op in epilogue.get_ops(self.epilogue) if op.argument_kind]

    @property
    def returns_stats(self) -> bool:
        """Whether the epilogue returns the statistics of the output's channels; they are the last argument before Y."""
        return epilogue.STATS in self.epilogue

    @property
    def argument_names(self) -> tuple[str, ...]:
        """The operands (X, K), cached frames, the arguments of the epilogue in its order, and the result (Y)."""
        cache = (self.CACHE,) if self.cached_frames else ()
        return *self.OPERANDS, *cache, *(operation.name for operation in self.argument_ops), self.RESULT

    @property
    def argument_shapes(self) -> tuple[Sizes, ...]:
        """Shapes of the arguments in memory order."""
        x, k, cache = (
            layout.to_storage_order(self.input_layout, shape)
            for shape in (self.x_shape, self.weight_shape, self.cache_shape)
        )
        operands = (x, k, cache) if self.cached_frames else (x, k)
        y = layout.to_storage_order(self.output_layout, self.output_shape)
        shapes = {"output": y, "channel": (self.O,), "tensor": (1,), "stats": (2, self.O)}
        return *operands, *(shapes[operation.argument_kind or ""] for operation in self.argument_ops), y

    @property
    def argument_dtypes(self) -> tuple[str, ...]:
        """Element types of the arguments in memory; per-channel arguments have the accumulator's type."""
        read = (
            self.storage if operation.argument_kind == "output" else dtypes.ACCUMULATOR
            for operation in self.argument_ops
        )
        return *(self.storage,) * self.num_operands, *read, self.storage

    @property
    def num_operands(self) -> int:
        """Number of arguments before those of the epilogue: X, K and, if there are, cached frames."""
        return 3 if self.cached_frames else 2

    @property
    def is_depthwise(self) -> bool:
        """Whether each output channel reads one input channel and each input channel feeds one output channel."""
        return self.C == self.O == self.groups

    @property
    def flops(self) -> int:
        """2·N·O·(C/groups)·out·kernel: one multiplication and one addition per tap, padding included.

        The operations of the epilogue are not counted.
        """
        return 2 * math.prod(self.output_shape) * math.prod(self.weight_shape[1:])

    @property
    def min_bytes(self) -> int:
        """Minimum memory traffic in bytes: used input elements are read once, Y is written once.

        Elements of X that the stride skips, and taps of K that only meet padding, are unused.
        """
        axes = zip(
            *(self.stored_size, self.upsampling, self.kernel, self.output_size, self.stride, self.dilation),
            self.pad_low,
            strict=True,
        )
        used_positions, taps = zip(*(_count_used(*axis) for axis in axes), strict=True)
        num_used_elements = [
            self.N * self.C * math.prod(used_positions),
            math.prod(self.weight_shape[:2]) * math.prod(taps),
        ]
        elements = [*num_used_elements, *map(math.prod, self.argument_shapes[self.num_operands :])]
        operand_dtypes, other_dtypes = self.argument_dtypes[:2], self.argument_dtypes[self.num_operands :]
        sizes = (dtypes.get_numpy_dtype(dtype).itemsize for dtype in (*operand_dtypes, *other_dtypes))
        return sum(count * size for count, size in zip(elements, sizes, strict=True))


@functools.lru_cache(maxsize=1024)  # schedules compute the bytes of a workload for each config
def _count_used(
    stored_size: int, factor: int, kernel: int, output_size: int, stride: int, dilation: int, pad_low: int
) -> tuple[int, int]:
    """Return how many of an axis's positions in memory any window reads, and how many of its `kernel` taps read any.
    Windows read each of the `stored_size` positions `factor` times.
    """
    positions = np.zeros(stored_size * factor, bool)
    taps = 0
    for tap in range(kernel):
        first = tap * dilation - pad_low  # input position that the first window's tap reads
        stop = max(0, first + (output_size - 1) * stride + 1)
        positions_read = positions[first if first >= 0 else first % stride : stop : stride]
        positions_read[:] = True
        taps += bool(positions_read.size)
    return int(np.count_nonzero(positions.reshape(stored_size, factor).any(axis=1))), taps
