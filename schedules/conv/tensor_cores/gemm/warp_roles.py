"""Roles of the warps of a warp-specialized CTA, and the registers that producers leave to consumers.

Source: CUTLASS, `include/cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative.hpp`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import round_up
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE

from ....tir_builder import Expr, emit_alternatives, if_
from .atoms import ThreadPosition, elect_thread, setmaxnreg


@dataclass(frozen=True)
class WarpRoles:
    """What the warps of a CTA do: consumer warpgroups come first, then warps for operands, then those for a residual.

    Attributes:
        consumer_warpgroups: Warpgroups that multiply and store.
        residual_warps: Warps that load a residual: one for each work tile that is computed at a time.
        registers: Registers per thread of producers and of consumers, which are moved between whole warpgroups; None
            leaves all threads the same number.
        operand_warps: Warps that load operands. A single one issues copies of TMA by one thread; of several, all
            threads run the loader.
    """

    consumer_warpgroups: int
    residual_warps: int
    registers: tuple[int, int] | None
    operand_warps: int = 1

    @property
    def consumer_threads(self) -> int:
        """Number of consumer threads; the first ones after them load operands."""
        return self.consumer_warpgroups * WARPGROUP_SIZE

    @property
    def producer_warp(self) -> int:
        """First warp that loads operands."""
        return self.consumer_threads // WARP_SIZE

    @property
    def num_threads(self) -> int:
        """Threads per CTA."""
        num_threads = self.consumer_threads + WARP_SIZE * (self.operand_warps + self.residual_warps)
        return round_up(num_threads, WARPGROUP_SIZE) if self.registers else num_threads

    @contextmanager
    def consumers(self, thread: ThreadPosition) -> Iterator[None]:
        """Open the branch of the consumer warpgroups."""
        with if_(thread.warp < self.producer_warp):
            if self.registers:
                setmaxnreg("inc", self.registers[1])
            yield

    def emit_producers(self, thread: ThreadPosition, loaders: Sequence[Callable[[], None]]) -> None:
        """Emit what producers run: the loader of operands, then those of a residual, by one thread each."""
        load_operands, *load_residuals = loaders
        first_residual_warp = self.producer_warp + self.operand_warps
        loader_by_warp = {first_residual_warp + i: load for i, load in enumerate(load_residuals)}
        branches: list[tuple[Expr, Callable[[], None]]] = []
        if self.operand_warps > 1:
            is_loader = T.And(thread.warp >= self.producer_warp, thread.warp < first_residual_warp)
            branches.append((is_loader, load_operands))
        else:
            loader_by_warp = {self.producer_warp: load_operands} | loader_by_warp
        for warp, load in loader_by_warp.items():
            branches.append((thread.warp == warp, functools.partial(_run_by_one_thread, load)))
        if not self.registers:
            for branch in branches:
                emit_alternatives([branch])
            return
        with if_(thread.warp >= self.producer_warp):
            setmaxnreg("dec", self.registers[0])
            emit_alternatives(branches)


def _run_by_one_thread(emit: Callable[[], None]) -> None:
    with elect_thread():
        emit()
