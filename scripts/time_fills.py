"""Time PyTorch's kernel that fills the output of a 1×1 layer, and computes and reads nothing.

    python scripts/time_fills.py 32x64x56x56,256 64x96x56x56,384 -o fills.json

A layer is batch × channels × height × width, and its filters. Several arrays take turns in a CUDA graph, so that no
launch finds its own in the L2 cache.
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


def time_launches(launch: Callable[[Any], Any], arrays: Sequence[Any]) -> float:
    """Return the median seconds of a launch, with another array each time."""
    import torch

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for array in arrays:
            launch(array)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for array in arrays:
                launch(array)
        seconds = []
        for replay in range(NUM_REPLAYS + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            if replay >= 3:
                seconds.append(start.elapsed_time(end) * 1e-3 / len(arrays))
    return statistics.median(seconds)


def time_layer(text: str) -> dict[str, Any]:
    """Return the bytes of the output of a layer, and the microseconds in which it is filled."""
    import torch

    shape, filters = text.split(",")
    batch, _, height, width = map(int, shape.split("x"))
    pixels, num_bytes = batch * height * width, 2 * batch * height * width * int(filters)
    count = max(3, int(MIN_BYTES / num_bytes) + 1)
    arrays = [torch.empty(pixels, int(filters), device="cuda", dtype=torch.float16) for _ in range(count)]
    micros = round(time_launches(lambda array: array.fill_(1.0), arrays) * 1e6, 2)
    return {"layer": text, "device": torch.cuda.get_device_name(), "bytes": num_bytes, "microseconds": micros}


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
