"""`build(w, log=…)` builds the fastest record that applies here, and says so when it has to build something else."""

import warnings

import pytest

import tvmconv as tc
from tvmconv.logs.record import Record

W = tc.parse("conv2d:2x3x9x8,6x3x3x3,s2x1,p1")
OTHER = tc.parse("conv2d:1x3x9x8,6x3x3x3")


@pytest.fixture
def log(tmp_path):
    return tc.Log(tmp_path / "log.jsonl")


@pytest.fixture
def record(opencl):
    """A record of this device unless it is told otherwise."""

    def make(seconds, tile_c=(-1, 1, 1), schedule="tiling", workload=W, device=opencl.name, target="opencl"):
        return Record(workload, schedule, {"tile_c": tile_c}, device, target, times=(seconds,))

    return make


def test_the_fastest_record_of_this_device_is_built(log, record):
    fastest = record(1e-6, (-1, 1, 3))
    for found in (record(2e-6), fastest, record(3e-6), record(1e-7, workload=OTHER)):
        log.append(found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel = tc.build(W, device="opencl:0", log=log.path)
    assert kernel.schedule.name == "tiling"
    assert kernel.config["tile_c"] == (-1, 1, 3)
    assert kernel.record == fastest
    assert kernel.verify().ok


@pytest.mark.parametrize("misfit", [{"tile_c": (-1, 1, 4000)}, {"schedule": "forgotten"}])
def test_a_record_that_no_longer_applies_gives_way_to_the_next(log, record, misfit):
    log.append(record(1e-6, **misfit))
    log.append(record(2e-6, (-1, 1, 3)))
    with pytest.warns(tc.FallbackWarning, match="a faster record .* does not apply; 1 skipped, the first: "):
        kernel = tc.build(W, device="opencl:0", log=log.path)
    assert kernel.config["tile_c"] == (-1, 1, 3)


def test_a_record_of_another_device_is_built_with_a_warning(log, record):
    log.append(record(2e-6, (-1, 1, 3), device="another CPU"))
    log.append(record(1e-6, device="NVIDIA H200", target="cuda -arch=sm_90"))
    with pytest.warns(tc.FallbackWarning, match=r"built is the fastest on another CPU$"):
        kernel = tc.build(W, device="opencl:0", log=log.path)
    assert kernel.config["tile_c"] == (-1, 1, 3)


def test_an_architecture_takes_the_record_of_a_device_of_its_own(log, record):
    log.append(record(1e-6, device="V100", target="cuda -arch=sm_70"))
    log.append(record(2e-6, (-1, 1, 3), device="NVIDIA H200", target="cuda -arch=sm_90"))
    with pytest.warns(tc.FallbackWarning, match="on NVIDIA H200"):
        assert tc.build(W, arch="sm_90", log=log.path).config["tile_c"] == (-1, 1, 3)


def test_a_config_and_a_log_contradict_each_other(log):
    with pytest.raises(tc.KnobError, match="a config or a log, not both"):
        tc.build(W, "tiling", device="opencl:0", config={}, log=log.path)


def test_an_architecture_without_a_record_is_named(log, record):
    log.append(record(1e-6, workload=OTHER))
    with pytest.warns(tc.FallbackWarning, match=r"^no record of \S+ for sm_90: built is "):
        tc.build(W, "tiling", arch="sm_90", log=log.path)
