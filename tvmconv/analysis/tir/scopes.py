"""Partial evaluation of lowered TIR: how often a statement is executed, by which threads, and with which indices.

`iterate_statements` and `iterate_parts` split a function into its stores, loads and computations, each with the loops
and conditions around it (its `Scope`). `execute_scope` evaluates these with NumPy for all threads of one block at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.compiler.executable import LaunchConfig
from tvmconv.compiler.tir_nodes import collect_nodes
from tvmconv.emulator.translation.arithmetic import ARITHMETIC, COMPARISONS
from tvmconv.errors import AnalysisError
from tvmconv.target import WARP_SIZE

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc


Values = Any  # array of integers or booleans that broadcasts over (iterations, lanes), or a scalar

_BINARY: dict[str, Callable[[Values, Values], Values]] = {
    **{name: compute_integers for name, (_, compute_integers) in ARITHMETIC.items()},
    **COMPARISONS,
    **{"And": np.logical_and, "Or": np.logical_or},
}
INDEX_DTYPES = ("int32", "int64")  # dtypes of loop counters and indices in memory, which no operand has
IF_THEN_ELSE = "prim.if_then_else"


def evaluate_expression(expression: Any, values: Mapping[Any, Values]) -> Values:
    """Return the value of an integer or boolean expression."""
    kind = type(expression).__name__
    if kind == "IntImm":
        return int(expression.value)
    if kind == "Var":
        return values[expression]
    if kind in _BINARY:
        return _BINARY[kind](evaluate_expression(expression.a, values), evaluate_expression(expression.b, values))
    if kind == "Not":
        return np.logical_not(evaluate_expression(expression.a, values))
    if kind == "Cast":
        return evaluate_expression(expression.value, values)
    if kind == "Select" or (kind == "Call" and expression.op.name == IF_THEN_ELSE):
        return np.where(*(evaluate_expression(child, values) for child in list_children(expression)))
    raise AnalysisError(f"index arithmetic cannot have a node of kind {kind}: {expression}")


def list_children(expression: Any) -> Sequence[Any]:
    """Return the operands of an expression; a selection's condition comes first."""
    kind = type(expression).__name__
    if kind in _BINARY:
        return (expression.a, expression.b)
    match kind:
        case "Select":
            return (expression.condition, expression.true_value, expression.false_value)
        case "Call":
            return tuple(expression.args)
        case "TensorLoad":
            return tuple(expression.indices)
        case "Ramp":
            return (expression.base, expression.stride)
        case "Cast" | "Broadcast":
            return (expression.value,)
        case "Shuffle":
            return (*expression.vectors, *expression.indices)
        case "Not":
            return (expression.a,)
        case "IntImm" | "FloatImm" | "StringImm" | "Var":
            return ()
    raise AnalysisError(f"expressions with a node of kind {kind} are not supported: {expression}")


ASYNC_COPY = "tirx.s_tir.cp_async_raw"  # TVM's own intrinsic for a copy to shared memory
SHARED_SCOPES = ("shared", "shared.dyn")  # static and dynamic shared memory
MAX_ITERATIONS = 1 << 16  # iterations of the loops that one scope depends on, seconds for a block of 1,024 threads
NUM_SAMPLED_ITERATIONS = 1 << 12  # size of the sample that replaces more than `MAX_ITERATIONS`
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
CHUNK_ELEMENTS = 1 << 20  # iterations × threads per evaluation
_ADDRESS_OF = "tirx.address_of"


