"""The line beside every table, on hosts of all kinds."""

from importlib import metadata

import pytest

from tvmconv import devices
from tvmconv.experiments.provenance import describe_provenance

BUILT = {"tvmconv": "0.1.0", "tvm": "0.27.0", "nvrtc": "13.5"}


@pytest.fixture
def without_tvm(monkeypatch):
    """A host where kernels are measured that were built elsewhere."""
    version = metadata.version

    def told(name):
        if name == "apache-tvm":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", told)


def test_tvm_is_named_where_it_is():
    assert "TVM " in describe_provenance(devices.find_device("opencl:0"), "this")


@pytest.mark.usefixtures("without_tvm")
def test_tvm_is_left_out_where_it_is_not():
    assert "TVM " not in describe_provenance(devices.find_device("opencl:0"), "this")


@pytest.mark.usefixtures("without_tvm")
def test_kernels_from_elsewhere_name_what_built_them():
    source = describe_provenance(
        devices.find_device("opencl:0"), "this", builder_versions=[BUILT, BUILT, {**BUILT, "nvrtc": "13.0"}]
    )
    assert "; tvmconv 0.1.0, TVM 0.27.0, NVRTC 13.5 and 13.0, pyopencl " in source
