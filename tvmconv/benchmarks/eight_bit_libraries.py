"""Calls of cuDNN in float16 and of cuBLAS in 8 bits, whose clocks run in turns with those of kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from tvmconv.baselines.base import require_gpu
from tvmconv.baselines.cudnn import CudnnPickThread, copy_to_gpu, torch_with_cudnn
from tvmconv.baselines.torch_calls import list_calls_in_layout
from tvmconv.benchmarks.layouts import ROUND_SECONDS, Clock
from tvmconv.devices import Device
from tvmconv.devices.device import TurnTimer
from tvmconv.errors import Error
from tvmconv.workloads import Conv
from tvmconv.workloads.layout import UNIFORM_LAYOUTS

CUDNN = "cuDNN f16"
# Picks of cuDNN: by its heuristics, and by trials of its first algorithms. Trials of all take seconds for a layer, and
# seldom find a faster one (`tvmconv.baselines.cudnn`).
NUM_ALGORITHMS = (None, 2, 4)
NEAR_RATIO = 1.15  # layouts within this factor of the fastest first pick of cuDNN are picked again

Arrays = Sequence[NDArray[Any]]


@dataclass(frozen=True)
class TurnClock:
    """A clock of a kernel or of a library's call, which can also be timed in turns with others."""

    time: Clock
    open_timer: Callable[[], AbstractContextManager[TurnTimer] | None]

    def __call__(self, seconds: float) -> float:
        """Return the median seconds of a launch, timed alone for about `seconds`."""
        return self.time(seconds)


def pick_library_calls(
    half: Conv,
    device: Device,
    cold: bool,
    stack: ExitStack,
    arrays: Arrays,
    num_algorithms: Sequence[int | None] = NUM_ALGORITHMS,
) -> dict[str, Clock]:
    """Return the clock of cuDNN's fastest pick by its layout; the stack closes all picks.

    Layouts whose first pick takes more than `NEAR_RATIO` times as long as the fastest are not picked again.

    Args:
        half: The convolution in float16.
        device: The GPU.
        cold: Whether operands are not in L2.
        stack: Context in which the picks stay.
        arrays: Arguments of the convolution.
        num_algorithms: Numbers of algorithms that cuDNN tries, in rounds; None for the choice of its heuristics.
    """
    gpu = require_gpu(device, CUDNN)
    torch_with_cudnn()
    inputs = copy_to_gpu(arrays, gpu)
    picks, errors = dict[str, CudnnPickThread](), list[Error]()
    calls = [(layout, call) for layout in UNIFORM_LAYOUTS for call in list_calls_in_layout(half, layout)]
    for count in num_algorithms:
        limit = NEAR_RATIO * min((pick.seconds for pick in picks.values()), default=math.inf)
        for layout, call in calls:
            if layout in picks and picks[layout].seconds > limit:
                continue
            try:
                pick = CudnnPickThread(half, call, inputs, gpu, cold=cold, num_algorithms=count)
            except Error as error:
                errors.append(error)
                continue
            stack.callback(pick.close)
            if layout not in picks or pick.seconds < picks[layout].seconds:
                picks[layout] = pick
    if not picks:
        raise errors[0]
    fastest = min(picks, key=lambda layout: picks[layout].seconds)
    return {fastest: make_pick_clock(picks[fastest])}


def make_pick_clock(pick: CudnnPickThread) -> Clock:
    """Return the clock of a pick of cuDNN."""
    return TurnClock(lambda seconds: pick.time(seconds).median, pick.open_timer)


def pick_product(w: Conv, device: Device, cold: bool, stack: ExitStack, inputs: Arrays) -> Clock | None:
    """Return the clock of cuBLAS's product of a convolution; None if it is no product that PyTorch supports."""
    from tvmconv.baselines.cublas import time_cublas

    try:
        timed = time_cublas(w, inputs, device=device, cold=cold, seconds=ROUND_SECONDS)
    except Error:
        return None
    stack.callback(timed.close)
    time_again, open_timer = timed.time_again, timed.open_timer
    if time_again is None or open_timer is None:
        return None
    return TurnClock(lambda seconds: time_again(seconds).median, open_timer)
