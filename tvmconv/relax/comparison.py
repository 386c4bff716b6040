"""The comparison of kernels with TVM's own code: how long TVM's default pipeline takes for what a kernel replaces.

A separate process compiles TVM's code while a search runs, and times it afterwards. A fault of that code, or a
compilation that takes too long, then costs the comparison alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, IRModule
from tvm.target import Target

from tvmconv.compiler.cuda_environment import make_cuda_environment
from tvmconv.compiler.tensor_intrinsics import import_tensor_intrinsics
from tvmconv.deadline import Deadline
from tvmconv.errors import describe_error
from tvmconv.relax.sites import RelaxConvolution
from tvmconv.workloads.dtypes import get_numpy_dtype

TIMING_SECONDS, WARM_UP_SECONDS = 0.01, 0.01
MAX_ERROR_CHARACTERS = 300
PART_SIZE = 8  # functions that are compiled at once
_MODULE_FILE = "module.json"


def extract_functions(mod: IRModule, sites_by_function: Mapping[str, Iterable[RelaxConvolution]]) -> IRModule:
    """Return a module with one function for each distinct workload, which computes what a kernel would replace.

    Args:
        mod: Module in which the convolutions were found.
        sites_by_function: The convolutions by the name of their function.

    Returns:
        The module. A function has the name `convN`, the text of the workload as the attribute `workload`, and the
        input, the weight and the residual as parameters.
    """
    builder, texts = relax.BlockBuilder(), set()
    for name, sites in sites_by_function.items():
        bindings = [binding for block in mod[name].body.blocks for binding in block.bindings]
        for site in sites:
            if site.workload.text not in texts:
                texts.add(site.workload.text)
                _emit_function(builder, f"conv{len(texts)}", site, bindings)
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
    """A process that compiles functions of Relax with TVM's default pipeline, and times them when it is asked to."""

    def __init__(self, process: subprocess.Popen[str], num_functions: int, errors: Path) -> None:
        self._process, self._num_functions, self._errors = process, num_functions, errors

    def time_functions(self, deadline: Deadline) -> TvmTimes:
        """Return the times of as many functions as are compiled and timed until a deadline."""
        times: dict[str, float] = {}
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended, and so has its output
            stdin.write("time\n")
            stdin.flush()
        for _ in range(self._num_functions):
            if not select.select([stdout], [], [], deadline.remaining_seconds)[0]:
                return TvmTimes(times, self._describe(len(times), "the time limit ended the comparison"))
            if not (line := stdout.readline()):
                break
            text, seconds = json.loads(line)
            if seconds is not None:
                times[text] = seconds
        is_complete = len(times) == self._num_functions
        return TvmTimes(times, "" if is_complete else self._describe(len(times), self._find_error()))

    def _describe(self, num_timed: int, reason: str) -> str:
        return f"TVM's own code was timed for {num_timed} of {self._num_functions} distinct convolutions: {reason}."

    def _find_error(self) -> str:
        """Return the last line that the process wrote about its error."""
        lines = self._errors.read_text(encoding="utf-8", errors="replace").splitlines()
        line = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return line.removesuffix(".")[:MAX_ERROR_CHARACTERS] or "its process ended"


@contextmanager
def start_timer(mod: IRModule, target: Target, device_index: int) -> Iterator[TvmTimer]:
    """Start a process for the functions of a module, and end it with the context."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / _MODULE_FILE
        path.write_text(str(tvm.ir.save_json([mod, target])), encoding="utf-8")
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main(sys.argv[1:])"
        errors = Path(folder) / "errors"
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(path), str(device_index)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **make_cuda_environment()},
                bufsize=1,
                text=True,
            )
        try:
            yield TvmTimer(process, len(mod.functions_items()), errors)
        finally:
            process.kill()
            process.communicate()


def main(argv: Sequence[str]) -> None:
    """Compile the functions in a file for a device, wait for a line, and print the seconds of each function; they are
    null for a function that does not compile.

    Functions are compiled a few at a time, so that a line that comes early has the times of some of them.
    """
    path, index = Path(argv[0]), int(argv[1])
    mod, target = tvm.ir.load_json(path.read_text(encoding="utf-8"))
    if any("float16" in str(param.ty.dtype) for function in mod.functions.values() for param in function.params):
        import_tensor_intrinsics()
    compiled: list[tuple[IRModule, Any]] = []
    is_timing = False
    for part, executable in _compile_parts(mod, target):
        compiled.append((part, executable))
        if not is_timing and select.select([sys.stdin], [], [], 0)[0]:
            if not sys.stdin.readline():  # the parent has ended
                return
            is_timing = True
        if is_timing:
            _print_times(compiled, index)
    if not is_timing and sys.stdin.readline():
        _print_times(compiled, index)


def _compile_parts(mod: IRModule, target: Target) -> Iterator[tuple[IRModule, Any]]:
    """Yield parts of a module and their executables. A part that does not compile is divided until single functions
    remain, whose executable is None.
    """
    functions = list(mod.functions_items())
    waiting = [functions[index : index + PART_SIZE] for index in range(0, len(functions), PART_SIZE)]
    while waiting:
        part = waiting.pop(0)
        part_mod = IRModule(dict(part))
        try:
            yield part_mod, tvm.compile(part_mod, target)
        except Exception as error:  # TVM and NVRTC raise many types
            if len(part) > 1:
                middle = len(part) // 2
                waiting[:0] = [part[:middle], part[middle:]]
            else:
                print(describe_error(error), file=sys.stderr, flush=True)
                yield part_mod, None


def _print_times(compiled: list[tuple[IRModule, Any]], index: int) -> None:
    """Print the seconds of the functions of compiled parts, which are removed from the list."""
    while compiled:
        part, executable = compiled.pop(0)
        machine = None if executable is None else relax.VirtualMachine(executable, tvm.cuda(index))
        for variable, function in part.functions_items():
            seconds = None
            if machine is not None:
                arguments = [_make_argument(param.ty, index) for param in function.params]
                seconds = _time_function(machine[str(variable.name_hint)], arguments, index)
            print(json.dumps([str(function.attrs["workload"]), seconds]), flush=True)


def _make_argument(tensor_type: relax.TensorType, index: int) -> Any:
    shape = [int(size) for size in tensor_type.shape]
    elements = np.random.default_rng(0).standard_normal(shape).astype(get_numpy_dtype(str(tensor_type.dtype)))
    return tvm.runtime.tensor(elements, tvm.cuda(index))


def _time_function(function: Any, arguments: Sequence[Any], index: int) -> float:
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
