"""Arguments that lie elsewhere than in global memory: constant memory, and textures.

TVM 0.27 passes every tensor as a pointer to global memory. A schedule marks an argument (`schedules.vocabulary.place`),
TVM generates its text as ever, and the text's declaration of the argument is changed here:

- `constant`: in place of the parameter CUDA's `__constant__` array, a symbol of the module that whoever launches the
  kernel fills; OpenCL's `__constant` pointer.
- `texture`: CUDA's texture object, from which the text fetches with `tex2D`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from tvmconv import gpu
from tvmconv.compiler.program import ArrayType
from tvmconv.compiler.source import Parameter, declaration, find_kernel, type_name
from tvmconv.errors import CompileError
from tvmconv.marks import SPACES, Space
from tvmconv.workloads.text import quote

if TYPE_CHECKING:
    from tvm.ir import IRModule

TEXEL = "float32"  # the dtype of what may lie behind a texture


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


def apply(
    source: str,
    kind: str,
    spaces: Mapping[str, Space],
    arrays: Sequence[ArrayType],
    kernels: Mapping[str, Sequence[Parameter]],
) -> str:
    """The generated text with its arguments in their spaces.

    Args:
        source: as TVM generates it, with a pointer to global memory for each parameter.
        kind: `cuda` or `opencl`.
        spaces: the space of each argument, in the order of `arrays`.
        arrays: the arguments' types.
        kernels: the parameters of each kernel of the text, by its name.

    Raises:
        CompileError: the target has no such space, not that much of it, or none for such elements; or the text does not
            declare an argument as expected.
    """
    placed = {i: (name, space) for i, (name, space) in enumerate(spaces.items()) if space != "global"}
    for i, (name, space) in placed.items():
        _check(name, space, arrays[i], kind)
    for kernel, parameters in kernels.items():
        for parameter in parameters:
            if parameter.index in placed:
                _, space = placed[parameter.index]
                source = _place(source, kind, kernel, parameter, space, arrays[parameter.index])
    return source


def _check(name: str, space: Space, array: ArrayType, kind: str) -> None:
    if space == "constant" and array.nbytes > gpu.CONSTANT_BYTES:
        raise CompileError(f"{name} has {array.nbytes} bytes: constant memory has {gpu.CONSTANT_BYTES}")
    if space == "texture" and kind != "cuda":
        raise CompileError(f"{name} is read through a texture, which is for CUDA, not for {kind}")
    if space == "texture" and array.dtype != TEXEL:
        raise CompileError(f"{name} is read through a texture, which is for {TEXEL}, not for {array.dtype}")


def _place(source: str, kind: str, kernel: str, parameter: Parameter, space: Space, array: ArrayType) -> str:
    """The text with one parameter of one kernel in its space."""
    found = find_kernel(source, kernel, kind)
    edits = {(start, end): _declare(source[start:end], kind, parameter, space) for start, end in found.declared}
    if space == "texture":  # an object is a number: where TIR has the address of the first element, the text has it
        start, end = found.body
        edits[found.body] = source[start:end].replace(f"(&({parameter.name}[0]))", parameter.name)
    for (start, end), text in sorted(edits.items(), reverse=True):
        source = source[:start] + text + source[end:]
    if space == "constant" and kind == "cuda":
        symbol = f"__constant__ {type_name(parameter.dtype, kind)} {parameter.name}[{math.prod(array.shape)}];\n\n"
        if symbol not in source:  # else another step reads it too
            before, function, after = source.partition('extern "C" __global__')
            source = f"{before}{symbol}{function}{after}"
    return source


def _declare(parameters: str, kind: str, parameter: Parameter, space: Space) -> str:
    """A kernel's parameters, with one of them in its space; raises `CompileError` unless it is exactly one."""
    every, expected = parameters.split(", "), declaration(parameter, kind)
    if every.count(expected) != 1:
        raise CompileError(f"the generated text declares no single {expected!r} to place among: {parameters}")
    at = every.index(expected)
    if space == "texture":
        every[at] = f"cudaTextureObject_t {parameter.name}"
    elif kind == "opencl":
        every[at] = expected.replace("__global", "__constant", 1)
    else:
        del every[at]
    return ", ".join(every)
