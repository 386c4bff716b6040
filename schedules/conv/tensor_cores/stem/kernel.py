"""Kernel of `stem`: persistent blocks that load the input rows of the next tiles while they compute one."""

from __future__ import annotations

from contextlib import ExitStack

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....tir_builder import emit_call, serial_loop, store
from .epilogue import StemEpilogue
from .input_loader import StemInputLoader
from .mainloop import StemMainloop
from .weight_loader import StemWeightLoader


class StemKernel(StemInputLoader, StemWeightLoader, StemMainloop, StemEpilogue):
    """The kernel: its parts in execution order."""

    def emit(self) -> None:
        """Emit the kernel."""
        with ExitStack() as axes:
            self.bind_axes(axes)
            self.allocate_buffers()
            self.emit_prologue()
            with serial_loop(
                (int(self.config.num_pixel_tiles) - self.cta_idx + self.num_pixel_ctas - 1) // self.num_pixel_ctas, "i"
            ) as round_idx:
                self.wait_inputs()
                next_tile = round_idx + self.num_input_buffers - 1
                if self.num_input_buffers > 1:
                    self.load_tile_if_valid(self.compute_tile_idx(next_tile), next_tile % self.num_input_buffers)
                self.init_accumulators()
                self.run_mainloop()
                self.advance_input_buffer(round_idx % self.num_input_buffers)
                self.apply_and_store(self.compute_tile_idx(round_idx))

    def emit_prologue(self) -> None:
        """Emit the work that a block does once: it requests the first inputs and spreads the weight meanwhile."""
        store(self.smem_base, 0, T.cuda.cvta_generic_to_shared(self.smem.access_ptr("rw")))
        self.copy_filters()
        emit_call(T.ptx.cp.async_.commit_group())
        for prefetched_tile in range(self.num_prefetched_tiles):
            self.load_tile_if_valid(self.compute_tile_idx(prefetched_tile), prefetched_tile)
        self.load_channel_args()
        emit_call(T.ptx.cp.async_.wait_group(self.num_prefetched_tiles if self.row_layout.can_copy_async else 0))
        emit_call(T.cuda.cta_sync())
        self.spread_filters()
        self.init_lane_addresses()
        if self.config.weights_in_registers:
            emit_call(T.cuda.cta_sync())
            for k_step in range(self.row_layout.num_k_steps):
                self.load_weight_fragments(k_step, k_step)
