"""A CTA: its place in the grid and in its cluster, its threads, and its dynamic shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.target import WARP_SIZE

from ....tir_builder import Expr, Register, allocate, emit_ptx, thread_axis, to_uint32
from .atoms import ALL_LANES, ThreadPosition
from .tile_scheduler import Cluster


@dataclass(frozen=True)
class Cta:
    """Position of a thread in the grid."""

    index: Expr  # index of the CTA among those that compute different tiles
    split: Expr  # index among the CTAs that split the reduction of a tile
    cluster: Cluster  # cluster of the CTAs that share operands
    thread: ThreadPosition  # position in the CTA


@contextmanager
def open_cta(
    num_ctas: int,
    num_threads: int,
    num_splits: int,
    *,
    splits_in_cluster: bool,
    cluster_shape: tuple[int, int] = (1, 1),
) -> Iterator[Cta]:
    """Open the loops over CTAs and threads.

    Args:
        num_ctas: CTAs that compute different tiles.
        num_threads: Threads per CTA.
        num_splits: CTAs that split the reduction of a tile.
        splits_in_cluster: Whether these form a cluster.
        cluster_shape: CTAs along M and along N of a cluster that shares operands.
    """
    m, n = cluster_shape
    with ExitStack() as axes:
        split = axes.enter_context(thread_axis(num_splits, "blockIdx.z"))
        if splits_in_cluster:
            axes.enter_context(thread_axis(num_splits, "clusterCtaIdx.z"))
        index = axes.enter_context(thread_axis(num_ctas, "blockIdx.x"))
        rank = axes.enter_context(thread_axis(m * n, "clusterCtaIdx.x")) if m * n > 1 else 0
        thread = ThreadPosition(axes.enter_context(thread_axis(num_threads, "threadIdx.x")))
        yield Cta(index, split, Cluster(m, n, rank), thread)


def allow_dependent_launch() -> None:
    """Wait for the end of the previous launch, and let the next one start early, which waits likewise.

    Source: PTX ISA, "griddepcontrol".
    """
    emit_ptx("griddepcontrol.wait")
    emit_ptx("griddepcontrol.launch_dependents")


def allocate_smem(nbytes: int, alignment: int = 1) -> Expr:
    """Allocate dynamic shared memory, and return its address rounded up to a multiple of `alignment` bytes."""
    smem = allocate("smem", nbytes // 4, "uint32", "shared.dyn")
    address = T.cuda.cvta_generic_to_shared(smem.access_ptr("rw"))
    if alignment > 1:
        address = (address + to_uint32(alignment - 1)) & T.uint32(2**32 - alignment)
    return Register("smem_base", "uint32", address).value


def broadcast_to_warp(address: Expr) -> Expr:
    """Return a shared-memory address in a register of which ptxas knows that all threads of a warp have the same value.

    It computes the address once then, and not before each copy of TMA. All threads of a warp run this.
    """
    shuffled = T.tvm_warp_shuffle(T.uint32(ALL_LANES), address, 0, WARP_SIZE, WARP_SIZE)
    return Register("warp_smem_base", "uint32", shuffled).value
