"""Options and default of the tile of `stem`; the default fills the warps and the SMs of an H200."""

from __future__ import annotations

from collections.abc import Iterator

from tvmconv.arithmetic import round_up
from tvmconv.target import H200, MAX_THREADS_PER_BLOCK, PORTABLE_SHARED_BYTES, WARP_SIZE
from tvmconv.workloads import Conv3d

from .row_layout import MMA_PIXELS, RowLayout
from .tile_config import StemTileConfig

BLOCK_P_CHOICES, STAGES_CHOICES = (1, 2, 4, 8), (2, 3, 4)
WARPS_CHOICES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
BLOCK_N_CHOICES = (16, 32, 48, 64, 96, 128)
MAX_CTAS_CHOICES = (0, 66, 132, 264, 396, 528, 792, 1056)

WARPS_PER_SM = 16  # resident warps per SM by default, whose registers suffice for 64 accumulators per thread


def select_default_config(w: Conv3d) -> StemTileConfig:
    """Return the first default candidate that fits every GPU, as candidates are sorted from best to worst."""
    tiles = list(list_default_candidates(w))
    return next((tile for tile in tiles if tile.dynamic_smem_bytes <= PORTABLE_SHARED_BYTES), tiles[-1])


def list_default_candidates(w: Conv3d) -> Iterator[StemTileConfig]:
    """Yield configs that keep most lanes and all SMs of an H200 busy, then smaller and smaller ones."""
    channels = list_block_n_choices(w)
    sorted_channels = sorted((n for n in channels if n <= 64), key=lambda n: (round_up(w.O, n), -n))  # least idle first
    block_p = min(2, list_block_p_choices(w)[-1])
    for n in sorted_channels:
        for max_warps in (8, 4, 2):
            for num_rows in dict.fromkeys((block_p, 1)):
                yield _select_filling_config(w, num_rows, n, max_warps)


def _select_filling_config(w: Conv3d, block_p: int, block_n: int, max_warps: int) -> StemTileConfig:
    """Return the config whose warps fill output rows best for given rows and channels, with fewer warps if tiles are
    few.
    """

    def make_config(warps: int, blocks: int = 0) -> StemTileConfig:
        config = StemTileConfig(w, block_p, warps, block_n, STAGES_CHOICES[0], blocks, 0)
        keeps_weights = config.weight_registers <= 32 and config.tiles_per_cta > 1
        return StemTileConfig(w, block_p, warps, block_n, STAGES_CHOICES[0], blocks, int(keeps_weights))

    def compute_fill_fraction(candidate: StemTileConfig) -> float:
        used_fraction = w.Q / (candidate.num_tiles_q * candidate.block_q)
        return float(used_fraction * candidate.warps / (candidate.warps + 0.5))  # warps share a block's fixed cost

    options = list_warp_choices(w)
    candidates = [make_config(warps) for warps in options if warps <= max_warps] or [make_config(options[0])]
    large_candidates = [
        candidate
        for candidate in candidates
        if candidate.num_pixel_tiles * candidate.num_channel_tiles >= 0.75 * H200.multiprocessors
    ]
    best = (
        max(large_candidates, key=compute_fill_fraction)
        if large_candidates
        else max(candidates, key=lambda candidate: (candidate.num_pixel_tiles, compute_fill_fraction(candidate)))
    )
    max_resident_ctas = max(
        blocks for blocks in MAX_CTAS_CHOICES if blocks <= H200.multiprocessors * max(1, WARPS_PER_SM // best.warps)
    )
    return make_config(
        best.warps, max_resident_ctas if max_resident_ctas < best.num_pixel_tiles * best.num_channel_tiles else 0
    )


def list_options(w: Conv3d) -> dict[str, tuple[int, ...]]:
    """Return the options of the knobs."""
    return {
        "block_p": list_block_p_choices(w),
        "warps": list_warp_choices(w),
        "block_n": list_block_n_choices(w),
        "stages": STAGES_CHOICES,
        "max_ctas": MAX_CTAS_CHOICES,
        "weights_in_registers": (0, 1),
    }


def list_block_p_choices(w: Conv3d) -> tuple[int, ...]:
    """Return the options for output rows per tile, of which more than half are inside the output."""
    return tuple(block_p for block_p in BLOCK_P_CHOICES if block_p < 2 * w.P)


def list_warp_choices(w: Conv3d) -> tuple[int, ...]:
    """Return the options for warps per block: the last warp has work, and both phases have equally many warps."""
    num_phases = RowLayout(w).num_phases
    allowed_warps = (
        warps for warps in WARPS_CHOICES if warps % num_phases == 0 and warps * WARP_SIZE <= MAX_THREADS_PER_BLOCK
    )
    return tuple(warps for warps in allowed_warps if warps == num_phases or (warps - num_phases) * MMA_PIXELS < w.Q)


def list_block_n_choices(w: Conv3d) -> tuple[int, ...]:
    """Return the options for channels per tile, of which the last 16 have work."""
    return tuple(channels for channels in BLOCK_N_CHOICES if channels - MMA_PIXELS < w.O)
