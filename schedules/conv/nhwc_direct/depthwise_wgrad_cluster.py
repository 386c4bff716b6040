"""Gradients of the weights of small depthwise layers, whose parts are the CTAs of a cluster.

The kernel is that of `depthwise_nhwc`. Of small images, a second kernel that adds the parts takes a tenth to a sixth of
the time. Here the CTAs of a cluster send their sums to each other through distributed shared memory. Each adds up a
share of them in the order of the parts, so that each run returns the same bits, and stores the gradient.

Source: PTX ISA, "mapa", "st" and "barrier.cluster".
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from tvm.s_tir import Schedule
from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, all_of
from tvmconv.space import Knobs
from tvmconv.target import H200
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import ACCUMULATOR

from ...tir_builder import (
    Register,
    allocate,
    build_schedule,
    emit_ptx,
    if_,
    items_loop,
    load_shared,
    store,
    thread_axis,
    to_uint32,
)
from ..gradient_operators import WGRAD
from ..reduction import FLOAT_DTYPES, has_filter_per_channel
from ..tensor_cores.gemm.cta import allocate_smem
from ..tensor_cores.gemm.pipelines import map_to_cta
from .wgrad_config import ClusterWgradConfig
from .wgrad_kernel import SumLayout, WgradKernel
from .wgrad_knobs import compute_usage, declare_knobs, list_starting_configs

FLOAT_BYTES = 4


def has_small_operands(w: WeightGradient) -> bool:
    """Return whether each channel has one filter, and the operands stay in a quarter of the L2 cache."""
    return w.groups > 1 and w.groups == w.C and bool(w.min_bytes <= H200.architecture.l2_bytes // 4)


@schedule(
    *WGRAD,
    dtypes=FLOAT_DTYPES,
    usage=functools.partial(compute_usage, in_cluster=True),
    condition=all_of(CHANNELS_LAST_LAYOUT, has_filter_per_channel),
    search_if=has_small_operands,
    starting_configs=functools.partial(list_starting_configs, in_cluster=True),
    device_kinds=("cuda",),
    min_arch=90,
)
def depthwise_cluster(s: Schedule, w: WeightGradient, k: Knobs) -> Schedule:
    """Sum products of dY and X in registers, over the threads of a CTA, and over the CTAs of a cluster."""
    config = declare_knobs(w, k, in_cluster=True)
    assert isinstance(config, ClusterWgradConfig)

    def emit(arguments: dict[str, Any]) -> None:
        ClusterWgradKernel(config, arguments, SumLayout(config, arguments), None).emit()

    return build_schedule(w, emit)


class ClusterWgradKernel(WgradKernel):
    """Emitter of the kernel.

    Threads of a warp may have different work before a barrier of the cluster, so that its forms are not `aligned`.
    """

    config: ClusterWgradConfig

    def open_blocks(self, stack: contextlib.ExitStack) -> tuple[Any, Any]:
        """Open the loops over the CTAs; the parts of the same sums are a cluster."""
        config = self.config
        num_parts = int(config.num_parts)
        part = stack.enter_context(thread_axis(num_parts, "blockIdx.y"))
        stack.enter_context(thread_axis(num_parts, "clusterCtaIdx.y"))
        block = stack.enter_context(thread_axis(config.filter_blocks * config.unit_blocks, "blockIdx.x"))
        return block, part

    def accumulate_pixels(self) -> None:
        """Walk over the thread's tiles of pixels, after the CTA has told the others that it runs."""
        self.cluster_sums = allocate_smem(int(self.config.dynamic_shared_bytes))
        emit_ptx("barrier.cluster.arrive.relaxed")
        super().accumulate_pixels()

    def store_sums(self) -> None:
        """Send the sums of the CTA to those that add them up, and store the CTA's share of the gradient."""
        config, layout = self.config, self.layout
        owners = config.threads_taps * config.threads_c
        emit_ptx("barrier.cluster.wait.acquire")  # all CTAs of the cluster run
        self.remote = Register("remote_sum", "uint32")
        super().store_sums()
        emit_ptx("barrier.cluster.arrive.release")
        emit_ptx("barrier.cluster.wait.acquire")
        total, value = allocate("cluster_total", 1, ACCUMULATOR), allocate("cluster_sum", 1, "uint32")
        thread = self.pixel_thread * owners + self.thread_of_sum
        with items_loop(int(config.sums_per_rank), thread, int(config.num_threads)) as item:
            index = self.part * config.sums_per_rank + item
            is_sum = index < config.sums_per_cta
            with if_(True if config.num_parts * config.sums_per_rank == config.sums_per_cta else is_sum):
                store(total, 0, T.float32(0))
                for part in range(int(config.num_parts)):
                    load_shared(value, self.locate_sum(part, item), FLOAT_BYTES)
                    store(total, 0, total[0] + T.reinterpret(ACCUMULATOR, value[0]))
                owner = index % owners
                filter_tile = self.first_filter_tile + owner // config.threads_c
                layout.store_result(index // owners, filter_tile, self.first_unit + owner % config.threads_c, total[0])

    def locate_sum(self, part: Any, place: Any) -> Any:
        """Return the address of a part's sum among those that a CTA adds up."""
        return self.cluster_sums + to_uint32((part * self.config.sums_per_rank + place) * FLOAT_BYTES)

    def store_sum(self, number: Any, filter_tile: Any, unit: Any, value: Any) -> None:
        """Send a sum of the CTA's part to the CTA that adds it up."""
        config = self.config
        owner = (filter_tile - self.first_filter_tile) * config.threads_c + unit - self.first_unit
        index = number * (config.threads_taps * config.threads_c) + owner
        rank, place = index // config.sums_per_rank, index % config.sums_per_rank
        map_to_cta(self.remote, self.locate_sum(self.part, place), rank)
        emit_ptx("st.shared::cluster.b32", self.remote.value, T.reinterpret("uint32", value))
