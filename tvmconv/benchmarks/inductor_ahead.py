"""Compilation by Inductor on the CPU, while another process has the GPU.

`torch.compile` compiles the backward graph when the backward pass first runs, after it ran the forward graph. Here both
graphs are compiled first, and then the step waits for the GPU. Inductor compares configs of its kernels in their first
launch, which no other process disturbs therefore.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tvmconv.benchmarks.common import hold_gpu

DEFAULT_MODE = "default"  # of `torch.compile`, which times kernels in their first launch alone

Result = TypeVar("Result")


@dataclass
class Waiting:
    """The seconds that a process has waited for the GPU."""

    seconds: float = 0.0


@contextlib.contextmanager
def make_waiting_backend(lock: Path) -> Iterator[tuple[Callable[..., Any], Waiting]]:
    """Give a backend of `torch.compile` that compiles without the GPU, and the time that its graphs waited for it.

    A graph that runs within the block holds the file `lock` until its end.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    waiting, is_holding = Waiting(), False
    # Earlier versions of PyTorch have no such setting, and compile the backward graph while they hold the lock.
    settings = {"force_non_lazy_backward_lowering": True}
    settings = settings if all(hasattr(config, name) for name in settings) else {}
    with contextlib.ExitStack() as stack:

        def backend(gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
            with config.patch(settings):
                run = compile_fx(gm, inputs)

            def wait_and_run(*arguments: Any) -> Any:
                nonlocal is_holding
                if not is_holding:
                    is_holding, started_at = True, time.perf_counter()
                    stack.enter_context(hold_gpu(lock))
                    waiting.seconds += time.perf_counter() - started_at
                return run(*arguments)

            return wait_and_run

        yield backend, waiting


def compile_ahead(compile_network: Callable[..., Result], mode: str, lock: Path) -> tuple[Result, float]:
    """Compile a network before the GPU is free, as far as a mode of `torch.compile` allows it.

    Args:
        compile_network: Function that takes an option of `torch.compile`, and compiles and runs the network.
        mode: The mode. Those other than the default time kernels, which needs a part of the GPU.
        lock: File that a process holds while it has the GPU.

    Returns:
        The result of `compile_network`, and the seconds that it waited for the GPU.
    """
    if mode != DEFAULT_MODE:
        with hold_gpu(lock, is_shared=True):
            return compile_network(mode=mode), 0.0
    with make_waiting_backend(lock) as (backend, waiting):
        result = compile_network(backend=backend)
    return result, waiting.seconds
