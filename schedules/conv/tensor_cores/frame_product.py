"""The products of a convolution with cached frames: one for each frame of the output, all of the same extents.

The input is in two arrays, so that no tensor map of TMA has all of it. A work tile has pixels of one output frame, and
each copy reads one input frame, from the one array or the other.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from tvmconv.workloads import Conv, Conv2d, Conv3d

from .gemm.frame_loaders import count_output_frames, view_frames
from .implicit_gemm_shape import ImplicitGemmShape, MatrixProduct


@dataclasses.dataclass(frozen=True)
class FrameProduct(MatrixProduct):
    """The products of the output frames, with the attributes of a convolution that kernels read."""

    volume: Conv3d  # the convolution
    dtype: str  # dtype in which operands are multiplied
    storage: str  # storage dtype of the operands
    epilogue: tuple[str, ...]  # operations on each sum
    argument_dtypes: tuple[str, ...]  # dtypes of the arguments
    kernel: tuple[int, ...]  # sizes of the filter
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    input_size: tuple[int, ...]
    output_size: tuple[int, ...]

    @classmethod
    def from_workload(cls, w: Conv3d) -> FrameProduct:
        """Return the products of a convolution."""
        names = [field.name for field in dataclasses.fields(cls)[1:]]
        return cls(w, **{name: getattr(w, name) for name in names})

    @property
    def planes(self) -> Conv2d:
        """The convolution of a frame, whose taps are those of a plane of the filter."""
        return view_frames(self.volume, self.volume.N)

    @functools.cached_property
    def shape(self) -> ImplicitGemmShape:
        """The extents of the product of a frame."""
        shape = ImplicitGemmShape.from_workload(self.volume)
        return shape._replace(m=math.prod(self.output_size[1:]), frames=count_output_frames(self.volume))


def get_planes(w: Conv) -> Conv:
    """Return the convolution whose images TMA loads: that of a frame, or the convolution itself."""
    return w.planes if isinstance(w, FrameProduct) else w
