"""Schedules for channels-last images without tensor cores: each thread computes a strip of neighbouring pixels."""

from . import depthwise_nhwc, grouped_nhwc  # noqa: F401
