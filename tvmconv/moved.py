"""Modules under the names that they had in version 0.1, for scripts and schedules that were written for it.

An old name imports the module that took its place: `tvmconv.space` is `tvmconv.knobs.space`. The name `schedules` is
asked for last, so that it hides nothing: somebody else's folder of that name is imported under it, and not ours.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

BUILT_IN = "tvmconv.builtin"
TAKEN = "schedules"  # a name that others may use
MOVED = {
    TAKEN: BUILT_IN,
    "tvmconv.tuning": "tvmconv.searching",
    "tvmconv.analysis.banks": "tvmconv.analysis.memory.banks",
    "tvmconv.analysis.barriers": "tvmconv.compiler.barriers",
    "tvmconv.analysis.ncu": "tvmconv.analysis.nsight.ncu",
    "tvmconv.analysis.tir": "tvmconv.analysis.lowered.tir",
    "tvmconv.analysis.traffic": "tvmconv.analysis.memory.traffic",
    "tvmconv.devices.cuda_bench": "tvmconv.devices.cuda.bench",
    "tvmconv.devices.cuda_kernel": "tvmconv.devices.cuda.kernel",
    "tvmconv.devices.dlpack": "tvmconv.devices.cuda.dlpack",
    "tvmconv.devices.graphs": "tvmconv.devices.cuda.graphs",
    "tvmconv.devices.opencl_kernel": "tvmconv.devices.opencl.kernel",
    "tvmconv.devices.texture": "tvmconv.devices.cuda.texture",
    "tvmconv.experiment": "tvmconv.experiments.run",
    "tvmconv.factors": "tvmconv.knobs.factors",
    "tvmconv.measured": "tvmconv.experiments.readings",
    "tvmconv.plot": "tvmconv.reports.charts",
    "tvmconv.provenance": "tvmconv.experiments.provenance",
    "tvmconv.report": "tvmconv.reports.tables",
    "tvmconv.results": "tvmconv.experiments.results",
    "tvmconv.space": "tvmconv.knobs.space",
    "tvmconv.sweep": "tvmconv.experiments.sweep",
    "tvmconv.tuning.autotvm": "tvmconv.logs.autotvm",
    "tvmconv.tuning.bench_process": "tvmconv.measuring.bench_process",
    "tvmconv.tuning.best": "tvmconv.logs.best",
    "tvmconv.tuning.builder": "tvmconv.measuring.builder",
    "tvmconv.tuning.child": "tvmconv.measuring.child",
    "tvmconv.tuning.fields": "tvmconv.logs.fields",
    "tvmconv.tuning.history": "tvmconv.reports.history",
    "tvmconv.tuning.index": "tvmconv.logs.index",
    "tvmconv.tuning.knob_values": "tvmconv.reports.knob_values",
    "tvmconv.tuning.lines": "tvmconv.logs.lines",
    "tvmconv.tuning.local": "tvmconv.measuring.local",
    "tvmconv.tuning.log": "tvmconv.logs.log",
    "tvmconv.tuning.measure": "tvmconv.measuring.measurer",
    "tvmconv.tuning.merge": "tvmconv.logs.merge",
    "tvmconv.tuning.pipeline": "tvmconv.measuring.pipeline",
    "tvmconv.tuning.pool": "tvmconv.measuring.pool",
    "tvmconv.tuning.record": "tvmconv.logs.record",
    "tvmconv.tuning.remote": "tvmconv.measuring.remote",
    "tvmconv.tuning.replay": "tvmconv.searching.replay",
    "tvmconv.tuning.runner": "tvmconv.measuring.runner",
    "tvmconv.tuning.scan": "tvmconv.logs.scan",
    "tvmconv.tuning.simulate": "tvmconv.searching.simulate",
    "tvmconv.tuning.stages": "tvmconv.measuring.stopwatch",
    "tvmconv.tuning.stats": "tvmconv.logs.stats",
    "tvmconv.tuning.status": "tvmconv.searching.status",
    "tvmconv.tuning.subject": "tvmconv.logs.subject",
    "tvmconv.tuning.tune": "tvmconv.searching.tune",
    "tvmconv.tuning.tuners": "tvmconv.searching.tuners",
    "tvmconv.tuning.wire": "tvmconv.measuring.wire",
    "tvmconv.tuning.worker": "tvmconv.measuring.worker",
    "tvmconv.workloads.conv2d": "tvmconv.workloads.operators.conv2d",
}


class OldNames(MetaPathFinder, Loader):
    """Finds old names, and loads what they stand for."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of an old name, or of a module inside one; None for all others."""
        if name == TAKEN or (name.startswith(f"{TAKEN}.") and sys.modules.get(TAKEN) is not sys.modules.get(BUILT_IN)):
            return None
        return ModuleSpec(name, self) if new_name(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module under its new name."""
        module = importlib.import_module(str(new_name(spec.name)))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module, which was executed under its new name, its own spec back."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


class OldTopLevel(OldNames):
    """Finds the name that others may use."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of that name; None for all others."""
        return ModuleSpec(name, self) if name == TAKEN else None


def new_name(name: str) -> str | None:
    """Where a module of version 0.1 is now; None for a name that it did not have, or has kept."""
    old = name
    while old:
        if old in MOVED:
            return MOVED[old] + name.removeprefix(old)
        old = old.rpartition(".")[0]
    return None


def install() -> None:
    """Let old names be imported, once."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldNames())  # before the one that would find the same files again, under the old name
        sys.meta_path.append(OldTopLevel())
