"""Schedules for channels-last images without tensor cores: each thread computes a strip of neighbouring pixels."""

from . import depthwise_nhwc, depthwise_tma, grouped_nhwc  # noqa: F401
