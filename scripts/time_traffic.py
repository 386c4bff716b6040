"""Time kernels of PyTorch that only move the bytes of a 1×1 layer: pixels are read once, and written several times.

    python scripts/time_traffic.py 32x64x56x56,256 64x96x56x56,384 -o traffic.json

A layer is batch × channels × height × width, and its filters, which are a multiple of the channels. "widen" reads each
pixel and writes its channels as often as filters have them, and "fill" writes as many bytes alone. The arrays take
turns in a CUDA graph, so that no launch finds its own in the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MIN_BYTES = 200e6  # of all arrays, several times the L2 cache
NUM_REPLAYS = 20

Arrays = tuple[Any, Any]  # an input and an output


def time_launches(launch: Callable[[Any, Any], Any], sets: Sequence[Arrays]) -> float:
    """Return the median seconds of a launch, with another set of arrays each time."""
    import torch

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for x, y in sets:
            launch(x, y)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for x, y in sets:
                launch(x, y)
        seconds = []
        for replay in range(NUM_REPLAYS + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            if replay >= 3:
                seconds.append(start.elapsed_time(end) * 1e-3 / len(sets))
    return statistics.median(seconds)


def time_layer(text: str) -> dict[str, Any]:
    """Return the bytes of a layer, and the microseconds of the kernels."""
    import torch

    shape, filters = text.split(",")
    batch, channels, height, width = map(int, shape.split("x"))
    pixels, copies = batch * height * width, int(filters) // channels
    num_bytes = 2 * pixels * (channels + copies * channels)
    sets = [
        (
            torch.randn(pixels, channels, device="cuda", dtype=torch.float16),
            torch.empty(pixels, copies, channels, device="cuda", dtype=torch.float16),
        )
        for _ in range(max(3, int(MIN_BYTES / num_bytes) + 1))
    ]
    kernels = {"widen": lambda x, y: y.copy_(x[:, None, :]), "fill": lambda x, y: y.fill_(1.0)}
    times = {name: round(time_launches(launch, sets) * 1e6, 2) for name, launch in kernels.items()}
    return {"layer": text, "device": torch.cuda.get_device_name(), "bytes": num_bytes, "microseconds": times}


def main() -> None:
    """Time all layers, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="+", metavar="NxCxHxW,O", help="Layers in float16.")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="File of JSON to write.")
    args = parser.parse_args()
    results = []
    for layer in args.layers:
        results.append(time_layer(layer))
        print(json.dumps(results[-1]), flush=True)
    args.output.write_text(json.dumps(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
