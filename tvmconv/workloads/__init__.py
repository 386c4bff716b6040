"""Workloads: operators on tensors of fixed shapes, which schedules implement."""

from tvmconv.workloads.base import Workload
from tvmconv.workloads.conv import Conv
from tvmconv.workloads.filters import Filter
from tvmconv.workloads.operators.convolutions import Conv1d, Conv2d, Conv3d
from tvmconv.workloads.operators.gradients import (
    Conv1dDgrad,
    Conv1dTranspose,
    Conv1dWgrad,
    Conv2dDgrad,
    Conv2dTranspose,
    Conv2dWgrad,
    Conv3dDgrad,
    Conv3dTranspose,
    Conv3dWgrad,
)
from tvmconv.workloads.operators.masks import Filter1d, Filter2d
from tvmconv.workloads.registry import operator, operators, parse
from tvmconv.workloads.suites import SUITES, Layer, suite

__all__ = [
    "SUITES",
    "Conv",
    "Conv1d",
    "Conv1dDgrad",
    "Conv1dTranspose",
    "Conv1dWgrad",
    "Conv2d",
    "Conv2dDgrad",
    "Conv2dTranspose",
    "Conv2dWgrad",
    "Conv3d",
    "Conv3dDgrad",
    "Conv3dTranspose",
    "Conv3dWgrad",
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
