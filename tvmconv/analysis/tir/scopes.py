"""Lowered TIR, executed as far as an analysis needs it: what runs how often, over many threads and iterations at once.

`iterate_statements` and `iterate_parts` take a function apart into what stores, loads and computes, each with the loops
and conditions around it (its `Scope`); `execute_scope` evaluates these with NumPy for all threads of one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.analysis.tir.expressions import IF_THEN_ELSE, Values, evaluate_expression, find_variables, list_children
from tvmconv.errors import AnalysisError
from tvmconv.gpu_specs import WARP_SIZE

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm.tirx import PrimFunc

    from tvmconv.compiler.executable import LaunchConfig

ASYNC_COPY = "tirx.s_tir.cp_async_raw"  # to shared memory, as TVM's own intrinsic
SHARED_SCOPES = ("shared", "shared.dyn")  # scopes: shared memory, static and dynamic
MAX_ITERATIONS = 1 << 16  # of the loops that one scope or index depends on: seconds, for a block of 1,024 threads
NUM_SAMPLED_ITERATIONS = 1 << 12  # iterations that stand for all where these are more, and may be sampled
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
CHUNK_ELEMENTS = 1 << 20  # iterations × threads that are evaluated at once


_ADDRESS_OF = "tirx.address_of"


@dataclass(frozen=True, eq=False)
class Scope:
    """What surrounds a statement or a part of an expression; told from others by identity.

    Attributes:
        loops: as (variable, first, extent), outermost first.
        conditions: what has to hold, as (condition, outcome).
        axes: the variable of each thread and block axis, by its tag.
        bindings: variables that stand for an expression, in the order in which they are bound.
    """

    loops: tuple[tuple[Any, int, int], ...] = ()
    conditions: tuple[tuple[Any, bool], ...] = ()
    axes: Mapping[str, Any] = field(default_factory=dict)
    bindings: Mapping[Any, Any] = field(default_factory=dict)

    def add_condition(self, condition: Any, outcome: bool) -> Scope:
        """The scope in here for which a condition holds, or does not."""
        return replace(self, conditions=(*self.conditions, (condition, outcome)))

    def find_variables(self, expressions: Iterable[Any]) -> set[Any]:
        """The variables that expressions have in them, themselves or through what is bound."""
        variables = [variable for expression in expressions for variable in find_variables(expression)]
        for variable in variables:  # grows while it is read
            if variable in self.bindings:
                variables += find_variables(self.bindings[variable])
        return set(variables)


def iterate_statements(function: PrimFunc) -> Iterator[tuple[Any, Scope]]:
    """Every `BufferStore`, `Evaluate` and `Bind` of a lowered device function, in the order of the text.

    Raises:
        AnalysisError: the function has a loop whose extent is not constant, or a statement of another kind.
    """

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
                raise AnalysisError(f"a kernel with a statement of the kind {kind}")

    return iterate(function.body, Scope())


def iterate_parts(
    expression: Any, scope: Scope, is_opaque: Callable[[Any], bool] = lambda node: False
) -> Iterator[tuple[Any, Scope]]:
    """An expression and everything in it that is executed, each with its scope: branches have their condition in it.

    Args:
        expression: of a statement.
        scope: the statement's.
        is_opaque: which nodes to leave whole: their own parts are not told.

    Raises:
        AnalysisError: the expression has a node of an unknown kind.
    """
    kind = type(expression).__name__
    op_name = str(expression.op.name) if kind == "Call" else None
    if op_name == _ADDRESS_OF:  # of something in memory, which is not read
        return
    if kind == "Select" or op_name == IF_THEN_ELSE:
        condition, *branches = list_children(expression)
        yield from iterate_parts(condition, scope, is_opaque)
        for branch, outcome in zip(branches, (True, False), strict=True):
            yield from iterate_parts(branch, scope.add_condition(condition, outcome), is_opaque)
        return
    yield expression, scope
    if not is_opaque(expression):
        for child in list_children(expression):
            yield from iterate_parts(child, scope, is_opaque)


@dataclass(frozen=True)
class ScopeExecutions:
    """Executions of one scope in one block.

    Attributes:
        num_repeats: how often each of them happens, for the loops that nothing of interest depends on.
        is_active: whether the thread takes part, of shape (iterations, threads).
        values: of the expressions that were asked for, each of that shape.
    """

    num_repeats: int
    is_active: NDArray[np.bool_]
    values: tuple[NDArray[Any], ...]


def execute_scope(
    scope: Scope,
    expressions: Sequence[Any],
    launch: LaunchConfig,
    block: tuple[int, int, int],
    *,
    allow_sampling: bool = False,
) -> Iterator[ScopeExecutions]:
    """Execute a scope for all threads of a block, and evaluate expressions in it; in pieces of about `CHUNK_ELEMENTS`
    elements.

    Args:
        scope: what is executed.
        expressions: integer or boolean expressions.
        launch: grid and block.
        block: which block of the grid, as (x, y, z).
        allow_sampling: of more than `MAX_ITERATIONS` iterations take `NUM_SAMPLED_ITERATIONS`, spread over them, for
            all.

    Raises:
        AnalysisError: it depends on more than `MAX_ITERATIONS` iterations, or on what is in memory.
    """
    evaluated_expressions = [*expressions, *(condition for condition, _ in scope.conditions)]
    variables = scope.find_variables(evaluated_expressions)
    loops = [loop for loop in scope.loops if loop[0] in variables]
    bindings = [(variable, value) for variable, value in scope.bindings.items() if variable in variables]
    extents = [extent for _, _, extent in loops]
    iterations = math.prod(extents)
    iterations_per_sample = (
        iterations // NUM_SAMPLED_ITERATIONS if allow_sampling and iterations > MAX_ITERATIONS else 1
    )
    if iterations > MAX_ITERATIONS and not allow_sampling:
        raise AnalysisError(
            f"what a thread does depends on {iterations:,} iterations; at most {MAX_ITERATIONS:,} count"
        )
    repeats = math.prod(extent for _, _, extent in scope.loops) // max(iterations, 1) * iterations_per_sample

    axes = _evaluate_axes(scope, launch, block)
    iterations_per_chunk = max(1, CHUNK_ELEMENTS // launch.threads_per_block)
    num_evaluated = iterations // iterations_per_sample
    for first_iteration in range(0, num_evaluated, iterations_per_chunk):
        iteration_numbers = np.arange(
            first_iteration, min(first_iteration + iterations_per_chunk, num_evaluated)
        ).reshape(-1, 1)
        if iterations_per_sample > 1:  # one of each so many, at a place that no inner loop's extent divides
            iteration_numbers = iteration_numbers * iterations_per_sample + (
                iteration_numbers * _GOLDEN_RATIO % 1 * iterations_per_sample
            ).astype(np.int64)
        values = dict(axes)
        for (variable, first, _), counter in zip(
            loops, np.unravel_index(iteration_numbers, extents or [1]), strict=False
        ):
            values[variable] = first + counter
        for variable, value in bindings:
            values[variable] = evaluate_expression(value, values)
        shape = (len(iteration_numbers), launch.threads_per_block)
        active = np.ones(shape, bool)
        for condition, outcome in scope.conditions:
            active &= evaluate_expression(condition, values) == outcome
        yield ScopeExecutions(
            repeats,
            active,
            tuple(np.broadcast_to(evaluate_expression(expression, values), shape) for expression in expressions),
        )


def _evaluate_axes(scope: Scope, launch: LaunchConfig, block: tuple[int, int, int]) -> dict[Any, Values]:
    """The value of each thread and block axis, by its variable."""
    thread = np.arange(launch.threads_per_block)
    x, y, _ = launch.block
    values = {
        "threadIdx.x": thread % x,
        "threadIdx.y": thread // x % y,
        "threadIdx.z": thread // (x * y),
        "blockIdx.x": block[0],
        "blockIdx.y": block[1],
        "blockIdx.z": block[2],
    }
    return {variable: values[tag] for tag, variable in scope.axes.items()}


INSTRUCTION_PREFIXES = (
    "tirx.ptx.",
    "tirx.ptx_legacy.",
    "tirx.mma_",
)  # what the names of intrinsics for instructions begin with


def has_instructions(function: PrimFunc) -> bool:
    """Whether a function has GPU instructions by name, whose addresses may be numbers that lie in registers."""
    import tvm_ffi
    from tvm.ir import Call

    op_names: list[str] = []
    tvm_ffi.structural_walk(function.body, (Call, lambda call: op_names.append(str(call.op.name))), order="post")
    return any(name.startswith(INSTRUCTION_PREFIXES) for name in op_names)


def group_by_warp(threads: NDArray[Any]) -> NDArray[Any]:
    """What the threads of a block have or do, of shape (iterations, threads), by warp: of shape (warps, `WARP_SIZE`).

    The last warp of an iteration is filled up with zeros.
    """
    return np.pad(threads, ((0, 0), (0, -threads.shape[1] % WARP_SIZE))).reshape(-1, WARP_SIZE)


def _require_constant(extent: Any) -> int:
    if type(extent).__name__ != "IntImm":
        raise AnalysisError(f"a loop's bound is not constant: {extent}")
    return int(extent)
