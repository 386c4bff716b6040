"""Filters that a persistent CTA keeps in shared memory, because all of its work tiles have the same channels.

If a reduction is short, the filters of a tile are as large as its pixels, and loading them for each tile doubles the
traffic from L2 to shared memory. Here TMA loads them once, at the start.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....tir_builder import Expr, Register, emit_call, emit_ptx, to_uint32


@dataclass(frozen=True)
class ResidentFilters:
    """The K tiles of operand B, one after another in shared memory."""

    address: Expr  # shared-memory address of the first K tile
    barrier: Expr  # address of the barrier that signals that all K tiles are there
    tile_bytes: int  # bytes of a K tile
    num_tiles: int  # number of K tiles
    next_address: Register  # address of the K tile that this thread multiplies next

    @classmethod
    def allocate(cls, address: Expr, barrier: Expr, tile_bytes: int, num_tiles: int) -> ResidentFilters:
        """Allocate the register of a thread's position."""
        return cls(address, barrier, tile_bytes, num_tiles, Register("filters", "uint32"))

    def init_barriers(self) -> None:
        """Initialize the barrier; called by one thread before the CTA synchronizes."""
        emit_ptx("mbarrier.init.shared.b64", self.barrier, T.uint32(1))

    def producer_expect(self) -> None:
        """Arrive at the barrier with the number of bytes that TMA will write; run by one thread."""
        total_bytes = T.uint32(self.tile_bytes * self.num_tiles)
        emit_ptx("mbarrier.arrive.expect_tx.shared.b64", self.barrier, total_bytes)

    def tile_address(self, k_tile: Expr) -> Expr:
        """Return the shared-memory address of a K tile."""
        return self.address + to_uint32(k_tile * self.tile_bytes)

    def consumer_wait(self) -> None:
        """Wait until all K tiles are there."""
        emit_call(T.cuda.mbarrier_wait(self.barrier, 0))

    def rewind(self) -> None:
        """Move to the first K tile."""
        self.next_address.set(self.address)

    def advance(self) -> Expr:
        """Return the address of the next K tile in a register, and move on behind it."""
        address = Register("filter_tile", "uint32", self.next_address.value)
        self.next_address.set(address.value + T.uint32(self.tile_bytes))
        return address.value
