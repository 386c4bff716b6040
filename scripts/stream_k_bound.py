"""Print what stream-K could gain on the layers of networks, by the latency estimate of `hopper`.

    python scripts/stream_k_bound.py

The last wave of a launch may have fewer tiles than there are SMs. Stream-K (Osama et al., "Stream-K: Work-Centric
Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU", 2023) divides all k-tiles equally among the
CTAs. The table compares the best config with whole waves, split-K and ping-pong with the best config in three cases:

* free: fractions of waves, and partial sums cost nothing, which no kernel can exceed;
* stream-K: each CTA also writes and reads the partial sums of one tile;
* split last wave: the knob `decomposition` of `hopper`.

Gains are those of estimates. They count for layers whose fastest record in the package's logs is one of `hopper` on an
H200 and takes more than 30 µs; other layers that take so long count as 1.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from tvmconv.builtin.conv.tensor_cores.hopper import latency, tile_config  # type: ignore[import-not-found, import-untyped, unused-ignore]
from tvmconv.builtin.conv.tensor_cores.implicit_gemm_shape import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
    ACCUMULATOR_BYTES,
    ImplicitGemmShape,
)

import tvmconv as tc
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.packaged import packaged_logs
from tvmconv.logs.record import Record
from tvmconv.registry import find_schedule
from tvmconv.reports.tables import Table
from tvmconv.target import get_block_limits
from tvmconv.workloads import Conv

SUITES = (("resnet50", 1), ("resnet50", 32), ("yolov8s", 1), ("yolov8s", 32), ("sd_unet", 2))
DEVICE, MIN_SECONDS = "NVIDIA H200", 30e-6
FLAGS_US = 1.7  # synchronization of CTAs with flags that a kernel clears before
CASES = ("free", "stream-K", "split last wave", "narrow last wave")


def list_tiles(w: Conv) -> Any:
    """Return all configs that a search may try, as columns."""
    space = find_schedule(w, "hopper").space(w, get_block_limits("sm_90"))
    parts = []
    for start in range(0, space.size, 1 << 18):
        points = space.slice_points(start, 1 << 18)
        parts.append(points[space.is_legal(points)])
    return tile_config.HopperTileConfig.of_workload(space.columns_from_points(np.concatenate(parts)), w)


def estimate_gains(w: Conv) -> list[float]:
    """Return the speed-ups of all cases."""
    tiles, gemm = list_tiles(w), ImplicitGemmShape.from_workload(w)
    all_tiles = np.ones(len(tiles.block_n), bool)
    has_split_wave, has_narrow_wave = tiles.splits_last_wave & all_tiles, tiles.narrows_last_wave & all_tiles
    split, narrow = tiles.filter(has_split_wave), tiles.filter(has_narrow_wave)
    tiles = tiles.filter(~(has_split_wave | has_narrow_wave))
    best_us = np.min(latency.estimate_latency_us(tiles, w))
    tiles = tiles.filter(tiles.cluster_size == 1)
    waves, num_ctas = tiles.num_tiles(gemm) / tiles.max_active_ctas, tiles.max_active_ctas
    tile_us = 2 * tiles.block_m * tiles.block_n * ACCUMULATOR_BYTES / latency.WORKSPACE_BYTES_PER_US
    free_us = latency.estimate_latency_us(tiles, w, waves=waves)
    stream_k_us = free_us + (waves % 1 > 0) * (num_ctas * tile_us + FLAGS_US)
    split_us, narrow_us = (np.min(latency.estimate_latency_us(each, w), initial=best_us) for each in (split, narrow))
    return [max(1.0, float(best_us / np.min(each))) for each in (free_us, stream_k_us, split_us, narrow_us)]


def find_fastest_records() -> dict[str, Record]:
    """Return the fastest record on `DEVICE` of each layer of the suites."""
    layers = {
        layer.workload.text for name, batch in SUITES for layer in tc.suite(name, batch, dtype="float16", layout="nhwc")
    }
    fastest: dict[str, Record] = {}
    for log in packaged_logs():
        for record in read_records(log, InvalidLines()):
            text = record.workload.text
            if text in layers and record.ok and record.device == DEVICE:
                fastest[text] = min(record, fastest.get(text, record), key=lambda each: each.cost)
    return fastest


def main() -> int:
    """Print the table and the geometric means."""
    rows, gains = [], []
    for text, record in find_fastest_records().items():
        if record.cost < MIN_SECONDS:
            continue
        w, uses_hopper = record.workload, record.schedule == "hopper"
        gains.append(estimate_gains(w) if isinstance(w, Conv) and uses_hopper else [1.0] * len(CASES))
        rows.append((text, record.schedule, f"{record.cost * 1e6:.1f}", *(f"{gain:.3f}" for gain in gains[-1])))
    means = np.exp(np.mean(np.log(gains), axis=0))
    rows.append((f"geometric mean of {len(gains)} layers", "", "", *(f"{mean:.3f}" for mean in means)))
    print(Table(("layer", "schedule", "measured [µs]", *CASES), rows, {"layer", "schedule"}).format_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
