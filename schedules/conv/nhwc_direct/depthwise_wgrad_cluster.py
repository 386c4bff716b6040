"""Gradients of the weights of small depthwise layers, whose parts are the CTAs of a cluster.

The kernel is that of `depthwise_nhwc`. Of small images, a second kernel that adds the parts takes a tenth to a sixth of
the time. Here the CTAs of a cluster add their sums (`cluster_sums`), and store the gradient.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, all_of
from tvmconv.space import Knobs
from tvmconv.target import H200
from tvmconv.workloads.conv_gradient import WeightGradient

from ...tir_builder import build_schedule, thread_axis
from ..gradient_operators import WGRAD
from ..reduction import FLOAT_DTYPES, has_filter_per_channel
from ..tensor_cores.gemm.cta import allocate_smem
from .cluster_sums import ClusterSums
from .wgrad_config import ClusterWgradConfig
from .wgrad_kernel import SumLayout, WgradKernel
from .wgrad_knobs import compute_usage, declare_knobs, list_starting_configs


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
    """Emitter of the kernel."""

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
        config = self.config
        smem = allocate_smem(int(config.dynamic_shared_bytes))
        sizes = int(config.num_parts), int(config.sums_per_cta), int(config.sums_per_rank)
        self.cluster_sums = ClusterSums(smem, self.part, *sizes)
        self.cluster_sums.announce()
        super().accumulate_pixels()

    def store_sums(self) -> None:
        """Send the sums of the CTA to those that add them up, and store the CTA's share of the gradient."""
        config, layout = self.config, self.layout
        owners = config.threads_taps * config.threads_c
        self.cluster_sums.begin()
        super().store_sums()

        def store_result(index: Any, value: Any) -> None:
            owner = index % owners
            filter_tile = self.first_filter_tile + owner // config.threads_c
            layout.store_result(index // owners, filter_tile, self.first_unit + owner % config.threads_c, value)

        thread = self.pixel_thread * owners + self.thread_of_sum
        self.cluster_sums.add_up(thread, int(config.num_threads), store_result)

    def store_sum(self, number: Any, filter_tile: Any, unit: Any, value: Any) -> None:
        """Send a sum of the CTA's part to the CTA that adds it up."""
        config = self.config
        owner = (filter_tile - self.first_filter_tile) * config.threads_c + unit - self.first_unit
        self.cluster_sums.send(number * (config.threads_taps * config.threads_c) + owner, value)
