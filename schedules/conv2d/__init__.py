"""Schedules of 2-D convolution, each a step up from the one before it."""

from schedules.conv2d import default, tiling, columns, vthread, conflict_free  # noqa: F401, I001  (in the ladder's order)
