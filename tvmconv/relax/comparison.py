"""The comparison of kernels with TVM's own code: how long TVM's default pipeline takes for what a kernel replaces.

Separate processes compile TVM's code while a search runs, and time it afterwards. A fault of that code, or a
compilation that takes too long, then costs the comparison alone.

The processes start before the convolutions are known, because their imports take seconds. They compile one convolution
at a time, those with the most operations first, so that any time limit leaves the times of those that matter most. In
float16, they begin with the import of TVM's tensor intrinsics.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, IRModule
from tvm.target import Target

from tvmconv.compiler.cuda_environment import make_cuda_environment
from tvmconv.compiler.cuda_library import compile_source
from tvmconv.compiler.lowered_module import override_cuda_compiler
from tvmconv.compiler.tensor_intrinsics import import_tensor_intrinsics
from tvmconv.deadline import Deadline
from tvmconv.devices import sharing
from tvmconv.errors import DeviceError, describe_error
from tvmconv.measure.workers.process import set_parent_death_signal
from tvmconv.relax.sites import RelaxConvolution
from tvmconv.workloads.dtypes import get_numpy_dtype

TIMING_SECONDS, WARM_UP_SECONDS = 0.01, 0.01
MAX_ERROR_CHARACTERS = 300
MAX_COMPILERS, CORES_PER_COMPILER = 4, 4  # processes that compile; the builders of the search need the other cores
NUM_RANDOM_ELEMENTS = 1 << 16  # an argument repeats so many random numbers, because random numbers take time
ERRORS_FILE = "errors"
_MODULE_FILE, _LOCK_FILE = "module.json", "lock"


def extract_functions(mod: IRModule, sites_by_function: Mapping[str, Iterable[RelaxConvolution]]) -> IRModule:
    """Return a module with one function for each distinct workload, which computes what a kernel would replace.

    Args:
        mod: Module in which the convolutions were found.
        sites_by_function: The convolutions by the name of their function.

    Returns:
        The module. A function has the name `convN`, where N counts from 1 for the workload with the most operations
        in all of its convolutions, the text of the workload as the attribute `workload`, and the input, the weight and
        the residual as parameters.
    """
    builder, operations = relax.BlockBuilder(), Counter[str]()
    first_sites: dict[str, tuple[str, RelaxConvolution]] = {}
    for name, sites in sites_by_function.items():
        for site in sites:
            operations[site.workload.text] += site.workload.flops
            first_sites.setdefault(site.workload.text, (name, site))
    for rank, (text, _) in enumerate(operations.most_common(), 1):
        name, site = first_sites[text]
        bindings = [binding for block in mod[name].body.blocks for binding in block.bindings]
        _emit_function(builder, f"conv{rank}", site, bindings)
    return builder.get()


def _emit_function(
    builder: relax.BlockBuilder, name: str, site: RelaxConvolution, bindings: Sequence[relax.Binding]
) -> None:
    """Emit the operations between the operands of a convolution and the result of its epilogue as a function."""
    operands = [expr for expr in (site.x, site.weight, site.residual) if expr is not None]
    params = {expr: relax.Var(f"arg{index}", expr.ty) for index, expr in enumerate(operands)}
    replaced: dict[relax.Expr, relax.Expr] = dict(params)
    with builder.function(name, list(params.values()), attrs={"workload": site.workload.text}):
        with builder.dataflow():
            for binding in _select_bindings(site, bindings, params):
                replaced[binding.var] = builder.emit(_replace_operands(binding.value, replaced))
            output = builder.emit_output(replaced[site.result])
        builder.emit_func_output(output)


def uses_float16(mod: IRModule) -> bool:
    """Return whether any expression of a module's Relax functions is a tensor in float16."""
    types: set[str] = set()

    def visit(expr: Any) -> None:
        types.add(str(getattr(expr.ty, "dtype", "")) if isinstance(expr, relax.Expr) else "")

    for function in mod.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return "float16" in types


def _replace_operands(value: relax.Expr, replaced: Mapping[relax.Expr, relax.Expr]) -> relax.Expr:
    """Return a call, or an item of the results of a normalization, with other operands."""
    if isinstance(value, relax.TupleGetItem):
        return relax.TupleGetItem(replaced[value.tuple_value], value.index)
    return Call(value.op, [replaced.get(arg, arg) for arg in value.args], value.attrs, value.ty_args)


