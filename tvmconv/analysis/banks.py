"""Shared-memory bank conflicts, counted from the lowered TIR without running the kernel.

The model is the one of the CUDA C++ Programming Guide for compute capability 5.0 and up ("Shared Memory" under "Compute
Capability 5.x"): 32 banks of 4 bytes; the threads of a warp that touch different words of one bank are served one after
the other, those that touch the same word are served together. An access of a warp then takes as many wavefronts as the
busiest bank has words, and all but the first are conflicts.

Counted are the 4-byte accesses that the TIR makes. The compiler may merge a thread's neighbouring loads into one of 8
or 16 bytes, which the hardware serves by half and quarter warps: conflicts of strides of 2 or 4 words can vanish then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tvmconv.analysis.tir import evaluate
from tvmconv.errors import AnalysisError

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

    from tvmconv.compiler.lower import Launch
    from tvmconv.kernel import Kernel

BANKS = 32
BANK_BYTES = 4
WARP = 32
MAX_ITERATIONS = 1 << 14


@dataclass(frozen=True)
class SharedAccess:
    """One load or store of shared memory in the text of a kernel, over all times that it runs in one block.

    Attributes:
        kind: load or store.
        buffer: the shared buffer's name.
        requests: how often a warp executes it, with at least one thread taking part.
        wavefronts: how many passes over the banks these take.
    """

    kind: Literal["load", "store"]
    buffer: str
    requests: int
    wavefronts: int

    @property
    def conflicts(self) -> int:
        """Wavefronts beyond the first of each request."""
        return self.wavefronts - self.requests


def shared_accesses(kernel: Kernel) -> list[SharedAccess]:
    """Every shared-memory access of a kernel's text, counted over its first block.

    Args:
        kernel: a built kernel, for any target.

    Raises:
        AnalysisError: an access is not of 4-byte scalars, or its loops run more than `MAX_ITERATIONS` times.
    """
    return [_count(access, kernel.launch) for access in _walk(kernel.lowered)]


def conflicts(kernel: Kernel, kind: Literal["load", "store"]) -> int:
    """Bank conflicts of all shared loads or stores of a kernel's first block."""
    return sum(access.conflicts for access in shared_accesses(kernel) if access.kind == kind)


@dataclass(frozen=True)
class _Scope:
    """What surrounds a statement: loops as (variable, first, extent), conditions and their outcomes, thread axes."""

    loops: tuple[tuple[Any, int, int], ...] = ()
    conditions: tuple[tuple[Any, bool], ...] = ()
    axes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Access:
    kind: Literal["load", "store"]
    buffer: Any
    index: Any
    scope: _Scope


def _walk(function: PrimFunc) -> Iterator[_Access]:
    def visit(node: Any, scope: _Scope) -> Iterator[_Access]:
        match type(node).__name__:
            case "SeqStmt":
                for statement in node.seq:
                    yield from visit(statement, scope)
            case "AttrStmt":
                if node.attr_key == "thread_extent":
                    scope = _Scope(
                        scope.loops, scope.conditions, {**scope.axes, str(node.node.thread_tag): node.node.var}
                    )
                yield from visit(node.body, scope)
            case "For":
                loop = (node.loop_var, int(node.min), int(node.extent))
                yield from visit(node.body, _Scope((*scope.loops, loop), scope.conditions, scope.axes))
            case "IfThenElse":
                for branch, outcome in ((node.then_case, True), (node.else_case, False)):
                    if branch is not None:
                        conditions = (*scope.conditions, (node.condition, outcome))
                        yield from visit(branch, _Scope(scope.loops, conditions, scope.axes))
            case "BufferStore":
                for load in _shared_loads(node.value):
                    yield _Access("load", load.source, load.indices[0], scope)
                if node.buffer.scope() == "shared":
                    yield _Access("store", node.buffer, node.indices[0], scope)

    return visit(function.body, _Scope())


def _shared_loads(expression: Any) -> list[Any]:
    import tvm_ffi
    from tvm.ir import TensorLoad

    loads: list[Any] = []

    def visit(load: Any) -> None:
        if load.source.scope() == "shared":
            loads.append(load)

    tvm_ffi.structural_walk(expression, (TensorLoad, visit), order="post")
    return loads


def _variables(expressions: list[Any]) -> list[Any]:
    import tvm_ffi
    from tvm import tirx

    found: list[Any] = []
    for expression in expressions:
        tvm_ffi.structural_walk(expression, (tirx.Var, found.append), order="post")
    return found


def _count(access: _Access, launch: Launch) -> SharedAccess:
    if np.dtype(str(access.buffer.dtype)).itemsize != BANK_BYTES:
        raise AnalysisError(f"shared accesses of {access.buffer.dtype}")
    used = _variables([access.index, *(condition for condition, _ in access.scope.conditions)])
    loops = [loop for loop in access.scope.loops if any(loop[0].same_as(variable) for variable in used)]
    repeats = int(np.prod([n for _, _, n in access.scope.loops])) // int(np.prod([n for _, _, n in loops]))
    iterations = int(np.prod([n for _, _, n in loops]))
    if iterations > MAX_ITERATIONS:
        raise AnalysisError(f"an access of {access.buffer.name} depends on {iterations:,} loop iterations")

    thread = np.arange(launch.threads)
    x, y, _ = launch.block
    values: dict[Any, Any] = {}
    for tag, variable in access.scope.axes.items():
        lane = {"threadIdx.x": thread % x, "threadIdx.y": thread // x % y, "threadIdx.z": thread // (x * y)}
        values[variable] = lane.get(tag, 0)
    grids = np.meshgrid(*(np.arange(first, first + n) for _, first, n in loops), indexing="ij")
    for (variable, _, _), grid in zip(loops, grids, strict=True):
        values[variable] = grid.reshape(-1, 1)

    shape = (iterations, launch.threads)
    words = np.broadcast_to(evaluate(access.index, values), shape)
    active = np.ones(shape, bool)
    for condition, outcome in access.scope.conditions:
        active = active & (evaluate(condition, values) == outcome)
    requests, wavefronts = bank_wavefronts(words, active)
    return SharedAccess(access.kind, str(access.buffer.name), repeats * requests, repeats * wavefronts)


def bank_wavefronts(words: np.ndarray, active: np.ndarray) -> tuple[int, int]:
    """Requests and wavefronts of 4-byte shared accesses.

    Args:
        words: the word index that each thread touches, shape (accesses, threads of the block).
        active: whether the thread takes part, same shape.

    Returns:
        How many warp-wide requests have an active thread, and how many wavefronts they take in all.
    """
    padding = ((0, 0), (0, -words.shape[1] % WARP))
    words = np.pad(words, padding).reshape(-1, WARP)
    active = np.pad(active, padding).reshape(-1, WARP)
    words = np.sort(np.where(active, words, -1), axis=1)
    first = (words >= 0) & (np.diff(words, axis=1, prepend=-1) != 0)  # of the threads that share a word
    warp = np.broadcast_to(np.arange(len(words))[:, None], words.shape)
    per_bank = np.zeros((len(words), BANKS), int)
    np.add.at(per_bank, (warp[first], words[first] % BANKS), 1)
    return int(active.any(axis=1).sum()), int(per_bank.max(axis=1, initial=0).sum())
