"""Workloads: what to compute."""

from tvmconv.workloads.base import Workload
from tvmconv.workloads.conv2d import Conv2d
from tvmconv.workloads.filters import Filter1d, Filter2d
from tvmconv.workloads.registry import parse
from tvmconv.workloads.suites import SUITES, Layer, suite

__all__ = ["SUITES", "Conv2d", "Filter1d", "Filter2d", "Layer", "Workload", "parse", "suite"]
