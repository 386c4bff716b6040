"""Kernels for a model's workloads: from logs, from a search, or predicted. `layer_search.py` adds those of a search."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from tvmconv import registry
from tvmconv.compiler.executable import Executable
from tvmconv.deadline import Deadline
from tvmconv.devices import Device
from tvmconv.errors import DeviceError, Error, ScheduleError
from tvmconv.logs.candidates import PREDICTED, TUNED, Candidate, iterate_candidates
from tvmconv.logs.log import Log
from tvmconv.logs.packaged import packaged_logs
from tvmconv.logs.ranking import RecordIndex, list_log_files
from tvmconv.logs.record import Record
from tvmconv.measure import kernel_cache
from tvmconv.measure.builder import NO_TIME_MESSAGE, BuilderInput, build_all
from tvmconv.measure.predictions import recommend_for_all
from tvmconv.measure.serialization import encode_executable
from tvmconv.measure.workers.pool import keep_workers_alive
from tvmconv.search.search import check_writable
from tvmconv.search.time_budget import sort_by_cost
from tvmconv.space import Config
from tvmconv.torch.launch import make_launcher
from tvmconv.torch.operator import Launcher
from tvmconv.torch.rounding import is_truncating
from tvmconv.torch.signature import KERNEL_NAME_SEPARATOR, parse_signature
from tvmconv.workloads import Workload, dtypes, parse

DEFAULT_LOG = "tuning.jsonl"
BUILD_SECONDS = 1.0  # approximate time of one build
OTHER_EPILOGUE = f"{TUNED} with another epilogue"  # source of a config
MAX_CANDIDATES = 4  # kernels to compare for a workload without a measurement on this device
MAX_ALTERNATIVES = 2  # kernels of other schedules that are compared with one that packs its weight in each call
# A record that takes longer than these multiples of the roofline's time and seconds is of a search that was cut off.
MAX_ROOFLINE_RATIO, ROOFLINE_MARGIN_SECONDS = 10.0, 20e-6


@dataclass
class AvailableKernel:
    """A kernel that was built for a device and tensors of PyTorch's device."""

    workload_text: str
    schedule: str
    config_source: str  # a few words
    program: Executable
    device: Device
    torch_device: torch.device
    seconds: float | None = None  # of a call with PyTorch's tensors, by the search that found it

    @property
    def name(self) -> str:
        """Name under which the operator runs the kernel."""
        return f"{self.workload_text}{KERNEL_NAME_SEPARATOR}{self.digest[:16]}"

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the executable, equal for equal executables."""
        header, code = encode_executable(self.program, None)
        return hashlib.sha256(header.encode() + code).hexdigest()

    @functools.cached_property
    def launcher(self) -> Launcher:
        """Launcher of the executable; it raises DeviceError if it cannot be loaded."""
        return make_launcher(parse_signature(self.workload_text), self.program, self.device, self.torch_device)

    @functools.cached_property
    def truncates(self) -> bool:
        """Whether the kernel truncates its inputs to TF32."""
        signature = parse_signature(self.workload_text)
        uses_tf32 = signature.workload.dtype == dtypes.TF32.name
        return uses_tf32 and is_truncating(signature, self.launcher, self.torch_device)


class KernelProvider:
    """A source of kernels for workloads on tvmconv's device, for tensors of PyTorch's device.

    Its log has earlier measurements, and a search appends to it; None stands for the default log. Measurements exclude
    the packing of a weight. In training, weights change, and kernels pack them in each call (`packs_in_each_call`).
    Where the fastest kernel packs its weight, the fastest kernels of other schedules are then available, too.
    """

    def __init__(
        self,
        device: Device,
        torch_device: torch.device,
        log: str | os.PathLike[str] | None,
        on_progress: Callable[[str], None],
        *,
        packs_in_each_call: bool = False,
    ) -> None:
        self.device, self.torch_device = device, torch_device
        self._packs_in_each_call = packs_in_each_call
        self._log, self.report_progress = log, on_progress
        self.available: dict[str, list[AvailableKernel]] = {}  # by the workload's text, the most promising first
        self.failure_reasons: dict[str, str] = {}  # reasons why workloads have no kernel
        self.unsearched_workloads: list[str] = []  # texts of workloads for whose search no time was left
        self._record_index: RecordIndex | None = None  # of the log and the packaged logs, once they were read
        self._derived: Collection[str] = ()  # texts of workloads that take the configs of others

    def find_kernels(
        self,
        counts: Mapping[str, float],
        deadline: Deadline | None,
        derived: Collection[str] = (),
    ) -> None:
        """Build kernels for each workload: the fastest one measured on this device, or several promising ones.

        `counts` are the numbers of layers by workload text, or weights that replace them. The deadline is that of all
        builds; the most expensive workloads come first. One kernel per workload may still be built until its cut-off.
        Without a deadline there is no limit. Workloads that have kernels of `add_searched_kernel` get no others. The
        workloads `derived` take the fastest config of the same workload without its epilogue, if it was measured.
        Raises Error if the log cannot be read, or does not exist and there is no deadline.
        """
        self._derived = frozenset(derived)
        workloads = {parse(text): count for text, count in counts.items() if self.has_dtypes(text)}
        with keep_workers_alive():
            record_index = self.read_record_index(deadline)
            remaining = [
                workload for workload in sort_by_cost(workloads, self.device) if workload.text not in self.available
            ]
            self._build_candidates(remaining, record_index, deadline)
            if self._packs_in_each_call:
                self._build_alternatives(remaining, record_index, deadline)

    def has_dtypes(self, text: str) -> bool:
        """Return whether the device supports the arguments of a workload; the reason is noted if it does not."""
        try:
            self.device.check_dtypes(parse(text).argument_dtypes)
        except DeviceError as error:
            self.failure_reasons[text] = str(error)
            return False
        return True

    def add_searched_kernel(
        self,
        workload: Workload,
        schedule_name: str,
        config: Config,
        program: Executable,
        seconds: float | None = None,
    ) -> None:
        """Add a kernel that a search has found, behind those that were added before, and store it in the cache.

        `seconds` is its time, or None if there was no time to measure it.
        """
        kernel_cache.store(workload, registry.find_schedule(workload, schedule_name), config, self.device, program)
        self._add_kernel(workload, schedule_name, PREDICTED if seconds is None else TUNED, program, seconds)

    def open_log(self) -> Log:
        """Return the log to which a search appends; raise Error if it cannot be written."""
        self._log = DEFAULT_LOG if self._log is None else self._log
        check_writable(Path(self._log))
        return Log(self._log)

    def forget_record_index(self) -> None:
        """Read the logs again when they are needed next, because a search has appended records."""
        self._record_index = None

    def adopt_configs(self, siblings: Mapping[str, str], deadline: Deadline | None) -> None:
        """Build kernels of workloads with their own fastest measured configs, or those of others with another epilogue.

        `siblings` are the texts of the others, by the texts of the workloads. A workload gets kernels by
        `find_kernels`, without a search, if the other one was not measured, or if its config makes no kernel with this
        epilogue: a residual may take more shared memory than there is.
        """
        record_index, batch, unmeasured = self.read_record_index(deadline), [], {}
        for text, sibling in siblings.items():
            workload, source = parse(text), TUNED
            if self._load_cached(workload, record_index):
                continue
            record = self._find_measured_record(workload, record_index)
            if record is None:
                record, source = self._find_measured_record(parse(sibling), record_index), OTHER_EPILOGUE
            try:
                schedule = None if record is None else registry.find_schedule(workload, record.schedule)
            except ScheduleError:
                schedule = None
            if record is None or schedule is None:
                unmeasured[text] = 1.0
            else:
                batch.append((workload, Candidate(schedule, record.config, source, record.cost)))
        if batch:
            with keep_workers_alive():
                self._build_batch(batch, deadline)
        unmeasured |= {workload.text: 1.0 for workload, _ in batch if workload.text not in self.available}
        if unmeasured:
            self.find_kernels(unmeasured, deadline, derived=unmeasured)

    def is_measured(self, text: str, deadline: Deadline | None) -> bool:
        """Return whether a kernel of a workload was measured on this device."""
        return self._find_measured_record(parse(text), self.read_record_index(deadline)) is not None

    def read_record_index(self, deadline: Deadline | None) -> RecordIndex:
        """Return the records of the log and of the packaged logs; with a deadline, the log need not exist."""
        if self._record_index is None:
            # A search that measured nothing has written no log.
            has_log = self._log is not None and (deadline is None or Path(self._log).exists())
            logs = list_log_files([self._log]) if has_log and self._log is not None else []
            self._record_index = RecordIndex([*logs, *packaged_logs()])
        return self._record_index

    def list_uncovered(self, texts: Collection[str], min_records: int) -> list[str]:
        """Return the texts of workloads of which the log has fewer measured kernels on this device."""
        if self._log is None or not Path(self._log).exists():
            return list(texts)
        index = RecordIndex([self._log])

        def is_covered(workload: Workload) -> bool:
            num_records = sum(1 for _ in islice(index.iterate_on_device(workload, self.device), min_records))
            return num_records == min_records and self._find_measured_record(workload, index) is not None

        return [text for text in texts if not is_covered(parse(text))]

    def _build_candidates(
        self, workloads: list[Workload], record_index: RecordIndex, deadline: Deadline | None
    ) -> None:
        """Build the first candidates of each workload, and further ones where all of them fail."""
        missing = [workload for workload in workloads if not self._load_cached(workload, record_index)]
        unmeasured = [
            workload
            for workload in missing
            if workload.text not in self._derived and not self._find_measured_record(workload, record_index)
        ]
        prediction_deadline = _reserve_time_for_builds(deadline)
        predictions = recommend_for_all(unmeasured, self.device, deadline=prediction_deadline)
        unpredicted = set(unmeasured).difference(predictions)
        remaining = {
            workload: iterate_candidates(record_index, workload, self.device, predictions.get(workload))
            for workload in missing
        }
        while remaining:
            batch: list[tuple[int, Workload, Candidate]] = []  # with the candidate's rank
            for workload, candidates in remaining.items():
                if workload in unpredicted and prediction_deadline.has_passed:
                    self.failure_reasons[workload.text] = NO_TIME_MESSAGE
                else:
                    next_candidates = self._next_candidates(workload, candidates, record_index)
                    batch += [(rank, workload, candidate) for rank, candidate in enumerate(next_candidates)]
            batch.sort(key=lambda entry: entry[0])
            self._build_batch([(workload, candidate) for _, workload, candidate in batch], deadline)
            tried_workloads = {workload for _, workload, _ in batch}
            remaining = {
                workload: candidates
                for workload, candidates in remaining.items()
                if workload in tried_workloads and workload.text not in self.available
            }

    def _build_alternatives(
        self, workloads: list[Workload], record_index: RecordIndex, deadline: Deadline | None
    ) -> None:
        """Build the fastest kernels of other schedules for each workload whose fastest measured kernel packs a weight.

        They are added behind that kernel. Their schedules may pack the weight as well, with other costs.
        """
        batch: list[tuple[Workload, Candidate]] = []
        for workload in workloads:
            kernels = self.available.get(workload.text, [])
            if not any(kernel.config_source == TUNED and kernel.program.num_prepack_kernels for kernel in kernels):
                continue
            for candidate in self._list_alternatives(workload, record_index, {kernel.schedule for kernel in kernels}):
                program = kernel_cache.lookup(workload, candidate.schedule.name, candidate.config, self.device)
                if program is None:
                    batch.append((workload, candidate))
                else:
                    self._add_kernel(workload, candidate.schedule.name, TUNED, program)
        if batch:
            self._build_batch(batch, deadline)

    def _list_alternatives(
        self, workload: Workload, record_index: RecordIndex, known_schedules: set[str]
    ) -> list[Candidate]:
        """Return the fastest configs of up to `MAX_ALTERNATIVES` further schedules that were measured on the device."""
        names = set(known_schedules)
        alternatives: list[Candidate] = []
        for record in record_index.iterate_on_device(workload, self.device):
            if len(alternatives) == MAX_ALTERNATIVES:
                break
            if record.schedule in names:
                continue
            names.add(record.schedule)
            with contextlib.suppress(ScheduleError):  # the schedule no longer exists or applies
                schedule = registry.find_schedule(workload, record.schedule)
                alternatives.append(Candidate(schedule, record.config, TUNED, record.cost))
        return alternatives

    def _build_batch(self, batch: list[tuple[Workload, Candidate]], deadline: Deadline | None) -> None:
        """Build candidates; the first one of each workload may be built until the deadline's cut-off."""
        if deadline and deadline.cut_off.has_passed:  # starting processes would take seconds
            self.failure_reasons.update((workload.text, NO_TIME_MESSAGE) for workload, _ in batch)
            return
        results = build_all(
            [BuilderInput(workload, candidate.schedule, candidate.config) for workload, candidate in batch],
            self.device,
            on_progress=lambda num_built: self.report_progress(f"{num_built} of {len(batch)} kernels built"),
            deadline=deadline,
            num_needed=len({workload for workload, _ in batch}),
        )
        for (workload, candidate), result in zip(batch, results, strict=True):
            if result.executable is None:
                self.failure_reasons[workload.text] = result.message
                continue
            self._add_kernel(workload, candidate.schedule.name, candidate.config_source, result.executable)
            if candidate.config_source == TUNED:
                kernel_cache.store(workload, candidate.schedule, candidate.config, self.device, result.executable)

    def _add_kernel(
        self,
        workload: Workload,
        schedule: str,
        config_source: str,
        program: Executable,
        seconds: float | None = None,
    ) -> None:
        devices = self.device, self.torch_device
        kernel = AvailableKernel(workload.text, schedule, config_source, program, *devices, seconds)
        self.available.setdefault(workload.text, []).append(kernel)

    def _find_measured_record(self, workload: Workload, record_index: RecordIndex) -> Record | None:
        """Return the fastest record of a workload on this device; None if there is none, or only slow ones."""
        record, target = next(record_index.iterate_on_device(workload, self.device), None), self.device.target
        if record is not None and target is not None:
            max_seconds = MAX_ROOFLINE_RATIO * target.roofline_seconds(workload) + ROOFLINE_MARGIN_SECONDS
            return record if record.cost <= max_seconds else None
        return record

    def _load_cached(self, workload: Workload, record_index: RecordIndex) -> bool:
        """Load the fastest measured kernel from the cache; return whether it was there."""
        record = self._find_measured_record(workload, record_index)
        if record is None:
            return False
        program = kernel_cache.lookup(workload, record.schedule, record.config, self.device)
        if program is not None:
            self._add_kernel(workload, record.schedule, TUNED, program)
        return program is not None

    def _next_candidates(
        self, workload: Workload, candidates: Iterator[Candidate], record_index: RecordIndex
    ) -> list[Candidate]:
        """Return the candidates to build next: the measured one, or a few predicted ones."""
        try:
            first = next(candidates, None)
            if first is None:
                return []
            is_derived = workload.text in self._derived and first.config_source.startswith(TUNED)
            if is_derived or (first.config_source == TUNED and self._find_measured_record(workload, record_index)):
                return [first]
            others = (candidate for candidate in candidates if candidate.config_source != TUNED)
            return [first, *islice(others, MAX_CANDIDATES - 1)]
        except Error as error:  # no schedule computes it on this device
            self.failure_reasons[workload.text] = str(error)
            return []


def _reserve_time_for_builds(deadline: Deadline | None) -> Deadline:
    """Return a deadline for predictions, which take a while for each workload: half of the time is for builds."""
    if deadline is None:
        return Deadline()
    return deadline.cut_off.reserve_seconds(deadline.cut_off.remaining_seconds / 2)


def make_training_provider(
    device: Device,
    torch_device: torch.device,
    log: str | os.PathLike[str] | None,
    on_progress: Callable[[str], None] | None,
) -> KernelProvider:
    """Return a provider of kernels whose weights change from call to call."""
    return KernelProvider(device, torch_device, log, on_progress or (lambda text: None), packs_in_each_call=True)
