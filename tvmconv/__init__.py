"""Schedule exploration of convolutions on Apache TVM.

    >>> import tvmconv as tc
    >>> w = tc.parse("conv2d:1x64x64x64,64x64x3x3,s1,p1")
    >>> kernel = tc.build(w, "vthread", device="opencl:0")
    >>> kernel.verify().ok
    True

The exported names are loaded on first use, so that importing the package does not import TVM.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tvmconv.version import VERSION as __version__  # noqa: N811

if TYPE_CHECKING:
    from tvmconv.errors import (
        AnalysisError,
        CompileError,
        DeviceError,
        Error,
        FallbackWarning,
        HostError,
        KnobError,
        ModelError,
        RecordError,
        RecordingError,
        ScheduleError,
        TunerError,
        TuningError,
        WorkloadError,
    )
    from tvmconv.experiments.results import Result
    from tvmconv.experiments.run import run
    from tvmconv.kernel import Kernel
    from tvmconv.logs.build import build
    from tvmconv.logs.log import Log
    from tvmconv.logs.record import ErrorKind, Record
    from tvmconv.registry import Schedule, schedule, schedules
    from tvmconv.reports.explained import Explanation, explain
    from tvmconv.search.progress import SearchProgress, Status
    from tvmconv.search.result import Tuned, TuneResult
    from tvmconv.search.tune import tune
    from tvmconv.verification import Problem, Verification
    from tvmconv.workloads import Conv1d, Conv2d, Conv3d, Filter1d, Filter2d, Layer, parse, suite

_EXPORTS = {
    "tvmconv.errors": (
        "AnalysisError",
        "CompileError",
        "DeviceError",
        "Error",
        "FallbackWarning",
        "HostError",
        "KnobError",
        "ModelError",
        "RecordError",
        "RecordingError",
        "ScheduleError",
        "TunerError",
        "TuningError",
        "WorkloadError",
    ),
    "tvmconv.experiments.results": ("Result",),
    "tvmconv.experiments.run": ("run",),
    "tvmconv.kernel": ("Kernel",),
    "tvmconv.registry": ("Schedule", "schedule", "schedules"),
    "tvmconv.logs.build": ("build",),
    "tvmconv.logs.log": ("Log",),
    "tvmconv.logs.record": ("ErrorKind", "Record"),
    "tvmconv.reports.explained": ("Explanation", "explain"),
    "tvmconv.search.result": ("TuneResult", "Tuned"),
    "tvmconv.search.progress": ("SearchProgress", "Status"),
    "tvmconv.search.tune": ("tune",),
    "tvmconv.verification": ("Problem", "Verification"),
    "tvmconv.workloads": ("Conv1d", "Conv2d", "Conv3d", "Filter1d", "Filter2d", "Layer", "parse", "suite"),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = list(_MODULE_OF)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name == "plot":  # a module
        return importlib.import_module("tvmconv.plot")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tvmconv' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
