"""Registration and common parts of baselines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from tvmconv.devices import sharing
from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.devices.cuda.loaded_kernel import translate_errors
from tvmconv.devices.device import Device, Timing, TurnTimer, get_first_line
from tvmconv.errors import DeviceError, Error
from tvmconv.workloads import Workload
from tvmconv.workloads.filters import Filter

TimeLibrary = Callable[..., "Baseline"]

REGISTRY: dict[str, TimeLibrary] = {}  # by name, filled by the import of the package's modules
CHECKING: set[str] = set()  # names of those that can choose an algorithm by its results
MODULES: dict[str, str] = {}  # modules of libraries that take seconds to import, likewise


def baseline(
    name: str, module: str | None = None, *, takes_turns: bool = False, checks_results: bool = False
) -> Callable[[TimeLibrary], TimeLibrary]:
    """Return a decorator that registers `f(w, inputs, *, device, cold=False, seconds=0.5) -> Baseline` under a name.

    The function gets all arguments of the workload except Y, times it with a cold cache if `cold`, and spends about
    `seconds` of device time. It imports the library when it is called. It raises `UnsupportedDeviceError` if the
    library never supports the device, and another `Error` if the library is missing or cannot compute the workload.
    `module` is the library's module if its import takes seconds, which `import_modules` can do before. The function
    runs in a turn at the GPU (`tvmconv.devices.sharing`), unless `takes_turns`: it takes one by itself. If
    `checks_results`, it has the argument `is_right`, a function from Y to whether an algorithm's result is accepted.
    """

    def register(function: TimeLibrary) -> TimeLibrary:
        other = REGISTRY.setdefault(name, function)
        if other.__module__ != function.__module__:
            raise Error(f"baseline {name} is defined in {other.__module__} and {function.__module__}")
        REGISTRY[name] = function if takes_turns else _run_in_a_turn(function)
        if module:
            MODULES[name] = module
        if checks_results:
            CHECKING.add(name)
        return function

    return register


def _run_in_a_turn(function: TimeLibrary) -> TimeLibrary:
    @functools.wraps(function)
    def run(*arguments: Any, **how: Any) -> Baseline:
        with sharing.hold_gpu():
            return function(*arguments, **how)

    return run


class UnsupportedDeviceError(DeviceError):
    """A library never supports devices of this kind."""


@dataclass(frozen=True)
class Baseline:
    """Result of a library for a workload."""

    timing: Timing  # taken with the method of our kernels
    output: NDArray[Any] | None  # None for a baseline that only moves bytes and cannot be verified
    description: str  # library with its version and settings
    # Function that times the same algorithm again for about the given seconds; None if the baseline is called again.
    time_again: Callable[[float], Timing] | None = None
    close: Callable[[], None] = lambda: None  # frees the resources of `time_again`
    # Function that returns a block with a timer of the same algorithm in turns; None if it can only be timed again.
    open_timer: Callable[[], AbstractContextManager[TurnTimer]] | None = None


def require_gpu(device: Device, library: str) -> CudaDevice:
    """Return the device if it is an NVIDIA GPU, else raise `UnsupportedDeviceError`."""
    if not isinstance(device, CudaDevice):
        raise UnsupportedDeviceError(
            f"the {library} baseline needs an NVIDIA GPU: expected cuda:N instead of {device.text}"
        )
    return device


def require_filter(w: Workload, library: str) -> Filter:
    """Return the workload if it is a filter, else raise `DeviceError`."""
    if not isinstance(w, Filter):
        raise DeviceError(f"the {library} baseline is for filter1d and filter2d, not for {w.operator}")
    return w


@contextmanager
def translate_library_errors(library: str, gpu: CudaDevice, *error_types: type[Exception]) -> Iterator[None]:
    """Make a GPU the current device, and translate exceptions of a library in the block to DeviceError."""
    with translate_errors(gpu):
        try:
            yield
        except DeviceError:  # DeviceError is a RuntimeError, which may be among `error_types`
            raise
        except error_types as error:
            raise DeviceError(f"{library}: {get_first_line(error)}") from error
