"""Tuned convolutions inside models that TVM Relax compiles. The import registers the pipeline `tvmconv`.

Examples:
    >>> import tvm, tvmconv.relax
    >>> mod = tvmconv.relax.optimize(mod, "sm_90", log="my.jsonl")  # doctest: +SKIP
    >>> executable = tvm.compile(mod, target, relax_pipeline="tvmconv")  # doctest: +SKIP
"""

from tvmconv.compiler.cuda_library import export_library
from tvmconv.relax.composition import dlight_rule, export_database
from tvmconv.relax.frontends import from_exported_program, from_onnx
from tvmconv.relax.optimize import OptimizedModule, declare_convolutions, optimize, optimize_with_report
from tvmconv.relax.pipeline import make_pipeline
from tvmconv.relax.precision import to_float16
from tvmconv.relax.report import ConvolutionReport, ModuleReport

__all__ = [
    "ConvolutionReport",
    "ModuleReport",
    "OptimizedModule",
    "declare_convolutions",
    "dlight_rule",
    "export_database",
    "export_library",
    "from_exported_program",
    "from_onnx",
    "make_pipeline",
    "optimize",
    "optimize_with_report",
    "to_float16",
]
