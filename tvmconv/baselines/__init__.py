"""What our kernels are compared with.

A library is a function `f(w, inputs, *, device, cold=False, seconds=0.5) -> Baseline`, which imports the library when
it is called, and raises `WrongDeviceError` for a device that the library is never for, another `Error` where it is
missing or cannot compute the workload.
"""

from __future__ import annotations

from collections.abc import Callable

from tvmconv.baselines.base import Baseline
from tvmconv.baselines.copy import time_copy
from tvmconv.baselines.cudnn import time_cudnn
from tvmconv.baselines.cupy import time_cupy

BASELINES: dict[str, Callable[..., Baseline]] = {"cudnn": time_cudnn, "cupy": time_cupy, "copy": time_copy}
