"""What every library to compare with gives, and what the functions that time one have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.devices.cuda.loaded_kernel import translate_errors
from tvmconv.devices.device import Device, Timing, get_first_line
from tvmconv.errors import DeviceError, Error
from tvmconv.workloads.filters import Filter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tvmconv.workloads import Workload


TimeLibrary = Callable[..., "Baseline"]

REGISTRY: dict[str, TimeLibrary] = {}  # by name; filled as the files of the folder are imported


def baseline(name: str) -> Callable[[TimeLibrary], TimeLibrary]:
    """Register `f(w, inputs, *, device, cold=False, seconds=0.5) -> Baseline` under a name.

    The function imports the library when it is called, and raises `UnsupportedDeviceError` for a device that the
    library is never for, another `Error` where it is missing or cannot compute the workload.

    Args:
        name: what users call the library.

    Raises:
        Error: another file has taken the name.
    """

    def register(function: TimeLibrary) -> TimeLibrary:
        other = REGISTRY.setdefault(name, function)
        if other.__module__ != function.__module__:
            raise Error(f"baseline {name} is defined in {other.__module__} and {function.__module__}")
        REGISTRY[name] = function
        return function

    return register


class UnsupportedDeviceError(DeviceError):
    """A library is not for devices of this kind, whatever is installed."""


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class Baseline:
    """A library's time for a workload.

    Attributes:
        timing: taken as those of our kernels are.
        output: what it computed; None of one that moves a workload's bytes and computes nothing, so that there is
            nothing to verify.
        description: what ran: the library, its version, its settings.
        time_again: times the same once more, for about so many seconds, without choosing anew among the library's
            algorithms; None for a library of which the whole function is called again.
        close: frees what `time_again` needs.
    """

    timing: Timing
    output: NDArray[Any] | None
    description: str
    time_again: Callable[[float], Timing] | None = None
    close: Callable[[], None] = _do_nothing


def require_gpu(device: Device, library: str) -> CudaDevice:
    """The device, which is an NVIDIA GPU; else raises `UnsupportedDeviceError`."""
    if not isinstance(device, CudaDevice):
        raise UnsupportedDeviceError(
            f"the {library} baseline needs an NVIDIA GPU: expected cuda:N instead of {device.text}"
        )
    return device


def require_filter(w: Workload, library: str) -> Filter:
    """The workload, which is a filter; else raises `DeviceError`."""
    if not isinstance(w, Filter):
        raise DeviceError(f"the {library} baseline is for filter1d and filter2d, not for {w.operator}")
    return w


@contextmanager
def translate_library_errors(library: str, gpu: CudaDevice, *error_types: type[Exception]) -> Iterator[None]:
    """Make `gpu` the current device, and the exceptions of a library errors that name both.

    Args:
        library: what errors name.
        gpu: the device.
        error_types: the library's exceptions.

    Raises:
        DeviceError: one of these was raised, or CUDA failed.
    """
    with translate_errors(gpu):
        try:
            yield
        except DeviceError:  # ours, which is a RuntimeError as those of the libraries are
            raise
        except error_types as error:
            raise DeviceError(f"{library}: {get_first_line(error)}") from error
