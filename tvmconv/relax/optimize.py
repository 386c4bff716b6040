"""The optimization of a Relax module: convolutions are found, kernels chosen, and calls of them inserted."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax
from tvm.ir import IRModule

from tvmconv.compiler.cuda_library import PrecompiledExecutable
from tvmconv.deadline import Deadline
from tvmconv.errors import Error, ModelError, translate_to_model_error
from tvmconv.measure.results import PhaseTimer
from tvmconv.measure.workers.pool import keep_workers_alive
from tvmconv.relax.comparison import TvmTimer, TvmTimes, extract_functions, start_timer, uses_float16
from tvmconv.relax.compile_target import CompileTarget, resolve_target
from tvmconv.relax.guarded_rules import make_default_pipeline
from tvmconv.relax.importers import simplify_imported
from tvmconv.relax.kernels import FoundKernel, KernelFinder
from tvmconv.relax.layouts import Layout, plan_layouts, validate_layout
from tvmconv.relax.linear import convert_linear_layers
from tvmconv.relax.narrowing import narrow_activations
from tvmconv.relax.norms import simplify_norms, widen_norms
from tvmconv.relax.report import TVM_NAME, ConvolutionReport, ModuleReport
from tvmconv.relax.rewriting import Replacement, replace_convolutions
from tvmconv.relax.sites import RelaxConvolution, find_sites
from tvmconv.relax.symbolic import ANY_BATCH, specialize_batch
from tvmconv.search.options import TuneOptions
from tvmconv.search.task_scheduler import MIN_SEARCH_SECONDS
from tvmconv.workloads import Workload
from tvmconv.workloads.conv_operator import ConvOperator

if TYPE_CHECKING:
    from tvm.target import Target

COMPARISON_FRACTION = 0.1  # of the time of a search, for the comparison with TVM's code
CUDA_GRAPH_OPTION = "relax.backend.use_cuda_graph"
CHANNELS_FIRST_LAYOUTS = {"relax.nn.conv2d": ["NCHW", "OIHW"]}


def capture_launches(target: Target, *, is_enabled: bool) -> tvm.transform.PassContext:
    """Return the current context of passes, in which `RewriteCUDAGraph` captures the launches of a target for CUDA if
    that is enabled. The pass would do so for other targets, too.
    """
    current = tvm.transform.PassContext.current()
    return tvm.transform.PassContext(
        opt_level=current.opt_level,
        required_pass=list(current.required_pass),
        disabled_pass=list(current.disabled_pass),
        instruments=list(current.instruments),
        config={**current.config, CUDA_GRAPH_OPTION: is_enabled and target.kind.name == "cuda"},
    )


class OptimizedModule:
    """A module whose convolutions call kernels of tvmconv, and the report on it.

    Attributes:
        mod: The module, which any pipeline of TVM for the target compiles.
        report: What computes each convolution, and why.
        target: The target of TVM.

    Examples:
        >>> import tvmconv.relax
        >>> optimized = tvmconv.relax.optimize_with_report(mod, "sm_90")  # doctest: +SKIP
        >>> print(optimized.report)  # doctest: +SKIP
        >>> optimized.compile().export_library("model.so")  # doctest: +SKIP
    """

    def __init__(self, mod: IRModule, report: ModuleReport, target: Target) -> None:
        self.mod, self.report, self.target = mod, report, target

    def __repr__(self) -> str:
        return f"<OptimizedModule {self.report.num_replaced} of {len(self.report.lines)} convolutions by tvmconv>"

    def _repr_html_(self) -> str:
        return self.report._repr_html_()

    def compile(self, *, cuda_graph: bool = True) -> Any:
        """Compile the module by TVM's default pipeline and return TVM's executable. For CUDA, a rule of dlight that
        raises an error for a function leaves it to the next rule.

        Libraries that the executable exports contain machine code, even where TVM has no CUDA runtime.

        Args:
            cuda_graph: Whether the virtual machine captures the launches of a CUDA model in a CUDA graph at the first
                call and replays it later, except for the launches that read inputs or write outputs.

        Examples:
            >>> executable = optimized.compile()  # doctest: +SKIP
            >>> executable.export_library("model.so")  # doctest: +SKIP
        """
        with capture_launches(self.target, is_enabled=cuda_graph):
            executable = tvm.compile(self.mod, self.target, relax_pipeline=make_default_pipeline(self.target))
        if self.target.kind.name != "cuda":
            return executable
        return PrecompiledExecutable(executable.mod, str(self.target.attrs["arch"]))


def optimize(
    mod: IRModule,
    target: str | Mapping[str, Any] | Target,
    *,
    log: str | os.PathLike[str] | None = None,
    seconds: float | None = None,
    layout: Layout = "auto",
    batch_sizes: Sequence[int] = (),
    tf32: bool = False,
) -> IRModule:
    """Return a Relax module whose convolutions call tuned kernels of tvmconv, to be compiled by any pipeline of TVM.

    A kernel computes a convolution and the bias, batch normalization, activations and residual that follow it. TVM's
    own code computes what no kernel does.

    Args:
        mod: Module of `relax.frontend.torch.from_exported_program` or `relax.frontend.onnx.from_onnx`, with its weights
            as constants. It is not modified.
        target: Target of TVM of the kind cuda, opencl or llvm, its attributes, or a text such as "sm_90", "cuda:0",
            "llvm" or "nvidia/nvidia-h100". For llvm, convolutions and their epilogues become functions that TVM
            compiles.
        log: Path of a tuning log, from which kernels are taken and to which a search appends. Kernels of other layers
            come from the packaged logs or from predictions.
        seconds: Time limit of a search on the GPU of the target for layers that the log does not cover, and of the
            comparison with TVM's own code, which computes the layers for which it is faster; None for neither. The
            limit counts from the call. The chosen kernels that no search has built are built afterwards.
        layout: "auto" runs 16-bit and TF32 convolutions channels last inside on CUDA, "nhwc" all, "nchw" none.
        batch_sizes: Batch sizes of a model with a symbolic batch that have kernels of their own; TVM's code computes
            other sizes. Each size adds a copy of the weights to the library.
        tf32: Whether CUDA kernels may round the operands of float32 convolutions to TF32, whose relative precision is
            that of float16. PyTorch does so by default.

    Returns:
        The module. Its function `main` takes and returns tensors of the same shapes as before.

    Raises:
        ModelError: `mod` is not a module of TVM, TVM's passes do not take it, or it has no symbolic batch for
            `batch_sizes`.
        DeviceError: There is no such target, or no GPU for a search.
        TuningError: `layout` has another value, or `seconds` or a batch size is not a positive number.
        Error: The log cannot be read or written.

    Examples:
        >>> import tvmconv.relax
        >>> mod = tvmconv.relax.optimize(mod, "sm_90", log="resnet18.jsonl")  # doctest: +SKIP
    """
    return optimize_with_report(
        mod, target, log=log, seconds=seconds, layout=layout, batch_sizes=batch_sizes, tf32=tf32
    ).mod


def optimize_with_report(
    mod: IRModule,
    target: str | Mapping[str, Any] | Target,
    *,
    log: str | os.PathLike[str] | None = None,
    seconds: float | None = None,
    layout: Layout = "auto",
    batch_sizes: Sequence[int] = (),
    tf32: bool = False,
) -> OptimizedModule:
    """Optimize a module as `optimize` does, and return it together with a report on each convolution.

    The arguments and errors are those of `optimize`.

    Returns:
        The module, its report and its target.

    Examples:
        >>> print(tvmconv.relax.optimize_with_report(mod, "sm_90").report)  # doctest: +SKIP
    """
    TuneOptions(seconds=seconds)  # raises TuningError for an invalid limit
    validate_layout(layout)
    compile_target = resolve_target(target)
    finder = KernelFinder(compile_target, log, creates_log=seconds is not None)
    return _replace_in_module(mod, compile_target, finder, seconds, layout, batch_sizes, tf32=tf32)


def declare_convolutions(
    mod: IRModule, target: str | Mapping[str, Any] | Target, *, layout: Layout = "auto", batch_sizes: Sequence[int] = ()
) -> IRModule:
    """Return a module whose convolutions call functions of TIR without a schedule, marked with their workloads.

    It is for pipelines of one's own, in which `dlight_rule` or a database of `export_database` schedules the functions.
    The arguments and errors are those of `optimize`.

    Examples:
        >>> import tvmconv.relax
        >>> from tvm.s_tir import dlight
        >>> mod = tvmconv.relax.declare_convolutions(mod, "sm_90")  # doctest: +SKIP
        >>> mod = relax.get_pipeline("zero")(mod)  # doctest: +SKIP
        >>> rules = tvmconv.relax.dlight_rule(), dlight.gpu.Fallback()
        >>> mod = dlight.ApplyDefaultSchedule(*rules)(mod)  # doctest: +SKIP
    """
    compile_target = resolve_target(target)
    finder = KernelFinder(CompileTarget(compile_target.target, None), None)
    return _replace_in_module(mod, compile_target, finder, None, validate_layout(layout), batch_sizes).mod


def _replace_in_module(
    mod: IRModule,
    target: CompileTarget,
    finder: KernelFinder,
    seconds: float | None,
    layout: Layout,
    batch_sizes: Sequence[int],
    *,
    tf32: bool = False,
) -> OptimizedModule:
    """Replace the convolutions of a module by the kernels of a finder, after a search if it has a time limit."""
    if not isinstance(mod, IRModule):
        raise ModelError(f"expected a tvm.IRModule with Relax functions, not {type(mod).__name__}")
    timer, deadline = PhaseTimer(), Deadline.after(seconds)
    device = None if seconds is None else target.device
    with contextlib.ExitStack() as stack:
        stack.enter_context(keep_workers_alive(starts_fork_server=seconds is not None))  # they also build the results
        tvm_timer = None
        if device is not None and device.kind == "cuda":  # TVM's wheel has no OpenCL runtime
            tvm_timer = stack.enter_context(start_timer(device.index, has_float16=uses_float16(mod)))
        with timer.phase("prepare"):
            if batch_sizes:
                mod = specialize_batch(mod, list(_list_functions(mod)), batch_sizes)
            prepared = prepare_module(mod, has_kernels=target.device is not None)
            planned, lines = plan_functions(prepared, target, layout, tf32=tf32)
            lines = [explain_other_batches(line, batch_sizes) for line in lines]
        times = TvmTimes()
        if seconds is not None:
            times = _search(prepared, planned, target, finder, deadline, timer, tvm_timer)
        with timer.phase("build"):
            finder.build(workload for sites in planned.values() for _, workload in sites)
    replacements: dict[str, list[Replacement]] = {}
    for name, sites in planned.items():
        choices = [choose_kernel(finder, name, site, workload, times.seconds) for site, workload in sites]
        replacements[name] = [replacement for replacement, _ in choices if replacement]
        lines += [line for _, line in choices]
    with timer.phase("replace"):
        new_mod = replace_convolutions(prepared, replacements, target.device)
    phase_seconds = {name: milliseconds / 1e3 for name, milliseconds in timer.milliseconds.items()}
    return OptimizedModule(new_mod, ModuleReport(tuple(lines), times.note, phase_seconds), target.target)


def prepare_module(mod: IRModule, *, has_kernels: bool) -> IRModule:
    """Return a module whose 2-D convolutions are channels first, and whose constants are computed.

    If there are kernels, linear layers become convolutions.
    """
    passes = [
        relax.transform.CanonicalizeBindings(),
        simplify_imported,
        narrow_activations,
        simplify_norms,
        widen_norms,
    ]
    passes += [relax.transform.FoldConstant()]
    if any("NHWC" in str(layout) for layout in _list_data_layouts(mod)):
        passes = [relax.transform.ConvertLayout(CHANNELS_FIRST_LAYOUTS), *passes]
    if has_kernels:
        passes += [convert_linear_layers]
    with translate_to_model_error("TVM's passes do not take the module"):
        return tvm.ir.transform.Sequential([*passes, relax.transform.DeadCodeElimination()])(mod)


def _list_data_layouts(mod: IRModule) -> set[str]:
    layouts: set[str] = set()

    def visit(expr: Any) -> None:
        if isinstance(expr, tvm.ir.Call) and getattr(expr.op, "name", "") in CHANNELS_FIRST_LAYOUTS:
            layouts.add(str(expr.attrs.data_layout))

    for function in _list_functions(mod).values():
        relax.analysis.post_order_visit(function, visit)
    return layouts


def _list_functions(mod: IRModule) -> dict[str, relax.Function]:
    """Return the Relax functions of a module by name, without those that another code generator compiles."""
    return {
        str(variable.name_hint): function
        for variable, function in mod.functions_items()
        if isinstance(function, relax.Function) and not _is_foreign(function)
    }


def _is_foreign(function: relax.Function) -> bool:
    return function.attrs is not None and any(name in function.attrs for name in ("Codegen", "Composite"))


Planned = dict[str, list[tuple[RelaxConvolution, ConvOperator]]]


def plan_functions(
    mod: IRModule, target: CompileTarget, layout: Layout, *, tf32: bool = False
) -> tuple[Planned, list[ConvolutionReport]]:
    """Return the convolutions of each function with their layouts, and the reports on those that are no workload."""
    planned: Planned = {}
    lines: list[ConvolutionReport] = []
    for name, function in _list_functions(mod).items():
        sites, reasons = find_sites(function)
        lines += [ConvolutionReport(name, label, "", TVM_NAME, reason=reason) for label, reason in reasons.items()]
        planned[name] = list(zip(sites, plan_layouts(sites, target.device, layout, tf32=tf32), strict=True))
    return planned, lines


def explain_other_batches(line: ConvolutionReport, batch_sizes: Sequence[int]) -> ConvolutionReport:
    """Return the report on a convolution for batch sizes without kernels with this reason, and any other as it is."""
    if not batch_sizes or not line.function.endswith(ANY_BATCH):
        return line
    return replace(line, reason=f"the batch size is none of {', '.join(map(str, batch_sizes))}")


def _search(
    mod: IRModule,
    planned: Planned,
    target: CompileTarget,
    finder: KernelFinder,
    deadline: Deadline,
    timer: PhaseTimer,
    tvm_timer: TvmTimer | None,
) -> TvmTimes:
    """Search for kernels until a deadline, and return the times of TVM's own code, as many as fit before it."""
    finder.check_device()
    workloads: Counter[Workload] = Counter(workload for sites in planned.values() for _, workload in sites)
    search_seconds = max(deadline.remaining_seconds, MIN_SEARCH_SECONDS)
    if not workloads or tvm_timer is None:
        with timer.phase("search"):
            finder.search(workloads, search_seconds)
        return TvmTimes()
    sites = {name: [site for site, _ in pairs] for name, pairs in planned.items()}
    tvm_timer.compile_functions(extract_functions(mod, sites), target.target)
    with timer.phase("search"):
        finder.search(workloads, search_seconds * (1 - COMPARISON_FRACTION))
    with timer.phase("compare"):  # a search that has exceeded its time takes nothing from the comparison
        compare_seconds = max(deadline.remaining_seconds, search_seconds * COMPARISON_FRACTION)
        return tvm_timer.time_functions(Deadline.after(compare_seconds))


def choose_kernel(
    finder: KernelFinder,
    function: str,
    site: RelaxConvolution,
    workload: ConvOperator,
    tvm_seconds: Mapping[str, float],
) -> tuple[Replacement | None, ConvolutionReport]:
    """Return the replacement of a convolution, None if TVM computes it, and the report on it.

    Args:
        finder: Source of the kernel.
        function: Name of the function in the module.
        site: Convolution, channels first.
        workload: Workload with the layout of the kernel.
        tvm_seconds: Seconds of TVM's own code by the text of a channels-first workload.
    """
    line = ConvolutionReport(
        function, site.name, workload.text, TVM_NAME, tvm_seconds=tvm_seconds.get(site.workload.text)
    )
    try:
        kernel: FoundKernel = finder.find(workload)
    except Error as error:
        return None, replace(line, reason=str(error))
    line = replace(line, config_source=kernel.config_source, seconds=kernel.seconds, config=kernel.config)
    if line.tvm_seconds and kernel.seconds and line.tvm_seconds < kernel.seconds:
        return None, replace(line, config_source="", reason=f"TVM's own code is faster than {kernel.schedule}")
    return Replacement(site, workload, kernel), replace(line, implementation=kernel.schedule)