@dataclass(frozen=True, eq=False)
class Scope:
    """Loops and conditions around a statement or a part of an expression; scopes compare by identity."""

    loops: tuple[tuple[Any, int, int], ...] = ()  # loops as (variable, first value, extent), outermost first
    # conditions that have to evaluate to an outcome, as (condition, outcome)
    conditions: tuple[tuple[Any, bool], ...] = ()
    axes: Mapping[str, Any] = field(default_factory=dict)  # variable of each thread and block axis, by the axis's tag
    # expression of each bound variable, in the order of the bindings
    bindings: Mapping[Any, Any] = field(default_factory=dict)

    def add_condition(self, condition: Any, outcome: bool) -> Scope:
        """Return the inner scope in which `condition` evaluates to `outcome`."""
        return replace(self, conditions=(*self.conditions, (condition, outcome)))

    def find_variables(self, expressions: Iterable[Any]) -> set[Any]:
        """Return the variables of the expressions, including those of the expressions bound to them."""
        from tvm import tirx

        variables = [variable for expression in expressions for variable in collect_nodes(expression, tirx.Var)]
        for variable in variables:  # the loop also visits the variables that it appends
            if variable in self.bindings:
                variables += collect_nodes(self.bindings[variable], tirx.Var)
        return set(variables)

    def reads_data(self, expression: Any) -> bool:
        """Return whether the value of an expression depends on elements of tensors or on floating-point numbers."""
        from tvm import tirx
        from tvm.ir import TensorLoad

        bound_values = [self.bindings[v] for v in self.find_variables([expression]) if v in self.bindings]
        return any(collect_nodes(value, TensorLoad, tirx.FloatImm) for value in (expression, *bound_values))


def iterate_statements(function: PrimFunc) -> Iterator[tuple[Any, Scope]]:
    """Yield every `BufferStore`, `Evaluate` and `Bind` of a lowered device function, in the order of the TIR."""

    def iterate(node: Any, scope: Scope) -> Iterator[tuple[Any, Scope]]:
        match type(node).__name__:
            case "SeqStmt":
                for statement in node.seq:
                    yield from iterate(statement, scope)
                    if type(statement).__name__ == "Bind":
                        scope = replace(scope, bindings={**scope.bindings, statement.var: statement.value})
            case "AttrStmt":
                if node.attr_key == "thread_extent":
                    scope = replace(scope, axes={**scope.axes, str(node.node.thread_tag): node.node.var})
                yield from iterate(node.body, scope)
            case "For":
                loop = (node.loop_var, _require_constant(node.min), _require_constant(node.extent))
                yield from iterate(node.body, replace(scope, loops=(*scope.loops, loop)))
            case "IfThenElse":
                yield from iterate(node.then_case, scope.add_condition(node.condition, True))
                if node.else_case is not None:
                    yield from iterate(node.else_case, scope.add_condition(node.condition, False))
            case "BufferStore" | "Evaluate" | "Bind":
                yield node, scope
            case "AllocBuffer" | "DeclBuffer":
                pass
            case kind:
                raise AnalysisError(f"statements of kind {kind} are not supported in an analysed kernel")

    return iterate(function.body, Scope())


def iterate_parts(
    expression: Any, scope: Scope, is_opaque: Callable[[Any], bool] = lambda node: False
) -> Iterator[tuple[Any, Scope]]:
    """Yield an expression and every executed part of it with its scope; a branch has its condition in its scope.

    Both branches count as executed if the condition depends on data.
    """
    kind = type(expression).__name__
    op_name = str(expression.op.name) if kind == "Call" else None
    if op_name == _ADDRESS_OF:  # the address of a memory location, which is not read
        return
    if kind == "Select" or op_name == IF_THEN_ELSE:
        condition, *branches = list_children(expression)
        yield from iterate_parts(condition, scope, is_opaque)
        reads_data = scope.reads_data(condition)
        for branch, outcome in zip(branches, (True, False), strict=True):
            branch_scope = scope if reads_data else scope.add_condition(condition, outcome)
            yield from iterate_parts(branch, branch_scope, is_opaque)
        return
    if kind == "Let":
        yield from iterate_parts(expression.value, scope, is_opaque)
        inner_scope = replace(scope, bindings={**scope.bindings, expression.var: expression.value})
        yield from iterate_parts(expression.body, inner_scope, is_opaque)
        return
    yield expression, scope
    if not is_opaque(expression):
        for child in list_children(expression):
            yield from iterate_parts(child, scope, is_opaque)


@dataclass(frozen=True)
class ScopeExecutions:
    """Executions of one scope in one block."""

    num_repeats: int  # times that each execution repeats in the loops that are not evaluated
    is_active: NDArray[np.bool_]  # whether the thread takes part, of shape (iterations, threads)
    values: tuple[NDArray[Any], ...]  # values of the evaluated expressions, each of that shape


