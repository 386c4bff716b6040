"""Kernels for a model's workloads: from logs, by a search, or predicted; made known to the operator."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tvmconv.devices import Device
from tvmconv.errors import Error, FallbackWarning, ScheduleError
from tvmconv.logs.best import best, log_files
from tvmconv.logs.build import build
from tvmconv.logs.shipped import shipped_logs
from tvmconv.measuring.ready import begin_processes
from tvmconv.measuring.standing import standing
from tvmconv.searching.request import Request
from tvmconv.searching.shares import share
from tvmconv.searching.tune import tune_all
from tvmconv.torch import operator
from tvmconv.torch.form import form_of
from tvmconv.torch.launch import launcher_of
from tvmconv.workloads import parse

LOG = "tuning.jsonl"


class Kernels:
    """Kernels for workloads on a device.

    Args:
        device: ours.
        place: PyTorch's.
        log: what was measured, and where a search writes.
        told: is called with a line of text now and then.
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
        self._built: dict[str, str] = {}  # names of schedules
        self._failed: dict[str, str] = {}

    def find(self, counts: Mapping[str, int], seconds: float | None) -> None:
        """Build a kernel for each workload.

        Args:
            counts: how often the model has each, by its text.
            seconds: for a search of those that the log knows nothing of, all together; None for no search.

        Raises:
            Error: the log is not there and nothing is searched, or it cannot be read or written.
            DeviceError: the device is lost.
        """
        if seconds is not None:
            self._search(counts, seconds)
        there = self._log is not None and (seconds is None or Path(self._log).exists())  # a search may find nothing
        logs = log_files([self._log]) if there and self._log is not None else []
        for text in [*counts][:1]:
            best(logs, parse(text))  # says what is wrong with a log, once
        for number, text in enumerate(counts, 1):
            self._told(f"{number} of {len(counts)}: building {text}")
            try:
                self._built[text] = self._build(text, [*logs, *shipped_logs()])
            except Error as error:
                self._failed[text] = str(error)

    def schedule_of(self, text: str) -> str | None:
        """The schedule of a workload's kernel, if there is one."""
        return self._built.get(text)

    def why_not(self, text: str) -> str:
        """Why there is none."""
        return self._failed.get(text, "")

    def _search(self, counts: Mapping[str, int], seconds: float) -> None:
        log = LOG if self._log is None else self._log
        self._log = log
        workloads = {parse(text): count for text, count in counts.items()}
        known = Path(log).exists()
        left = [w for w in workloads if not (known and best(log, w, device=self.device.name))]
        end = time.monotonic() + seconds
        with standing():
            if left:
                begin_processes(None, [self.device])
            while left:
                first = left[0]
                now = time.monotonic()
                own = share(max(end - now, 0.1), left, workloads, self.device)
                request = Request(seconds=own, log=log, begun=now)
                line = f"{len(workloads) - len(left) + 1} of {len(workloads)}: {first.text}"
                try:
                    tune_all(
                        first,
                        [],
                        [self.device],
                        request,
                        lambda status, line=line: self._told(  # type: ignore[misc]
                            f"{line}: {status.done:,} configs, {end - time.monotonic():.0f} s left for all"
                        ),
                    )
                except ScheduleError as error:  # nothing computes it there
                    self._told(f"{line}: {error}")
                left = left[1:]

    def _build(self, text: str, logs: list[Path]) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            kernel = build(parse(text), device=self.device, log=logs)
        launcher = launcher_of(form_of(text), kernel.program, self.device, self.place)
        operator.install(text, self.place, launcher)
        return kernel.schedule.name
