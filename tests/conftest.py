import functools

import pytest

from tvmconv.devices import find
from tvmconv.devices.base import AbsentError


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


@pytest.fixture(scope="session")
def gpu():
    """The first NVIDIA GPU; for tests with the mark `gpu`."""
    return find("cuda:0")