def execute_scope(
    scope: Scope,
    expressions: Sequence[Any],
    launch: LaunchConfig,
    block: tuple[int, int, int],
    *,
    allow_sampling: bool = False,
) -> Iterator[ScopeExecutions]:
    """Execute a scope for all threads of a block and evaluate expressions, in chunks of `CHUNK_ELEMENTS` values.

    Above `MAX_ITERATIONS`, `NUM_SAMPLED_ITERATIONS` evenly spread iterations stand for all if `allow_sampling` is set.
    """
    evaluated_expressions = [*expressions, *(condition for condition, _ in scope.conditions)]
    variables = scope.find_variables(evaluated_expressions)
    loops = [loop for loop in scope.loops if loop[0] in variables]
    bindings = [(variable, value) for variable, value in scope.bindings.items() if variable in variables]
    extents = [extent for _, _, extent in loops]
    iterations = math.prod(extents)
    if iterations > MAX_ITERATIONS and not allow_sampling:
        raise AnalysisError(f"an access depends on {iterations:,} iterations; at most {MAX_ITERATIONS:,} are supported")
    sample_stride = iterations // NUM_SAMPLED_ITERATIONS if iterations > MAX_ITERATIONS else 1
    repeats = math.prod(extent for _, _, extent in scope.loops) // max(iterations, 1) * sample_stride

    axes = _evaluate_axes(scope, launch, block)
    chunk_size = max(1, CHUNK_ELEMENTS // launch.threads_per_block)
    num_samples = iterations // sample_stride
    for first_sample in range(0, num_samples, chunk_size):
        samples = np.arange(first_sample, min(first_sample + chunk_size, num_samples)).reshape(-1, 1)
        if sample_stride > 1:  # the irregular offset avoids aliasing with the inner loops' extents
            samples = samples * sample_stride + (samples * _GOLDEN_RATIO % 1 * sample_stride).astype(np.int64)
        values = dict(axes)
        for (variable, first, _), counter in zip(loops, np.unravel_index(samples, extents or [1]), strict=False):
            values[variable] = first + counter
        for variable, value in bindings:
            values[variable] = evaluate_expression(value, values)
        shape = (len(samples), launch.threads_per_block)
        active = np.ones(shape, bool)
        for condition, outcome in scope.conditions:
            active &= evaluate_expression(condition, values) == outcome
        evaluated = tuple(np.broadcast_to(evaluate_expression(item, values), shape) for item in expressions)
        yield ScopeExecutions(repeats, active, evaluated)


def _evaluate_axes(scope: Scope, launch: LaunchConfig, block: tuple[int, int, int]) -> dict[Any, Values]:
    thread = np.arange(launch.threads_per_block)
    x, y, _ = launch.block
    values: dict[str, Values] = {f"blockIdx.{name}": index for name, index in zip("xyz", block, strict=True)}
    values |= {"threadIdx.x": thread % x, "threadIdx.y": thread // x % y, "threadIdx.z": thread // (x * y)}
    return {variable: values[tag] for tag, variable in scope.axes.items()}


INSTRUCTION_PREFIXES = ("tirx.ptx.", "tirx.ptx_legacy.", "tirx.mma_")  # of the intrinsics for GPU instructions


def has_instructions(function: PrimFunc) -> bool:
    """Return whether a function uses GPU instructions by name, whose addresses may lie in registers."""
    from tvm.ir import Call

    return any(str(call.op.name).startswith(INSTRUCTION_PREFIXES) for call in collect_nodes(function.body, Call))


def needs_execution(function: PrimFunc) -> bool:
    """Return whether indices and conditions cannot be evaluated without executing a function.

    It uses GPU instructions by name, or it reads loop counters and indices from memory.
    """
    from tvm.ir import TensorLoad

    loads = collect_nodes(function.body, TensorLoad)
    return has_instructions(function) or any(str(load.source.dtype) in INDEX_DTYPES for load in loads)


def group_by_warp(threads: NDArray[Any]) -> NDArray[Any]:
    """Reshape values per (iteration, thread) of a block to (warps, `WARP_SIZE`).

    Zeros fill up the last warp of an iteration.
    """
    return np.pad(threads, ((0, 0), (0, -threads.shape[1] % WARP_SIZE))).reshape(-1, WARP_SIZE)


def _require_constant(extent: Any) -> int:
    if type(extent).__name__ != "IntImm":
        raise AnalysisError(f"the loop bound {extent} is not constant; only constant bounds are supported")
    return int(extent)
