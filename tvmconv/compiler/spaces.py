"""Arguments that lie elsewhere than in global memory: constant memory, and textures.

TVM 0.27 passes every tensor as a pointer to global memory. A schedule marks an argument (`schedules.vocabulary.place`),
TVM generates its text as ever, and the text's declaration of the argument is changed here:

- `constant`: in place of the parameter CUDA's `__constant__` array, a symbol of the module that whoever launches the
  kernel fills; OpenCL's `__constant` pointer.
- `texture`: CUDA's texture object, from which the text fetches with `tex2D`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from tvmconv.compiler.program import ArrayType
from tvmconv.errors import CompileError
from tvmconv.gpu import CONSTANT_BYTES
from tvmconv.marks import SPACES, Space
from tvmconv.workloads.text import quote

if TYPE_CHECKING:
    from tvm.ir import IRModule

POINTER = "_ptr"  # behind an argument's name in generated text


def read(mod: IRModule) -> dict[str, Space]:
    """Where the schedule of `main` puts each of its arguments.

    Raises:
        CompileError: the schedule marks what is no argument, or with what is no space.
    """
    function = mod["main"]
    names = [str(p.name) for p in function.params]
    marked = {str(name): str(space) for name, space in root_annotations(mod).get(SPACES, {}).items()}
    for name, space in marked.items():
        if name not in names:
            raise CompileError(f"the schedule places {quote(name)}: expected one of {', '.join(names)}")
        if space not in get_args(Space):
            raise CompileError(f"the schedule places {name} in {quote(space)}: expected {', '.join(get_args(Space))}")
    return {name: marked.get(name, "global") for name in names}  # type: ignore[misc]  # checked above


def root_annotations(mod: IRModule) -> Mapping[str, Any]:
    """What a schedule says of `main` as a whole, in the annotations of its root block."""
    root = getattr(mod["main"].body, "block", None)  # a function written by hand may do without one
    return root.annotations if root is not None else {}


def apply(source: str, kind: str, spaces: Mapping[str, Space], arrays: Sequence[ArrayType]) -> str:
    """The generated text with its arguments in their spaces.

    Args:
        source: as TVM generates it, with a `float` pointer for each argument.
        kind: `cuda` or `opencl`.
        spaces: the space of each argument, in the order of `arrays`.
        arrays: the arguments' types.

    Raises:
        CompileError: the target has no such space, or not that much of it.
    """
    for (name, space), array in zip(spaces.items(), arrays, strict=True):
        if space == "constant":
            _check_constant(name, array)
            source = _cuda_constant(source, name, array) if kind == "cuda" else _opencl_constant(source, name)
        elif space == "texture":
            if kind != "cuda":
                raise CompileError(f"{name} is read through a texture, which is for CUDA, not for {kind}")
            source = _cuda_texture(source, name)
    return source


def symbol(name: str) -> str:
    """What an argument is called in generated text."""
    return name + POINTER


def _check_constant(name: str, array: ArrayType) -> None:
    if array.nbytes > CONSTANT_BYTES:
        raise CompileError(f"{name} has {array.nbytes} bytes: constant memory has {CONSTANT_BYTES}")


def _cuda_constant(source: str, name: str, array: ArrayType) -> str:
    pointer = rf"float\* __restrict__ {symbol(name)}\b"
    without = re.sub(rf"{pointer}, |, {pointer}|{pointer}", "", source)
    head, function, body = without.partition('extern "C" __global__')
    return f"{head}__constant__ float {symbol(name)}[{math.prod(array.shape)}];\n\n{function}{body}"


def _opencl_constant(source: str, name: str) -> str:
    return source.replace(f"__global float* restrict {symbol(name)}", f"__constant float* restrict {symbol(name)}")


def _cuda_texture(source: str, name: str) -> str:
    declared = source.replace(f"float* __restrict__ {symbol(name)}", f"cudaTextureObject_t {symbol(name)}")
    # An object is a number: where TIR has the address of the array's first element, the text is to have the object.
    return declared.replace(f"(&({symbol(name)}[0]))", symbol(name))
