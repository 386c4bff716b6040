"""Format `kernel.so`: library of machine code and host code, with an example of a call through TVM's runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv.errors import CompileError
from tvmconv.export.example_code import fill_example
from tvmconv.export.formats.base import ExportFormat
from tvmconv.export.linker import link_library

if TYPE_CHECKING:
    from tvmconv.kernel import Kernel

_EXAMPLE = """\
import numpy as np
from cuda.pathfinder import load_nvidia_dynamic_lib

load_nvidia_dynamic_lib("cudart")  # before TVM, which skips its CUDA runtime without this library
import tvm
{imports}
random = np.random.default_rng(0)
gpu = tvm.cuda(0)
{inputs}
{output} = tvm.runtime.empty({output_shape}, "{dtype}", gpu)

kernel = tvm.runtime.load_module("./kernel.so")["main"]
kernel({arguments})

{output} = {output}.numpy()
print({output}.shape, np.linalg.norm({output}.astype("float64")))
"""


def write_file(kernel: Kernel, path: Path) -> None:
    """Link the library; raises `CompileError` if it cannot be linked or TVM's runtime could not call it."""
    if kernel.device.kind != "cuda":
        raise CompileError("TVM's wheel has no OpenCL runtime")
    link_library(kernel.lowered_module, path)


def format_example(description: Mapping[str, Any]) -> list[str]:
    """Return the example of a call through TVM's runtime."""
    versions = description["versions"]
    install = (
        f'`pip install "apache-tvm=={versions["apache-tvm"]}" "apache-tvm-ffi>=0.1.14.post0,<0.1.15" cuda-pathfinder '
        '"cuda-toolkit[cudart]>=13,<14"`'
    )
    return [
        f"With TVM ({install}):",
        fill_example(_EXAMPLE, description, "tvm.runtime.tensor({}, gpu)"),
        "`tvm.runtime.from_dlpack` passes a tensor of another library without a copy.",
    ]


FORMAT = ExportFormat(
    "kernel.so",
    "the machine code, and host code that checks arguments and launches, for TVM's runtime",
    ("cuda", "opencl"),
    write_file,
    format_example,
    order=2,
    optional=True,
)
