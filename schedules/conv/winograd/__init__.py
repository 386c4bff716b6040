"""Winograd's algorithm, fewer products for more bytes: in three kernels, in one, and on Hopper's tensor cores."""

from . import schedule, fused, hopper  # noqa: F401, I001  (in the order of the optimizations)
