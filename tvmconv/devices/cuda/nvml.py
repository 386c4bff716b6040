"""Sensors of a GPU by NVML, the library of `nvidia-smi`, which comes with the driver.

Source: NVIDIA, "NVML API Reference Guide", Device Queries.
"""

from __future__ import annotations

import ctypes
import functools
import time
from typing import Any

from tvmconv.devices.power import PowerSample
from tvmconv.errors import DeviceError

LIBRARY = "libnvidia-ml.so.1"
CLOCK_SM = 1  # NVML_CLOCK_SM of nvmlClockType_t


class GpuSensors:
    """The sensors of the GPU with a PCI bus id, such as "0000:1b:00.0".

    Raises:
        DeviceError: NVML is missing, or does not read this GPU.
    """

    def __init__(self, bus_id: str) -> None:
        self._library = _load_library()
        self._handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByPciBusId_v2", bus_id.encode(), ctypes.byref(self._handle))

    def read(self) -> PowerSample:
        """Return the clock of the multiprocessors and the energy since the driver was loaded."""
        clock_mhz, millijoules = ctypes.c_uint(), ctypes.c_ulonglong()
        self._call("nvmlDeviceGetClockInfo", self._handle, CLOCK_SM, ctypes.byref(clock_mhz))
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(millijoules))
        return PowerSample(time.monotonic(), clock_mhz.value * 1e6, millijoules.value / 1e3)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise DeviceError(f"NVML: {name} failed: {_describe_status(self._library, status)}")


@functools.cache
def _load_library() -> Any:
    """Return the initialized library."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DeviceError(f"{LIBRARY}, which comes with NVIDIA's driver, is missing") from error
    if status := library.nvmlInit_v2():
        raise DeviceError(f"NVML does not start: {_describe_status(library, status)}")
    return library


def _describe_status(library: Any, status: int) -> str:
    library.nvmlErrorString.restype = ctypes.c_char_p
    return str(library.nvmlErrorString(status).decode())
