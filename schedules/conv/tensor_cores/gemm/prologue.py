"""Prologue of a warp-specialized kernel: its barriers are initialized while the previous launch may still run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....tir_builder import Expr, emit_call, if_
from .atoms import ThreadPosition
from .cta import allow_dependent_launch
from .pipelines import fence_barrier_init, sync_cluster_relaxed
from .tile_scheduler import SINGLE_CTA, Cluster
from .tma import prefetch_tensor_maps


class BarrierOwner(Protocol):
    """A pipeline, or another object with mbarriers."""

    def init_barriers(self) -> None:
        """Initialize the barriers; called by one thread."""


def emit_prologue(
    thread: ThreadPosition,
    barrier_owners: Sequence[BarrierOwner],
    tensor_maps: Sequence[Expr],
    first_loader: int,
    cluster: Cluster = SINGLE_CTA,
) -> None:
    """Initialize the barriers, and wait for the results of the previous launch; run by all threads of a CTA.

    Args:
        thread: Position of this thread.
        barrier_owners: Pipelines and other objects whose barriers thread 0 initializes.
        tensor_maps: Tensor maps that another thread prefetches meanwhile.
        first_loader: Index of that thread, the first one that loads operands.
        cluster: CTAs that arrive at each other's barriers.
    """
    with if_(thread.thread == first_loader):
        prefetch_tensor_maps(tensor_maps)
    with if_(thread.thread == 0):
        for owner in barrier_owners:
            owner.init_barriers()
        fence_barrier_init()
    if cluster.size > 1:
        sync_cluster_relaxed()
    else:
        emit_call(T.cuda.cta_sync())
    allow_dependent_launch()
