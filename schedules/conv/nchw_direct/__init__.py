"""Schedules for channels-first images without tensor cores: each thread computes a strip of neighbouring pixels."""

from . import depthwise_nchw, depthwise_planes, grouped_nchw  # noqa: F401
