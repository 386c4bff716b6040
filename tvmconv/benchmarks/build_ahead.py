"""Kernels of many layers, which processes compile while a GPU measures the layers before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import closing

from tvmconv import registry
from tvmconv.benchmarks.builder_pool import start_builders
from tvmconv.benchmarks.prebuild import (
    ArchivedKernel,
    Entry,
    build_entry,
    get_config,
    make_record,
    measure_kernels,
    select_fastest,
)
from tvmconv.cli.errors import print_note
from tvmconv.compiler.executable import CompiledKernel, Executable, LaunchConfig
from tvmconv.compiler.nvrtc import Resources
from tvmconv.devices import Device, sharing
from tvmconv.errors import Error
from tvmconv.kernel import Kernel
from tvmconv.logs.log import Log
from tvmconv.measure.runner import measure_executable
from tvmconv.measure.serialization import decode_executable
from tvmconv.verification import Problem, Verification
from tvmconv.workloads import Workload

MAX_FINALISTS = 3  # fastest kernels that are timed again
MAX_FINALIST_RATIO = 1.05  # trials longer than the fastest by this factor are not timed again
BUILDER_NICENESS = 19  # of the processes that compile, so that they delay no lane that holds the GPU
MAX_WAIT_SECONDS = 40.0  # time to wait for the kernels of a layer, after which those that are not built are left out


class AheadBuilder:
    """Processes that compile the configs of all layers in order; `get_kernels` waits for those of one layer.

    Args:
        entries: Configs to compile.
        archived: Kernels that are compiled already, by the text of the workload.
        num_workers: Number of processes.
    """

    def __init__(
        self, entries: Sequence[Entry], archived: Mapping[str, Sequence[ArchivedKernel]], num_workers: int
    ) -> None:
        self._archived = archived
        self._pool = start_builders(num_workers, BUILDER_NICENESS) if entries else None
        self._futures: dict[str, list[Future[tuple[Entry, bytes | None]]]] = {}
        for entry in entries:
            assert self._pool
            self._futures.setdefault(entry["workload"], []).append(self._pool.submit(build_entry, entry))

    def wait_for_any(self, workloads: Mapping[str, Workload]) -> str:
        """Return the label of the first workload whose kernels are compiled, and wait until there is one."""
        while True:
            for label, workload in workloads.items():
                if all(future.done() for future in self._futures.get(workload.text, ())):
                    return label
            futures = [future for workload in workloads.values() for future in self._futures[workload.text]]
            wait([future for future in futures if not future.done()], return_when=FIRST_COMPLETED)

    def get_kernels(self, workload: Workload) -> list[ArchivedKernel]:
        """Return the kernels of a workload; those that cannot be built are reported and left out."""
        kernels = list(self._archived.get(workload.text, ()))
        futures = self._futures.pop(workload.text, [])
        wait(futures, MAX_WAIT_SECONDS)
        for future in futures:
            if not future.done():
                future.cancel()
                continue
            try:
                entry, code = future.result()
            except (Exception, CancelledError) as error:  # a process that ended breaks the pool
                print_note(f"{workload.text}: not built: {error}")
                continue
            if code is None:
                print_note(f"{workload.text} {entry['schedule']}: {entry['error']}")
            else:
                kernels.append((entry, decode_executable(entry["header"], code)[0]))
        return kernels

    def close(self) -> None:
        """End the processes, without waiting for builds in progress."""
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)


class BuiltKernel(Kernel):
    """A kernel of an archive, without its TIR and its source."""

    def __init__(self, workload: Workload, device: Device, entry: Entry, executable: Executable) -> None:
        self.workload, self.device = workload, device
        self.schedule, self.config = registry.find_schedule(workload, entry["schedule"]), get_config(entry)
        self.record = self.prediction = None
        self._executable, self._resources = executable, entry["resources"]

    @property
    def executable(self) -> Executable:
        """Compiled code that a device loads."""
        return self._executable

    @property
    def kernels(self) -> tuple[CompiledKernel, ...]:  # type: ignore[override]
        """Device functions in launch order."""
        return self._executable.kernels

    @property
    def launch(self) -> LaunchConfig:
        """Launch configuration of the first device function: grid and block."""
        return self._executable.kernels[0].launch

    @property
    def resources(self) -> Resources:
        """Registers, spills and shared memory that ptxas reported."""
        known = self._resources
        return Resources(known.get("registers", 0), known.get("spills", 0), 0, known["shared_bytes"], None)

    def verify(self, problem: Problem | None = None, *, full: bool = False) -> Verification:
        """Run the kernel and compare its output with a float64 reference; see `Kernel.verify`."""
        problem = problem or Problem(self.workload, mode="full" if full else "auto")
        return problem.check(self.loaded_kernel.run(problem.inputs))


def find_fastest(problem: Problem, kernels: Sequence[ArchivedKernel], device: Device, log: Log) -> BuiltKernel:
    """Verify and time a workload's kernels, then time the fastest ones again, and return the fastest.

    All measurements are appended to the log. Error is raised if no kernel is right.
    """
    workload, tolerance = problem.workload, problem.workload.tolerance
    with closing(device.create_benchmark(problem.inputs, problem.expected_output)) as benchmark, sharing.hold_gpu():
        records = measure_kernels(workload, kernels, device, benchmark, log)
        finalists = select_fastest(records, kernels, MAX_FINALISTS, MAX_FINALIST_RATIO)
        if not finalists:
            raise Error(f"no kernel of {workload} is right: {len(kernels)} were measured")
        finals = []
        for entry, executable in finalists:
            outcome = measure_executable(device, benchmark, executable, None, tolerance)
            finals.append(make_record(workload, device, entry, outcome, is_final=True))
            log.append(finals[-1])
    ((entry, executable),) = select_fastest(finals, finalists, 1)
    return BuiltKernel(workload, device, entry, executable)
