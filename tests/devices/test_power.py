"""Clock, power and energy of a sustained run, from samples as NVML gives them."""

import ctypes
import time

import pytest

from tvmconv.devices.cuda import nvml
from tvmconv.devices.power import PowerSample, SustainedRun, measure_sustained, summarize_samples
from tvmconv.errors import DeviceError


def sample_run(watts, idle_watts=100.0, step_seconds=0.1):
    """Samples of a second: idle for 0.3 s, then busy at a lower clock; the counter moves every `step_seconds`."""
    samples = []
    for index in range(201):
        at = index * 0.005
        counted = int((at + 1e-9) / step_seconds) * step_seconds
        joules = idle_watts * min(counted, 0.3) + watts * max(counted - 0.3, 0.0)
        samples.append(PowerSample(at, 1980e6 if at < 0.3 else 1410e6, joules))
    return samples


def test_power_is_that_between_steps_of_the_counter_in_the_busy_time():
    run = summarize_samples(sample_run(650.0), launch_seconds=1e-3, busy_seconds=0.65)
    assert (run.clock_hz, run.watts) == (1410e6, pytest.approx(650))
    assert run.joules == pytest.approx(0.65)


def test_a_counter_that_hardly_moves_gives_no_power():
    run = summarize_samples(sample_run(650.0, step_seconds=0.5), 1e-3, 0.4)
    assert run == SustainedRun(1e-3, 1410e6, None)
    assert run.joules is None
    assert summarize_samples([], 1e-3, 0.4) is None


def test_sensors_are_read_while_a_kernel_is_timed():
    state = {"busy": False}

    def run(seconds):
        state["busy"] = True
        time.sleep(seconds)
        return 2e-3

    def read():
        return PowerSample(time.monotonic(), 1e9 if state["busy"] else 2e9, 300.0 * time.monotonic())

    result = measure_sustained(run, read, 0.1)
    assert (result.seconds, result.clock_hz) == (2e-3, 1e9)
    assert result.watts == pytest.approx(300, rel=0.02)


class Library:
    """NVML's functions for a GPU at 1,200 MHz that has used 5.5 J."""

    nvmlErrorString = staticmethod(lambda status: b"Not Supported")  # noqa: N815

    def __init__(self, status=0):
        self.status = status

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id, handle):  # noqa: N802
        assert bus_id == b"0000:1b:00.0"
        return 0

    def nvmlDeviceGetClockInfo(self, handle, kind, value):  # noqa: N802
        assert kind == nvml.CLOCK_SM
        ctypes.cast(value, ctypes.POINTER(ctypes.c_uint)).contents.value = 1200
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, value):  # noqa: N802
        ctypes.cast(value, ctypes.POINTER(ctypes.c_ulonglong)).contents.value = 5500
        return self.status


def test_sensors_convert_the_units_of_nvml(monkeypatch):
    monkeypatch.setattr(nvml, "_load_library", Library)
    sample = nvml.GpuSensors("0000:1b:00.0").read()
    assert (sample.clock_hz, sample.joules) == (1.2e9, 5.5)


def test_a_failed_query_names_the_function(monkeypatch):
    monkeypatch.setattr(nvml, "_load_library", lambda: Library(3))
    monkeypatch.setattr(nvml, "_describe_status", lambda library, status: library.nvmlErrorString(status).decode())
    with pytest.raises(DeviceError, match="nvmlDeviceGetTotalEnergyConsumption failed: Not Supported"):
        nvml.GpuSensors("0000:1b:00.0").read()


def test_a_device_without_sensors_says_so(opencl):
    with pytest.raises(DeviceError, match="has no sensors of clock and energy"):
        opencl.open_sensors()
