"""What each knob of the built-in schedules means: its effect, its unit, and its special values.

Schedules that share a knob share its description, unless `OWN_DESCRIPTIONS` has another one for (schedule, knob).
"""

from __future__ import annotations

DIRECT_TILE = "(block, virtual thread, thread, local): CTAs; strided pieces; threads of a CTA; outputs of a thread"
REDUCTION_TILE = "(step, tap): k-tiles staged in shared memory one after another; elements per k-tile"
TEXTBOOK_TILE = "(block, thread, local), with virtual threads after the block in `vthread`"
TEXTBOOK_REDUCTION_TILE = "(step, substep, tap): copies to shared memory; copies to registers; products per copy"
STRIP_TILE = "(block, thread, local): CTAs; threads of a CTA; outputs of a thread"

DESCRIPTIONS = {
    "atomics": "1 adds partial sums to one array by atomics, in any order, so that the last bits differ between runs; "
    "0 has a second kernel add them in order. Only workloads with the option `atomics` have this knob.",
    "auto_unroll_max_step": "Loops of at most this many statements are unrolled by NVCC or TVM; 0 unrolls none.",
    "block_c": "Channels of X of a CTA, whose window in shared memory all taps read.",
    "blocks_m": "CTAs that divide the filters of a wgrad.",
    "blocks_n": "CTAs that divide the channels of X in a wgrad.",
    "block_k": "Elements of the reduction per k-tile, which a CTA stages in shared memory at a time.",
    "block_k_bytes": "Bytes of the reduction per k-tile, for each pixel and each output channel.",
    "block_m": "GEMM M tile of a CTA: output pixels, or filters in a wgrad.",
    "block_n": "GEMM N tile of a CTA: output channels, or (tap, channel) in a wgrad.",
    "block_p": "Output rows per tile of a CTA.",
    "block_q": "Output columns per tile of a CTA.",
    "channels": "Channels per tile of a CTA.",
    "channels_per_exchange": "Channels per thread whose products are in shared memory at a time, before the output "
    "transform.",
    "cluster_m": "CTAs of a cluster along the pixels: they share the weights, and each multicasts a slice of them.",
    "cluster_n": "CTAs of a cluster along the channels: they share the pixels, and each multicasts a slice of them.",
    "columns": "Output columns per tile of a CTA.",
    "copy_order": 'Order of copies to shared memory: "contiguous" gives a thread neighbouring elements, "coalesced" '
    'gives neighbouring threads neighbouring elements, "vectorized" does so with four elements per thread.',
    "decomposition": 'How CTAs divide the work: in "data_parallel" a CTA computes whole tiles; in "split_last_wave" '
    "several CTAs also divide each tile of the last wave along the reduction, and a second kernel adds the parts; in "
    '"narrow_last_wave" they divide it along the channels.',
    "filters": 'How often a CTA loads filters: "streamed", with the pixels of a tile, or "resident", once for all.',
    "fragment_prefetch": "When a warp loads its fragments: 0 is just before their product, 1 is one slice earlier.",
    "input_eviction": 'When lines of the input leave the L2 cache: "first", before others, or in the "normal" order.',
    "input_loader": 'How a channels-first input is loaded: "converted" transposes it by a launch of its own; "tma" and '
    '"cp_async" copy pixels of filters of one tap as they lie; with "halo_smem" and "halo", warps of the kernel '
    "transpose tiles that all taps of the filter share, in shared memory or in registers.",
    "k_slices": "Consumer warpgroups that take the K tiles of a tile in turn, and add their sums in shared memory.",
    "kernel_schedule": 'How consumer warpgroups share tiles: "cooperative" computes one tile together; '
    '"cooperative_setmaxnreg" also gives them registers of the producer; "pingpong" alternates two tiles, so that one '
    "warpgroup stores while the other multiplies.",
    "lines": "Input lines that TMA loads at a time, once for all taps that need them; 0 loads all lines of a tile.",
    "load_rows_once": "1 loads each input row once and adds it to all output rows that it reaches; 0 loads it for each "
    "row of the mask, with shorter code.",
    "local_x": "Output tiles per thread.",
    "local_y": "Output channels per thread.",
    "max_ctas": "Maximum number of CTAs, which share all tiles in turn; 0 launches one CTA per tile.",
    "octets": "Octets of channels of a CTA; half octets in layers with channels first.",
    "operand_scope": 'Where operands are staged: "shared" copies the window of a tile once per CTA; "registers" reads '
    "it from global memory, through the L1 cache.",
    "output": 'How results are stored: "direct" by threads, or "staged" in shared memory, whole planes at a time.',
    "output_boxes": 'Boxes of the output: "swizzled", of up to 128 bytes per row, or "wide", without bank swizzle.',
    "output_eviction": 'When written lines leave the L2 cache: "first", before the operands, or in the "normal" order.',
    "output_stages": "Parts of the output of a warpgroup in shared memory, of which all but one may wait for stores.",
    "output_tile": "m of Winograd's F(m × m, r × r): outputs per tile and axis. A larger m takes fewer products and "
    "has a larger rounding error.",
    "parts": "CTAs among which the pixels of a sum are divided; a second kernel adds their partial sums in order.",
    "parts_in_cluster": "1 has the CTAs of a cluster add their parts; 0 has a second kernel add them.",
    "pipeline": 'How the next k-tile is loaded: "none" waits for it; "registers" loads it to registers while this one '
    'is computed; "async2" to "async4" copy asynchronously (cp.async) into two to four buffers.',
    "pixel_octets": "Octets of pixels that a warp multiplies at a time, each a column of an mma.",
    "pixels_x": "Columns of dY in a tile of pixels, whose products a thread adds at a time.",
    "pixels_y": "Rows of dY in a tile of pixels.",
    "points_per_thread": "Winograd points per thread, of the α² of a tile.",
    "prefetch_tile": "1 loads the next tile of pixels to registers while this one is multiplied; 0 loads a tile just "
    "before its products.",
    "producer_warpgroups": "Warpgroups that load filters, and load and transpose halo rows of a channels-first input.",
    "raster_order": 'Order of tiles: consecutive tiles are neighbours along "n" (channels) or "m" (pixels), and share '
    "the other operand in the L2 cache.",
    "residual_add": 'When a residual is added: in the "epilogue", or as "accumulator_init", before the first product.',
    "rows": "Output rows per tile of a CTA.",
    "rows_per_thread": "Output rows per thread.",
    "rows_per_warp": "Rows of 16 positions that a warp computes.",
    "sliced_k": "Groups of threads that share the reduction of an output, each with a slice of every k-tile.",
    "split_k": "CTAs that share the reduction of a tile, each with a part of the k-tiles; 1 does not split it.",
    "split_k_reduction": 'Where partial sums of split_k meet: in a "workspace" in global memory, or in the shared '
    'memory of a "cluster".',
    "stages": "Pipeline stages: k-tiles that are in shared memory at a time.",
    "taps_per_copy": "Filter taps of a row that share one copy of pixels, at different offsets: 1 or the whole row.",
    "taps_x": "Columns of the filter whose sums a thread keeps in registers.",
    "taps_y": "Rows of the filter whose sums a thread keeps in registers.",
    "threads_c": "Threads of a CTA along the output channels; each computes a vector of channels.",
    "threads_pixels": "Threads of a CTA along tiles of pixels; they add their sums in shared memory.",
    "threads_taps": "Threads of a CTA along tiles of the filter.",
    "threads_x": "Threads of a CTA along a row.",
    "threads_y": "Threads of a CTA along a column.",
    "strip": "Neighbouring output columns per thread.",
    "tile_b": f"Split of the α² points of a Winograd tile: {DIRECT_TILE}.",
    "tile_c": f"Split of the output channels: {TEXTBOOK_TILE}.",
    "tile_f": f"Split of the output channels: {DIRECT_TILE}.",
    "tile_h": f"Split of the output rows: {TEXTBOOK_TILE}.",
    "tile_p": f"Split of the output pixels: {DIRECT_TILE}.",
    "tile_rc": f"Split of the input channels: {REDUCTION_TILE}.",
    "tile_rd": f"Split of the filter's depth: {REDUCTION_TILE}.",
    "tile_rh": f"Split of the filter's rows: {REDUCTION_TILE}.",
    "tile_rw": f"Split of the filter's columns: {REDUCTION_TILE}.",
    "tile_rx": f"Split of the filter's columns: {REDUCTION_TILE}.",
    "tile_ry": f"Split of the filter's rows: {REDUCTION_TILE}.",
    "tile_rz": f"Split of the filter's depth: {REDUCTION_TILE}.",
    "tile_w": f"Split of the output columns: {TEXTBOOK_TILE}.",
    "tile_x": f"Split of the output columns: {DIRECT_TILE}.",
    "tile_y": f"Split of the output rows: {DIRECT_TILE}.",
    "tiles_per_block": "Tiles that a CTA computes one after another, with their copies pipelined.",
    "units": "Units of a CTA; a unit has the fewest groups whose channels fill octets.",
    "unroll_explicit": "1 unrolls in the generated source; 0 writes `#pragma unroll` and leaves it to the compiler.",
    "unroll_scope": 'Unrolled part of the filter: all of it ("filter"), one row ("row"), or nothing ("tap"). In '
    'gradients, "input_row" loops over the rows of dY, and adds each to all rows of dX that it reaches.',
    "vector": "Elements that a thread loads, computes and stores at once, neighbours in memory.",
    "vector_in": "Channels of X of a group that a thread multiplies by each of its channels of dY.",
    "vectors_per_thread": "Neighbouring vectors per thread.",
    "warpgroups": "Consumer warpgroups, of 128 threads each.",
    "warps": "Warps of a CTA.",
    "warps_k": "Warps that share the reduction of an output, each with a part of every k-tile.",
    "warps_m": "Warps of a CTA along GEMM M: pixels, or filters in a wgrad.",
    "warps_n": "Warps of a CTA along GEMM N: output channels, or (tap, channel) in a wgrad.",
    "warps_pixels": "Warps of a CTA along the pixels of a tile.",
    "warps_taps": "Warps of a CTA along the taps of the filter.",
    "warps_x": "Warps of a CTA along a row.",
    "warps_y": "Warps of a CTA along a column.",
    "whole_rows": "1 copies rows of all channels as contiguous lines, whose ends threads guard; 0 copies boxes.",
    "weight_layout": 'Order of the weight in shared memory: "oihw" as in global memory, or "ihwo" with output channels '
    "innermost, which a thread then loads as one vector.",
    "weight_pad": "Words by which rows of the weight are padded in shared memory, against bank conflicts.",
    "weight_scope": 'Memory from which threads read the filter: "shared" (transposed), "registers" or "global".',
    "weights_in_registers": "1 keeps the weight in registers for all tiles of a warp; 0 loads it for each tile.",
    "wgmma_m_tiles": "Wgmma tiles of a warpgroup along GEMM M, of 64 pixels each.",
}

