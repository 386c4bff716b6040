"""Convolutions of any rank: what one-, two- and three-dimensional ones have in common, which is nearly everything."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.errors import WorkloadError
from tvmconv.workloads import convolve, draw, dtypes, epilogue, layout, sample
from tvmconv.workloads.base import Points
from tvmconv.workloads.geometry import OPTIONS, Geometry, Sizes
from tvmconv.workloads.text import by, count, integers, quote

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm import te, tirx
    from typing_extensions import Self

SIGMAS = 8.0  # times the tolerance of the relative L2 error: what a single sum may err by
TINY = 1e-30  # of a window that lies in the padding, whose sum is zero, any error is larger


class Conv(Geometry):
    """A convolution Y of images X with kernels K; `Geometry` tells its fields and what it computes."""

    @property
    def text(self) -> str:
        """Canonical text, such as `conv2d:1x64x56x56,64x64x3x3,s1,p1`: options d1, g1, f32, nchw are left out."""
        padding = _shortest(self.before) if self.before == self.behind else by(self.padding)
        pieces = [by(self.input_shape), by(self.weight_shape), f"s{_shortest(self.stride)}", f"p{padding}"]
        if set(self.dilation) != {1}:
            pieces.append(f"d{_shortest(self.dilation)}")
        if self.groups != 1:
            pieces.append(f"g{self.groups}")
        if self.dtype != dtypes.FLOAT32.name:
            pieces.append(dtypes.DTYPES[self.dtype].text)
        if self.layout != layout.CHANNELS_FIRST:
            pieces.append(self.layout)
        return f"{self.operator}:{','.join([*pieces, *self.epilogue])}"

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the workload's text, such as `EXAMPLE`.

        Behind input and weight there may be options s, p, d, g with integers, a dtype, a layout and the operations of
        an epilogue, each at most once; only the order of the operations counts.

        Raises:
            WorkloadError: the text is malformed, or its numbers contradict each other.
        """
        operator, colon, sizes = text.partition(":")
        pieces = sizes.split(",")
        if operator != cls.operator or not colon or len(pieces) < 2:
            raise WorkloadError(f"{quote(text)}: expected {cls.operator}:INPUT,WEIGHT[,OPTION…], as in {cls.EXAMPLE}")
        axes, taps = ("x".join(names) for names in (cls.SPACE, cls.KERNEL))
        lengths = (2 + len(cls.SPACE),)
        given = integers(pieces[0], lengths, f"the input's NxCx{axes}, as in {cls.EXAMPLE}")
        weight = integers(pieces[1], lengths, f"the weight's Ox(C/groups)x{taps}, as in {cls.EXAMPLE}")
        filters, channels, *kernel = weight
        named = dict(zip(("N", "C", *cls.SPACE, "O", *cls.KERNEL), (*given, filters, *kernel), strict=True))
        workload = cls(**named, **_parse_options(cls, pieces[2:]))
        if channels != workload.weight_shape[1]:
            raise WorkloadError(
                f"weight {quote(pieces[1])} has {channels} input channels: {workload.C} channels in {workload.groups} "
                f"group{'s' if workload.groups > 1 else ''} need {by(workload.weight_shape)}"
            )
        return workload

    def inputs(self, seed: int) -> tuple[NDArray[Any], ...]:
        """Draw all arguments but Y from the standard normal distribution, as they lie in memory, and round them.

        X and K are rounded to the dtype, also where it is not that of their elements (TF32).
        """
        rounded = [self.dtype, self.dtype, *self.argument_dtypes[2:-1]]
        return draw.normal(seed, list(zip(self.argument_shapes, rounded, strict=False)))

    def reference(self, *inputs: NDArray[Any]) -> NDArray[np.float64]:
        """The right Y for all arguments before it, computed in float64; all as they lie in memory."""
        x, k = (layout.channels_second(self.layout, array) for array in inputs[:2])
        y = convolve.convolve(x, k, self.stride, self.padding, self.dilation, self.groups)
        read = {}
        for operation, array in zip(self.reading, inputs[2:], strict=True):
            exact = array.astype(np.float64)
            of_channels = operation.takes == "channel"
            read[operation.name] = (
                exact.reshape(-1, *(1,) * self.rank) if of_channels else layout.channels_second(self.layout, exact)
            )
        return layout.as_stored(self.layout, epilogue.reference(self.epilogue, y, read))

    def sample(self, cell: int, seed: int, *inputs: NDArray[Any]) -> Points:
        """Compute the outputs of a random sample of pixels in float64, with what rounding may change of each.

        A right kernel's sum errs by less than `SIGMAS` times the dtype's tolerance of its typical size s (see
        `convolve_at`): the tolerance is of the root mean square of all errors, and of 2^31 normally distributed ones
        none exceeds 6.3 times that. The epilogue is applied to the sum moved by as much, up and down, so that what an
        activation amplifies or levels out is counted as it is. Rounding at the store adds the tolerance times the
        output, and evaluating the epilogue in float32 adds `SUM_TOLERANCE` times |sum| + s. A kernel that computes
        something else is off by s or so, which is 100,000 times as much in float32 and 8 times in bfloat16.

        Args:
            cell: about one in cell / 2 pixels is chosen; see `tvmconv.workloads.sample`.
            seed: of the choice.
            inputs: all arguments but Y, as they lie in memory.
        """
        pixels = sample.choose_pixels(self, cell, seed)
        last = self.layout == layout.CHANNELS_LAST
        x, k = inputs[:2]
        geometry = self.out, self.stride, self.before, self.dilation
        sums, scales = convolve.convolve_at(x, k, pixels, *geometry, self.groups, channels_last=last)
        size = math.prod(self.out)
        image, place = pixels[:, None] // size, pixels[:, None] % size
        channel = np.arange(self.O)
        positions = pixels[:, None] * self.O + channel if last else (image * self.O + channel) * size + place
        read = {
            operation.name: dtypes.widen(array if operation.takes == "channel" else array.ravel()[positions])
            for operation, array in zip(self.reading, inputs[2:], strict=True)
        }
        values = epilogue.reference(self.epilogue, sums, read)
        error = SIGMAS * self.tolerance * scales
        moved = [np.abs(epilogue.reference(self.epilogue, sums + by, read) - values) for by in (error, -error)]
        floor = dtypes.SUM_TOLERANCE * (np.abs(sums) + scales)
        allowed = np.maximum(*moved) + self.tolerance * np.abs(values) + floor
        return Points(positions.ravel(), values.ravel(), np.maximum(allowed.ravel(), TINY).astype(np.float32))

    def declare(self) -> tuple[te.Tensor, ...]:
        """Declare the convolution in tensor expressions.

        Whatever rank, dtype, layout, groups and epilogue, the stages are, in this order:

        - `padded` (N, groups, C/groups, space): X with its zeros as far as windows reach, even if no side is padded.
        - `weight` (groups, O/groups, C/groups, kernel): K by group.
        - `sum` (N, groups, O/groups, out): the sum, in float32, of the products of `padded` and `weight`.
        - `Y`: the output in its layout and dtype, each element the epilogue of one of `sum`.

        `padded` and `weight` can be inlined into the sum, and `Y` into a `cache_write` of it.

        Returns:
            A tensor for each of `argument_names`.
        """
        from tvmconv.workloads import declaration

        return declaration.declare(self)

    def prim_func(self) -> tirx.PrimFunc:
        """The declaration as an unscheduled TIR function of the arguments."""
        from tvm import te

        return te.create_prim_func(list(self.declare()))


