"""Models with a symbolic batch: a copy of the model for each of a few batch sizes, and a dispatch on the size."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax, tirx
from tvm.ir import Call, GlobalVar, IRModule

from tvmconv.errors import ModelError, TuningError

ANY_BATCH = "_batch_any"  # end of the name of a function that computes other batch sizes


def specialize_batch(mod: IRModule, names: Sequence[str], batch_sizes: Sequence[int]) -> IRModule:
    """Return a module whose functions call a copy of themselves for the batch size if it is one of those given.

    The batch is the symbolic first size of a function's first parameter that has one. The functions `NAME_batch8` have
    this size as a number, and `NAME_batch_any` has all other sizes.

    Args:
        mod: Module with the functions.
        names: Names of the functions of Relax that may be specialized.
        batch_sizes: Batch sizes, which differ.

    Raises:
        TuningError: A batch size is not a positive integer, or occurs twice.
        ModelError: No function has a symbolic batch.
    """
    sizes = _list_batch_sizes(batch_sizes)
    batches = {name: batch for name in names if (batch := _find_batch(mod[name])) is not None}
    if not batches:
        raise ModelError("batch_sizes: no function has a symbolic size as the first of a parameter")
    for name, batch in batches.items():
        mod = _specialize_function(mod, name, batch, sizes)
    return mod


def _list_batch_sizes(batch_sizes: Sequence[int]) -> list[int]:
    """Return batch sizes as integers of Python."""
    try:
        sizes = [operator.index(size) for size in batch_sizes]
    except TypeError as error:
        raise TuningError(f"batch_sizes={batch_sizes!r}: expected a list of integers") from error
    if len({*sizes}) < len(sizes) or min(sizes) <= 0:
        raise TuningError(f"batch_sizes={sizes}: expected different positive integers")
    return sizes


def _find_batch(function: relax.Function) -> tirx.Var | None:
    """Return the symbolic first size of the first parameter that has one."""
    for parameter in function.params:
        shape = getattr(parameter.ty, "shape", None)
        if isinstance(shape, relax.ShapeExpr) and len(shape) and isinstance(shape[0], tirx.Var):
            return shape[0]
    return None


def _specialize_function(mod: IRModule, name: str, batch: tirx.Var, batch_sizes: Sequence[int]) -> IRModule:
    function, builder = mod[name], relax.BlockBuilder(mod)
    copies: dict[int | None, tuple[GlobalVar, relax.Function]] = {}
    for size in (*batch_sizes, None):
        copy_name = f"{name}{ANY_BATCH}" if size is None else f"{name}_batch{size}"
        copy = relax.utils.copy_with_new_vars(function).with_attr("global_symbol", copy_name)
        copy = _bind_batch(copy, str(batch.name), size)
        copies[size] = builder.add_func(copy, copy_name), copy
    builder.update_func(mod.get_global_var(name), _make_dispatcher(function, batch, copies))
    return relax.transform.Normalize()(builder.get())


def _bind_batch(function: relax.Function, batch_name: str, size: int | None) -> relax.Function:
    if size is None:
        return function
    name = str(function.attrs["global_symbol"])
    return relax.transform.BindSymbolicVars({batch_name: size}, name)(IRModule({name: function}))[name]


def _make_dispatcher(
    function: relax.Function, batch: tirx.Var, copies: Mapping[int | None, tuple[GlobalVar, relax.Function]]
) -> relax.Function:
    """Return a function that compares its batch with each size."""
    body = _make_call(function, *copies[None], casts=False)
    for size, (variable, copy) in copies.items():
        if size is not None:
            result = relax.Var("result", function.ret_ty)
            branch = relax.If(batch == size, _make_call(function, variable, copy, casts=True), body)
            body = relax.SeqExpr([relax.BindingBlock([relax.VarBinding(result, branch)])], result)
    return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)


def _make_call(function: relax.Function, variable: GlobalVar, copy: relax.Function, *, casts: bool) -> relax.SeqExpr:
    """Return the call of a copy, with casts to the types of its parameters and back to the type of the function."""
    bindings: list[Any] = []
    arguments = list(function.params)
    if casts:
        arguments = [relax.Var(str(parameter.name), parameter.ty) for parameter in copy.params]
        bindings += [
            relax.MatchCast(argument, parameter, argument.ty)
            for argument, parameter in zip(arguments, function.params, strict=True)
        ]
    result = relax.Var("result", copy.ret_ty if casts else function.ret_ty)
    bindings.append(relax.VarBinding(result, Call(variable, arguments)))
    if casts:
        cast = relax.Var("result", function.ret_ty)
        bindings.append(relax.MatchCast(cast, result, function.ret_ty))
        result = cast
    return relax.SeqExpr([relax.BindingBlock(bindings)], result)
