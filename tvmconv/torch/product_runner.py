"""A process that checks and times kernels of products with PyTorch's tensors on a GPU.

The search of a training step runs untried kernels here, because a faulty one may hang or make the GPU unusable for its
process. Operands and references stay on the GPU: at the batch sizes of training, sending them from another process and
computing float64 references on the host would take seconds for each product.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

import torch

from tvmconv.errors import Error, describe_error
from tvmconv.measure.results import ErrorKind, RunnerResult
from tvmconv.measure.workers.process import FinalMessage, iterate_messages
from tvmconv.torch import operator
from tvmconv.torch.conv_call import WGRAD
from tvmconv.torch.conv_operators import run_with_stats
from tvmconv.torch.kernel_table import TableEntry
from tvmconv.torch.kernels import AvailableKernel
from tvmconv.torch.product_task import Operands, ProductTask, check_kernel, make_entry
from tvmconv.torch.timing import time_call


@dataclass(frozen=True)
class ProductRunnerSetup:
    """Setup of the process."""

    torch_device: torch.device


@dataclass(frozen=True)
class ProductJob:
    """A kernel to check and time for a product."""

    task: ProductTask
    kernel: AvailableKernel


@dataclass(frozen=True)
class ProductResult:
    """The result of a job."""

    result: RunnerResult  # without the packing of a weight, as records have it
    call_seconds: float = math.inf  # of a call with the packing of its weight; infinite after an error


@dataclass
class Reference:
    """Operands of a product and its result by PyTorch in float32, kept for further kernels of the product."""

    name: str = ""
    operands: Operands | None = field(default=None, repr=False)
    result: torch.Tensor | None = field(default=None, repr=False)

    def update(self, task: ProductTask) -> tuple[Operands, torch.Tensor]:
        """Return operands and result of a task, which are computed if the last task was another one."""
        if self.name != task.name or self.operands is None or self.result is None:
            self.name, self.operands, self.result = "", None, None
            operands = task.make_operands()
            call = task.call._replace(dtype=torch.float32)
            exact_task = replace(task, example=replace(task.example, call=call))
            first, second, bias = (None if each is None else each.float() for each in operands)
            assert first is not None
            assert second is not None
            result = exact_task.run_by_pytorch((first, second, bias))
            self.name, self.operands, self.result = task.name, operands, result
        return self.operands, self.result


def measure_product(job: ProductJob, reference: Reference) -> ProductResult:
    """Check a kernel against PyTorch's result in float32, and time it if it is correct."""
    task, started_at = job.task, time.monotonic()

    def make_result(**fields: object) -> RunnerResult:
        return RunnerResult(**fields, seconds=time.monotonic() - started_at)  # type: ignore[arg-type]

    try:
        operands, expected = reference.update(task)
        entry = make_entry(job.kernel)
        error, problem = check_kernel(task, entry, operands, expected)
        if problem:
            return ProductResult(make_result(error=ErrorKind.WRONG_ANSWER, message=problem, relative_error=error))
        call_seconds = seconds = _time_entry(task, entry, operands)
        if job.kernel.program.num_prepack_kernels and task.product != WGRAD:
            seconds = _time_packed(task, entry, operands)
    except (Error, RuntimeError) as failure:
        return ProductResult(make_result(error=ErrorKind.RUNTIME, message=describe_error(failure)))
    return ProductResult(make_result(times=(seconds,), relative_error=error), call_seconds)


def _time_entry(task: ProductTask, entry: TableEntry, operands: Operands) -> float:
    return time_call(lambda: run_with_stats(task.product, task.call, entry, *operands), task.call.device)


def _time_packed(task: ProductTask, entry: TableEntry, operands: Operands) -> float:
    """Return the seconds of a kernel without the packing of its weight, which is then packed once."""
    first, weight, bias = operands
    weight = weight.clone()
    operator.register_weight_refresh(weight, lambda: None)  # a weight with a known lifetime is not packed in each call
    return _time_entry(task, entry, (first, weight, bias))


def main(connection: Connection) -> None:
    """Serve measurements: answer `ProductRunnerSetup` with None or an error text, and each job with its result."""
    reference = Reference()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # for the references
    torch.set_grad_enabled(False)
    for message in iterate_messages(connection):
        if isinstance(message, ProductRunnerSetup):
            try:
                if message.torch_device.type == "cuda":
                    torch.cuda.set_device(message.torch_device)
                ones = torch.ones(1, 8, 8, 8, device=message.torch_device)
                torch.conv2d(ones, ones).sum().item()  # loads cuDNN, which no kernel's time limit has to include
            except RuntimeError as error:
                connection.send(describe_error(error))
                return
            connection.send(None)
            continue
        answer = measure_product(message, reference)
        if answer.result.error is ErrorKind.RUNTIME and not _is_usable(message.task.call.device):
            connection.send(FinalMessage(answer))  # a kernel fault made the GPU unusable for this process
            return
        connection.send(answer)


def _is_usable(torch_device: torch.device) -> bool:
    try:
        torch.zeros(1, device=torch_device).item()
    except RuntimeError:
        return False
    return True
