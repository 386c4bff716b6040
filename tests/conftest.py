import functools
import gc
import os

# Workers are more than processors: threads that wait for one another in numerical libraries would wait at their cost.
# The libraries read this as they are imported.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import lean_opencl
import pytest
from hypothesis import HealthCheck, settings
from instant import Instant

from tvmconv import lean, library
from tvmconv.devices import find
from tvmconv.devices.base import AbsentError
from tvmconv.measuring import standing

# PoCL compiles every kernel for its work-group size, at its first launch: without its optimiser in a tenth of the time
# and less. Kernels are judged by what they compute here, and processes that tests start inherit this.
os.environ.setdefault("POCL_EXTRA_BUILD_FLAGS", "-cl-opt-disable")
os.environ["TVMCONV_CACHE"] = "none"  # tests build anew, and leave the user's cache alone
lean_opencl.install()
lean_opencl.install_in_children()
lean.load_tvm()  # as whoever uses the package does: before helpers import it with all that it imports by itself

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
        find("cuda:0")
    except AbsentError as absent:
        return str(absent)
    return None


@pytest.fixture(scope="session")
def opencl():
    return find("opencl:0")


@pytest.fixture
def optimised(monkeypatch):
    """For kernels that run longer than they compile: PoCL with its optimiser."""
    monkeypatch.delenv("POCL_EXTRA_BUILD_FLAGS")


@pytest.fixture(scope="session")
def gpu():
    """The first NVIDIA GPU; for tests with the mark `gpu`."""
    return find("cuda:0")


@pytest.fixture(scope="session")
def _stood():
    """Processes that stand ready as long as tests run, for those alone that share them."""
    stood = standing._Standing()
    stood.enter()
    yield stood
    stood.leave()


@pytest.fixture
def shared_processes(_stood, monkeypatch):
    """For tests that are not of how processes start and end: each takes those that the one before it has done with."""
    monkeypatch.setattr(standing, "_now", _stood)


@pytest.fixture
def registry(monkeypatch):
    """A copy of the schedules' registry, so that a test's schedules do not outlive it."""
    library.schedules()
    monkeypatch.setattr(library, "_registry", dict(library._registry))
    yield library._registry
    library._load.cache_clear()


@pytest.fixture
def log(tmp_path):
    """The path of a log that is not there yet."""
    return tmp_path / "log.jsonl"


@pytest.fixture
def instant(monkeypatch):
    """What stands in for the measurer of a search; no process is started for it ahead of time either."""
    instant = Instant()
    monkeypatch.setattr("tvmconv.searching.search.Measurer", instant)
    monkeypatch.setattr(standing, "begin", lambda *_: None)
    return instant
