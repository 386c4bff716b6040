"""Gradients of convolutions and transposed convolutions, each defined by a forward convolution.

Let Y be the forward convolution of X with K. The gradient of X (dgrad) is the product of dY with the transposed matrix
of the convolution, and a transposed convolution is the same product with other names. The gradient of K (wgrad) is
the correlation of X with dY.

All of them are also declared as convolutions, with the stages `padded`, `weight` and `sum` of `Conv.declare`, so that
schedules of convolutions apply to them. `as_convolution` has the sizes of these stages:

- dgrad and transposed: a convolution of stride 1. `padded` is dY with `stride` - 1 zeros between its elements and with
  a border; `weight` is K with flipped taps, and with input and output channels exchanged.
- wgrad: X's channels are images, its images are channels, and dY is the filter. Stride and dilation are exchanged.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tvmconv.errors import WorkloadError
from tvmconv.workloads import conv_reference, dtypes, epilogue, layout
from tvmconv.workloads.conv import Conv
from tvmconv.workloads.conv_geometry import Sizes
from tvmconv.workloads.conv_operator import ConvOperator, format_sizes
from tvmconv.workloads.text import join_sizes, quote

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm import te

OUT_FLOAT32 = "out-f32"  # text of the option that stores sums in float32
ATOMICS = "atomics"  # text of the option that permits sums in any order, which differ between runs
SUMMED_PRODUCTS = 5000  # products per sum up to which `dtypes.SUM_TOLERANCE` suffices for float32


class DerivedConv(ConvOperator, ABC):
    """An operator that a forward convolution defines; subclasses have the same fields as convolutions."""

    FORWARD: ClassVar[type[Conv]]  # class of the forward convolution
    LAYOUTS: ClassVar[tuple[str, ...]] = layout.UNIFORM_LAYOUTS
    EPILOGUE_OPS: ClassVar[tuple[str, ...] | None] = None  # operations that an epilogue may have; None for all

    @property
    def forward(self) -> Conv:
        """The forward convolution, without an epilogue."""
        return self._derive(
            (self.N, self.C, *self.input_size),
            (self.O, *self.kernel),
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
        )

    def _derive(self, image: Sizes, filters: Sizes, **options: Any) -> Conv:
        """Return the convolution of an image (N, C, space) with filters (O, kernel), with this operator's groups."""
        names = ("N", "C", *self.SPACE, "O", *self.KERNEL)
        options |= {"groups": self.groups, "dtype": self.dtype, "layout": self.layout}
        return _make_conv(self.FORWARD, tuple(zip(names, (*image, *filters), strict=True)), tuple(options.items()))

    @property
    @abstractmethod
    def as_convolution(self) -> Conv:
        """The convolution whose stages the declaration has; its sizes are those of `padded`, `weight` and `sum`."""

    def _check_views(self) -> None:
        if dtypes.DTYPES[self.dtype].has_8_bits:
            raise WorkloadError(f"dtype={quote(self.dtype)}: {self.operator} does not support it")
        for name in (epilogue.STATS, epilogue.QUANTIZE, epilogue.ZERO_POINT):
            if name in self.epilogue:
                raise WorkloadError(f"epilogue={quote(name)}: {self.operator} does not support it")
        for name in self.epilogue:
            if self.EPILOGUE_OPS is not None and name not in self.EPILOGUE_OPS:
                accepted = ", ".join(self.EPILOGUE_OPS)
                raise WorkloadError(f"epilogue={quote(name)}: {self.operator} supports only {accepted}")
        try:
            assert self.as_convolution
        except WorkloadError as error:
            raise WorkloadError(f"{self.operator} as a convolution: {error}") from error

    @property
    def flops(self) -> int:
        """FLOP of the forward convolution: two for each of its products, padding included."""
        return self.forward.flops

    @property
    def min_bytes(self) -> int:
        """Minimum memory traffic in bytes: each argument is read or written once.

        Elements of X and dY that no window connects, and taps of K that only meet padding, are unused.
        """
        forward = self.forward
        axes = list(
            zip(
                forward.input_size,
                forward.kernel,
                forward.output_size,
                forward.stride,
                forward.dilation,
                forward.pad_low,
                strict=True,
            )
        )
        used = [_find_used(*axis) for axis in axes]
        counts = self._count_used_operands([math.prod(sizes) for sizes in zip(*used, strict=True)])
        elements = [*counts, *map(math.prod, self.argument_shapes[2:])]
        sizes = (dtypes.get_numpy_dtype(dtype).itemsize for dtype in self.argument_dtypes)
        return sum(count * size for count, size in zip(elements, sizes, strict=True))

    @abstractmethod
    def _count_used_operands(self, used: list[int]) -> tuple[int, int]:
        """Return the used elements of both operands from the used positions of X, taps of K and positions of Y."""

    def _apply_epilogue(self, sums: NDArray[np.float64], arguments: tuple[NDArray[Any], ...]) -> NDArray[np.float64]:
        """Apply the epilogue to sums (first, channel, space), and return the result in memory order."""
        values = {}
        for operation, array in zip(self.argument_ops, arguments, strict=True):
            widened = array.astype(np.float64)
            values[operation.name] = (
                widened.reshape(-1, *(1,) * self.spatial_ndim)
                if operation.argument_kind == "channel"
                else layout.move_channels_second(self.layout, widened)
            )
        return layout.to_storage_layout(self.layout, epilogue.apply_to_array(self.epilogue, sums, values))