def _select_bindings(
    site: RelaxConvolution, bindings: Sequence[relax.Binding], operands: Mapping[relax.Expr, relax.Var]
) -> list[relax.Binding]:
    """Return the bindings on which the result depends, without those of the operands."""
    needed: set[relax.Expr] = {site.result}
    selected: list[relax.Binding] = []
    for binding in reversed(bindings):
        if binding.var in needed:
            selected.insert(0, binding)
            needed |= {var for var in relax.analysis.free_vars(binding.value) if var not in operands}
    return selected


@dataclass(frozen=True)
class TvmTimes:
    """The times of TVM's own code.

    Attributes:
        seconds: Seconds per call by the text of a channels-first workload.
        note: Why workloads are missing; "" if none are, or if there was no comparison.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


class TvmTimer:
    """Processes that compile functions of Relax with TVM's default pipeline, and time them when they are asked to."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]], results: int, folder: Path) -> None:
        self._processes, self._results, self._folder, self._num_functions = processes, results, folder, 0

    def compile_functions(self, mod: IRModule, target: Target) -> None:
        """Begin to compile the functions of a module for a target."""
        self._num_functions = len(mod.functions_items())
        path = self._folder / _MODULE_FILE
        path.write_text(str(tvm.ir.save_json([mod, target])), encoding="utf-8")
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # the process has ended, and so has its output
                stdin = _get_stdin(process)
                stdin.write(f"{path}\n")
                stdin.flush()

    def time_functions(self, deadline: Deadline) -> TvmTimes:
        """Return the times of as many functions as are compiled and timed until a deadline."""
        times: dict[str, float] = {}
        for process in self._processes:
            _get_stdin(process).close()
        reason, num_lines, buffer = "", 0, b""
        while num_lines < self._num_functions:
            if not select.select([self._results], [], [], deadline.remaining_seconds)[0]:
                reason = "the time limit ended the comparison"
                break
            if not (data := os.read(self._results, 1 << 16)):
                break
            *lines, buffer = (buffer + data).split(b"\n")
            num_lines += len(lines)
            times |= {text: seconds for text, seconds in map(json.loads, lines) if seconds is not None}
        if len(times) < self._num_functions:
            reason = f": {reason or self._find_error()}"
        counts = f"{len(times)} of {self._num_functions} distinct convolutions"
        return TvmTimes(times, f"TVM's own code was timed for {counts}{reason}.")

    def _find_error(self) -> str:
        """Return the last line that the processes wrote about an error."""
        lines = (self._folder / ERRORS_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
        line = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return line.removesuffix(".")[:MAX_ERROR_CHARACTERS] or "its process ended"


def _get_stdin(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdin is not None
    return process.stdin


def count_compilers(num_cores: int) -> int:
    """Return the number of processes that compile TVM's code beside a search."""
    return min(max(num_cores // CORES_PER_COMPILER, 1), MAX_COMPILERS)


@contextmanager
def start_timer(device_index: int, *, has_float16: bool) -> Iterator[TvmTimer]:
    """Start the processes of a timer for a device, and end them with the context.

    Args:
        device_index: Index of the CUDA device.
        has_float16: Whether there are convolutions in float16, for which TVM considers tensor cores.
    """
    number, has_intrinsics = count_compilers(len(os.sched_getaffinity(0))), int(has_float16)
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from tvmconv.tvm_import import import_tvm; import_tvm(); "
        f"from {__name__} import main; main(sys.argv[1:])"
    )
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        errors = stack.enter_context((Path(name) / ERRORS_FILE).open("a"))
        results, writes = os.pipe()
        stack.callback(os.close, results)
        with os.fdopen(writes, "w") as shared:
            processes = [
                subprocess.Popen(
                    [
                        *(sys.executable, "-c", code),
                        *map(str, (device_index, os.getpid(), rank, number, has_intrinsics)),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=shared,
                    stderr=errors,
                    env={sharing.LOCK_VARIABLE: str(Path(name) / _LOCK_FILE), **os.environ, **make_cuda_environment()},
                    text=True,
                )
                for rank in range(number)
            ]
        try:
            yield TvmTimer(processes, results, Path(name))
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def main(argv: Sequence[str]) -> None:
    """Wait for the path of a file with functions, compile some of them, wait for the end of the standard input, and
    write the seconds of each to the standard output; they are null for a function that does not compile.

    Functions are timed as soon as they are compiled after the standard input has ended. The arguments are the index of
    the device, the process that ends this one, the rank of this process among those that share the functions, their
    number, and 1 if TVM will need its tensor intrinsics.
    """
    index, parent_pid, rank, number, has_intrinsics = map(int, argv)
    set_parent_death_signal(parent_pid)
    results = os.dup(1)
    os.dup2(2, 1)  # for what TVM and its compilers print
    if has_intrinsics:
        import_tensor_intrinsics()
    if not (line := sys.stdin.readline()):  # the parent has no functions
        return
    path = Path(line.rstrip("\n"))
    mod, target = tvm.ir.load_json(path.read_text(encoding="utf-8"))
    device = tvm.cpu() if target.kind.name == "llvm" else tvm.device(target.kind.name, index)
    with contextlib.suppress(Exception):  # TVM raises many types; it says why when a function is timed
        tvm.runtime.tensor(np.zeros(1, np.float32), device)  # creates the context before time is counted
    reporter = _Reporter(device, results)
    with compile_faster(target):
        compile_and_time(rank_functions(mod)[rank::number], target, sys.stdin.fileno(), reporter)


def compile_faster(target: Target) -> contextlib.AbstractContextManager[None]:
    """Return a context in which CUDA sources of TVM are compiled without headers that take NVRTC a second."""
    if target.kind.name != "cuda":
        return contextlib.nullcontext()
    return override_cuda_compiler(functools.partial(compile_source, arch=str(target.attrs["arch"])))


Function = tuple[Any, relax.Function]  # a function of a module and its variable


def rank_functions(mod: IRModule) -> list[Function]:
    """Return the functions of `extract_functions` in the order of their operations."""
    return sorted(mod.functions_items(), key=lambda item: int(str(item[0].name_hint).removeprefix("conv")))


def compile_and_time(functions: Sequence[Function], target: Target, begins: int, reporter: _Reporter) -> None:
    """Compile functions one at a time, and report on each after the end of a pipe has come.

    Args:
        functions: The functions in the order in which they are compiled.
        target: Target of TVM.
        begins: File descriptor of the pipe.
        reporter: What times the functions.
    """
    compiled: list[tuple[Function, Any]] = []
    for variable, function in functions:
        try:
            executable = tvm.compile(IRModule({variable: function}), target)
        except Exception as error:  # TVM and NVRTC raise many types
            print(describe_error(error), file=sys.stderr, flush=True)
            executable = None
        compiled.append(((variable, function), executable))
        if select.select([begins], [], [], 0)[0]:
            reporter.report_times(compiled)
    os.read(begins, 1)
    reporter.report_times(compiled)


@dataclass(frozen=True)
class _Reporter:
    """Times functions on a device, one process at a time.

    Attributes:
        device: Device of TVM.
        results: File descriptor that gets the seconds.
    """

    device: Any
    results: int

    def report_times(self, compiled: list[tuple[Function, Any]]) -> None:
        """Write the seconds of compiled functions, which are removed from the list."""
        while compiled:
            (variable, function), executable = compiled.pop(0)
            seconds = None
            if executable is not None:
                with sharing.hold_gpu():
                    try:
                        seconds = _time_executable(executable, variable, function, self.device)
                    except Exception as error:  # of TVM's code or of the device
                        print(describe_error(error), file=sys.stderr, flush=True)
            os.write(self.results, f"{json.dumps([str(function.attrs['workload']), seconds])}\n".encode())


def _time_executable(executable: Any, variable: Any, function: relax.Function, device: Any) -> float:
    """Return the median seconds of a call of a compiled function."""
    machine = relax.VirtualMachine(executable, device)
    arguments = [_make_argument(param.ty, device) for param in function.params]
    name = str(variable.name_hint)
    if device.dlpack_device_type() == tvm.cuda().dlpack_device_type():
        with contextlib.suppress(RuntimeError, DeviceError):  # TVM's code does what a capture does not allow
            return _time_graph(machine[name], arguments, device.index)
    return float(machine.time_evaluator(name, device)(*arguments).median)


def _make_argument(tensor_type: relax.TensorType, device: Any) -> Any:
    shape = [int(size) for size in tensor_type.shape]
    elements = np.random.default_rng(0).standard_normal(NUM_RANDOM_ELEMENTS, dtype=np.float32)
    return tvm.runtime.tensor(np.resize(elements.astype(get_numpy_dtype(str(tensor_type.dtype))), shape), device)


def _time_graph(function: Any, arguments: Sequence[Any], index: int) -> float:
    """Return the median seconds of a call in a CUDA graph, which excludes the host's time."""
    import tvm_ffi

    from tvmconv.devices.cuda.graphs import create_stream, make_capture, time_replays

    with create_stream(index) as stream, tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", index), stream):
        function(*arguments)  # loads the kernel, and allocates the memory that later calls use
        capture = make_capture(stream, lambda _: function(*arguments) and None)
        timing = time_replays(
            capture, stream, launch_multiple=1, seconds=TIMING_SECONDS, warm_up_seconds=WARM_UP_SECONDS
        )
    return float(np.median(timing.seconds))
