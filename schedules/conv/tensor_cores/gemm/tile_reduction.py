"""Interface of reductions that pass the sums of a work tile through shared memory before they are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....tir_builder import Buffer, Expr, emit_call, if_
from .atoms import ThreadPosition
from .epilogue_ops import EpilogueOps
from .tile_scheduler import WorkTile


class TileReduction(ABC):
    """Adds up the accumulators of several threads or CTAs, applies the epilogue and stores the outputs of a tile."""

    num_threads: int  # threads that hold accumulators

    def reduce_and_store(
        self,
        accumulators: Sequence[Expr],
        tile: WorkTile,
        split: Expr,
        thread: ThreadPosition,
        smem: Expr,
        ops: EpilogueOps,
        arguments: Mapping[str, Buffer],
    ) -> None:
        """Reduce a tile; run by all threads of all CTAs, after the mainloop whose stages the accumulators replace.

        Args:
            accumulators: This thread's accumulators.
            tile: The work tile.
            split: Rank of this CTA among those that share the tile.
            thread: Position of this thread.
            smem: Shared-memory address of the accumulators.
            ops: The epilogue.
            arguments: Argument buffers by name.
        """
        holds_accumulators = thread.thread < self.num_threads
        self._wait_for_reads()
        with if_(holds_accumulators):
            self._stage(accumulators, split, thread, smem)
        self._sync()
        with if_(holds_accumulators):
            self._store(tile, split, thread, smem, ops, arguments)

    def _wait_for_reads(self) -> None:
        """Wait until all threads that share the tile have read the stages, which the accumulators replace."""
        self._sync()

    def _sync(self) -> None:
        """Wait for all threads that share the tile, which are by default those of one CTA."""
        emit_call(T.cuda.cta_sync())

    @abstractmethod
    def _stage(self, accumulators: Sequence[Expr], split: Expr, thread: ThreadPosition, smem: Expr) -> None:
        """Store this thread's accumulators to shared memory."""

    @abstractmethod
    def _store(
        self,
        tile: WorkTile,
        split: Expr,
        thread: ThreadPosition,
        smem: Expr,
        ops: EpilogueOps,
        arguments: Mapping[str, Buffer],
    ) -> None:
        """Add up the accumulators in shared memory, apply the epilogue and store the results."""