class InputGradient(DerivedConv):
    """The gradient of a convolution's input, dX, from dY and K; `DerivedConv` documents its declaration."""

    OPERANDS: ClassVar[tuple[str, str]] = ("dY", "K")
    RESULT: ClassVar[str] = "dX"
    EPILOGUE_OPS: ClassVar[tuple[str, ...] | None] = ("add", "drelu")

    @property
    def argument_shapes(self) -> tuple[Sizes, ...]:
        """Shapes of the arguments in memory order."""
        x, k, y = self.forward.argument_shapes
        channels = self.forward.C
        return y, k, *(x if each.argument_kind == "output" else (channels,) for each in self.argument_ops), x

    @property
    def border(self) -> Sizes:
        """Zeros before dY in `padded` along each axis; negative where padding hides elements of dY."""
        windows = zip(self.forward.window, self.forward.pad_low, strict=True)
        return tuple(window - 1 - pad_low for window, pad_low in windows)

    @property
    def as_convolution(self) -> Conv:
        """A convolution of stride 1 without padding, from O to C channels; `padded` has the zeros between elements."""
        forward = self.forward
        padded = [n + window - 1 for n, window in zip(forward.input_size, forward.window, strict=True)]
        return self._derive((forward.N, forward.O, *padded), (forward.C, *forward.kernel), dilation=forward.dilation)

    @property
    def direct_convolution(self) -> Conv | None:
        """The convolution of dY itself that the operator is at stride 1, with the epilogue; None if there is none.

        Its filters are K with flipped taps and exchanged channels.
        """
        forward, border = self.forward, self.border
        sizes = zip(forward.input_size, forward.window, forward.output_size, border, strict=True)
        border_high = [n + window - 1 - out - low for n, window, out, low in sizes]
        if max(forward.stride) > 1 or min(*border, *border_high) < 0:
            return None
        return self._derive(
            (forward.N, forward.O, *forward.output_size),
            (forward.C, *forward.kernel),
            padding=(*border, *border_high),
            dilation=forward.dilation,
            epilogue=self.epilogue,
        )

    def _count_used_operands(self, used: list[int]) -> tuple[int, int]:
        forward, (_, taps, outputs) = self.forward, used
        return forward.N * forward.O * outputs, math.prod(forward.weight_shape[:2]) * taps

    def reference(self, *inputs: NDArray[Any]) -> NDArray[np.float64]:
        """Compute the correct result in float64 from all other arguments, in memory order."""
        forward = self.forward
        dy, k = (layout.move_channels_second(self.layout, array) for array in inputs[:2])
        sums = conv_reference.input_gradient(
            dy, k, forward.input_size, forward.stride, forward.pad_low, forward.dilation, forward.groups
        )
        return self._apply_epilogue(sums, inputs[2:])

    def declare(self) -> tuple[te.Tensor, ...]:
        """Declare the operator in tensor expressions, with the stages that `DerivedConv` describes."""
        from tvmconv.workloads import conv_gradient_te

        return conv_gradient_te.declare_input_gradient(self, self.forward, self.as_convolution, self.border)


