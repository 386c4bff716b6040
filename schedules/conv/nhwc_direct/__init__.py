"""Schedules for images with channels last, without tensor cores: each thread computes a strip of pixels."""

from . import depthwise_nhwc, grouped_nhwc  # noqa: F401
