"""Split reduction within a cluster by columns: each CTA receives the sums of some columns, in its accumulators.

A CTA pushes its partial sums of a slice of the columns to the CTA that adds them up, where the same thread needs them.
The sums stay fragments of accumulators, so that any epilogue stores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....tir_builder import Buffer, Expr, Register, allocate, emit_call, emit_ptx, if_, store, to_uint32
from ..implicit_gemm_shape import ACCUMULATOR_BYTES
from .atoms import ThreadPosition, WgmmaAtom
from .pipelines import map_to_cta, sync_cluster_relaxed

VECTOR = 4  # sums that a thread stores at a time


@dataclass(frozen=True)
class ColumnReduction:
    """Adds up the partial sums of the CTAs of a cluster, of which each keeps some columns."""

    atom: WgmmaAtom  # the wgmma instruction, whose columns are divided
    m_atoms: int  # instructions of a warpgroup along M
    num_ctas: int  # CTAs of the cluster
    num_threads: int  # threads that hold accumulators

    @property
    def slice_atom(self) -> WgmmaAtom:
        """The instruction that would compute the columns of one CTA."""
        return replace(self.atom, n=self.atom.n // self.num_ctas)

    def _offset(self, source: Expr, vector: int, thread: ThreadPosition) -> Expr:
        """Return the shared-memory offset of sums from a CTA."""
        vectors_per_cta = self.m_atoms * self.slice_atom.num_accumulators // VECTOR
        index = (source * vectors_per_cta + vector) * self.num_threads + thread.thread
        return to_uint32(index * (VECTOR * ACCUMULATOR_BYTES))

    def reduce(self, accumulators: Buffer, rank: Expr, thread: ThreadPosition, smem: Expr) -> Sequence[Expr]:
        """Return the sums of this CTA's columns; run by all threads of the cluster, after the mainloop."""
        num_sums = self.slice_atom.num_accumulators
        sums, vector = allocate("sums", self.m_atoms * num_sums, "float32"), allocate("partial", VECTOR, "float32")
        remote, holds_sums = Register("remote_sums", "uint32"), thread.thread < self.num_threads
        sync_cluster_relaxed()
        with if_(holds_sums):
            for target in range(self.num_ctas):
                map_to_cta(remote, smem + self._offset(rank, 0, thread), target)
                for i in range(0, self.m_atoms * num_sums, VECTOR):
                    m_atom, element = divmod(i, num_sums)
                    first = m_atom * self.atom.num_accumulators + target * num_sums + element
                    offset = to_uint32(i * self.num_threads * ACCUMULATOR_BYTES)
                    partial_sums = [accumulators[first + e] for e in range(VECTOR)]
                    emit_ptx("st.shared::cluster.v4.b32", remote.value + offset, *partial_sums)
        emit_call(T.cuda.cluster_sync())
        with if_(holds_sums):
            for i in range(0, self.m_atoms * num_sums, VECTOR):
                for source in range(self.num_ctas):
                    address = smem + self._offset(source, i // VECTOR, thread)
                    emit_ptx("ld.shared.v4.b32", *(vector[e] for e in range(VECTOR)), address)
                    for e in range(VECTOR):
                        store(sums, i + e, vector[e] if source == 0 else sums[i + e] + vector[e])
        return [sums[i] for i in range(self.m_atoms * num_sums)]
