"""The replacement of convolutions in a Relax module by calls of kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import GenericConst, IRModule

from tvmconv.compiler.executable import Executable
from tvmconv.devices import Device
from tvmconv.relax.graph import list_sizes
from tvmconv.relax.kernels import FoundKernel
from tvmconv.relax.launcher import make_launcher_module
from tvmconv.relax.layout_ops import (
    CAST_OP,
    MEAN_OP,
    SPLIT_OP,
    find_shuffled,
    is_permutation,
    list_layout_operands,
    make_channels_last,
    permute,
    shuffle_channels_last,
)
from tvmconv.relax.layouts import is_truncating
from tvmconv.relax.reductions import MEAN_DTYPES, make_mean_function, make_mean_symbol
from tvmconv.relax.sites import RelaxConvolution, make_weight, reshape_scale
from tvmconv.workloads.conv_operator import ConvOperator
from tvmconv.workloads.dtypes import ACCUMULATOR, MEAN_TRUNCATION_LOSS, TF32, round_operand
from tvmconv.workloads.layout import CHANNELS_LAST

EXTERNAL_MODULES = "external_mods"  # attribute of a module: compiled modules that the executable links


@dataclass(frozen=True)
class Replacement:
    """A convolution and the kernel that computes it, for a workload with the layout of the kernel."""

    site: RelaxConvolution
    workload: ConvOperator
    kernel: FoundKernel

    @property
    def channels_last(self) -> bool:
        """Whether the kernel's arrays are channels last."""
        return self.workload.layout == CHANNELS_LAST


def replace_convolutions(
    mod: IRModule, replacements: Mapping[str, Sequence[Replacement]], device: Device | None
) -> IRModule:
    """Return a module that calls kernels instead of convolutions.

    Weights become constants in the memory order of the kernel. A tensor is transposed where its layout changes, once
    for all of its readers. Operations between channels-last kernels that compute the same in either layout are done
    channels last, so that such a region has no transposition inside.

    Args:
        mod: Module in which the convolutions were found.
        replacements: What is replaced, by the name of the function.
        device: Device of the kernels; None for a CPU.
    """
    rewriter = _ConvReplacer(mod, has_threads=device is not None)
    for name, function_replacements in replacements.items():
        if function_replacements:
            rewriter.rewrite(name, function_replacements)
    new_mod = rewriter.builder_.get()
    if rewriter.executables:
        others = (mod.attrs or {}).get(EXTERNAL_MODULES, [])
        new_mod = new_mod.with_attr(
            EXTERNAL_MODULES, [*others, make_launcher_module(rewriter.executables, device.arch if device else None)]
        )
    return relax.transform.DeadCodeElimination()(new_mod)


