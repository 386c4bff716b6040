"""Roles of the warps of a warp-specialized CTA, and the registers that producers leave to consumers.

Source: CUTLASS, `include/cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative.hpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tvmconv.arithmetic import round_up
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE

from ....tir_builder import emit_alternatives, if_
from .atoms import ThreadPosition, setmaxnreg


@dataclass(frozen=True)
class WarpRoles:
    """What the warps of a CTA do: consumer warpgroups come first, then a warp for operands, then those for a residual.

    Attributes:
        consumer_warpgroups: Warpgroups that multiply and store.
        residual_warps: Warps that load a residual: one for each work tile that is computed at a time.
        registers: Registers per thread of producers and of consumers, which are moved between whole warpgroups; None
            leaves all threads the same number.
    """

    consumer_warpgroups: int
    residual_warps: int
    registers: tuple[int, int] | None

    @property
    def consumer_threads(self) -> int:
        """Number of consumer threads; the first thread after them loads operands."""
        return self.consumer_warpgroups * WARPGROUP_SIZE

    @property
    def producer_warp(self) -> int:
        """Warp that loads operands."""
        return self.consumer_threads // WARP_SIZE

    @property
    def num_threads(self) -> int:
        """Threads per CTA."""
        num_threads = self.consumer_threads + WARP_SIZE * (1 + self.residual_warps)
        return round_up(num_threads, WARPGROUP_SIZE) if self.registers else num_threads

    @contextmanager
    def consumers(self, thread: ThreadPosition) -> Iterator[None]:
        """Open the branch of the consumer warpgroups."""
        with if_(thread.warp < self.producer_warp):
            if self.registers:
                setmaxnreg("inc", self.registers[1])
            yield

    def emit_producers(self, thread: ThreadPosition, loaders: Sequence[Callable[[], None]]) -> None:
        """Emit what the first thread of each producer warp runs: the loader of operands, then those of a residual."""
        branches = [(thread.is_first_of_warp(self.producer_warp + i), loader) for i, loader in enumerate(loaders)]
        if not self.registers:
            for branch in branches:
                emit_alternatives([branch])
            return
        with if_(thread.warp >= self.producer_warp):
            setmaxnreg("dec", self.registers[0])
            emit_alternatives(branches)
