import functools
import gc
import os
import subprocess
import sys
from pathlib import Path

# Workers are more than processors: threads that wait for one another in numerical libraries would wait at their cost.
# The libraries read this as they are imported.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import pytest
from covering_cases import mark_unsampled_slow
from doc_blocks import SERVED
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

LONG_TESTS = {  # tests of ten seconds and more
    "test_section_runs_as_printed",
    "test_section_for_a_gpu_runs_smaller_without_one",
    "test_bounds_are_set_beside_what_was_measured",
    "test_one_step_of_each_knob",
}

# How fast examples are drawn depends on what else the machine does, and says nothing about what is tested.
settings.register_profile("any machine", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("any machine")


def pytest_sessionstart():
    """Modules that tests import, and the tests, are no garbage: to look for some meanwhile takes a second."""
    gc.disable()


@pytest.hookimpl(specname="pytest_collection_modifyitems", tryfirst=True)  # before tests are deselected
def pytest_mark_cases_slow(items):
    """Leave as many cases of a test as its mark `sample` says; `-m slow` runs the others."""
    mark_unsampled_slow(items)


@pytest.hookimpl(trylast=True)  # after tests are deselected
def pytest_collection_modifyitems(config, items):
    """Deal long tests to the starts of the workers' shares, so that none is left at the end of a parallel run."""
    _deselect_repeated_skips(config, items)
    long_tests = [item for item in items if getattr(item, "originalname", "") in LONG_TESTS]
    others = [item for item in items if item not in long_tests]
    num_workers, num_items = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), len(items)
    items.clear()
    for worker in range(num_workers):
        own = long_tests[worker::num_workers]
        share = (num_items - len(items)) // (num_workers - worker)  # as `--dist worksteal` divides the tests
        num_others = max(share - len(own), 0)
        items += own + others[:num_others]
        del others[:num_others]
    items += others


def _deselect_repeated_skips(config, items):
    """Without a GPU, leave one case of each test that needs one: to skip a thousand for one reason takes seconds."""
    gpu_items: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("gpu"):
            gpu_items.setdefault(item.nodeid.partition("[")[0], []).append(item)
    repeated = [item for cases in gpu_items.values() for item in cases[1:]]
    if repeated and _no_gpu():
        config.hook.pytest_deselected(items=repeated)
        nodes = {item.nodeid for item in repeated}
        items[:] = [item for item in items if item.nodeid not in nodes]


def pytest_collection_finish():
    """What is there before the first test stays: to go through it again and again takes seconds of each worker."""
    gc.freeze()
    gc.set_threshold(20_000)  # collections among the many objects of TVM's trees take 2% of the tests' time by default
    gc.enable()


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


@pytest.fixture(scope="session", autouse=True)
def working_folder(tmp_path_factory):
    """Tests run in a temporary folder, in which none leaves a log under its default name."""
    folder, start = tmp_path_factory.mktemp("working"), Path.cwd()
    os.chdir(folder)
    yield
    os.chdir(start)
    assert not list(folder.glob("*.jsonl"))


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


@pytest.fixture(autouse=True)
def late_fork_server(monkeypatch):
    """A search starts its fork server when it builds: most searches of tests build nothing, and to load TVM takes long.

    In tests of the processes it starts ahead of time, as it does for users.
    """
    monkeypatch.setattr(pool.WorkerPool, "prestart_fork_server", lambda _: None)


@pytest.fixture
def schedule_registry():
    """The registered schedules, restored afterwards, so that those of a test do not outlive it."""
    registry.schedules()
    registered_before = dict(registry.registered_schedules)
    yield registry.registered_schedules
    registry.registered_schedules.clear()
    registry.registered_schedules.update(registered_before)
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


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The socket of a server of Python processes in which TVM is loaded."""
    path = str(tmp_path_factory.mktemp("python") / "server")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen([sys.executable, SERVED, "serve", path], **pipes) as process:
        assert process.stdout.readline() == b"ready\n"
        yield path


@pytest.fixture
def python(server):
    """The words that run one of these processes, for the arguments that follow."""
    return [sys.executable, "-S", SERVED, "call", server]