@relax.expr_functor.mutator
class _ConvReplacer(relax.PyExprMutator):
    """A rewriter of functions. The operations that a kernel replaces stay behind, without a reader."""

    def __init__(self, mod: IRModule, *, has_threads: bool) -> None:
        super().__init__(mod)
        self._mod, self._has_threads = mod, has_threads
        self._replacements: dict[relax.Var, Replacement] = {}
        # The same tensors channels last, in this block, and those among them that are computed channels last.
        self._channels_last: dict[relax.Expr, relax.Expr] = {}
        self._native: set[relax.Expr] = set()
        self._values: dict[relax.Expr, relax.Expr] = {}  # by their variables, before the rewriting
        self._splits: dict[relax.Expr, relax.Expr] = {}  # channels-last tuple by the variable of a split
        self._has_channels_last = False  # whether a kernel of the function is channels last
        self._cast_operands: dict[relax.Expr, relax.Expr] = {}  # by the variable of the cast
        self._mean_operands: dict[relax.Expr, relax.Expr] = {}  # channels-last operand by the variable of the mean
        self._functions: dict[str, Any] = {}
        self.executables: dict[str, Executable] = {}  # of the external functions that are called, by name

    def rewrite(self, name: str, replacements: Sequence[Replacement]) -> None:
        """Rewrite a function of the module."""
        self._replacements = {replacement.site.result: replacement for replacement in replacements}
        self._has_channels_last = any(replacement.channels_last for replacement in replacements)
        self.builder_.update_func(self._mod.get_global_var(name), self.visit_expr(self._mod[name]))

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        """Visit a block, whose variables are not visible in other blocks."""
        self._channels_last, self._native, self._splits = {}, set(), {}
        return super().visit_dataflow_block_(block)

    def visit_binding_block_(self, block: relax.BindingBlock) -> relax.BindingBlock:
        """Visit a block."""
        self._channels_last, self._native, self._splits = {}, set(), {}
        return super().visit_binding_block_(block)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Emit the call of a kernel where the last operation of an epilogue stood."""
        self._values[binding.var] = binding.value
        replacement = self._replacements.get(binding.var)
        if replacement is not None:
            value: relax.Expr = self._make_call(replacement)
            is_channels_last = replacement.channels_last
        elif is_permutation(binding.value, to_last=True) and binding.value.args[0] in self._native:
            value, is_channels_last = self._channels_last[binding.value.args[0]], False
        elif (moved := self._move_channels(binding)) is not None:
            value, is_channels_last = moved, True
        else:
            super().visit_var_binding_(binding)
            if is_permutation(binding.value, to_last=False):
                self._channels_last[binding.var] = self.visit_expr(binding.value.args[0])
            return
        if is_channels_last:
            self._channels_last[binding.var] = result = self.builder_.emit(value)
            self._native.add(binding.var)
            value = permute(result, to_last=False)
        is_output = self.builder_.current_block_is_dataflow() and not isinstance(binding.var, relax.DataflowVar)
        self.set_var_remap(binding.var, self.builder_.emit_output(value) if is_output else self.builder_.emit(value))

    def _move_channels(self, binding: relax.VarBinding) -> relax.Expr | None:
        """Return the channels-last tensor of a binding whose operation has a channels-last operand and does the same in
        both layouts; None for another binding. That of a split is known for its items alone.
        """
        value = binding.value
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self._splits:
            return relax.TupleGetItem(self._splits[value.tuple_value], int(value.index))
        is_image = len(list_sizes(binding.var) or ()) > 3  # of three axes, the same permutation moves channels back
        if self._has_channels_last and is_image and is_permutation(value, to_last=False):
            return self.visit_expr(value.args[0])
        if (shuffled := find_shuffled(value, self._values)) is not None and shuffled[0] in self._native:
            return shuffle_channels_last(self._channels_last[shuffled[0]], shuffled[1], self.builder_.emit)
        if not any(operand in self._native for operand in list_layout_operands(value)):
            return None
        if value.op.name != SPLIT_OP:
            return self._make_channels_last(binding)
        self._splits[binding.var] = self.builder_.emit(make_channels_last(value, self._read_channels_last))
        return None

    def _make_channels_last(self, binding: relax.VarBinding) -> relax.Expr:
        """Return an operation for channels-last operands. Means, and casts before and after them, are one function."""
        call, name = binding.value, str(binding.value.op.name)
        if name == CAST_OP:
            self._cast_operands[binding.var] = call.args[0]
            if (x := self._mean_operands.get(call.args[0])) is not None:
                return self._call_mean(x, str(call.attrs.dtype))
        if name == MEAN_OP and self._has_threads:
            x = self._read_channels_last(self._cast_operands.get(call.args[0], call.args[0]))
            if str(x.ty.dtype) in MEAN_DTYPES:
                self._mean_operands[binding.var] = x
                return self._call_mean(x, str(binding.var.ty.dtype))
        return make_channels_last(call, self._read_channels_last)

    def _call_mean(self, x: relax.Expr, dtype: str) -> relax.Expr:
        sizes = list_sizes(x) or ()
        symbol = make_mean_symbol(sizes, str(x.ty.dtype), dtype)
        if symbol not in self._functions:
            self._functions[symbol] = self.builder_.add_func(make_mean_function(sizes, str(x.ty.dtype), dtype), symbol)
        output_sizes = (sizes[0], *(1 for _ in sizes[2:]), sizes[-1])
        return relax.call_tir(self._functions[symbol], [x], out_ty=relax.TensorType(output_sizes, dtype))

    def _make_call(self, replacement: Replacement) -> relax.Expr:
        site, workload, kernel = replacement.site, replacement.workload, replacement.kernel
        arguments = {
            workload.OPERANDS[0]: lambda: self._read_tensor(site.x, replacement),
            workload.OPERANDS[1]: lambda: self._read_weight(replacement),
            "bias": lambda: relax.const(site.bias.astype(ACCUMULATOR), ACCUMULATOR),
            "add": lambda: self._read_tensor(site.residual, replacement),
        }
        names = workload.argument_names[:-1]
        if kernel.function is None:
            return self._call_external(replacement, [arguments[name] for name in names])
        args = [arguments[name]() for name in names]
        out_type = relax.TensorType(workload.argument_shapes[-1], workload.argument_dtypes[-1])
        if kernel.symbol not in self._functions:
            self._functions[kernel.symbol] = self.builder_.add_func(kernel.function, kernel.symbol)
        return relax.call_tir(self._functions[kernel.symbol], args, out_ty=out_type)

    def _call_external(self, replacement: Replacement, arguments: Sequence[Callable[[], relax.Expr]]) -> relax.Expr:
        """Return the result of a call of compiled code, which takes its workspace as further results."""
        site, kernel = replacement.site, replacement.kernel
        symbol, executable, packed = kernel.symbol, kernel.executable, kernel.packed
        if packed is not None and isinstance(site.weight, GenericConst):
            symbol, executable = f"{symbol}_packed", packed.executable
            weight = make_weight(site, site.weight.value.numpy(), channels_last=replacement.channels_last)
            args = [arguments[index]() for index in packed.input_indices]
            args += [relax.const(array, str(array.dtype)) for array in kernel.pack_weight(weight)]
        else:
            args = [argument() for argument in arguments]
        assert executable is not None
        self.executables[symbol] = executable
        results = [executable.output, *executable.workspace]
        types = [relax.TensorType(array.shape, array.dtype) for array in results]
        call = relax.call_dps_packed(symbol, args, out_ty=types if len(types) > 1 else types[0])
        return relax.TupleGetItem(self.builder_.emit(call), 0) if len(types) > 1 else call

    def _read_tensor(self, expr: relax.Expr, replacement: Replacement) -> relax.Expr:
        return self._read_channels_last(expr) if replacement.channels_last else self.visit_expr(expr)

    def _read_channels_last(self, expr: relax.Expr) -> relax.Expr:
        if expr not in self._channels_last:
            value = permute(self.visit_expr(expr), to_last=True)
            self._channels_last[expr] = value if isinstance(value, GenericConst) else self.builder_.emit(value)
        return self._channels_last[expr]

    def _read_weight(self, replacement: Replacement) -> relax.Expr:
        site = replacement.site
        if isinstance(site.weight, GenericConst):
            elements = make_weight(site, site.weight.value.numpy(), channels_last=replacement.channels_last)
            if is_truncating(replacement.workload, replacement.kernel.schedule):  # as the kernel truncates the input
                elements = round_operand(TF32.name, elements * np.float32(1 + MEAN_TRUNCATION_LOSS))
            return relax.const(elements, str(site.weight.ty.dtype))
        weight = self.visit_expr(site.weight)
        if site.is_scaled:
            dtype = str(site.weight.ty.dtype)
            weight = self.builder_.emit(
                relax.op.multiply(weight, relax.const(reshape_scale(site).astype(np.float32), dtype))
            )
        return self.builder_.emit(permute(weight, to_last=True)) if replacement.channels_last else weight
