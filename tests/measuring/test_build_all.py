"""Kernels of many workloads are built until a deadline."""

import time

import pytest

import tvmconv as tc
from tvmconv.deadline import Deadline
from tvmconv.measure.builder import NO_TIME_MESSAGE, BuilderInput, build_all
from tvmconv.measure.results import ErrorKind
from tvmconv.measure.workers import pool
from tvmconv.measure.workers.pool import BUILDER_MODULE
from tvmconv.registry import find_schedule

WORKLOAD = tc.parse("conv2d:1x4x6x6,8x4x3x3,p1")
TILING = find_schedule(WORKLOAD, "tiling")
CHOICES = [BuilderInput(WORKLOAD, TILING, TILING.space(WORKLOAD).default)] * 2


@pytest.mark.usefixtures("shared_processes")
def test_what_is_built_before_the_deadline_is_there(opencl):
    assert all(built.executable for built in build_all(CHOICES, opencl, deadline=Deadline.after(300.0)))


@pytest.mark.usefixtures("shared_processes")
@pytest.mark.parametrize("num_needed", [0, 1])
def test_needed_kernels_are_built_until_the_cut_off(opencl, num_needed):
    pool.shared.prestart(BUILDER_MODULE, BUILDER_MODULE, 1)
    assert pool.shared.wait_for_worker(BUILDER_MODULE, 300.0)
    deadline = Deadline(time.monotonic(), 300.0)
    first, _ = build_all(CHOICES, opencl, num_workers=1, deadline=deadline, num_needed=num_needed)
    assert (first.executable is not None) == bool(num_needed)


def test_after_the_deadline_nothing_is_built(opencl):
    with pool.keep_workers_alive():
        late = build_all(CHOICES, opencl, deadline=Deadline.after(0.0))
    assert [(built.error, built.message) for built in late] == [(ErrorKind.BUILD_TIMEOUT, NO_TIME_MESSAGE)] * 2
