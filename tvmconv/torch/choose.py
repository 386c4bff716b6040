"""Which convolutions run by our kernels: those that are right, and faster."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch

from tvmconv.deadline import Deadline
from tvmconv.errors import Error, TuningError
from tvmconv.torch import operator
from tvmconv.torch.form import form_of
from tvmconv.torch.kernels import Kernels, Ready
from tvmconv.torch.layer import Key, TunedConv
from tvmconv.torch.look import Found
from tvmconv.torch.model import Optimized
from tvmconv.torch.report import PYTORCH, Line, Report
from tvmconv.torch.split import Part
from tvmconv.torch.times import Times, by_heuristics
from tvmconv.workloads import dtypes

OTHERWISE = "Inputs of other shapes and dtypes, on other devices, in training mode, or for gradients: by PyTorch."
NO_TIME = "not compared: no time left"
COMPARE_SECONDS = {"cuda": 0.15, "cpu": 1.0}  # that a layer's comparison takes, about: two timings, and a check
Choose = Literal["fastest", "tuned"]
TOLERANCES = 4.0  # of the dtype: PyTorch's result is as far off, and rounds between the operations


def checked(how: str) -> Choose:
    """What `choose` is, if it is one; raises TuningError."""
    if how not in get_args(Choose):
        raise TuningError(f"choose={how!r}: expected one of {', '.join(get_args(Choose))}")
    return cast(Choose, how)


def kernels_deadline(num_workloads: int, place: torch.device, deadline: Deadline) -> Deadline:
    """Return the deadline of finding kernels, which leaves time to compare the layers with PyTorch.

    Of what is left until the deadline, and until its cut-off, half is kept at most.

    Args:
        num_workloads: how many different layers there are.
        place: where they run.
        deadline: when all shall be compared.
    """
    wanted = num_workloads * COMPARE_SECONDS[place.type]
    end = deadline.end - min(wanted, deadline.left / 2)
    cut_off = deadline.cut_off.end - min(wanted, deadline.cut_off.left / 2)
    return Deadline(end, max(cut_off - end, 0.0))


@dataclass
class _Decided:
    """What was measured for a workload on tensors that lie in one way, for all layers that are like this."""

    before: float
    after: float | None = None
    ready: Ready | None = None
    reason: str = ""


class Chooser:
    """Decides what runs.

    Args:
        kernels: of the model's workloads.
        times: of the model's parts.
        how: "fastest" is what is measured to be faster; "tuned" is our kernel wherever it is right.
        deadline: when all layers shall be decided on. After it each is compared with the most promising of its kernels
            alone, and those that would not be done by its cut-off are left to PyTorch.

    Attributes:
        omitted: how many layers came too late.
    """

    def __init__(self, kernels: Kernels, times: Times, how: Choose, deadline: Deadline | None = None) -> None:
        self._kernels, self._times, self._how = kernels, times, how
        self._deadline = deadline or Deadline()
        self._seconds: list[float] = []  # that each workload took
        self.omitted = 0
        self._taken: list[tuple[TunedConv, Key]] = []
        self._programs: list[str] = []
        self._decided: dict[str, _Decided] = {}

    def choose(self, found: Found) -> Line:
        """Decide on one convolution."""
        followed_by = found.site.followed_by if found.site else ""
        line = Line(found.path, found.text, PYTORCH, found.reason, followed_by=followed_by)
        if found.module is None or found.x is None:
            return line
        if not self._kernels.ready(found.text):
            return replace(line, reason=self._kernels.why_not(found.text))
        module, key = found.module, found.x.key
        begun = time.monotonic()
        given = [found.x.like(), *([found.add.like()] if found.add else [])]
        like = f"{found.text}, {found.x}, {found.add}, {'no ' if module.norm is None else ''}normalisation"
        decided = self._decided.get(like)
        if self._deadline.cut_off.left <= (
            0.0 if decided else max(self._seconds, default=COMPARE_SECONDS[self._kernels.place.type])
        ):
            self.omitted += 1
            return replace(line, reason=NO_TIME)
        with torch.no_grad():
            with by_heuristics():
                wanted = module(*given)
            if decided is None:
                decided = self._decided[like] = self._measured(found, like, given, wanted)
                self._seconds.append(time.monotonic() - begun)
            line = replace(line, before=decided.before, after=decided.after, reason=decided.reason)
            if decided.ready is None:
                return line
            problem = self._take(found, decided.ready, given, wanted)
        if problem:
            module.leave(key)
            return replace(line, reason=problem)
        self._taken.append((module, key))
        self._programs.append(f"{found.path} {decided.ready.digest}")
        return replace(line, runs=decided.ready.schedule, origin=decided.ready.origin)

    def _measured(self, found: Found, like: str, given: Sequence[torch.Tensor], wanted: torch.Tensor) -> _Decided:
        """Time PyTorch and our kernels; the fastest of those that are right."""
        module, x = found.module, found.x
        assert x is not None
        decided = _Decided(self._times.seconds(f"PyTorch: {like}", lambda: module(*given)))
        for number, ready in enumerate(self._kernels.ready(found.text)):
            if self._deadline.cut_off.has_passed or (number and self._deadline.has_passed):
                break
            others = operator.installed(ready.name, self._kernels.place)  # have it
            problem = self._take(found, ready, given, wanted)
            if not problem:
                after = self._times.seconds(f"{ready.digest}: {like}", lambda: module(*given))
                if decided.after is None or after < decided.after:
                    decided.after, decided.ready, decided.reason = after, ready, ""
            elif decided.ready is None:
                decided.reason = problem
            module.leave(x.key)
            if not others:
                operator.remove(ready.name, self._kernels.place)
        if decided.ready is None and not decided.reason:
            self.omitted, decided.reason = self.omitted + 1, NO_TIME
        if self._how == "fastest" and decided.after is not None and decided.after >= decided.before:
            decided.ready, decided.reason = None, "PyTorch is no slower"
        return decided

    def _take(self, found: Found, ready: Ready, given: Sequence[torch.Tensor], wanted: torch.Tensor) -> str:
        """Have a kernel compute a layer; what is wrong with that, "" for nothing."""
        assert found.x is not None
        try:
            launcher = ready.launcher(self._kernels.device, self._kernels.place)
            operator.install(ready.name, self._kernels.place, launcher)
            found.module.take(
                found.x.key, ready.name, truncates=ready.truncates(self._kernels.device, self._kernels.place)
            )
            error, allowed = deviation(found.module(*given), wanted), _tolerance(found.text)
        except (Error, RuntimeError) as failure:
            return str(failure).splitlines()[0]
        return "" if error <= allowed else f"our result differs by {error:.1e}, more than {allowed:.1e}"

    def whole(
        self, model: Optimized, parts: Sequence[Part], arguments: Sequence[Any], report: Report, *, timed: bool = True
    ) -> Report:
        """Time the whole model, and give it back to PyTorch if our kernels make it no faster.

        Args:
            model: all of it.
            parts: which are graphs.
            arguments: of the model.
            report: what was decided so far, and what the model took as it was.
            timed: whether there is time for that; without, the kernels stay that are faster for their layers.
        """
        taken = {id(module) for module, _ in self._taken}
        ours = [part.module for part in parts if taken & {id(module) for module in part.module.graph.modules()}]
        for part in parts:
            part.module.leave(part.module not in ours)
        before = report.before
        programs = hashlib.sha256("\n".join(self._programs).encode()).hexdigest()
        if ours and not timed:
            note = "No time was left to time the whole model with our kernels."
            return replace(report, notes=(*report.notes, note))
        after = self._times.seconds(f"the whole by {programs}", lambda: model(*arguments)) if ours else before
        if ours and (self._how == "tuned" or before is None or after is None or after < before):
            return replace(report, after=after)
        for part in parts:
            part.module.leave()
        model.lie_as_before()
        if not ours:
            return replace(report, after=before)
        lines = [replace(line, runs=PYTORCH, reason=line.reason or "the whole is no faster") for line in report.lines]
        note = "All is left to PyTorch: with our kernels the whole model was no faster."
        return Report(tuple(lines), before, before, notes=(OTHERWISE, note))


def _tolerance(text: str) -> float:
    return TOLERANCES * dtypes.DTYPES[form_of(text).workload.dtype].tolerance


def deviation(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The relative L2 difference."""
    norm = float(theirs.double().norm())
    return float((ours.double() - theirs.double()).norm()) / norm if norm else float(ours.double().norm())
