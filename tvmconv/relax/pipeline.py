"""The pipeline `tvmconv` of Relax, and a rule for dlight."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax
from tvm.ir import IRModule
from tvm.s_tir import Schedule
from tvm.s_tir import dlight as dl

from tvmconv import devices
from tvmconv.errors import Error
from tvmconv.logs.candidates import iterate_candidates
from tvmconv.logs.packaged import packaged_logs
from tvmconv.logs.ranking import RecordIndex, list_log_files
from tvmconv.relax.kernels import WORKLOAD_ATTRIBUTE, CompileTarget, KernelFinder, resolve_target
from tvmconv.relax.layouts import Layout
from tvmconv.relax.optimize import optimize
from tvmconv.workloads import parse

if TYPE_CHECKING:
    from tvm.target import Target

PIPELINE_NAME = "tvmconv"


@relax.register_pipeline(PIPELINE_NAME)
def make_pipeline(
    *, log: str | os.PathLike[str] | None = None, seconds: float | None = None, layout: Layout = "auto"
) -> Any:
    """Return the pipeline that runs `optimize` and then TVM's default pipeline, for the target of the context.

    Args:
        log: Path of a tuning log, as in `optimize`.
        seconds: Time limit of a search, as in `optimize`.
        layout: Layout inside the model, as in `optimize`.

    Examples:
        >>> import tvm, tvmconv.relax
        >>> tvm.compile(mod, "llvm", relax_pipeline="tvmconv")  # doctest: +SKIP
        >>> pipeline = tvmconv.relax.make_pipeline(log="my.jsonl")
    """

    @tvm.transform.module_pass(opt_level=0, name="tvmconv.pipeline")
    def run(mod: IRModule, _context: Any) -> IRModule:
        target = tvm.target.Target.current(allow_none=False)
        optimized = optimize(mod, target, log=log, seconds=seconds, layout=layout)
        return relax.get_default_pipeline(target)(optimized)

    return run
