"""Kernel of `hopper`: a producer warp, consumer warpgroups, and a warp that loads the residual."""

from __future__ import annotations

from contextlib import ExitStack

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.target import WARP_SIZE

from ....tir_builder import emit_call, emit_ptx, if_, logical_and
from .consumer import HopperConsumer
from .epilogue import HopperEpilogue
from .producer import HopperProducer
from .tma_requirements import WARPGROUP_THREADS


class HopperKernel(HopperProducer, HopperConsumer, HopperEpilogue):
    """The kernel with its warp-specialized roles."""

    def emit(self) -> None:
        """Emit the kernel."""
        config = self.config
        self.declare_tensor_maps()
        with ExitStack() as axes:
            self.bind_axes(axes)
            self.allocate_buffers()
            self.emit_prologue()
            warp_idx = self.thread_idx // WARP_SIZE
            with if_(warp_idx < self.num_consumer_threads // WARP_SIZE):
                self.for_each_work_tile(self.run_consumer)
                if not self.uses_smem_reduction:
                    with if_(self.thread_idx % WARPGROUP_THREADS == 0):  # TMA reads shared memory until here
                        emit_ptx("cp.async.bulk.wait_group.read", 0)
            with if_(logical_and(warp_idx == self.num_consumer_threads // WARP_SIZE, self.lane_idx == 0)):
                self.for_each_work_tile(self.run_producer)
            if self.residual_name:
                with if_(logical_and(warp_idx == self.num_consumer_threads // WARP_SIZE + 1, self.lane_idx == 0)):
                    self.for_each_work_tile(self.load_residual)
            if self.uses_smem_reduction:
                self.reduce_over_cluster()
            elif config.multicast_size > 1:  # a CTA must not exit before the others stop writing to its shared memory
                emit_call(T.cuda.cluster_sync())

    def run_consumer(self) -> None:
        """Emit a warpgroup's work for one tile."""
        self.prefetch_channel_args()
        self.run_mainloop()
        if self.uses_smem_reduction:
            return
        self.store_channel_args_to_smem()
        self.store_tile()
