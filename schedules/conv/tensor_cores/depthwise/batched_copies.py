"""Copies to shared memory whose loads are under way together, before any of them is stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tvmconv.arithmetic import ceil_div

from ....tir_builder import Expr, if_, serial_loop

CopyAction = Callable[[int, Expr], None]  # from an item's number in its batch, and its index


@dataclasses.dataclass(frozen=True)
class BatchedCopies:
    """Items that the threads of a CTA load, a batch at a time, before they store them to shared memory."""

    thread: Expr
    num_threads: int
    count: int
    batch: int  # items of a thread in a batch
    load: CopyAction
    put: CopyAction

    def emit(self) -> None:
        """Emit all copies."""
        with serial_loop(self._num_batches, "batch") as number:
            self._emit_batch(self.load, number)
            self._emit_batch(self.put, number)

    def load_first(self) -> None:
        """Emit the loads of the first batch."""
        self._emit_batch(self.load, 0)

    def finish(self) -> None:
        """Emit what `load_first` leaves."""
        self._emit_batch(self.put, 0)
        if self._num_batches > 1:
            with serial_loop(self._num_batches - 1, "batch") as number:
                self._emit_batch(self.load, number + 1)
                self._emit_batch(self.put, number + 1)

    @property
    def _num_batches(self) -> int:
        return ceil_div(self.count, self.batch * self.num_threads)

    def _emit_batch(self, action: CopyAction, number: Expr) -> None:
        for i in range(self.batch):
            item = (number * self.batch + i) * self.num_threads + self.thread
            with if_(True if self.count % (self.batch * self.num_threads) == 0 else item < self.count):
                action(i, item)
