"""Schedules of gradients and transposed convolutions, which are declared with the stages of convolutions."""

from . import default, tiling, implicit_gemm  # noqa: F401, I001  (from the simplest to the fastest)
