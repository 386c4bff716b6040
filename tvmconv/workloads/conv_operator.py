"""What convolutions, their gradients and transposed convolutions share: texts and random inputs."""

from __future__ import annotations

import difflib
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.errors import WorkloadError
from tvmconv.workloads import dtypes, epilogue, layout, random_inputs
from tvmconv.workloads.conv_geometry import ConvGeometry, Sizes
from tvmconv.workloads.text import describe_count, join_sizes, parse_integers, quote

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self


class ConvOperator(ConvGeometry):
    """An operator with the sizes and options of a convolution."""

    @property
    def kind(self) -> str:
        """What the operator is for any number of spatial axes: `conv`, `dgrad`, `wgrad` or `transpose`.

        Example:
            >>> from tvmconv import parse
            >>> parse("conv2d_dgrad:1x64x56x56,64x64x3x3,s1,p1").kind
            'dgrad'
        """
        return self.operator.partition("_")[2] or "conv"

    def to_channels_last(self) -> Self:
        """Return the convolution with all arrays channels last.

        Examples:
            >>> from tvmconv import parse
            >>> parse("conv2d:1x64x56x56,64x64x3x3,s1,p1").to_channels_last().text
            'conv2d:1x64x56x56,64x64x3x3,s1,p1,nhwc'
        """
        return self if self.layout == layout.CHANNELS_LAST else self.with_fields(layout=layout.CHANNELS_LAST)

    def with_fields(self, **fields: Any) -> Self:
        """Return the convolution with other values of some fields.

        Args:
            fields: Values by the names of the fields.

        Raises:
            WorkloadError: The values contradict each other.

        Examples:
            >>> from tvmconv import parse
            >>> parse("conv2d:1x64x56x56,64x64x3x3,s1,p1").with_fields(N=8, dtype="float16").text
            'conv2d:8x64x56x56,64x64x3x3,s1,p1,f16'
        """
        return type(self)(**{**vars(self), **fields})

    def inputs(self, seed: int) -> tuple[NDArray[Any], ...]:
        """Draw all arguments except Y from the standard normal distribution, in memory order.

        X and K are rounded to the workload's dtype, also for TF32, whose elements are stored as float32. The array of
        `stats`, which kernels write, is filled with NaN.

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
        cache = [self.dtype] * (self.num_operands - 2)
        rounding_dtypes = [*self.operand_dtypes, *cache, *self.argument_dtypes[self.num_operands : -1]]
        arrays = list(zip(self.argument_shapes, rounding_dtypes, strict=False))
        if not self.returns_stats:
            return self._fit_inputs(random_inputs.draw_normal(seed, arrays))
        return *random_inputs.draw_normal(seed, arrays[:-1]), np.full(arrays[-1][0], np.nan, np.float32)

    def _fit_inputs(self, arrays: tuple[NDArray[Any], ...]) -> tuple[NDArray[Any], ...]:
        """Return random arguments that suit the size of the sums."""
        return arrays

    @property
    def text(self) -> str:
        """Canonical text, such as `conv2d:1x64x56x56,64x64x3x3,s1,p1`; without the defaults d1, g1, f32 and nchw."""
        padding = format_sizes(self.pad_low) if self.pad_low == self.pad_high else join_sizes(self.padding)
        pieces = [
            join_sizes(self.x_shape),
            join_sizes(self.weight_shape),
            f"s{format_sizes(self.stride)}",
            f"p{padding}",
        ]
        if set(self.dilation) != {1}:
            pieces.append(f"d{format_sizes(self.dilation)}")
        if self.groups != 1:
            pieces.append(f"g{self.groups}")
        pieces += self._format_more_options()
        if self.dtype != dtypes.FLOAT32.name:
            pieces.append(dtypes.DTYPES[self.dtype].text)
        if self.layout != layout.CHANNELS_FIRST:
            pieces.append(self.layout)
        return f"{self.operator}:{','.join([*pieces, *self.epilogue])}"

    def _format_more_options(self) -> list[str]:
        """Return the texts of the options that only this operator has."""
        return []

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
        first, second = cls.WEIGHT_AXES
        input_sizes = parse_integers(parts[0], lengths, f"the input's NxCx{axes}, as in {cls.EXAMPLE}")
        weight = parse_integers(
            parts[1], lengths, f"the weight's {first}x({second}/groups)x{taps}, as in {cls.EXAMPLE}"
        )
        named = dict(zip(("N", "C", *cls.SPACE, *cls.KERNEL), (*input_sizes, *weight[2:]), strict=True))
        options = cls._parse_options(parts[2:])
        named["O"] = cls._count_filters(weight, options)
        workload = cls(**named, **options)
        workload._check_weight(parts[1], weight)
        return workload

    @classmethod
    def _count_filters(cls, weight: Sizes, options: dict[str, Any]) -> int:
        """Return O from the sizes of the weight in a text."""
        return weight[0]

    def _check_weight(self, text: str, weight: Sizes) -> None:
        """Raise WorkloadError if the sizes of the weight in a text contradict the other sizes."""
        if weight[1] != self.weight_shape[1]:
            raise WorkloadError(
                f"weight {quote(text)} has {weight[1]} input channels: {self.C} channels in {self.groups} "
                f"group{'s' if self.groups > 1 else ''} need {join_sizes(self.weight_shape)}"
            )

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
        names = {cls.OPTION_TEXTS[name]: name for name in cls.OPTION_NAMES}
        letters = piece[: len(piece) - len(piece.lstrip(ascii_lowercase))]
        if letters not in names or not piece[len(letters) : len(letters) + 1].isdigit():
            words = ", ".join([*dtypes.DTYPES_BY_TEXT, *cls.LAYOUTS])
            near = difflib.get_close_matches(piece, epilogue.load_ops()) or ["bias", "add", "relu"]
            raise WorkloadError(
                f"{quote(piece)}: expected an option, one of s2 (or s2x1), p1, d2, g4, {words}, or an epilogue "
                f"operation such as {', '.join(near)}"
            )
        name = names[letters]
        lengths = cls.allowed_lengths(name)
        return name, parse_integers(
            piece[len(letters) :], lengths, f"{describe_count(lengths)} after the {letters} of {name}, as in {letters}1"
        )


def format_sizes(numbers: Sizes) -> str:
    """Return (2, 2) as `2` and (2, 1) as `2x1`."""
    return str(numbers[0]) if len(set(numbers)) == 1 else join_sizes(numbers)
