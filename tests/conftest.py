import functools
import gc
import os
from pathlib import Path

# Workers are more than processors: threads that wait for one another in numerical libraries would wait at their cost.
# The libraries read this as they are imported.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import pytest
from hypothesis import HealthCheck, settings
from instant import Instant

from tvmconv import registry
from tvmconv.devices import find_device
from tvmconv.devices.device import DeviceNotFoundError
from tvmconv.measure.workers import pool
from tvmconv.tvm_import import import_tvm

# PoCL compiles every kernel for its work-group size, at its first launch: without its optimiser in a tenth of the time
# and less. Kernels are judged by what they compute here, and processes that tests start inherit this.
# PoCL's header declares all 18,000 functions of OpenCL C, and to parse it takes ten times as long as a small kernel.
# A header of the few functions that generated kernels call takes its place; other functions do not compile.
os.environ.setdefault("POCL_EXTRA_BUILD_FLAGS", "-cl-opt-disable -D_OPENCL_H_ -DDECLARE_FUNCTIONS -w")
os.environ["TVMCONV_OPENCL_HEADER"] = str(Path(__file__).parent / "data" / "opencl_functions.h")
os.environ["TVMCONV_CACHE"] = "none"  # tests build anew, and leave the user's cache alone
import_tvm()  # before helpers import it, which would import PyTorch in every worker

# How fast examples are drawn depends on what else the machine does, and says nothing about what is tested.
settings.register_profile("any machine", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("any machine")


def pytest_collection_finish():
    """What is there before the first test stays: to go through it again and again takes seconds of each worker."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and (reason := _no_gpu()):
        pytest.skip(reason)


@functools.cache
def _no_gpu() -> str | None:
    try:
        find_device("cuda:0")
    except DeviceNotFoundError as absent:
        return str(absent)
    return None


@pytest.fixture(scope="session")
def opencl():
    return find_device("opencl:0")


@pytest.fixture
def optimised(monkeypatch):
    """For kernels that run longer than they compile: PoCL with its optimiser."""
    monkeypatch.delenv("POCL_EXTRA_BUILD_FLAGS")


@pytest.fixture(scope="session")
def gpu():
    """The first NVIDIA GPU; for tests with the mark `gpu`."""
    return find_device("cuda:0")


@pytest.fixture(scope="session")
def _stood():
    """Processes that stand ready as long as tests run, for those alone that share them."""
    stood = pool.WorkerPool()
    stood.enter_context()
    yield stood
    stood.exit_context()


@pytest.fixture
def shared_processes(_stood, monkeypatch):
    """For tests that are not of how processes start and end: each takes those that the one before it has done with."""
    monkeypatch.setattr(pool, "shared", _stood)


@pytest.fixture
def schedule_registry(monkeypatch):
    """A copy of the schedules' schedule_registry, so that a test's schedules do not outlive it."""
    registry.schedules()
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    yield registry._registry
    registry._load_schedule_packages.cache_clear()


@pytest.fixture
def log(tmp_path):
    """The path of a log that is not there yet."""
    return tmp_path / "log.jsonl"


@pytest.fixture
def instant(monkeypatch):
    """What stands in for the measurer of a search; no process is started for it ahead of time either."""
    instant = Instant()
    monkeypatch.setattr("tvmconv.search.search.Measurer", instant)
    monkeypatch.setattr(pool.WorkerPool, "prestart", lambda *_: None)
    return instant
