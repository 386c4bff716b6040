"""Which convolutions run by our kernels: those that are right, and faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from tvmconv.errors import Error
from tvmconv.torch.form import form_of
from tvmconv.torch.kernels import Kernels
from tvmconv.torch.layer import Key, TunedConv
from tvmconv.torch.look import Found, Part
from tvmconv.torch.model import Optimized
from tvmconv.torch.report import PYTORCH, Line, Report
from tvmconv.torch.timing import seconds_of
from tvmconv.workloads import dtypes

Choose = Literal["fastest", "tuned"]
TOLERANCES = 4.0  # of the dtype: PyTorch's result is as far off, and rounds between the operations


class Chooser:
    """Decides what runs.

    Args:
        kernels: of the model's workloads.
        how: "fastest" is what is measured to be faster; "tuned" is our kernel wherever it is right.
    """

    def __init__(self, kernels: Kernels, how: Choose) -> None:
        self._kernels, self._how = kernels, how
        self._taken: list[tuple[TunedConv, Key]] = []

    def choose(self, found: Found) -> Line:
        """Decide on one convolution."""
        line = Line(found.path, found.text, PYTORCH, found.reason)
        if found.module is None or found.x is None:
            return line
        schedule = self._kernels.schedule_of(found.text)
        if schedule is None:
            return replace(line, reason=self._kernels.why_not(found.text))
        module, key = found.module, found.x.key
        given = [found.x.like(), *([found.add.like()] if found.add else [])]
        place = self._kernels.place
        with torch.no_grad():
            wanted = module(*given)
            before = seconds_of(lambda: module(*given), place)
            module.take(key, found.text)
            try:
                error = _deviation(module(*given), wanted)
                after = seconds_of(lambda: module(*given), place)
            except (Error, RuntimeError) as failure:
                module.leave(key)
                return replace(line, reason=str(failure).splitlines()[0], before=before)
        line = replace(line, before=before, after=after)
        allowed = _tolerance(found.text)
        if not error <= allowed:
            module.leave(key)
            return replace(line, reason=f"our result differs by {error:.1e}, more than {allowed:.1e}")
        if self._how == "fastest" and after >= before:
            module.leave(key)
            return replace(line, reason="PyTorch is no slower")
        self._taken.append((module, key))
        return replace(line, runs=schedule)

    def whole(self, model: Optimized, parts: Sequence[Part], arguments: Sequence[Any], report: Report) -> Report:
        """Time the whole model, and give it back to PyTorch if our kernels make it no faster.

        Args:
            model: all of it.
            parts: which are graphs.
            arguments: of the model.
            report: what was decided so far.
        """
        taken = {id(module) for module, _ in self._taken}
        ours = [part.module for part in parts if taken & {id(module) for module in part.module.graph.modules()}]

        def timed(*, left: bool) -> float:
            for part in parts:
                part.module.leave(left or part.module not in ours)
            return seconds_of(lambda: model(*arguments), self._kernels.place)

        before = timed(left=True)
        after = timed(left=False) if ours else before
        if self._how == "tuned" or not ours or after < before:
            return replace(report, before=before, after=after)
        for part in parts:
            part.module.leave()
        lines = [replace(line, runs=PYTORCH, reason=line.reason or "the whole is no faster") for line in report.lines]
        note = "All is left to PyTorch: with our kernels the whole model was no faster."
        return Report(tuple(lines), before, before, (*report.notes, note))


def _tolerance(text: str) -> float:
    return TOLERANCES * dtypes.DTYPES[form_of(text).workload.dtype].tolerance


def _deviation(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The relative L2 difference."""
    norm = float(theirs.double().norm())
    return float((ours.double() - theirs.double()).norm()) / norm if norm else float(ours.double().norm())
