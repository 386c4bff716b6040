"""Sums over the CTAs of a cluster, which send partial sums to each other through distributed shared memory.

Each CTA adds up a share of the sums in the order of the CTAs, so that each run returns the same bits. Threads of a warp
may have different work before a barrier of the cluster, so that its forms are not `aligned`.

Source: PTX ISA, "mapa", "st" and "barrier.cluster".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads.dtypes import ACCUMULATOR

from ...tir_builder import Expr, Register, allocate, emit_ptx, if_, items_loop, load_shared, store, to_uint32
from ..tensor_cores.gemm.pipelines import map_to_cta

FLOAT_BYTES = 4


@dataclass
class ClusterSums:
    """Shared memory of a CTA for the sums that it adds up: (CTAs, sums)."""

    smem: Expr  # its address
    rank: Expr  # rank of the CTA
    num_ctas: int  # CTAs of the cluster
    sums_per_cta: int  # partial sums of a CTA
    sums_per_rank: int  # sums that a CTA adds up over all of them

    def announce(self) -> None:
        """Tell the other CTAs that this one runs, without waiting for them."""
        emit_ptx("barrier.cluster.arrive.relaxed")

    def begin(self) -> None:
        """Wait until all CTAs of the cluster run, before sums are sent to them."""
        emit_ptx("barrier.cluster.wait.acquire")
        self._remote = Register("remote_sum", "uint32")

    def send(self, index: Expr, value: Expr) -> None:
        """Send a partial sum to the CTA that adds it up."""
        rank, place = index // self.sums_per_rank, index % self.sums_per_rank
        map_to_cta(self._remote, self._locate(self.rank, place), rank)
        emit_ptx("st.shared::cluster.b32", self._remote.value, T.reinterpret("uint32", value))

    def add_up(self, thread: Expr, num_threads: int, store_sum: Callable[[Expr, Expr], None]) -> None:
        """Wait for the sums of all CTAs, add up the share of this one, and store it by `store_sum(index, value)`."""
        emit_ptx("barrier.cluster.arrive.release")
        emit_ptx("barrier.cluster.wait.acquire")
        total, value = allocate("cluster_total", 1, ACCUMULATOR), allocate("cluster_sum", 1, "uint32")
        with items_loop(self.sums_per_rank, thread, num_threads) as item:
            index = self.rank * self.sums_per_rank + item
            with if_(True if self.num_ctas * self.sums_per_rank == self.sums_per_cta else index < self.sums_per_cta):
                store(total, 0, T.float32(0))
                for rank in range(self.num_ctas):
                    load_shared(value, self._locate(rank, item), FLOAT_BYTES)
                    store(total, 0, total[0] + T.reinterpret(ACCUMULATOR, value[0]))
                store_sum(index, total[0])

    def _locate(self, rank: Expr, place: Expr) -> Expr:
        """Return the address of a sum of a CTA among those that a CTA adds up."""
        return self.smem + to_uint32((rank * self.sums_per_rank + place) * FLOAT_BYTES)