def _shortest(numbers: Sizes) -> str:
    """(2, 2) as `2`, (2, 1) as `2x1`."""
    return str(numbers[0]) if len(set(numbers)) == 1 else by(numbers)


def _parse_options(operator: type[Conv], pieces: list[str]) -> dict[str, Any]:
    """Read `s2`, `p1x2`, `g4`, `f16`, `nhwc`, `relu` … into the arguments of an operator."""
    options: dict[str, Any] = {}
    epilogues: list[str] = []
    for piece in pieces:
        name, value = _parse_option(operator, piece)
        if name == "epilogue":
            epilogues.append(value)
            continue
        if name in options:
            raise WorkloadError(f"{quote(piece)}: expected {name} at most once")
        options[name] = value
    return {**options, "epilogue": tuple(epilogues)}


def _parse_option(operator: type[Conv], piece: str) -> tuple[str, Any]:
    """The argument that an option is for, and its value."""
    if piece in dtypes.BY_TEXT:
        return "dtype", dtypes.BY_TEXT[piece].name
    if piece in layout.LAYOUTS:
        return "layout", piece
    if piece in epilogue.operations():
        return "epilogue", piece
    names = {name[0]: name for name in OPTIONS}
    if piece[:1] not in names or not piece[1:2].isdigit():
        words = ", ".join([*dtypes.BY_TEXT, *layout.LAYOUTS, *epilogue.operations()])
        raise WorkloadError(f"{quote(piece)}: expected an option, one of s2 (or s2x1), p1, d2, g4, {words}")
    name = names[piece[0]]
    lengths = operator.lengths(name)
    return name, integers(piece[1:], lengths, f"{count(lengths)} after the {piece[0]} of {name}, as in {piece[0]}1")
