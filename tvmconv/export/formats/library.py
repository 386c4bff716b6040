"""Format `kernel.so`: library of machine code and host code, with an example of a call through TVM's runtime."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv.errors import CompileError
from tvmconv.export.formats.base import ExportFormat, fill_example

if TYPE_CHECKING:
    from tvmconv.compiler.lowered_module import LoweredModule
    from tvmconv.kernel import Kernel

_ERROR_HEADING = "Compilation error:"  # line before the compiler's output in TVM's errors
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
        fill_example(_EXAMPLE, description, input_format="tvm.runtime.tensor({}, gpu)"),
        "`tvm.runtime.from_dlpack` passes a tensor of another library without a copy.",
    ]


def link_library(lowered: LoweredModule, path: Path) -> None:
    """Write a shared library whose `main` takes the PrimFunc's arguments as DLPack tensors; this needs no GPU.

    The library contains the cubin and host code for the type of this machine's processor. `tvm.runtime.load_module`
    loads it if TVM's CUDA runtime is available.
    """
    from tvm.support import cc

    from tvmconv.compiler.cuda_library import pack_imports

    module, image = lowered.build_runtime_module(), lowered.cubin.image
    if cc.get_cc() is None:
        raise CompileError("no C++ compiler to link with: install g++ or clang++, or name one in CXX")

    pack = functools.partial(pack_imports, lambda source: image)
    try:
        module.export_library(str(path), fpack_imports=pack)
    except (OSError, RuntimeError) as error:
        messages = str(error).removeprefix(_ERROR_HEADING).strip().splitlines() or [type(error).__name__]
        raise CompileError(f"{cc.get_cc()} does not link {path.name}: {messages[0]}") from error


FORMAT = ExportFormat(
    "kernel.so",
    "the machine code, and host code that checks arguments and launches, for TVM's runtime",
    ("cuda", "opencl"),
    write_file,
    format_example,
    order=2,
    optional=True,
)
