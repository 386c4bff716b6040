"""Launch kernels thousands of times, on two streams at once and from a CUDA graph: the same bits each time, no hang.

    python scripts/soak.py --suite resnet50 --dtype f16 --layout nhwc --log FILE --launches 10000 --device cuda:0
    python scripts/soak.py --archive kernels.zip --device cuda:0     # built apart: needs no TVM

Before each launch its output is filled with NaN, and behind it compared on the GPU with that of the first launch, which
is verified. Exit status 1 if a launch left other bits. A kernel that hangs is what a time limit is for: timeout(1).
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from prebuild import entries

import tvmconv as tc
from tvmconv import devices
from tvmconv.cli.errors import Parser, UsageError, guarded
from tvmconv.cli.options import add_suite, chosen_layers, count, told_fallbacks
from tvmconv.compiler import nvrtc
from tvmconv.compiler.program import Launch, Program
from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.devices.cuda.function import Function
from tvmconv.devices.cuda.graphs import Graph, check, new_stream
from tvmconv.devices.cuda.kernel import Arrays, poison
from tvmconv.errors import Error
from tvmconv.verify import Problem

STREAMS = 2
OF_GRAPH = 50  # launches of one graph
THREADS = 256
DIFFERENCES = """
extern "C" __global__ void differences(const unsigned short* a, const unsigned short* b, long long count,
                                       unsigned long long* sum) {
  unsigned long long mine = 0;
  long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step) mine += a[i] != b[i];
  if (mine) atomicAdd(sum, mine);
}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Launch, compare and say."""
    return guarded("soak", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="soak", description="Launch kernels thousands of times: the same bits each time.")
    add_suite(parser, "resnet50")
    parser.add_argument("--log", type=Path, metavar="FILE", help="where the tuned kernels are from")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="instead: kernels that were built apart")
    parser.add_argument("--launches", type=count, default=10_000, metavar="N", help="of each (default: %(default)s)")
    parser.add_argument("--device", default="cuda:0", help="a CUDA device (default: %(default)s)")
    args = parser.parse_args(argv)
    if not (args.log or args.archive):
        raise UsageError("give a --log with tuned kernels, or an --archive of kernels")
    device = devices.find(args.device)
    if not isinstance(device, CudaDevice):
        raise UsageError(f"{device.text} is no CUDA device of this machine")
    kernels = other = 0
    for name, problem, program in _programs(args):
        started = time.monotonic()
        error, different = soak(device, program, problem, args.launches)
        kernels, other = kernels + 1, other + (different > 0)
        print(
            f"{name}: error {error:.1e}, {different} elements differ in {args.launches:,} launches on {STREAMS} "
            f"streams and as many from graphs, {time.monotonic() - started:.1f} s",
            flush=True,
        )
    print(f"{kernels} kernels, {other} of them with other bits at times")
    return 1 if other else 0


def _programs(args: Namespace) -> Iterator[tuple[str, Problem, Program]]:
    """Each kernel's name, its problem and its program."""
    if args.archive:
        for entry, _, program in entries(args.archive):
            yield f"{entry['workload']} {entry['schedule']}", Problem(tc.parse(entry["workload"])), program
        return
    with told_fallbacks():
        for layer in chosen_layers(args).layers.values():
            kernel = tc.build(layer.workload, device=args.device, log=args.log)
            yield f"{layer.name} {kernel.schedule.name}", Problem(layer.workload), kernel.program


def soak(device: CudaDevice, program: Program, problem: Problem, launches: int) -> tuple[float, int]:
    """Launch a program again and again.

    Args:
        device: where.
        program: the kernel.
        problem: its inputs, and their reference.
        launches: on the streams, half of them on each, and as many from graphs.

    Returns:
        The first launch's relative error, and how many elements of 16 bits differed from it afterwards, in all.

    Raises:
        DeviceError: a launch fails.
        Error: the first launch is wrong.
    """
    from cuda.bindings import runtime

    loaded = device.load(program)
    first = loaded.run(problem.inputs)
    checked = problem.check(first)
    if not checked.ok:
        raise Error(f"{problem.workload}: relative error {checked.error:.1e} in the first launch")
    nbytes = program.output.nbytes
    with loaded.border(), ExitStack() as stack:
        arrays = stack.enter_context(Arrays())
        inputs = [arrays.upload(np.ascontiguousarray(array)) for array in problem.inputs]
        expected, sum_ = arrays.upload(first), arrays.upload(np.zeros(1, np.uint64))
        compare = Function(nvrtc.compile_cubin(DIFFERENCES, str(device.arch)).image, "differences")
        shape = Launch(grid=(4 * (device.multiprocessors or 1), 1, 1), block=(THREADS, 1, 1))
        streams = [stack.enter_context(new_stream(device.index)) for _ in range(STREAMS)]
        turns: list[Any] = []
        for stream in streams:
            output = arrays.allocate(nbytes)
            bound = stack.enter_context(loaded.bind([*inputs, output], stream))
            compared = compare.prepare(shape, (output, expected, nbytes // 2, sum_), stream)

            def turn(i: int, output: int = output, stream: int = stream, bound: Any = bound, compared: Any = compared):
                poison(output, nbytes, stream)
                bound.launch()
                compared()

            turns.append(turn)
        for i in range(launches):
            turns[i % STREAMS](i)
        check(runtime.cudaDeviceSynchronize())
        graphs = [Graph(stream, OF_GRAPH, turn) for stream, turn in zip(streams, turns, strict=True)]
        for i in range(-(-launches // OF_GRAPH)):
            graphs[i % STREAMS].replay()
        check(runtime.cudaDeviceSynchronize())
        found = np.zeros(1, np.uint64)
        arrays.download(sum_, found)
    return checked.error, int(found[0])


if __name__ == "__main__":
    sys.exit(main())
