"""Kernel arguments in constant memory and textures.

TVM 0.27 passes every tensor as a pointer to global memory. A schedule marks an argument with `set_memory_scope`. TVM
generates the source as usual, and this module replaces the declaration of the argument:

- `constant`: In CUDA, a `__constant__` array that the caller fills replaces the parameter. In OpenCL, the parameter
  becomes a `__constant` pointer.
- `texture`: The parameter becomes a CUDA texture object, from which the kernel reads with `tex2D`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from tvmconv.annotations import MEMORY_SCOPES, MemoryScope
from tvmconv.compiler.executable import ArrayType
from tvmconv.compiler.source import KernelParameter, find_kernel, format_declaration, get_type_name
from tvmconv.errors import CompileError
from tvmconv.target import CONSTANT_BYTES
from tvmconv.workloads.text import quote

if TYPE_CHECKING:
    from tvm.ir import IRModule

TEXEL_DTYPE = "float32"  # only supported dtype of a texture


def read_memory_scopes(mod: IRModule) -> dict[str, MemoryScope]:
    """Return the memory scope of each argument of `main` by name."""
    function = mod["main"]
    names = [str(p.name) for p in function.params]
    marked_scopes = {str(name): str(scope) for name, scope in get_root_annotations(mod).get(MEMORY_SCOPES, {}).items()}
    for name, scope in marked_scopes.items():
        if name not in names:
            raise CompileError(f"the schedule places {quote(name)}: expected one of {', '.join(names)}")
        if scope not in get_args(MemoryScope):
            expected = ", ".join(get_args(MemoryScope))
            raise CompileError(f"the schedule places {name} in {quote(scope)}: expected {expected}")
    return {name: marked_scopes.get(name, "global") for name in names}  # type: ignore[misc]  # checked above


def get_root_annotations(mod: IRModule) -> Mapping[str, Any]:
    """Return the annotations of the root block of `main`."""
    root = getattr(mod["main"].body, "block", None)  # a handwritten function may have no root block
    return root.annotations if root is not None else {}


def apply_memory_scopes(
    source: str,
    target_kind: str,
    memory_scopes: Mapping[str, MemoryScope],
    arrays: Sequence[ArrayType],
    parameters_by_kernel: Mapping[str, Sequence[KernelParameter]],
) -> str:
    """Return TVM's source with the declarations of arguments changed from global memory to their memory scopes.

    `memory_scopes` and `arrays` have the same order. CompileError is raised if the target does not support the scope,
    its size or the dtype.
    """
    special_scopes = {i: (name, scope) for i, (name, scope) in enumerate(memory_scopes.items()) if scope != "global"}
    for i, (name, scope) in special_scopes.items():
        _check_scope(name, scope, arrays[i], target_kind)
    for kernel, parameters in parameters_by_kernel.items():
        for parameter in parameters:
            if parameter.index in special_scopes:
                _, scope = special_scopes[parameter.index]
                source = _set_parameter_scope(source, target_kind, kernel, parameter, scope, arrays[parameter.index])
    return source


def _check_scope(name: str, scope: MemoryScope, array: ArrayType, target_kind: str) -> None:
    if scope == "constant" and array.nbytes > CONSTANT_BYTES:
        raise CompileError(f"{name} has {array.nbytes} bytes: expected at most {CONSTANT_BYTES} in constant memory")
    if scope == "texture" and target_kind != "cuda":
        raise CompileError(f"{name} is read through a texture: expected the target cuda, not {target_kind}")
    if scope == "texture" and array.dtype != TEXEL_DTYPE:
        raise CompileError(f"{name} is read through a texture: expected the dtype {TEXEL_DTYPE}, not {array.dtype}")


def _set_parameter_scope(
    source: str, target_kind: str, kernel: str, parameter: KernelParameter, scope: MemoryScope, array: ArrayType
) -> str:
    """Return the source with one parameter of one kernel in its memory scope."""
    span = find_kernel(source, kernel, target_kind)
    edits = {(i, j): _rewrite_parameters(source[i:j], target_kind, parameter, scope) for i, j in span.parameter_spans}
    if scope == "texture":  # the handle replaces the address of the first element
        start, stop = span.body_span
        edits[span.body_span] = source[start:stop].replace(f"(&({parameter.name}[0]))", parameter.name)
    for (start, stop), text in sorted(edits.items(), reverse=True):
        source = source[:start] + text + source[stop:]
    if scope == "constant" and target_kind == "cuda":
        element_type = get_type_name(parameter.dtype, target_kind)
        symbol = f"__constant__ {element_type} {parameter.name}[{math.prod(array.shape)}];\n\n"
        if symbol not in source:  # another device function may have declared it
            text_before, function, text_after = source.partition('extern "C" __global__')
            source = f"{text_before}{symbol}{function}{text_after}"
    return source


def _rewrite_parameters(parameters: str, target_kind: str, parameter: KernelParameter, scope: MemoryScope) -> str:
    """Return a kernel's parameter list with one declaration replaced; raises `CompileError` if it is not unique."""
    declarations, expected = parameters.split(", "), format_declaration(parameter, target_kind)
    if declarations.count(expected) != 1:
        raise CompileError(f"the generated text declares no single {expected!r} to place among: {parameters}")
    index = declarations.index(expected)
    if scope == "texture":
        declarations[index] = f"cudaTextureObject_t {parameter.name}"
    elif target_kind == "opencl":
        declarations[index] = expected.replace("__global", "__constant", 1)
    else:
        del declarations[index]
    return ", ".join(declarations)
