"""One- and two-dimensional filters: a small mask is slid over a signal or an image, with zeros outside."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.errors import WorkloadError
from tvmconv.workloads import epilogue
from tvmconv.workloads.filter_geometry import CLAMP, FilterGeometry
from tvmconv.workloads.filters_reference import correlate
from tvmconv.workloads.text import quote

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm import te, tirx
    from typing_extensions import Self


class Filter(FilterGeometry):
    """The methods that one- and two-dimensional filters share."""

    def __str__(self) -> str:
        return self.text

    @property
    @abstractmethod
    def text(self) -> str:
        """Canonical text, from which `parse` returns an equal workload."""

    def inputs(self, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Draw X and K from the standard normal distribution as C-contiguous float32 arrays.

        Args:
            seed: Seed of the random number generator, not negative.

        Returns:
            X of shape `signal_shape` and K of shape `mask_shape`.
        """
        rng = np.random.default_rng(seed)
        return rng.standard_normal(self.signal_shape, np.float32), rng.standard_normal(self.mask_shape, np.float32)

    def reference(self, *inputs: NDArray[Any]) -> NDArray[np.float64]:
        """Correlate, and clamp if the filter does, in float64.

        Args:
            inputs: A signal of shape `signal_shape` and a mask of shape `mask_shape`.

        Returns:
            The filtered signal, of shape `signal_shape`.
        """
        x, k = inputs
        y = correlate(x.reshape(self.image), k.reshape(self.mask)).reshape(self.signal_shape)
        return epilogue.apply_to_array(self.epilogue, y, {})

    def declare(self) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
        """Declare the filter in tensor expressions.

        The stages are, in this order:

        - `padded`: X with its halo of zeros, of shape `padded_shape`.
        - `sum`: the sum of the products of `padded` and K, of Y's shape.
        - `Y`: the output, of X's shape, with the epilogue applied to each element of `sum`.

        Returns:
            The tensors X, K and Y.
        """
        from tvmconv.workloads import filters_te

        return filters_te.declare(self)

    def prim_func(self) -> tirx.PrimFunc:
        """Return the declaration as an unscheduled TIR function of X, K and Y."""
        from tvm import te

        return te.create_prim_func(list(self.declare()))

    def _format_text(self, signal: str, mask: str) -> str:
        return ",".join([f"{self.operator}:{signal}", mask, *([CLAMP] if self.clamp else [])])

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self:
        """Read a filter from its text.

        Args:
            text: Text of a workload, such as `EXAMPLE`.

        Returns:
            The workload.

        Raises:
            WorkloadError: The text is malformed, or a number is out of range.
        """

    @classmethod
    def _split_text(cls, text: str) -> tuple[str, str, bool]:
        """Return the signal and the mask in a text, and whether it ends in the clamp."""
        operator, colon, sizes = text.partition(":")
        pieces = sizes.split(",")
        if operator != cls.operator or not colon or len(pieces) < 2:
            raise WorkloadError(f"{quote(text)}: expected {cls.operator}:SIGNAL,MASK[,{CLAMP}], as in {cls.EXAMPLE}")
        if pieces[2:] not in ([], [CLAMP]):
            raise WorkloadError(
                f"{quote(','.join(pieces[2:]))}: expected nothing or {CLAMP!r} after the mask, as in {cls.EXAMPLE}"
            )
        return pieces[0], pieces[1], len(pieces) > 2