class WeightGradient(DerivedConv):
    """The gradient of a convolution's weight, dK, from dY and X; `DerivedConv` documents its declaration."""

    OPERANDS: ClassVar[tuple[str, str]] = ("dY", "X")
    RESULT: ClassVar[str] = "dK"
    EPILOGUE_OPS: ClassVar[tuple[str, ...] | None] = ("add",)

    out_float32: bool
    atomics: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("out_float32", "atomics"):
            if not isinstance(getattr(self, name), bool):
                raise WorkloadError(f"{name}={quote(getattr(self, name))}: expected True or False")
        # Where elements are float32 anyway, there is one workload and one text.
        object.__setattr__(self, "out_float32", self.out_float32 and self.storage != dtypes.ACCUMULATOR)

    @property
    def argument_dtypes(self) -> tuple[str, ...]:
        """Element types of the arguments in memory."""
        dtype = dtypes.ACCUMULATOR if self.out_float32 else self.storage
        return self.storage, self.storage, *(dtype for _ in self.argument_ops), dtype

    def _format_more_options(self) -> list[str]:
        return [OUT_FLOAT32] * self.out_float32 + [ATOMICS] * self.atomics

    @classmethod
    def _parse_option(cls, piece: str) -> tuple[str, Any]:
        names = {OUT_FLOAT32: "out_float32", ATOMICS: "atomics"}
        return (names[piece], True) if piece in names else super()._parse_option(piece)

    @property
    def argument_shapes(self) -> tuple[Sizes, ...]:
        """Shapes of the arguments in memory order."""
        x, k, y = self.forward.argument_shapes
        return y, x, *(k for _ in self.argument_ops), k

    @property
    def as_convolution(self) -> Conv:
        """A convolution of C / groups images with N channels by O filters of the output's size."""
        forward = self.forward
        sizes = zip(forward.output_size, forward.stride, forward.window, strict=True)
        return self._derive(
            (
                forward.C // forward.groups,
                forward.N * forward.groups,
                *((out - 1) * stride + window for out, stride, window in sizes),
            ),
            (forward.O, *forward.output_size),
            stride=forward.dilation,
            dilation=forward.stride,
        )

    @property
    def tolerance(self) -> float:
        """Largest relative L2 error of a correct result; float32 sums of many products err more than those of few."""
        products = self.N * math.prod(self.output_size)
        more = dtypes.SUM_TOLERANCE * max(0.0, math.sqrt(products / SUMMED_PRODUCTS) - 1)
        return dtypes.DTYPES[self.dtype].tolerance + more

    def _count_used_operands(self, used: list[int]) -> tuple[int, int]:
        forward, (positions, _, outputs) = self.forward, used
        return forward.N * forward.O * outputs, forward.N * forward.C * positions

    def reference(self, *inputs: NDArray[Any]) -> NDArray[np.float64]:
        """Compute the correct result in float64 from all other arguments, in memory order."""
        forward = self.forward
        dy, x = (layout.move_channels_second(self.layout, array) for array in inputs[:2])
        sums = conv_reference.weight_gradient(
            dy, x, forward.kernel, forward.stride, forward.pad_low, forward.dilation, forward.groups
        )
        return self._apply_epilogue(sums, inputs[2:])

    def declare(self) -> tuple[te.Tensor, ...]:
        """Declare the operator in tensor expressions, with the stages that `DerivedConv` describes."""
        from tvmconv.workloads import conv_gradient_te

        return conv_gradient_te.declare_weight_gradient(self, self.forward, self.as_convolution)


