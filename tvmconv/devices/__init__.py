"""Devices: where kernels run and are timed, and what they are compiled for."""

from tvmconv.devices.arch import Arch
from tvmconv.devices.base import AbsentError, Device, Loaded, Timing
from tvmconv.devices.find import find
from tvmconv.devices.inventory import Entry, inventory

__all__ = ["AbsentError", "Arch", "Device", "Entry", "Loaded", "Timing", "find", "inventory"]
