"""Devices on which kernels run and are timed, and architectures that they are compiled for."""

from tvmconv.devices.cuda.device import Arch
from tvmconv.devices.device import Device, DeviceNotFoundError, LoadedKernel, Timing
from tvmconv.devices.lookup import DeviceStatus, find_device, list_devices

__all__ = [
    "Arch",
    "Device",
    "DeviceNotFoundError",
    "DeviceStatus",
    "LoadedKernel",
    "Timing",
    "find_device",
    "list_devices",
]