class TransposedConv(InputGradient):
    """A transposed convolution Y of X with K: the gradient of the input of a convolution from O to C channels.

    Element X[n, c, i] adds X[n, c, i] · K[c, o, r] to Y[n, o, i·stride + r·dilation - before]. The weight is (C, O /
    groups, kernel), as in PyTorch. `output_padding` adds positions at the end of each axis of Y.
    """

    OPERANDS: ClassVar[tuple[str, str]] = ("X", "K")
    RESULT: ClassVar[str] = "Y"
    EPILOGUE_OPS: ClassVar[tuple[str, ...] | None] = None
    OPTION_NAMES: ClassVar[tuple[str, ...]] = (*ConvOperator.OPTION_NAMES, "output_padding")
    OPTION_TEXTS: ClassVar[dict[str, str]] = {**ConvOperator.OPTION_TEXTS, "output_padding": "op"}
    WEIGHT_AXES: ClassVar[tuple[str, str]] = ("C", "O")

    output_padding: Sizes

    @property
    def output_size(self) -> Sizes:
        """Sizes of the output along the spatial axes."""
        axes = zip(
            self.input_size,
            self.stride,
            self.window,
            self.pad_low,
            self.pad_high,
            self.output_padding,
            strict=True,
        )
        return tuple((n - 1) * stride + window - low - high + more for n, stride, window, low, high, more in axes)

    @property
    def weight_shape(self) -> Sizes:
        """Shape of K: (C, O / groups, kernel)."""
        return self.C, self.O // self.groups, *self.kernel

    @property
    def forward(self) -> Conv:
        """The convolution from O to C channels whose input's gradient this is."""
        # The output's padding is as much as the last window leaves out, so it shortens the padding behind the input.
        return self._derive(
            (self.N, self.O, *self.output_size),
            (self.C, *self.kernel),
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
        )

    def _check_sizes(self) -> None:
        if min(self.output_size) < 1:
            raise WorkloadError(
                f"the output, {join_sizes([max(0, n) for n in self.output_size])}, is empty: expected less padding"
            )
        limits = [max(sizes) for sizes in zip(self.stride, self.dilation, strict=True)]
        if any(more >= limit for more, limit in zip(self.output_padding, limits, strict=True)):
            raise WorkloadError(
                f"output_padding={quote(self.output_padding)}: expected less than the stride or the dilation"
            )
        if self.forward.output_size != self.input_size:
            raise WorkloadError(
                f"output_padding={quote(self.output_padding)}: expected less than the stride along each axis"
            )

    def _format_more_options(self) -> list[str]:
        return [f"op{format_sizes(self.output_padding)}"] if any(self.output_padding) else []

    @classmethod
    def _count_filters(cls, weight: Sizes, options: dict[str, Any]) -> int:
        (groups,) = options.get("groups", (1,))
        return weight[1] * groups

    def _check_weight(self, text: str, weight: Sizes) -> None:
        if weight[0] != self.C:
            raise WorkloadError(
                f"weight {quote(text)} has {weight[0]} input channels: {self.C} channels need "
                f"{join_sizes(self.weight_shape)}"
            )


@functools.lru_cache(maxsize=1024)
def _make_conv(cls: type[Conv], sizes: tuple[tuple[str, int], ...], options: tuple[tuple[str, Any], ...]) -> Conv:
    return cls(**dict(sizes), **dict(options))


def _find_used(
    size: int, kernel: int, output_size: int, stride: int, dilation: int, pad_low: int
) -> tuple[int, int, int]:
    """Return how many positions of an axis of X, taps of K and positions of Y occur in a product inside of X."""
    inputs, outputs, taps = np.zeros(size, bool), np.zeros(output_size, bool), 0
    for tap in range(kernel):
        positions = np.arange(output_size) * stride + (tap * dilation - pad_low)
        is_inside = (positions >= 0) & (positions < size)
        inputs[positions[is_inside]] = True
        outputs |= is_inside
        taps += bool(is_inside.any())
    return int(np.count_nonzero(inputs)), taps, int(np.count_nonzero(outputs))
