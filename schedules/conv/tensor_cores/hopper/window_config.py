"""Configs of `window_hopper`: tiles of output pixels whose windows and filters fit in shared memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.target import H200, WARP_SIZE, WARPGROUP_SIZE
from tvmconv.tensor_map import MAX_BOX_ELEMENTS
from tvmconv.workloads import Conv, epilogue
from tvmconv.workloads.dtypes import get_itemsize

from ...estimated_config import EstimatedTileConfig
from ...tile_config import Rule
from ..gemm.shared_windows import PATCH, PatchTiles
from ..gemm.tma_loaders import INTERLEAVED_FILTERS
from ..implicit_gemm_shape import ACCUMULATOR_BYTES
from ..latency_model import count_ctas_per_sm
from ..promotion import KNOB, has_float8_sums, limit_accumulation_error, list_intervals
from .constraints import MAX_SHARED_BYTES, limit_registers_per_thread
from .tile_config import BARRIER_BYTES, MAX_SWIZZLE_BYTES, OVERHEAD_REGISTERS, SWIZZLE_ALIGNMENT_BYTES

if TYPE_CHECKING:
    from typing_extensions import Self

EPILOGUE_STAGES = 2
MIN_ROW_BYTES = 32  # of a swizzle
MAX_FILTERS = 256  # columns of a wgmma
# Rates of an SM per clock, approximately, of an H100: multiply-adds of 16 bits, shared-memory bytes that wgmma reads,
# bytes that TMA copies from L2, and of an H200 its share of the global memory's bandwidth.
MACS_PER_CLOCK, SMEM_BYTES_PER_CLOCK, COPIED_BYTES_PER_CLOCK, MEMORY_BYTES_PER_CLOCK = 2048, 128, 48, 16
EPILOGUE_CYCLES, START_CYCLES = 600, 3000  # of a tile's stores that nothing overlaps with, and of a launch


def get_output_itemsize(w: Conv) -> int:
    """Return the bytes per element of the output, which has a type of its own if operands have 8 bits."""
    return get_itemsize(w.argument_dtypes[-1])


def count_block_n(w: Conv) -> int:
    """Return the columns of a wgmma: all filters, in whole subtiles of the output, and in 16 for operands of 8 bits."""
    min_columns = MIN_ROW_BYTES // get_output_itemsize(w)
    return round_up(w.O, max(min_columns, INTERLEAVED_FILTERS) if get_itemsize(w.storage) == 1 else min_columns)


def count_row_bytes(w: Conv) -> int:
    """Return the bytes of a block of channels, the widest swizzle that divides all channels."""
    return math.gcd(w.C * get_itemsize(w.storage), MAX_SWIZZLE_BYTES)


@dataclass(frozen=True)
class WindowConfig(EstimatedTileConfig):
    """One config, or many configs as columns."""

    TILE_KNOBS: ClassVar[tuple[str, ...]] = ("lines", "columns")
    SECONDS_PER_CYCLE: ClassVar[float | None] = 1 / 1.755e9  # boost clock of an H100

    w: Conv
    lines: Any  # output lines per tile
    columns: Any  # output columns per tile
    warpgroups: Any  # warpgroups that multiply
    stages: Any  # windows in shared memory
    promotion_interval: Any = 0  # products of 8-bit floats before a promotion; 0 without one

    @classmethod
    def list_options(cls, w: Conv) -> Mapping[str, Sequence[Any]]:
        """Return the options of all knobs."""
        height, width = (round_up(size, PATCH) for size in w.output_size[-2:])
        return {
            "lines": [n for n in (8, 16, 24, 32) if n <= height],
            "columns": [n for n in (8, 16, 24, 32, 40, 48, 64) if n <= width],
            "warpgroups": (1, 2, 3, 4),
            "stages": (1, 2, 3, 4),
            **({KNOB: list_intervals(w)} if has_float8_sums(w) else {}),
        }

    @classmethod
    def list_required(cls, w: Conv) -> list[Rule]:
        """Return the conditions on every config."""
        return [
            ("each warpgroup has equally many patches", lambda t: t.patches % t.warpgroups == 0),
            (
                "a warpgroup's patches are whole lines of them, or parts of one",
                lambda t: (
                    (t.m_atoms % (t.columns // PATCH) == 0) | (t.columns // PATCH % np.maximum(t.m_atoms, 1) == 0)
                ),
            ),
            ("the registers of all threads fit", lambda t: t.registers <= limit_registers_per_thread(t.num_threads)),
            (
                f"a line of a window has at most {MAX_BOX_ELEMENTS} pixels",
                lambda t: t.of_tiles("pitch") <= MAX_BOX_ELEMENTS,
            ),
            (f"at most {MAX_SHARED_BYTES} bytes of shared memory", lambda t: t.smem_bytes <= MAX_SHARED_BYTES),
        ]

    @classmethod
    def list_pruned(cls, w: Conv) -> list[Rule]:
        """Return the conditions on configs that are worth a search."""
        return [
            *limit_accumulation_error(w, lambda t: t.promoted_products),
            ("windows are loaded ahead", lambda t: (t.stages > 1) | (t.ctas_per_sm > 1)),
        ]

    @classmethod
    @functools.lru_cache(maxsize=64)
    def list_legal(cls, w: Conv) -> tuple[Self, Any]:
        """Return all configs, and which of them meet the required rules."""
        configs = cls.from_options(cls.list_options(w), w=w)
        return configs, functools.reduce(np.logical_and, [predicate(configs) for _, predicate in cls.list_required(w)])

    def of_tiles(self, name: str) -> Any:
        """Return an attribute of the tiles of each config."""
        columns = np.broadcast_arrays(self.lines, self.columns)
        sizes, indices = np.unique(np.stack([np.ravel(each) for each in columns]), axis=1, return_inverse=True)
        values = [getattr(PatchTiles(self.w, int(lines), int(width)), name) for lines, width in sizes.T]
        return np.array(values)[indices.ravel()].reshape(np.shape(columns[0]))

    @property
    def tiles(self) -> PatchTiles:
        """Tiles of one config."""
        return PatchTiles(self.w, int(self.lines), int(self.columns))

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return get_itemsize(self.w.storage)

    @property
    def patches(self) -> Any:
        """Patches per tile."""
        return self.lines * self.columns // PATCH**2

    @property
    def m_atoms(self) -> Any:
        """Patches of a warpgroup."""
        return self.patches // self.warpgroups

    @property
    def promoted_taps(self) -> Any:
        """Blocks of channels of a tap whose products are added before a promotion; 0 without one."""
        blocks = np.maximum(1, self.promotion_interval // (count_row_bytes(self.w) // self.itemsize))
        return np.where(np.greater(self.promotion_interval, 0), blocks, 0)

    @property
    def promoted_products(self) -> Any:
        """Products that are added before a promotion; 0 without one."""
        return self.promoted_taps * (count_row_bytes(self.w) // self.itemsize)

    @property
    def block_n(self) -> int:
        """Columns of a wgmma."""
        return count_block_n(self.w)

    @property
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""
        return self.m_atoms * self.block_n // 2

    @property
    def registers(self) -> Any:
        """Estimated registers per thread."""
        num_sums = self.num_accumulators * np.where(np.greater(self.promotion_interval, 0), 2, 1)
        return round_up(num_sums + OVERHEAD_REGISTERS, 8)

    @property
    def num_warps(self) -> Any:
        """Warps per CTA, the last of which loads windows, and another one a residual."""
        return self.warpgroups * (WARPGROUP_SIZE // WARP_SIZE) + 1 + self.has_residual

    @property
    def has_residual(self) -> bool:
        """Whether the epilogue has an argument with the output's shape."""
        return any(op.argument_kind == "output" for op in epilogue.get_ops(self.w.epilogue))

    @property
    def num_planes(self) -> int:
        """Planes of a window."""
        return len(PatchTiles(self.w, PATCH, PATCH).planes)

    @property
    def window_bytes(self) -> Any:
        """Bytes of a window, of a volume those of one tap along the depth."""
        return self.num_planes * self.of_tiles("plane_rows") * (self.w.C * self.itemsize)

    @property
    def stage_bytes(self) -> Any:
        """Bytes from one stage of windows to the next."""
        return round_up(self.window_bytes, SWIZZLE_ALIGNMENT_BYTES)

    @property
    def filter_bytes(self) -> int:
        """Bytes of all filters in shared memory."""
        return round_up(math.prod(self.w.kernel) * self.w.C * self.itemsize * self.block_n, SWIZZLE_ALIGNMENT_BYTES)

    @property
    def epilogue_row_bytes(self) -> int:
        """Bytes of a row of a subtile of the output."""
        return math.gcd(self.block_n * get_output_itemsize(self.w), MAX_SWIZZLE_BYTES)

    @property
    def epilogue_stage_bytes(self) -> int:
        """Bytes of a subtile of the output."""
        return PATCH**2 * self.epilogue_row_bytes

    @property
    def filters_offset_bytes(self) -> Any:
        """Shared-memory offset of the filters."""
        return self.stages * self.stage_bytes

    @property
    def epilogue_offset_bytes(self) -> Any:
        """Shared-memory offset of the subtiles of the output."""
        return self.filters_offset_bytes + self.filter_bytes

    @property
    def channel_args_offset_bytes(self) -> Any:
        """Shared-memory offset of the per-channel arguments."""
        return self.epilogue_offset_bytes + self.warpgroups * (EPILOGUE_STAGES * self.epilogue_stage_bytes)

    @property
    def barrier_offset_bytes(self) -> Any:
        """Shared-memory offset of the barriers."""
        num_channel_args = sum(op.argument_kind == "channel" for op in epilogue.get_ops(self.w.epilogue))
        return self.channel_args_offset_bytes + self.warpgroups * (num_channel_args * self.block_n * ACCUMULATOR_BYTES)

    @property
    def smem_bytes(self) -> Any:
        """Dynamic shared memory per CTA in bytes, including the alignment of its start."""
        num_stages = self.stages + 1 + self.warpgroups * (EPILOGUE_STAGES * self.has_residual)
        return SWIZZLE_ALIGNMENT_BYTES + self.barrier_offset_bytes + 2 * num_stages * BARRIER_BYTES

    @property
    def num_tiles(self) -> Any:
        """Number of work tiles."""
        return self.of_tiles("count")

    @property
    def ctas_per_sm(self) -> Any:
        """Number of resident CTAs per SM."""
        limits = self.num_tiles, H200.multiprocessors, self.smem_bytes
        return count_ctas_per_sm(*limits, self.registers, self.num_threads)

    @property
    def num_blocks(self) -> Any:
        """CTAs of the persistent grid."""
        return np.minimum(self.num_tiles, H200.multiprocessors * self.ctas_per_sm)

    @property
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles: the longest of products, copies and memory, and what does not overlap."""
        w, k_bytes = self.w, 32
        tiles_per_sm = ceil_div(self.num_tiles, self.num_blocks) * self.ctas_per_sm
        mmas = self.patches * (math.prod(w.kernel) * w.C * self.itemsize // k_bytes)
        macs = PATCH**2 * self.block_n * (k_bytes // 2)  # of operands of 16 bits; others take as long per byte
        smem_cycles = (PATCH**2 + self.block_n) * k_bytes / SMEM_BYTES_PER_CLOCK
        product_cycles = mmas * np.maximum(macs / MACS_PER_CLOCK, smem_cycles)
        output_bytes = self.lines * self.columns * w.O * get_output_itemsize(w)
        num_windows = len(PatchTiles(w, PATCH, PATCH).depth_taps)
        copy_cycles = (num_windows * self.window_bytes + output_bytes) / COPIED_BYTES_PER_CLOCK
        memory_cycles = w.min_bytes / (H200.multiprocessors * MEMORY_BYTES_PER_CLOCK)
        exposed_cycles = tiles_per_sm * EPILOGUE_CYCLES * self.m_atoms / self.ctas_per_sm
        longest = np.maximum(np.maximum(tiles_per_sm * product_cycles, tiles_per_sm * copy_cycles), memory_cycles)
        filters_cycles = self.ctas_per_sm * self.filter_bytes / COPIED_BYTES_PER_CLOCK
        return longest + 0.5 * exposed_cycles + filters_cycles + START_CYCLES
