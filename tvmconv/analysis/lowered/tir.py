"""Lowered TIR, executed as far as an analysis needs it: what runs how often, over many threads and iterations at once.

`statements` and `parts` take a function apart into what stores, loads and computes, each with the loops and conditions
around it (its `Scope`); `executions` evaluates these with NumPy for all threads of one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.analysis.lowered.expressions import IF_THEN_ELSE, Values, children, evaluate, variables_of
from tvmconv.errors import AnalysisError
from tvmconv.gpu import WARP

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm.tirx import PrimFunc

    from tvmconv.compiler.program import Launch

ASYNC_COPY = "tirx.s_tir.cp_async_raw"  # to shared memory, as TVM's own intrinsic
SHARED = ("shared", "shared.dyn")  # scopes: shared memory, static and dynamic
MAX_ITERATIONS = 1 << 16  # of the loops that one scope or index depends on: seconds, for a block of 1,024 threads
SAMPLED = 1 << 12  # iterations that stand for all where these are more, and may be sampled
_GOLDEN = (math.sqrt(5) - 1) / 2
CHUNK = 1 << 20  # iterations × threads that are evaluated at once


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

    def where(self, condition: Any, outcome: bool) -> Scope:
        """The scope in here for which a condition holds, or does not."""
        return replace(self, conditions=(*self.conditions, (condition, outcome)))

    def variables(self, expressions: Iterable[Any]) -> set[Any]:
        """The variables that expressions have in them, themselves or through what is bound."""
        found = [variable for expression in expressions for variable in variables_of(expression)]
        for variable in found:  # grows while it is read
            if variable in self.bindings:
                found += variables_of(self.bindings[variable])
        return set(found)


def statements(function: PrimFunc) -> Iterator[tuple[Any, Scope]]:
    """Every `BufferStore`, `Evaluate` and `Bind` of a lowered device function, in the order of the text.

    Raises:
        AnalysisError: the function has a loop whose extent is not constant, or a statement of another kind.
    """

    def visit(node: Any, scope: Scope) -> Iterator[tuple[Any, Scope]]:
        match type(node).__name__:
            case "SeqStmt":
                for statement in node.seq:
                    yield from visit(statement, scope)
                    if type(statement).__name__ == "Bind":
                        scope = replace(scope, bindings={**scope.bindings, statement.var: statement.value})
            case "AttrStmt":
                if node.attr_key == "thread_extent":
                    scope = replace(scope, axes={**scope.axes, str(node.node.thread_tag): node.node.var})
                yield from visit(node.body, scope)
            case "For":
                loop = (node.loop_var, _constant(node.min), _constant(node.extent))
                yield from visit(node.body, replace(scope, loops=(*scope.loops, loop)))
            case "IfThenElse":
                yield from visit(node.then_case, scope.where(node.condition, True))
                if node.else_case is not None:
                    yield from visit(node.else_case, scope.where(node.condition, False))
            case "BufferStore" | "Evaluate" | "Bind":
                yield node, scope
            case "AllocBuffer" | "DeclBuffer":
                pass
            case kind:
                raise AnalysisError(f"a kernel with a statement of the kind {kind}")

    return visit(function.body, Scope())


def parts(
    expression: Any, scope: Scope, whole: Callable[[Any], bool] = lambda node: False
) -> Iterator[tuple[Any, Scope]]:
    """An expression and everything in it that is executed, each with its scope: branches have their condition in it.

    Args:
        expression: of a statement.
        scope: the statement's.
        whole: which nodes to leave whole: their own parts are not told.

    Raises:
        AnalysisError: the expression has a node of an unknown kind.
    """
    kind = type(expression).__name__
    called = str(expression.op.name) if kind == "Call" else None
    if called == _ADDRESS_OF:  # of something in memory, which is not read
        return
    if kind == "Select" or called == IF_THEN_ELSE:
        condition, *branches = children(expression)
        yield from parts(condition, scope, whole)
        for branch, outcome in zip(branches, (True, False), strict=True):
            yield from parts(branch, scope.where(condition, outcome), whole)
        return
    yield expression, scope
    if not whole(expression):
        for child in children(expression):
            yield from parts(child, scope, whole)


@dataclass(frozen=True)
class Executions:
    """Executions of one scope in one block.

    Attributes:
        repeats: how often each of them happens, for the loops that nothing of interest depends on.
        active: whether the thread takes part, of shape (iterations, threads).
        values: of the expressions that were asked for, each of that shape.
    """

    repeats: int
    active: NDArray[np.bool_]
    values: tuple[NDArray[Any], ...]


def executions(
    scope: Scope, expressions: Sequence[Any], launch: Launch, block: tuple[int, int, int], *, sampled: bool = False
) -> Iterator[Executions]:
    """Execute a scope for all threads of a block, and evaluate expressions in it; in pieces of about `CHUNK` elements.

    Args:
        scope: what is executed.
        expressions: integer or boolean expressions.
        launch: grid and block.
        block: which block of the grid, as (x, y, z).
        sampled: of more than `MAX_ITERATIONS` iterations take `SAMPLED`, spread over them, for all.

    Raises:
        AnalysisError: it depends on more than `MAX_ITERATIONS` iterations, or on what is in memory.
    """
    used = [*expressions, *(condition for condition, _ in scope.conditions)]
    variables = scope.variables(used)
    loops = [loop for loop in scope.loops if loop[0] in variables]
    bound = [(variable, value) for variable, value in scope.bindings.items() if variable in variables]
    extents = [extent for _, _, extent in loops]
    iterations = math.prod(extents)
    every = iterations // SAMPLED if sampled and iterations > MAX_ITERATIONS else 1
    if iterations > MAX_ITERATIONS and not sampled:
        raise AnalysisError(
            f"what a thread does depends on {iterations:,} iterations; at most {MAX_ITERATIONS:,} count"
        )
    repeats = math.prod(extent for _, _, extent in scope.loops) // max(iterations, 1) * every

    axes = _axes(scope, launch, block)
    step = max(1, CHUNK // launch.threads)
    taken = iterations // every
    for start in range(0, taken, step):
        numbers = np.arange(start, min(start + step, taken)).reshape(-1, 1)
        if every > 1:  # one of each so many, at a place that no inner loop's extent divides
            numbers = numbers * every + (numbers * _GOLDEN % 1 * every).astype(np.int64)
        values = dict(axes)
        for (variable, first, _), counter in zip(loops, np.unravel_index(numbers, extents or [1]), strict=False):
            values[variable] = first + counter
        for variable, value in bound:
            values[variable] = evaluate(value, values)
        shape = (len(numbers), launch.threads)
        active = np.ones(shape, bool)
        for condition, outcome in scope.conditions:
            active &= evaluate(condition, values) == outcome
        yield Executions(repeats, active, tuple(np.broadcast_to(evaluate(each, values), shape) for each in expressions))


def _axes(scope: Scope, launch: Launch, block: tuple[int, int, int]) -> dict[Any, Values]:
    """The value of each thread and block axis, by its variable."""
    thread = np.arange(launch.threads)
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


INSTRUCTIONS = (
    "tirx.ptx.",
    "tirx.ptx_legacy.",
    "tirx.mma_",
)  # what the names of intrinsics for instructions begin with


def has_instructions(function: PrimFunc) -> bool:
    """Whether a function has GPU instructions by name, whose addresses may be numbers that lie in registers."""
    import tvm_ffi
    from tvm.ir import Call

    found: list[str] = []
    tvm_ffi.structural_walk(function.body, (Call, lambda call: found.append(str(call.op.name))), order="post")
    return any(name.startswith(INSTRUCTIONS) for name in found)


def warps(threads: NDArray[Any]) -> NDArray[Any]:
    """What the threads of a block have or do, of shape (iterations, threads), by warp: of shape (warps, `WARP`).

    The last warp of an iteration is filled up with zeros.
    """
    return np.pad(threads, ((0, 0), (0, -threads.shape[1] % WARP))).reshape(-1, WARP)


def _constant(extent: Any) -> int:
    if type(extent).__name__ != "IntImm":
        raise AnalysisError(f"a loop's bound is not constant: {extent}")
    return int(extent)
