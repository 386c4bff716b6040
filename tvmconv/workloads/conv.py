"""Convolutions over any number of spatial axes: the methods that Conv1d, Conv2d and Conv3d share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tvmconv.errors import WorkloadError
from tvmconv.workloads import conv_reference, dtypes, epilogue, layout, pixel_sample, quantization, text
from tvmconv.workloads.base import OutputSample
from tvmconv.workloads.conv_operator import ConvOperator, format_sizes
from tvmconv.workloads.text import quote

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm import te

SIGMA_FACTOR = 8.0  # largest error of a single sum, in units of the tolerance of the relative L2 error
MIN_ALLOWED_ERROR = 1e-30  # a window inside the padding sums to exactly zero; any real error is larger than this


class Conv(ConvOperator):
    """A convolution Y of images X with kernels K; `ConvGeometry` documents its fields and its formula."""

    OPTION_NAMES: ClassVar[tuple[str, ...]] = (*ConvOperator.OPTION_NAMES, "upsample")
    OPTION_TEXTS: ClassVar[dict[str, str]] = {**ConvOperator.OPTION_TEXTS, "upsample": "up", "cached_frames": "c"}
    MAX_ELEMENTS: ClassVar[int] = text.MAX_ELEMENTS

    # Element type of Y, and of arguments like Y, if operands have 8 bits. The empty text stands for the default of
    # `quantization.select_output_dtype`, and for the type of other operands.
    out_dtype: str
    # Dtype of K if it and X are 8-bit floats of different types. The empty text stands for that of X.
    weight_dtype: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if dtypes.DTYPES[self.dtype].has_8_bits and not self.reads_x_only:
            raise WorkloadError(
                f"{dtypes.DTYPES[self.dtype].text}: expected no options c and up with operands of 8 bits"
            )
        if self.weight_dtype:
            quantization.validate_weight(self.dtype, self.weight_dtype)
            object.__setattr__(self, "weight_dtype", self.weight_dtype if self.weight_dtype != self.dtype else "")
        if dtypes.DTYPES[self.dtype].has_8_bits:
            num_products = math.prod(self.weight_shape[1:])
            quantization.validate_output(self.dtype, self.epilogue, self.output_dtype, num_products)
            if self.out_dtype == quantization.select_output_dtype(self.dtype, self.epilogue):
                object.__setattr__(self, "out_dtype", "")
        elif self.out_dtype or (ops := [op for op in self.epilogue if op in (epilogue.QUANTIZE, epilogue.ZERO_POINT)]):
            accepted = ", ".join(dtypes.DTYPES[name].text for name in dtypes.EIGHT_BIT_DTYPES)
            option = f"out_dtype={quote(self.out_dtype)}" if self.out_dtype else f"epilogue={ops[0]!r}"
            raise WorkloadError(f"{option}: expected operands of {accepted}, not {dtypes.DTYPES[self.dtype].text}")

    @property
    def operand_dtypes(self) -> tuple[str, str]:
        """Types in which X and K are multiplied, two of `dtypes.DTYPES`.

        Example:
            >>> import tvmconv as tc
            >>> tc.parse("conv2d:1x16x8x8,16x16x3x3,s1,p1,weight-e5m2,e4m3").operand_dtypes
            ('float8_e4m3fn', 'float8_e5m2')
        """
        return self.dtype, self.weight_dtype or self.dtype

    @property
    def output_dtype(self) -> str:
        """Element type of Y, and of arguments like Y.

        Example:
            >>> import tvmconv as tc
            >>> tc.parse("conv2d:1x16x8x8,16x16x3x3,s1,p1,e4m3").output_dtype
            'bfloat16'
        """
        if not dtypes.DTYPES[self.dtype].has_8_bits:
            return self.storage
        return self.out_dtype or quantization.select_output_dtype(self.dtype, self.epilogue)

    @property
    def argument_dtypes(self) -> tuple[str, ...]:
        """Element types of the arguments in memory; arguments per channel or tensor have the accumulator's type."""
        read = (
            self.output_dtype if operation.argument_kind == "output" else dtypes.ACCUMULATOR
            for operation in self.argument_ops
        )
        cache = (self.storage,) * (self.num_operands - 2)
        return self.storage, self.weight_storage, *cache, *read, self.output_dtype

    @property
    def tolerance(self) -> float:
        """Largest relative L2 error of a correct result against `reference`."""
        dtype = dtypes.DTYPES[self.dtype]
        return quantization.get_tolerance(self.dtype, self.output_dtype) if dtype.has_8_bits else dtype.tolerance

    def _fit_inputs(self, arrays: tuple[NDArray[Any], ...]) -> tuple[NDArray[Any], ...]:
        """Return random arguments; those of operations with a `draw` suit the size of the sums of 8-bit operands."""
        if not dtypes.DTYPES[self.dtype].has_8_bits:
            return arrays
        size = quantization.get_sum_size(self.dtype, math.prod(self.weight_shape[1:]))
        is_scaled = any(op.draw for op in self.argument_ops)
        arguments = []
        for op, numbers in zip(self.argument_ops, arrays[2:], strict=True):
            arguments.append(op.draw(numbers, size, self.output_dtype) if op.draw else numbers)
            size = 1.0 if op.draw else size
        operands = (quantization.reduce_operand(x, self.output_dtype, is_scaled=is_scaled) for x in arrays[:2])
        return *operands, *arguments

    def _format_more_options(self) -> list[str]:
        options = {stored: text for text, stored in quantization.OUT_DTYPES.items()}
        cached = [f"c{self.cached_frames}"] if self.cached_frames else []
        upsampled = [f"up{format_sizes(self.upsample)}"] if max(self.upsample) > 1 else []
        output = [options[self.out_dtype]] if self.out_dtype else []
        weight = [f"{quantization.WEIGHT_PREFIX}{dtypes.DTYPES[self.weight_dtype].text}"] if self.weight_dtype else []
        return [*cached, *upsampled, *output, *weight]

    @classmethod
    def _parse_option(cls, piece: str) -> tuple[str, Any]:
        if piece in quantization.OUT_DTYPES:
            return "out_dtype", quantization.OUT_DTYPES[piece]
        if piece in quantization.WEIGHT_DTYPES:
            return "weight_dtype", quantization.WEIGHT_DTYPES[piece]
        if piece.startswith(quantization.WEIGHT_PREFIX):
            raise WorkloadError(f"{quote(piece)}: expected one of {', '.join(quantization.WEIGHT_DTYPES)}")
        if piece.startswith(quantization.OUT_PREFIX):
            raise WorkloadError(f"{quote(piece)}: expected one of {', '.join(quantization.OUT_DTYPES)}")
        return super()._parse_option(piece)

    def _assemble_input(self, inputs: Sequence[NDArray[Any]], *, upsamples: bool = True) -> NDArray[Any]:
        """Return what windows read, of shape (N, C, space): cached frames, then X, upsampled unless not `upsamples`."""
        x = layout.move_channels_second(self.input_layout, inputs[0])
        if self.cached_frames:
            x = np.concatenate([layout.move_channels_second(self.input_layout, inputs[2]), x], axis=2)
        for axis, factor in enumerate(self.upsample if upsamples else (), 2):
            x = x.repeat(factor, axis) if factor > 1 else x
        return x

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
        x, k = self._assemble_input(inputs), layout.move_channels_second(self.input_layout, inputs[1])
        y = conv_reference.convolve(x, k, self.stride, self.padding, self.dilation, self.groups)
        arguments = {}
        for operation, array in zip(self.argument_ops, inputs[self.num_operands :], strict=True):
            if not operation.reads_argument:
                continue
            widened = array.astype(np.float64)
            arguments[operation.name] = (
                widened.reshape(-1, *(1,) * self.spatial_ndim)
                if operation.argument_kind != "output"
                else layout.move_channels_second(self.output_layout, widened)
            )
        y = quantization.limit_array(epilogue.apply_to_array(self.epilogue, y, arguments), self.output_dtype)
        return layout.to_storage_layout(self.output_layout, y)

    def compute_stats(self, y: NDArray[Any]) -> NDArray[np.float64]:
        """Compute what the operation `stats` returns, from the whole output.

        Args:
            y: The output in memory order, of any dtype of numbers.

        Returns:
            The mean and the biased variance of each output channel in float64, of shape (2, O).

        Examples:
            >>> import numpy as np, tvmconv as tc
            >>> w = tc.parse("conv2d:2x4x8x8,6x4x3x3,s1,p1,f16,nhwc,stats")
            >>> w.compute_stats(np.ones((2, 8, 8, 6))).tolist()
            [[1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
        """
        channels_second = layout.move_channels_second(self.output_layout, np.asarray(y, np.float64))
        axes = (0, *range(2, channels_second.ndim))
        return np.stack([channels_second.mean(axes), channels_second.var(axes)])

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
        reads_channels_last, stores_channels_last = (
            each == layout.CHANNELS_LAST for each in (self.input_layout, self.output_layout)
        )
        x, weight = inputs[:2]
        if self.cached_frames:
            x = layout.to_storage_layout(self.input_layout, self._assemble_input(inputs, upsamples=False))
        geometry = self.output_size, self.stride, self.pad_low, self.dilation
        sums, scales = conv_reference.convolve_pixels(
            x, weight, pixels, *geometry, self.groups, self.upsample, channels_last=reads_channels_last
        )
        size = math.prod(self.output_size)
        image, position = pixels[:, None] // size, pixels[:, None] % size
        channel = np.arange(self.O)
        positions = (
            pixels[:, None] * self.O + channel if stores_channels_last else (image * self.O + channel) * size + position
        )
        epilogue_arguments = {
            operation.name: dtypes.widen_to_float64(
                array if operation.argument_kind != "output" else array.ravel()[positions]
            )
            for operation, array in zip(self.argument_ops, inputs[self.num_operands :], strict=True)
            if operation.reads_argument
        }

        def apply(values: NDArray[np.float64]) -> NDArray[np.float64]:
            results = epilogue.apply_to_array(self.epilogue, values, epilogue_arguments)
            return quantization.limit_array(results, self.output_dtype)

        values = apply(sums)
        error = SIGMA_FACTOR * self.tolerance * scales
        shifted_errors = [np.abs(apply(sums + shift) - values) for shift in (error, -error)]
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