OWN_DESCRIPTIONS = {
    **{
        (name, f"tile_r{axis}"): f"Split of the {extent}: {TEXTBOOK_REDUCTION_TILE}."
        for name in ("tiling", "columns", "vthread")
        for axis, extent in (("c", "input channels"), ("h", "filter's rows"), ("w", "filter's columns"))
    },
    ("conflict_free", "tile_c"): f"Split of the output channels: {DIRECT_TILE}.",
    ("conflict_free", "tile_p"): "Split of the output pixels, in groups of 32 lanes: (block, virtual thread, warp).",
    ("winograd", "tile_x"): f"Split of the Winograd tiles: {DIRECT_TILE}.",
    ("winograd", "tile_y"): f"Split of the output channels: {DIRECT_TILE}.",
    ("winograd_fused", "block_k"): "Input channels between two barriers.",
    ("winograd_fused", "threads_x"): "Threads of a CTA along the output tiles.",
    ("winograd_fused", "threads_y"): "Threads of a CTA along the output channels.",
    ("winograd_hopper", "vector"): "Channels that a thread of the transforms loads and stores at once.",
    **{
        ("grouped_mma_sync", f"pixels_{axis}"): f"{extent} in a tile; in dgrad, of dX in steps of the stride."
        for axis, extent in (("x", "Columns of dY"), ("y", "Rows of dY"))
    },
    ("depthwise_mma_sync", "images"): "Images of a CTA; 16 are the rows of a product, which otherwise has rows of one.",
    ("depthwise_mma_sync", "mmas_y"): "Instructions along the rows of Y (or dX) of a warp, 16 rows each.",
    ("depthwise_mma_sync", "mmas_x"): "Instructions along the columns of Y (or dX) of a warp, 8 columns each.",
    ("winograd", "gradient_tile"): "Elements of dY of a tile along each axis.",
    ("winograd", "block_k"): "Tiles of dY between two barriers.",
    ("winograd", "parts"): "Parts of the tiles of dY, whose sums are added in order before the last transform.",
    ("depthwise_diagonal", "columns"): "Output columns of a tile; in a gradient with a stride, divided by the stride.",
    ("depthwise_diagonal", "mma_columns"): "Columns of the 16 pixels of a product, which has one row or two.",
    ("depthwise_diagonal", "rows"): "Output rows of a tile; in a gradient with a stride, divided by the stride.",
    ("depthwise_diagonal", "warps"): "Warps of an octet of channels, which divide the columns of a tile.",
    ("depthwise_planes", "rows"): "Output rows per thread.",
    ("depthwise_planes", "stages"): "Tiles in shared memory at a time; 0 launches one CTA per tile.",
    (
        "depthwise_tma",
        "stages",
    ): "Copies in shared memory at a time; 0 launches a CTA per tile, with all of its copies.",
    ("depthwise_cluster", "parts"): "CTAs of a cluster among which the pixels of a sum are divided.",
    ("depthwise_diagonal", "pixels_x"): "Columns of dY in a tile.",
    ("depthwise_diagonal", "strip_rows"): "Rows of dY of a strip, whose fragments a warp keeps in registers.",
    ("depthwise_diagonal", "strips"): "Strips of rows of dY of a tile, each with its own halo of X.",
    ("depthwise_diagonal", "taps_y"): "Rows of the filter whose sums a warp keeps in registers.",
    ("grouped_nhwc", "block_k"): "Input channels per step of the reduction.",
    ("halo_hopper", "rows"): "Rows of the product: pixels, or filters.",
    ("halo_hopper", "halo_stages"): "Blocks of channels of pixels in shared memory, each for all taps.",
    ("halo_hopper", "stages"): "Filters of a tap and a block of channels in shared memory.",
    ("halo_hopper", "cluster_size"): "CTAs of a cluster, which load a part of the filters each.",
    ("pixel_dots", "lane_pixels"): "Pixels that the lanes of a pixel load before they use any.",
    ("halo_mma_sync", "taps_y"): "Rows of the filter whose sums a CTA keeps in registers.",
    ("shuffle", "warps"): "Warps of a CTA; each computes 32 neighbouring outputs.",
    ("shuffle", "threads_y"): "Rows of a CTA; each warp computes outputs of one row.",
    ("stem", "warps"): "Warps of a CTA; each computes 16 pixels of every row of the tile.",
    **{
        (name, f"tile_{axis}"): f"Split of the output {extent}, for gradients in steps of the stride: {STRIP_TILE}."
        for name in ("depthwise_nhwc", "grouped_nhwc")
        for axis, extent in (("x", "columns"), ("y", "rows"))
    },
}


def describe_knob(schedule: str, knob: str) -> str:
    """Return the meaning of a knob of a schedule; an empty text for knobs of other authors' schedules."""
    return OWN_DESCRIPTIONS.get((schedule, knob), DESCRIPTIONS.get(knob, ""))
