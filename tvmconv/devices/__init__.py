"""Devices on which kernels run and are timed, and architectures that they are compiled for."""

from tvmconv.devices.arch import Arch
from tvmconv.devices.device import Device, DeviceNotFoundError, LoadedKernel, Timing
from tvmconv.devices.discovery import DeviceStatus, list_devices
from tvmconv.devices.lookup import find_device

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
