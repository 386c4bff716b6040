"""The compilation pipeline `tvmconv` for `tvm.compile`: `optimize`, and then TVM's default pipeline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.ir import IRModule

from tvmconv.relax.guarded_rules import make_default_pipeline
from tvmconv.relax.layouts import Layout, validate_layout
from tvmconv.relax.optimize import capture_launches, optimize
from tvmconv.search.options import TuneOptions

PIPELINE_NAME = "tvmconv"


@relax.register_pipeline(PIPELINE_NAME)
def make_pipeline(
    *,
    log: str | os.PathLike[str] | None = None,
    seconds: float | None = None,
    layout: Layout = "auto",
    batch_sizes: Sequence[int] = (),
    tf32: bool = False,
    cuda_graph: bool = True,
) -> Any:
    """Return the pipeline that runs `optimize` and then TVM's default pipeline, for the target of the context.

    Args:
        log: Path of a tuning log, as in `optimize`.
        seconds: Time limit of a search, as in `optimize`.
        layout: Layout inside the model, as in `optimize`.
        batch_sizes: Batch sizes of a model with a symbolic batch, as in `optimize`.
        tf32: Whether kernels may round operands to TF32, as in `optimize`.
        cuda_graph: Whether launches are captured in a CUDA graph, as in `OptimizedModule.compile`.

    Raises:
        TuningError: `layout` has another value, or `seconds` is not a positive number.

    Examples:
        >>> import tvm, tvmconv.relax
        >>> tvm.compile(mod, "llvm", relax_pipeline="tvmconv")  # doctest: +SKIP
        >>> pipeline = tvmconv.relax.make_pipeline(log="my.jsonl")
    """
    validate_layout(layout)
    TuneOptions(seconds=seconds)

    @tvm.transform.module_pass(opt_level=0, name="tvmconv.pipeline")
    def run(mod: IRModule, _context: Any) -> IRModule:
        target = tvm.target.Target.current(allow_none=False)
        optimized = optimize(mod, target, log=log, seconds=seconds, layout=layout, batch_sizes=batch_sizes, tf32=tf32)
        with capture_launches(target, is_enabled=cuda_graph):
            return make_default_pipeline(target)(optimized)

    return run
