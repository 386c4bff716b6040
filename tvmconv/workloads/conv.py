"""Convolutions over any number of spatial axes: the methods that Conv1d, Conv2d and Conv3d share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.errors import WorkloadError
from tvmconv.workloads import conv_reference, dtypes, epilogue, layout, pixel_sample, random_inputs
from tvmconv.workloads.base import OutputSample
from tvmconv.workloads.conv_geometry import OPTION_NAMES, ConvGeometry, Sizes
from tvmconv.workloads.text import describe_count, join_sizes, parse_integers, quote

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm import te
    from typing_extensions import Self

SIGMA_FACTOR = 8.0  # largest error of a single sum, in units of the tolerance of the relative L2 error
MIN_ALLOWED_ERROR = 1e-30  # a window inside the padding sums to exactly zero; any real error is larger than this


class Conv(ConvGeometry):
    """A convolution Y of images X with kernels K; `ConvGeometry` documents its fields and its formula."""

    def to_channels_last(self) -> Self:
        """Return the convolution with all arrays channels last.

        Examples:
            >>> from tvmconv import parse
            >>> parse("conv2d:1x64x56x56,64x64x3x3,s1,p1").to_channels_last().text
            'conv2d:1x64x56x56,64x64x3x3,s1,p1,nhwc'
        """
        is_last = self.layout == layout.CHANNELS_LAST
        return self if is_last else type(self)(**{**vars(self), "layout": layout.CHANNELS_LAST})

    @property
    def text(self) -> str:
        """Canonical text, such as `conv2d:1x64x56x56,64x64x3x3,s1,p1`; without the defaults d1, g1, f32 and nchw."""
        padding = _format_sizes(self.pad_low) if self.pad_low == self.pad_high else join_sizes(self.padding)
        pieces = [
            join_sizes(self.input_shape),
            join_sizes(self.weight_shape),
            f"s{_format_sizes(self.stride)}",
            f"p{padding}",
        ]
        if set(self.dilation) != {1}:
            pieces.append(f"d{_format_sizes(self.dilation)}")
        if self.groups != 1:
            pieces.append(f"g{self.groups}")
        if self.dtype != dtypes.FLOAT32.name:
            pieces.append(dtypes.DTYPES[self.dtype].text)
        if self.layout != layout.CHANNELS_FIRST:
            pieces.append(self.layout)
        return f"{self.operator}:{','.join([*pieces, *self.epilogue])}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a convolution from its text.

        After the input and the weight follow options in any order: s, p, d and g with integers, a dtype and a layout,
        each at most once. The operations of an epilogue follow in the order in which they are applied.

        Args:
            text: Text of a workload, such as `EXAMPLE`.

        Returns:
            The workload.

        Raises:
            WorkloadError: The text is malformed, or its numbers contradict each other.

        Examples:
            >>> from tvmconv import Conv2d
            >>> Conv2d.parse("conv2d:1x64x56x56,128x64x3x3,s2,p1,f16,nhwc,bias,relu").output_shape
            (1, 128, 28, 28)
        """
        operator, colon, sizes = text.partition(":")
        parts = sizes.split(",")
        if operator != cls.operator or not colon or len(parts) < 2:
            raise WorkloadError(f"{quote(text)}: expected {cls.operator}:INPUT,WEIGHT[,OPTION…], as in {cls.EXAMPLE}")
        axes, taps = ("x".join(names) for names in (cls.SPACE, cls.KERNEL))
        lengths = (2 + len(cls.SPACE),)
        input_sizes = parse_integers(parts[0], lengths, f"the input's NxCx{axes}, as in {cls.EXAMPLE}")
        weight = parse_integers(parts[1], lengths, f"the weight's Ox(C/groups)x{taps}, as in {cls.EXAMPLE}")
        filters, channels, *kernel = weight
        named = dict(zip(("N", "C", *cls.SPACE, "O", *cls.KERNEL), (*input_sizes, filters, *kernel), strict=True))
        workload = cls(**named, **cls._parse_options(parts[2:]))
        if channels != workload.weight_shape[1]:
            raise WorkloadError(
                f"weight {quote(parts[1])} has {channels} input channels: {workload.C} channels in {workload.groups} "
                f"group{'s' if workload.groups > 1 else ''} need {join_sizes(workload.weight_shape)}"
            )
        return workload

    @classmethod
    def _parse_options(cls, pieces: list[str]) -> dict[str, Any]:
        """Parse `s2`, `p1x2`, `g4`, `f16`, `nhwc`, `relu` and so on into keyword arguments."""
        options: dict[str, Any] = {}
        operations: list[str] = []
        for piece in pieces:
            if piece in epilogue.load_ops():
                operations.append(piece)
                continue
            name, value = cls._parse_option(piece)
            if name in options:
                raise WorkloadError(f"{quote(piece)}: expected {name} at most once")
            options[name] = value
        return {**options, "epilogue": tuple(operations)}

    @classmethod
    def _parse_option(cls, piece: str) -> tuple[str, Any]:
        """Return the name of the keyword argument that an option sets, and its value."""
        if piece in dtypes.DTYPES_BY_TEXT:
            return "dtype", dtypes.DTYPES_BY_TEXT[piece].name
        if piece in layout.LAYOUTS:
            return "layout", piece
        names = {name[0]: name for name in OPTION_NAMES}
        if piece[:1] not in names or not piece[1:2].isdigit():
            words = ", ".join([*dtypes.DTYPES_BY_TEXT, *layout.LAYOUTS, *epilogue.load_ops()])
            raise WorkloadError(f"{quote(piece)}: expected an option, one of s2 (or s2x1), p1, d2, g4, {words}")
        name = names[piece[0]]
        lengths = cls.allowed_lengths(name)
        return name, parse_integers(
            piece[1:], lengths, f"{describe_count(lengths)} after the {piece[0]} of {name}, as in {piece[0]}1"
        )

    def inputs(self, seed: int) -> tuple[NDArray[Any], ...]:
        """Draw all arguments except Y from the standard normal distribution, in memory order.

        X and K are rounded to the workload's dtype, also for TF32, whose elements are stored as float32.

        Args:
            seed: Seed of the random numbers, not negative.

        Returns:
            One array for each of `argument_names` except Y, of `argument_shapes` and `argument_dtypes`.

        Examples:
            >>> import tvmconv as tc
            >>> x, k = tc.parse("conv2d:1x4x8x8,6x4x3x3,s1,p1").inputs(seed=0)
            >>> x.shape, k.shape, str(x.dtype)
            ((1, 4, 8, 8), (6, 4, 3, 3), 'float32')
        """
        rounding_dtypes = [self.dtype, self.dtype, *self.argument_dtypes[2:-1]]
        return random_inputs.draw_normal(seed, list(zip(self.argument_shapes, rounding_dtypes, strict=False)))

    def reference(self, *inputs: NDArray[Any]) -> NDArray[np.float64]:
        """Compute the correct Y in float64 from all other arguments, in memory order.

        Args:
            inputs: One array for each of `argument_names` except Y, of their shapes, as `inputs` returns them.

        Returns:
            Y in float64, of the output's shape in memory.

        Examples:
            >>> import tvmconv as tc
            >>> w = tc.parse("conv2d:1x4x8x8,6x4x3x3,s1,p1")
            >>> w.reference(*w.inputs(seed=0)).shape
            (1, 6, 8, 8)
        """
        x, k = (layout.move_channels_second(self.layout, array) for array in inputs[:2])
        y = conv_reference.convolve(x, k, self.stride, self.padding, self.dilation, self.groups)
        arguments = {}
        for operation, array in zip(self.argument_ops, inputs[2:], strict=True):
            widened = array.astype(np.float64)
            arguments[operation.name] = (
                widened.reshape(-1, *(1,) * self.spatial_ndim)
                if operation.argument_kind == "channel"
                else layout.move_channels_second(self.layout, widened)
            )
        return layout.to_storage_layout(self.layout, epilogue.apply_to_array(self.epilogue, y, arguments))

    def sample_outputs(self, cell: int, seed: int, *inputs: NDArray[Any]) -> OutputSample:
        """Compute the outputs of a random sample of pixels in float64, with the error that rounding allows for each.

        About one in cell / 2 pixels is chosen; see `tvmconv.workloads.pixel_sample`. All O channels of it are computed.

        Let s be the typical size of a sum (see `convolve_pixels`). The sum of a correct kernel errs by less than
        `SIGMA_FACTOR` times the dtype's tolerance times s. The tolerance limits the root mean square of all errors, and
        among 2^31 normally distributed errors none exceeds 6.3 times that. The epilogue is applied to the sum shifted
        by this error in both directions, because an activation may amplify or remove it. Rounding at the store adds the
        tolerance times the output. Evaluating the epilogue in float32 adds `SUM_TOLERANCE` times |sum| + s. A kernel
        that computes something else errs by about s, which is 100,000 times the allowed error in float32 and 8 times in
        bfloat16.

        Args:
            cell: Inverse density of the sample, in pixels: about one in cell / 2 is chosen.
            seed: Seed of the choice of pixels, not negative.
            inputs: One array for each of `argument_names` except Y, of their shapes, as `inputs` returns them.

        Returns:
            The sampled outputs, their flat positions in Y, and the largest error that rounding explains for each.

        Examples:
            >>> import tvmconv as tc
            >>> w = tc.parse("conv2d:1x4x32x32,6x4x3x3,s1,p1")
            >>> sample = w.sample_outputs(16, 0, *w.inputs(seed=0))
            >>> sample.positions.shape == sample.values.shape
            True
        """
        pixels = pixel_sample.choose_pixels(self, cell, seed)
        is_channels_last = self.layout == layout.CHANNELS_LAST
        x, weight = inputs[:2]
        geometry = self.output_size, self.stride, self.pad_low, self.dilation
        sums, scales = conv_reference.convolve_pixels(
            x, weight, pixels, *geometry, self.groups, channels_last=is_channels_last
        )
        size = math.prod(self.output_size)
        image, position = pixels[:, None] // size, pixels[:, None] % size
        channel = np.arange(self.O)
        positions = (
            pixels[:, None] * self.O + channel if is_channels_last else (image * self.O + channel) * size + position
        )
        epilogue_arguments = {
            operation.name: dtypes.widen_to_float64(
                array if operation.argument_kind == "channel" else array.ravel()[positions]
            )
            for operation, array in zip(self.argument_ops, inputs[2:], strict=True)
        }
        values = epilogue.apply_to_array(self.epilogue, sums, epilogue_arguments)
        error = SIGMA_FACTOR * self.tolerance * scales
        shifted_errors = [
            np.abs(epilogue.apply_to_array(self.epilogue, sums + shift, epilogue_arguments) - values)
            for shift in (error, -error)
        ]
        min_errors = dtypes.SUM_TOLERANCE * (np.abs(sums) + scales)
        allowed = np.maximum(*shifted_errors) + self.tolerance * np.abs(values) + min_errors
        return OutputSample(
            positions.ravel(), values.ravel(), np.maximum(allowed.ravel(), MIN_ALLOWED_ERROR).astype(np.float32)
        )

    def declare(self) -> tuple[te.Tensor, ...]:
        """Declare the convolution in tensor expressions.

        The stages are the same for all numbers of spatial axes, dtypes, layouts, groups and epilogues, in this order:

        - `padded` (N, groups, C/groups, space): X with zeros as far as windows reach, even where no side is padded.
        - `weight` (groups, O/groups, C/groups, kernel): K split into groups.
        - `sum` (N, groups, O/groups, out): the sum of the products of `padded` and `weight`, in float32.
        - `Y`: the output in its layout and dtype, with the epilogue applied to each element of `sum`.

        `padded` and `weight` can be inlined into the sum, and `Y` into a `cache_write` of it.

        Returns:
            One tensor for each of `argument_names`, the output last.

        Examples:
            >>> import tvmconv as tc
            >>> [tensor.op.name for tensor in tc.parse("conv2d:1x4x8x8,6x4x3x3,s1,p1").declare()]
            ['X', 'K', 'Y']
        """
        from tvmconv.workloads import conv_te

        return conv_te.declare(self)


def _format_sizes(numbers: Sizes) -> str:
    """Return (2, 2) as `2` and (2, 1) as `2x1`."""
    return str(numbers[0]) if len(set(numbers)) == 1 else join_sizes(numbers)
