"""Two-dimensional convolution: NCHW input, OIHW weight, any stride, padding, dilation and groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from tvmconv.errors import WorkloadError
from tvmconv.workloads.text import by, check_elements, checked_integers, count, integers, quote

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm import te, tirx

REFERENCE_CHUNK_BYTES = 16 << 20  # of unfolded input that the reference holds at a time

_DTYPES = {"f32": "float32", "f16": "float16"}
_SIZES = ("N", "C", "H", "W", "O", "R", "S")
_OPTIONS = {"stride": (1, 2), "padding": (1, 2, 4), "dilation": (1, 2), "groups": (1,)}  # how many integers each takes


@dataclass(frozen=True)
class Conv2d:
    """A convolution Y of images X with kernels K.

    Y[n, o, p, q] is the sum over c, r, s of X[n, c, p·stride + r·dilation - top, q·stride + s·dilation - left] ·
    K[o, c, r, s], with zeros outside X. As in every deep-learning library this is a correlation: K is not flipped.
    With groups, the C input and the O output channels fall into that many equal parts, and each part of the output
    sees its own part of the input only.

    Attributes:
        N: batch size.
        C: input channels.
        H: input height.
        W: input width.
        O: output channels.
        R: kernel height.
        S: kernel width.
        stride: vertical and horizontal step; the constructor also takes one int for both.
        padding: zeros above, left, below and right of the input; the constructor also takes one int for all four, or
            (vertical, horizontal).
        dilation: vertical and horizontal distance between the kernel's taps; the constructor also takes one int.
        groups: number of groups; it divides C and O.
        dtype: element type of X, K and Y, `float32` or `float16`. Sums are accumulated in float32 either way.

    Raises:
        WorkloadError: a number is no integer or out of range, or the numbers contradict each other.
    """

    operator: ClassVar[str] = "conv2d"
    argument_names: ClassVar[tuple[str, ...]] = ("X", "K", "Y")
    EXAMPLE: ClassVar[str] = "conv2d:1x64x56x56,64x64x3x3,s1,p1"

    N: int
    C: int
    H: int
    W: int
    O: int  # noqa: E741  the field's own letter
    R: int
    S: int
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in _SIZES:
            self._normalise(name, lengths=(1,))
        for name, lengths in _OPTIONS.items():
            self._normalise(name, lengths)
        self._validate()

    def _normalise(self, name: str, lengths: tuple[int, ...]) -> None:
        """Check a field's integers and repeat a short form such as `padding=1` up to the longest of its lengths."""
        least = 0 if name == "padding" else 1
        values = checked_integers(name, getattr(self, name), lengths, least)
        numbers = values * (lengths[-1] // len(values))
        object.__setattr__(self, name, numbers if len(numbers) > 1 else numbers[0])

    def _validate(self) -> None:
        """Check that the normalised fields fit together."""
        if not isinstance(self.dtype, str) or self.dtype not in _DTYPES.values():
            raise WorkloadError(f"dtype={quote(self.dtype)}: expected one of {', '.join(_DTYPES.values())}")
        if self.C % self.groups or self.O % self.groups:
            raise WorkloadError(
                f"groups={self.groups} must divide both the {self.C} input and the {self.O} output channels"
            )
        if self.P < 1 or self.Q < 1:
            raise WorkloadError(
                f"the kernel, {by(self._window)} with its dilation, is larger than the padded image, "
                f"{by(self.padded_shape[2:])}: expected more padding or a smaller kernel"
            )
        named = [*zip(self.argument_names, self.argument_shapes, strict=True), ("the padded X", self.padded_shape)]
        for name, shape in named:
            check_elements(name, shape)

    @property
    def _window(self) -> tuple[int, int]:
        """Height and width of the input that one output sees: the kernel with its dilation."""
        return (self.R - 1) * self.dilation[0] + 1, (self.S - 1) * self.dilation[1] + 1

    @property
    def P(self) -> int:  # noqa: N802  the field's own letter
        """Output height."""
        return (self.padded_shape[2] - self._window[0]) // self.stride[0] + 1

    @property
    def Q(self) -> int:  # noqa: N802  the field's own letter
        """Output width."""
        return (self.padded_shape[3] - self._window[1]) // self.stride[1] + 1

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        """Shape of X: (N, C, H, W)."""
        return self.N, self.C, self.H, self.W

    @property
    def padded_shape(self) -> tuple[int, int, int, int]:
        """Shape of X with its padding: (N, C, top + H + bottom, left + W + right)."""
        top, left, bottom, right = self.padding
        return self.N, self.C, top + self.H + bottom, left + self.W + right

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """Shape of K: (O, C / groups, R, S)."""
        return self.O, self.C // self.groups, self.R, self.S

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        """Shape of Y: (N, O, P, Q)."""
        return self.N, self.O, self.P, self.Q

    @property
    def argument_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of X, K and Y."""
        return self.input_shape, self.weight_shape, self.output_shape

    @property
    def depthwise(self) -> bool:
        """Whether every output channel sees one input channel and every input channel feeds one output channel."""
        return self.C == self.O == self.groups

    @property
    def flops(self) -> int:
        """2·N·O·P·Q·(C/groups)·R·S: a multiplication and an addition for each tap, those in the padding included."""
        return 2 * math.prod(self.output_shape) * math.prod(self.weight_shape[1:])

    @property
    def min_bytes(self) -> int:
        """Least bytes moved to and from memory: what is used of X and K read once, Y written once.

        Not used are the elements of X that strides step over and the taps of K that only ever meet padding.
        """
        rows, kernel_rows = _used(self.H, self.R, self.P, self.stride[0], self.dilation[0], self.padding[0])
        columns, kernel_columns = _used(self.W, self.S, self.Q, self.stride[1], self.dilation[1], self.padding[1])
        read = self.N * self.C * rows * columns + math.prod(self.weight_shape[:2]) * kernel_rows * kernel_columns
        return (read + math.prod(self.output_shape)) * np.dtype(self.dtype).itemsize

    @property
    def arithmetic_intensity(self) -> float:
        """`flops` over `min_bytes`, in FLOP per byte."""
        return self.flops / self.min_bytes

    @property
    def text(self) -> str:
        """Canonical text, such as `conv2d:1x64x56x56,64x64x3x3,s1,p1`: options d1, g1 and f32 are left out."""
        top, left, bottom, right = self.padding
        padding = _shortest((top, left)) if (top, left) == (bottom, right) else by(self.padding)
        pieces = [by(self.input_shape), by(self.weight_shape), f"s{_shortest(self.stride)}", f"p{padding}"]
        if self.dilation != (1, 1):
            pieces.append(f"d{_shortest(self.dilation)}")
        if self.groups != 1:
            pieces.append(f"g{self.groups}")
        if self.dtype != "float32":
            pieces.append(next(short for short, dtype in _DTYPES.items() if dtype == self.dtype))
        return f"{self.operator}:{','.join(pieces)}"

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> Conv2d:
        """Read `conv2d:NxCxHxW,Ox(C/groups)xRxS` and options s, p, d, g, f16, f32, in any order and each at most once.

        Raises:
            WorkloadError: the text is malformed, or its numbers contradict each other.
        """
        operator, colon, sizes = text.partition(":")
        pieces = sizes.split(",")
        if operator != cls.operator or not colon or len(pieces) < 2:
            raise WorkloadError(f"{quote(text)}: expected conv2d:INPUT,WEIGHT[,OPTION…], as in {cls.EXAMPLE}")
        N, C, H, W = integers(pieces[0], (4,), f"the input's NxCxHxW, as in {cls.EXAMPLE}")
        O, channels, R, S = integers(pieces[1], (4,), f"the weight's Ox(C/groups)xRxS, as in {cls.EXAMPLE}")  # noqa: E741
        workload = cls(N, C, H, W, O, R, S, **_parse_options(pieces[2:]))
        if channels != workload.weight_shape[1]:
            raise WorkloadError(
                f"weight {quote(pieces[1])} has {channels} input channels: {C} channels in {workload.groups} "
                f"group{'s' if workload.groups > 1 else ''} need {by(workload.weight_shape)}"
            )
        return workload

    def inputs(self, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Draw X and K from the standard normal distribution, C-contiguous and of the workload's dtype."""
        rng = np.random.default_rng(seed)
        x, k = (rng.standard_normal(shape, np.float32) for shape in (self.input_shape, self.weight_shape))
        return x.astype(self.dtype, copy=False), k.astype(self.dtype, copy=False)

    def reference(self, x: NDArray[Any], k: NDArray[Any]) -> NDArray[np.float64]:
        """Convolve in float64: unfold the windows into columns (im2col) and multiply with NumPy's BLAS.

        Source: Chellapilla, Puri, Simard, "High Performance Convolutional Neural Networks for Document Processing",
        2006. The columns are made a chunk at a time, as all of them are R·S times the input.

        Args:
            x: input of shape `input_shape`.
            k: weight of shape `weight_shape`.

        Returns:
            Output of shape `output_shape`.
        """
        top, left, bottom, right = self.padding
        weight = k.astype(np.float64).reshape(self.groups, self.O // self.groups, -1)
        pixels = max(1, REFERENCE_CHUNK_BYTES // (8 * self.C * self.R * self.S))
        rows, columns = max(1, pixels // self.Q), min(pixels, self.Q)
        y = np.empty(self.output_shape, np.float64)
        for image, out in zip(x, y, strict=True):
            padded = np.pad(image.astype(np.float64), ((0, 0), (top, bottom), (left, right)))
            windows = sliding_window_view(padded, self._window, axis=(1, 2))
            windows = windows[:, :: self.stride[0], :: self.stride[1], :: self.dilation[0], :: self.dilation[1]]
            for p in range(0, self.P, rows):
                for q in range(0, self.Q, columns):
                    chunk = windows[:, p : p + rows, q : q + columns].transpose(0, 3, 4, 1, 2)  # c, r, s, p, q
                    product = weight @ chunk.reshape(*weight.shape[::2], -1)
                    out[:, p : p + rows, q : q + columns] = product.reshape(self.O, *chunk.shape[3:])
        return y

    def declare(self) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
        """Declare the convolution in tensor expressions.

        The stages are, in this order:

        - `padded` (N, C, top + H + bottom, left + W + right): X with its zeros, there even when no side is padded.
        - `weight` (groups, O/groups, C/groups, R, S): K by group; only with groups.
        - `conv`: the sum, in float32; only with groups or float16.
        - `Y` (N, O, P, Q): the output; it is the sum itself where there is no `conv`, else a copy of it.

        With groups, `padded` and `conv` have the group as an axis after the batch, so that schedules can bind it.
        `padded` and `weight` can be inlined into the sum, and `Y` into a `cache_write` of `conv`.

        Returns:
            The tensors X, K and Y.
        """
        from tvmconv.workloads import conv2d_te

        return conv2d_te.declare(self)

    def prim_func(self) -> tirx.PrimFunc:
        """The declaration as an unscheduled TIR function of X, K and Y."""
        from tvm import te

        return te.create_prim_func(list(self.declare()))


def _used(size: int, kernel: int, out: int, stride: int, dilation: int, before: int) -> tuple[int, int]:
    """How many of an axis's `size` positions some window reads, and how many of its `kernel` taps read any."""
    positions = np.zeros(size, bool)
    taps = 0
    for tap in range(kernel):
        first = tap * dilation - before  # where the tap of the first window falls
        stop = max(0, first + (out - 1) * stride + 1)
        read = positions[first if first >= 0 else first % stride : stop : stride]
        read[:] = True
        taps += bool(read.size)
    return int(np.count_nonzero(positions)), taps


def _shortest(pair: tuple[int, int]) -> str:
    """(2, 2) as `2`, (2, 1) as `2x1`."""
    return str(pair[0]) if pair[0] == pair[1] else by(pair)


def _parse_options(pieces: list[str]) -> dict[str, Any]:
    """Read `s2`, `p1x2`, `g4`, `f16` … into the arguments of `Conv2d`."""
    options: dict[str, Any] = {}
    names = {name[0]: name for name in _OPTIONS}
    for piece in pieces:
        if piece not in _DTYPES and piece[:1] not in names:
            raise WorkloadError(f"{quote(piece)}: expected an option, one of s2 (or s2x1), p1, d2, g4, f16, f32")
        name = "dtype" if piece in _DTYPES else names[piece[0]]
        if name in options:
            raise WorkloadError(f"{quote(piece)}: expected {name} at most once")
        options[name] = _DTYPES[piece] if name == "dtype" else _parse_integers(piece, name)
    return options


def _parse_integers(piece: str, name: str) -> tuple[int, ...]:
    """Read the integers after an option's letter."""
    lengths = _OPTIONS[name]
    return integers(piece[1:], lengths, f"{count(lengths)} after the {piece[0]} of {name}, as in {piece[0]}1")
