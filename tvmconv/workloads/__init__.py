"""Workloads: operators on tensors of fixed shapes, which schedules implement."""

from tvmconv.workloads.base import Workload
from tvmconv.workloads.conv import Conv
from tvmconv.workloads.filters import Filter
from tvmconv.workloads.operators.conv1d import Conv1d
from tvmconv.workloads.operators.conv2d import Conv2d
from tvmconv.workloads.operators.conv3d import Conv3d
from tvmconv.workloads.operators.filter1d import Filter1d
from tvmconv.workloads.operators.filter2d import Filter2d
from tvmconv.workloads.registry import operator, operators, parse
from tvmconv.workloads.suites import SUITES, Layer, suite

__all__ = [
    "SUITES",
    "Conv",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "Filter",
    "Filter1d",
    "Filter2d",
    "Layer",
    "Workload",
    "operator",
    "operators",
    "parse",
    "suite",
]
