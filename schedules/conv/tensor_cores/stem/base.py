"""Common state of the `stem` kernel: sizes of a block, its buffers, and the coordinates of lanes and tiles."""

from __future__ import annotations

from contextlib import ExitStack

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.target import WARP_SIZE
from tvmconv.workloads import epilogue
from tvmconv.workloads.dtypes import ACCUMULATOR

from ....tir_builder import Buffer, Expr, allocate, block_axes, emit_ptx, thread_axis, to_uint32
from .row_layout import ACCUMULATOR_BYTES, MMA_CHANNELS, MMA_PIXELS, QUAD_WORDS, VECTOR_BYTES, WORD_BYTES
from .tile_config import StemTileConfig

CP_ASYNC_MNEMONIC = {4: "cp.async.ca.shared.global", 8: "cp.async.ca.shared.global", 16: "cp.async.cg.shared.global"}
INPUT_WORDS_IN_FLIGHT, WEIGHT_ROWS_IN_FLIGHT = 8, 8  # input words and weight rows that a thread loads at a time


class StemKernelBase:
    """State that the parts of the `stem` kernel share for one block of the grid.

    Args:
        tile: The tile config.
        arguments: Argument buffers by name.
    """

    def __init__(self, tile: StemTileConfig, arguments: dict[str, Buffer]) -> None:
        self.config, self.w = tile, tile.w
        self.arguments = arguments
        self.row_layout, self.smem_layout = tile.row_layout, tile.smem_layout
        self.num_threads, self.block_n = int(tile.num_threads), int(tile.block_n)
        self.num_input_buffers, self.num_pixel_ctas = int(tile.num_input_buffers), int(tile.num_pixel_ctas)
        self.num_mma_n = self.block_n // MMA_CHANNELS
        first_op = epilogue.get_ops(self.w.epilogue)[:1]
        # Accumulators start with the bias if it is the first operation of the epilogue.
        self.starts_with_bias = any(op.is_addition and op.argument_kind == "channel" for op in first_op)
        self.channel_arg_names = [op.name for op in self.w.argument_ops if op.argument_kind == "channel"]
        self.residual_names = [op.name for op in self.w.argument_ops if op.argument_kind == "output"]

        self.num_prefetched_tiles = int(tile.num_prefetched_tiles)
        self.input_bytes = int(tile.input_bytes)
        self.arguments_offset = int(tile.weight_bytes)
        self.inputs_offset = self.arguments_offset + int(tile.argument_bytes)
        self.filters_offset = self.inputs_offset + self.num_prefetched_tiles * self.input_bytes
        self.output_offset = self.inputs_offset + self.num_input_buffers * self.input_bytes
        self.output_bytes, self.output_row_bytes = int(tile.output_bytes), int(tile.output_row_bytes)

    def bind_axes(self, axes: ExitStack) -> None:
        """Open the loops over blocks and threads."""
        bind = axes.enter_context
        self.channel_tile_idx, self.cta_idx = bind(block_axes(int(self.config.num_channel_tiles), self.num_pixel_ctas))
        self.thread_idx = bind(thread_axis(self.num_threads, "threadIdx.x"))

    def allocate_buffers(self) -> None:
        """Allocate registers and shared memory."""
        config, num_weight_steps = self.config, self.row_layout.num_k_steps if self.config.weights_in_registers else 1
        self.quad_patterns = list(
            dict.fromkeys(
                tuple(word_offset - quad[0] for word_offset in quad) for quad in self.smem_layout.list_quads()
            )
        )
        self.smem = allocate("shared", int(config.dynamic_smem_bytes) // WORD_BYTES, "uint32", "shared.dyn")
        self.accum = allocate("sums", int(config.num_accumulators), ACCUMULATOR)
        self.a_frag = allocate("a", 4, "uint32")
        self.b_frag = allocate("b", num_weight_steps * self.num_mma_n * 2, "uint32")
        self.smem_base = allocate("base", 1, "uint32")
        self.weight_address = allocate("weight", 1, "uint32")
        self.pixel_address = allocate("pixel", len(self.quad_patterns), "uint32")
        self.values = allocate("values", 2, ACCUMULATOR)
        self.source_addresses = allocate("sources", 2, "uint32")
        self.keep_mask = allocate("keep", 1, "uint32")
        self.row_address = allocate("row", 1, "uint32")
        self.packed = allocate("words", max(VECTOR_BYTES // WORD_BYTES, WEIGHT_ROWS_IN_FLIGHT), "uint32")
        self.halves = allocate("halves", 2 * max(INPUT_WORDS_IN_FLIGHT, WEIGHT_ROWS_IN_FLIGHT), "uint16")
        self.channel_arg_regs = {name: allocate(name, 2, ACCUMULATOR) for name in self.channel_arg_names}
        self.residual_regs = {
            name: allocate(name, self.count_residual_registers(name), "uint32") for name in self.residual_names
        }

    def count_residual_registers(self, name: str) -> int:
        """Return the registers of a residual: two elements for the last residual, a whole row for the others."""
        num_pairs = 1 if name == self.residual_names[-1] else self.num_mma_n * 2
        return num_pairs * 2 // self.row_layout.elements_per_word

    @property
    def lane_idx(self) -> Expr:
        """Index of the thread in its warp."""
        return self.thread_idx % WARP_SIZE

    @property
    def warp_idx(self) -> Expr:
        """Index of the warp in its block."""
        return self.thread_idx // WARP_SIZE

    @property
    def phase_idx(self) -> Expr:
        """Phase of the warp's pixels: even or odd, if these are aligned differently."""
        return self.warp_idx % self.row_layout.num_phases

    @property
    def first_channel(self) -> Expr:
        """First output channel of the tile."""
        return self.channel_tile_idx * self.block_n

    def pixel_column(self, pixel: Expr) -> Expr:
        """Return the column within the tile of one of the warp's 16 pixels."""
        return (
            self.warp_idx // self.row_layout.num_phases * MMA_PIXELS + pixel
        ) * self.row_layout.num_phases + self.phase_idx

    def compute_tile_idx(self, round_idx: Expr) -> Expr:
        """Return the index of the block's tile in a round."""
        return round_idx * self.num_pixel_ctas + self.cta_idx

    def compute_tile_origin(self, tile_idx: Expr) -> tuple[Expr, Expr, Expr]:
        """Return the image, the first output row and the first output column of a tile."""
        config = self.config
        num_tiles_q, num_tiles_p = int(config.num_tiles_q), int(config.num_tiles_p)
        return (
            tile_idx // (num_tiles_p * num_tiles_q),
            tile_idx // num_tiles_q % num_tiles_p * config.block_p,
            tile_idx % num_tiles_q * int(config.block_q),
        )

    def argument_address(self, arg_idx: int, channel: Expr) -> Expr:
        """Return the shared-memory address of a per-channel epilogue argument."""
        offset = self.arguments_offset + arg_idx * self.block_n * ACCUMULATOR_BYTES
        return self.smem_base[0] + to_uint32(offset) + to_uint32(channel * ACCUMULATOR_BYTES)

    def load_channel_arg(self, arg_idx: int, mma_n: Expr) -> None:
        """Load a per-channel epilogue argument for the lane's two channels of an mma."""
        arg_regs = self.channel_arg_regs[self.channel_arg_names[arg_idx]]
        address = self.argument_address(arg_idx, mma_n * MMA_CHANNELS + self.lane_idx % QUAD_WORDS * 2)
        emit_ptx("ld.shared.v2.f32", arg_regs[0], arg_regs[1], address)

    def accum_index(self, output_row: Expr, mma_n: Expr) -> Expr:
        """Return the index of the first of a lane's four accumulators: two channels of each of its two pixels."""
        return (output_row * self.num_mma_n + mma_n) * 4

    def join_halves(self, first_half: Expr) -> Expr:
        """Return a word from its two halves in consecutive registers."""
        low_half, high_half = (T.Cast("uint32", self.halves[first_half + e]) for e in range(2))
        return low_half | T.shift_left(high_half, T.uint32(16))
