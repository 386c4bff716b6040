"""Kernels for a model's workloads: from logs, by a search, or predicted."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from tvmconv import library
from tvmconv.compiler.program import Program
from tvmconv.deadline import Deadline
from tvmconv.devices import Device
from tvmconv.errors import Error, ScheduleError
from tvmconv.knobs import Config
from tvmconv.logs.best import Nearness, Rankings, log_files
from tvmconv.logs.candidates import TUNED, Candidate, candidates
from tvmconv.logs.record import Record
from tvmconv.logs.shipped import shipped_logs
from tvmconv.measuring import kept
from tvmconv.measuring.build_all import NO_TIME, Choice, build_all
from tvmconv.measuring.pool import workers_of
from tvmconv.measuring.ready import begin_processes
from tvmconv.measuring.standing import standing
from tvmconv.measuring.wire import encode_program
from tvmconv.searching.network import one_after_another
from tvmconv.searching.request import Request
from tvmconv.searching.search import Omitted, Tuned
from tvmconv.searching.shares import by_cost
from tvmconv.torch.form import MARK, form_of
from tvmconv.torch.launch import launcher_of
from tvmconv.torch.operator import Launcher
from tvmconv.torch.rounding import truncates
from tvmconv.workloads import Workload, dtypes, parse

LOG = "tuning.jsonl"
BUILD_SECONDS = 1.0  # that a builder takes for a kernel, about
TAKE_OVER_SECONDS = 1.0  # until builders have ended what a search had them do
FEW = 4  # kernels that are compared for a workload that was not measured on this device


@dataclass
class Ready:
    """A kernel that was built.

    Attributes:
        text: of its workload.
        schedule: its name.
        origin: where the config is from, in a few words.
        program: for the device.
    """

    text: str
    schedule: str
    origin: str
    program: Program
    _launcher: Launcher | None = None
    _truncates: bool | None = None

    def launcher(self, device: Device, place: torch.device) -> Launcher:
        """What runs it, loaded once; raises DeviceError if it does not load."""
        if self._launcher is None:
            self._launcher = launcher_of(form_of(self.text), self.program, device, place)
        return self._launcher

    @property
    def name(self) -> str:
        """What the operator calls it."""
        return f"{self.text}{MARK}{self.digest[:16]}"

    @functools.cached_property
    def digest(self) -> str:
        """The same for the same program."""
        header, code = encode_program(self.program, None)
        return hashlib.sha256(header.encode() + code).hexdigest()

    def truncates(self, device: Device, place: torch.device) -> bool:
        """Whether it truncates its inputs to TF32; raises DeviceError as `launcher` does."""
        if self._truncates is None:
            form = form_of(self.text)
            tf32 = form.workload.dtype == dtypes.TF32.name
            self._truncates = tf32 and truncates(form, self.launcher(device, place), place)
        return self._truncates


class Kernels:
    """Kernels for workloads on a device.

    Args:
        device: ours.
        place: PyTorch's.
        log: what was measured, and where a search writes.
        told: is called with a line of text now and then.

    Attributes:
        unsearched: workloads that a search was asked for and had no time for, by their texts.
    """

    def __init__(
        self,
        device: Device,
        place: torch.device,
        log: str | os.PathLike[str] | None,
        told: Callable[[str], None],
    ) -> None:
        self.device, self.place = device, place
        self._log, self._told = log, told
        self._ready: dict[str, list[Ready]] = {}
        self._failed: dict[str, str] = {}
        self._built: dict[str, Program] = {}  # by a search, under what `_spelt` gives
        self.unsearched: list[str] = []

    def find(self, counts: Mapping[str, int], deadline: Deadline | None) -> None:
        """Build kernels for each workload: the one that was measured to be the fastest here, or some that promise most.

        Args:
            counts: how often the model has each, by its text.
            deadline: when a search of those that the log knows nothing of, and all building, shall be done; those that
                cost the model most come first. One kernel of each workload may be built until its cut-off. None for no
                search, and no limit for building.

        Raises:
            Error: the log is not there and nothing is searched, or it cannot be read or written.
            DeviceError: the device is lost.
        """
        with standing():
            if deadline is not None:
                self._search(counts, deadline)
            there = self._log is not None and (
                deadline is None or Path(self._log).exists()
            )  # a search may find nothing
            logs = log_files([self._log]) if there and self._log is not None else []
            texts = [w.text for w in by_cost({parse(text): count for text, count in counts.items()}, self.device)]
            self._build(texts, Rankings([*logs, *shipped_logs()]), deadline)

    def ready(self, text: str) -> list[Ready]:
        """The kernels of a workload, the most promising first; none if none could be built."""
        return self._ready.get(text, [])

    def why_not(self, text: str) -> str:
        """Why there is none."""
        return self._failed.get(text, "")

    def _search(self, counts: Mapping[str, int], deadline: Deadline) -> None:
        log = LOG if self._log is None else self._log
        self._log = log
        workloads = {parse(text): count for text, count in counts.items()}
        known = Rankings([log]) if Path(log).exists() else None
        left = {w: count for w, count in workloads.items() if not (known and self._measured(w, known))}
        if not left:
            return
        begin_processes(None, [self.device])
        request = Request(log=log, compare=False)
        building = min(deadline.left / 3, TAKE_OVER_SECONDS + BUILD_SECONDS * math.ceil(len(left) / workers_of(None)))
        searching = deadline.reserving(building)
        searches = one_after_another(left, [self.device], request, deadline=searching)
        for number, (w, search) in enumerate(searches, len(workloads) - len(left) + 1):
            line = f"{number} of {len(workloads)}: {w.text}"
            try:
                tuned = search(
                    lambda status, line=line: self._told(  # type: ignore[misc]
                        f"{line}: {status.done:,} configs, {searching.left:.0f} s left for all"
                    )
                )
            except ScheduleError as error:  # nothing computes it there
                self._told(f"{line}: {error}")
            else:
                self._count(w, tuned)

    def _count(self, w: Workload, tuned: Tuned) -> None:
        """Note what came of a search, with the kernels that it built."""
        if Omitted.SEARCH in tuned.omitted:
            self.unsearched.append(w.text)
        for trial in tuned.built:
            if trial.program is not None:
                self._built[_spelt(w, trial.schedule, trial.config)] = trial.program

    def _build(self, texts: list[str], rankings: Rankings, deadline: Deadline | None) -> None:
        """Build the candidates of each workload, and others where all of them fail."""
        left: dict[str, Iterator[Candidate]] = {
            text: candidates(rankings, parse(text), self.device) for text in texts if not self._recall(text, rankings)
        }
        while left:
            # To predict takes a while for each workload: half of the time is for building.
            predicting = deadline.cut_off.reserving(deadline.cut_off.left / 2) if deadline else Deadline()
            ranked: list[tuple[int, str, Candidate]] = []
            for text, several in left.items():
                if predicting.has_passed:
                    self._failed[text] = NO_TIME
                else:
                    ranked += [(rank, text, each) for rank, each in enumerate(self._next(text, several))]
            begun = [(text, each) for _, text, each in sorted(ranked, key=lambda one: one[0])]
            left = {text: several for text, several in left.items() if any(text == other for other, _ in begun)}
            choices = [Choice(parse(text), each.schedule, each.config) for text, each in begun]
            told = f"of {len(choices)} kernels are built"
            results = build_all(
                choices,
                self.device,
                told=lambda done, told=told: self._told(f"{done} {told}"),  # type: ignore[misc]
                deadline=deadline,
                num_needed=sum(rank == 0 for rank, _, _ in ranked),
            )
            for (text, each), built in zip(begun, results, strict=True):
                if built.program is None:
                    self._failed[text] = built.message
                else:
                    ready = Ready(text, each.schedule.name, each.origin, built.program)
                    self._ready.setdefault(text, []).append(ready)
                    if each.origin == TUNED:
                        kept.keep(parse(text), each.schedule, each.config, self.device, built.program)
            left = {text: several for text, several in left.items() if text not in self._ready}

    def _measured(self, w: Workload, rankings: Rankings) -> Record | None:
        """The fastest record of a workload on this device."""
        nearness, record = next(rankings.nearest_first(w, self.device), (None, None))
        return record if nearness is Nearness.DEVICE else None

    def _recall(self, text: str, rankings: Rankings) -> bool:
        """Take the kernel that was measured to be the fastest, if it was built before; whether it was."""
        w = parse(text)
        record = self._measured(w, rankings)
        if record is None:
            return False
        program = self._built.get(_spelt(w, record.schedule, record.config))
        if program is not None:
            kept.keep(w, library.find(w, record.schedule), record.config, self.device, program)
        else:
            program = kept.find(w, record.schedule, record.config, self.device)
        if program is not None:
            self._ready[text] = [Ready(text, record.schedule, TUNED, program)]
        return program is not None

    def _next(self, text: str, several: Iterator[Candidate]) -> list[Candidate]:
        """The candidates to build next: one that was measured, or a few."""
        try:
            first = next(several, None)
            if first is None or first.origin == TUNED:
                return [first] if first else []
            return [first, *islice((each for each in several if each.origin != TUNED), FEW - 1)]
        except Error as error:  # nothing computes it there
            self._failed[text] = str(error)
            return []


def _spelt(w: Workload, schedule: str, config: Config) -> str:
    """The same for the same config of a schedule for a workload."""
    return json.dumps([w.text, schedule, sorted(config.items())])
