"""Kernel of `stem`: persistent CTAs that load the input rows of the next tiles while they compute one."""

from __future__ import annotations

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....tir_builder import Buffer, emit_call, serial_loop
from .cta import open_cta
from .epilogue import StemEpilogue
from .input_loader import StemInputLoader
from .mainloop import StemMainloop
from .tile_config import StemTileConfig
from .weight_loader import copy_filters, spread_filters


def emit_kernel(config: StemTileConfig, arguments: dict[str, Buffer]) -> None:
    """Emit the kernel."""
    num_buffers, num_prefetched = int(config.num_input_buffers), int(config.num_prefetched_tiles)
    num_ctas = int(config.num_pixel_ctas)
    with open_cta(config) as cta:
        loader, mainloop = StemInputLoader(cta, arguments["X"]), StemMainloop(cta)
        epilogue = StemEpilogue(cta, arguments)
        copy_filters(cta, arguments["K"])  # the first inputs are requested while the weight is spread
        epilogue.copy_channel_args()
        emit_call(T.ptx.cp.async_.commit_group())
        for prefetched in range(num_prefetched):
            loader.load_if_valid(cta.tile_at(prefetched), prefetched)
        emit_call(T.ptx.cp.async_.wait_group(num_prefetched if cta.row_layout.can_copy_async else 0))
        emit_call(T.cuda.cta_sync())
        spread_filters(cta)
        mainloop.init_lane_addresses()
        if config.weights_in_registers:
            emit_call(T.cuda.cta_sync())
            mainloop.load_all_weights()
        num_rounds = (int(config.num_pixel_tiles) - cta.index + num_ctas - 1) // num_ctas
        with serial_loop(num_rounds, "i") as tile_round:
            loader.wait()
            if num_buffers > 1:
                next_round = tile_round + num_buffers - 1
                loader.load_if_valid(cta.tile_at(next_round), next_round % num_buffers)
            epilogue.init_accumulators(mainloop.accumulators)
            mainloop.run()
            mainloop.advance_input_buffer(tile_round % num_buffers)
            epilogue.store(mainloop.accumulators, cta.tile_at(tile_round))
