"""A process that checks and times kernels of layers and of products of a training step with PyTorch's tensors.

The search runs untried kernels here, because a faulty one may hang or make the GPU unusable for its
process. Operands and references stay on the GPU: at the batch sizes of training, sending them from another process and
computing float64 references on the host would take seconds for each product.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from tvmconv.errors import Error, describe_error
from tvmconv.measure.results import ErrorKind, RunnerResult
from tvmconv.measure.workers.process import FinalMessage, iterate_messages
from tvmconv.torch.kernels import AvailableKernel
from tvmconv.torch.timing import time_call
from tvmconv.workloads.conv_operator import ConvOperator


@dataclass(frozen=True)
class KernelCalls:
    """Calls of a kernel on the operands of a task."""

    check: Callable[[torch.Tensor], tuple[float, str]]  # from PyTorch's result to the relative error and a problem
    run: Callable[[], object]  # a call as in the model
    run_packed: Callable[[], object] | None = None  # one without the packing of its weight, if `run` packs it


class SearchTask(Protocol):
    """What is searched: a workload, its operands, PyTorch's result for them, and calls of kernels."""

    @property
    def pytorch_seconds(self) -> float | None:
        """PyTorch's time of one call; None before it was measured."""

    @property
    def workload(self) -> ConvOperator | None:
        """The workload; None if no kernel computes it."""

    @property
    def name(self) -> str:
        """Text that is equal for tasks with equal operands."""

    @property
    def num_calls(self) -> float:
        """Number of calls in the model, or a weight that replaces it."""

    @property
    def torch_device(self) -> torch.device:
        """Device of the operands."""

    def strip(self) -> SearchTask:
        """Return a copy for another process."""

    def make_operands(self) -> Any:
        """Return random operands."""

    def compute_reference(self, operands: Any) -> torch.Tensor:
        """Return PyTorch's result in float32."""

    def make_calls(self, kernel: AvailableKernel, operands: Any) -> KernelCalls:
        """Return the calls of a kernel; raise Error or RuntimeError if it cannot be loaded."""


@dataclass(frozen=True)
class ProductRunnerSetup:
    """Setup of the process."""

    torch_device: torch.device


@dataclass(frozen=True)
class ProductJob:
    """A kernel to check and time for a product."""

    task: SearchTask
    kernel: AvailableKernel


@dataclass(frozen=True)
class ProductResult:
    """The result of a job."""

    result: RunnerResult  # without the packing of a weight, as records have it
    call_seconds: float = math.inf  # of a call with the packing of its weight; infinite after an error


@dataclass
class Reference:
    """Operands of a task and its result by PyTorch in float32, kept for further kernels of the task."""

    name: str = ""
    operands: Any = field(default=None, repr=False)
    result: torch.Tensor | None = field(default=None, repr=False)

    def update(self, task: SearchTask) -> tuple[Any, torch.Tensor]:
        """Return operands and result of a task, which are computed if the last task was another one."""
        if self.name != task.name or self.operands is None or self.result is None:
            self.name, self.operands, self.result = "", None, None  # frees the memory of the last ones
            operands = task.make_operands()
            result = task.compute_reference(operands)
            self.name, self.operands, self.result = task.name, operands, result
        return self.operands, self.result


def measure_product(job: ProductJob, reference: Reference) -> ProductResult:
    """Check a kernel against PyTorch's result in float32, and time it if it is correct."""
    task, started_at = job.task, time.monotonic()

    def make_result(**fields: object) -> RunnerResult:
        return RunnerResult(**fields, seconds=time.monotonic() - started_at)  # type: ignore[arg-type]

    try:
        operands, expected = reference.update(task)
        calls = task.make_calls(job.kernel, operands)
        error, problem = calls.check(expected)
        if problem:
            return ProductResult(make_result(error=ErrorKind.WRONG_ANSWER, message=problem, relative_error=error))
        call_seconds = seconds = time_call(calls.run, task.torch_device)
        if calls.run_packed:
            seconds = time_call(calls.run_packed, task.torch_device)
    except (Error, RuntimeError) as failure:
        return ProductResult(make_result(error=ErrorKind.RUNTIME, message=describe_error(failure)))
    return ProductResult(make_result(times=(seconds,), relative_error=error), call_seconds)


def main(connection: Connection) -> None:
    """Serve measurements: answer `ProductRunnerSetup` with None or an error text, and each job with its result.

    An optional first message is a device, which is initialized before the setup arrives.
    """
    reference = Reference()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # for the references
    torch.set_grad_enabled(False)
    for message in iterate_messages(connection):
        if isinstance(message, torch.device):
            with contextlib.suppress(RuntimeError):  # the answer to `ProductRunnerSetup` reports errors
                _initialize(message)
            continue
        if isinstance(message, ProductRunnerSetup):
            try:
                _initialize(message.torch_device)
            except RuntimeError as error:
                connection.send(describe_error(error))
                return
            connection.send(None)
            continue
        answer = measure_product(message, reference)
        if answer.result.error is ErrorKind.RUNTIME and not _is_usable(message.task.torch_device):
            connection.send(FinalMessage(answer))  # a kernel fault made the GPU unusable for this process
            return
        connection.send(answer)


def _initialize(torch_device: torch.device) -> None:
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    ones = torch.ones(1, 8, 8, 8, device=torch_device)
    torch.conv2d(ones, ones).sum().item()  # loads cuDNN, which no kernel's time limit has to include


def _is_usable(torch_device: torch.device) -> bool:
    try:
        torch.zeros(1, device=torch_device).item()
    except RuntimeError:
        return False
    return True
