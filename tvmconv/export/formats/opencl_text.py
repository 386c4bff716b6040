"""Format `kernel.cl`: generated OpenCL source, with an example of a call through pyopencl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvmconv.export.formats.base import ExportFormat, fill_example, write_source

_EXAMPLE = """\
import numpy as np
import pyopencl as cl
{imports}
random = np.random.default_rng(0)
{inputs}
{output} = np.empty({output_shape}, "{dtype}")

context = cl.create_some_context(interactive=False)
queue = cl.CommandQueue(context)
with open("kernel.cl") as source:
    program = cl.Program(context, source.read()).build()

flags = cl.mem_flags.READ_WRITE
memory = {{
{memory}
}}
steps = [  # function, global and local work size, parameters in order
{steps}
]
for name, work_items, group, parameters in steps:
    function = cl.Kernel(program, name)
    function.set_args(*(memory[parameter] for parameter in parameters))
    cl.enqueue_nd_range_kernel(queue, function, work_items, group)
cl.enqueue_copy(queue, {output}.view("uint8"), memory["{output}"])
print({output}.shape, np.linalg.norm({output}.astype("float64")))
"""
_ON_NEW_PROCESSORS = """\
On a CPU with PoCL, `error: unknown target CPU 'generic'` means that PoCL is older than the processor, as PoCL 3.0 of
`pyopencl[pocl]` may be. In this case install a newer PoCL (Debian: `pocl-opencl-icd`) and uninstall
`pocl-binary-distribution`."""
_COPY_BUFFER_FORMAT = 'cl.Buffer(context, flags | cl.mem_flags.COPY_HOST_PTR, hostbuf={}.view("uint8"))'


def format_example(description: Mapping[str, Any]) -> list[str]:
    """Return the example of a call through pyopencl."""
    memory = {
        **{argument["name"]: _COPY_BUFFER_FORMAT.format(argument["name"]) for argument in description["arguments"]},
        **{buffer["name"]: f"cl.Buffer(context, flags, {buffer['bytes']})" for buffer in description["workspace"]},
    }
    steps = [
        (
            kernel["function"],
            tuple(grid * block for grid, block in zip(kernel["grid"], kernel["block"], strict=True)),
            tuple(kernel["block"]),
            kernel["parameters"],
        )
        for kernel in description["kernels"]
    ]
    text = fill_example(_EXAMPLE, description, memory=memory, steps=steps)
    return ["With pyopencl (`pip install pyopencl`):", text, _ON_NEW_PROCESSORS]


FORMAT = ExportFormat("kernel.cl", "the device function, OpenCL C", ("opencl",), write_source, format_example, order=0)
