"""Winograd's algorithm, fewer products for more bytes: in three kernels, and fused in one."""

from . import schedule, fused  # noqa: F401, I001  (in the ladder's order)
