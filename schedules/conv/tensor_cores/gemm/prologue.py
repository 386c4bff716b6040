"""What a CTA does before its warps take their roles: barriers, tensor maps, and the end of the previous launch."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....tir_builder import Expr, emit_call, if_
from .cta import allow_dependent_launch
from .pipelines import TmaPipeline, fence_barrier_init
from .tma import prefetch_tensor_maps


def emit_prologue(
    pipeline: TmaPipeline, thread: Expr, tensor_maps: Sequence[Expr] = (), prefetching_thread: int = 0
) -> None:
    """Initialize the barriers of a CTA that is no part of a cluster, and wait for the results of the previous launch.

    Args:
        pipeline: Pipeline of the CTA.
        thread: Index of the thread.
        tensor_maps: Tensor maps to prefetch.
        prefetching_thread: Thread that prefetches them, which copies the first tiles as well.
    """
    if tensor_maps:
        with if_(thread == prefetching_thread):
            prefetch_tensor_maps(tensor_maps)
    with if_(thread == 0):
        pipeline.init_barriers()
        fence_barrier_init()
    emit_call(T.cuda.cta_sync())
    allow_dependent_launch()
