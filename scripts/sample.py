"""Convolutions of all kinds, drawn at random: the layers that a cost model learns from, as a suite file.

    python scripts/sample.py --count 160 --seed 1 -o tuning_logs/sampled/f32.json
    python scripts/sample.py --count 80 --seed 2 --dtype f16 --layout nhwc -o tuning_logs/sampled/f16.json

Sizes are those that networks have, but no layer is one of a built-in suite, so that these remain to be tested on. Most
are dense 1×1 and 3×3 ones; the others are strided, dilated, of larger or oblong filters, grouped or depthwise. As in
networks the channels grow as the image shrinks, within a factor of some four. Three in five have batch 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvmconv.cli.errors import Parser, guarded
from tvmconv.cli.options import count, seed_number
from tvmconv.errors import WorkloadError
from tvmconv.workloads import SUITES, Conv2d, Workload, dtypes, parse, suite
from tvmconv.workloads.layout import LAYOUTS
from tvmconv.workloads.suites import Variant

CHANNELS: tuple[int, ...] = (
    8,
    12,
    16,
    24,
    32,
    40,
    48,
    64,
    72,
    80,
    96,
    112,
    128,
    144,
    160,
    192,
    224,
    256,
    288,
    320,
    384,
    448,
    512,
)
CHANNELS += (576, 640, 768, 960, 1024, 1152, 1280, 1536, 1920, 2048)
SIDES: tuple[int, ...] = (
    4,
    7,
    8,
    10,
    12,
    13,
    14,
    15,
    16,
    17,
    19,
    20,
    24,
    26,
    28,
    30,
    32,
    35,
    38,
    40,
    48,
    52,
    56,
    60,
    64,
    71,
    75,
    76,
    80,
)
SIDES += (80, 96, 104, 112, 120, 128, 147, 149, 150, 152, 160, 192, 208, 224, 240, 256, 299, 320, 384, 416, 448, 512)
CHANNELS_BY_SIDE = 4000.0  # channels × image side, about
BATCHES = (2, 4, 8, 16, 32)
FEWEST_FLOPS, MOST_FLOPS = 2e6, 3e10
KINDS = {  # how often each is drawn, of a hundred
    "pointwise": 28,
    "3x3": 26,
    "3x3 strided": 8,
    "pointwise strided": 3,
    "first": 5,
    "large": 6,
    "oblong": 4,
    "dilated": 5,
    "grouped": 5,
    "depthwise": 10,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, and write the file."""
    return guarded("sample", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="sample", description="Draw convolutions at random.")
    parser.add_argument("--count", type=count, default=100, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=seed_number, default=0, help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=dtypes.BY_TEXT, default="f32", help="(default: %(default)s)")
    parser.add_argument("--layout", choices=LAYOUTS, default="nchw", help="(default: %(default)s)")
    parser.add_argument("-o", dest="out", type=Path, required=True, metavar="FILE", help="a suite file")
    args = parser.parse_args(argv)
    variant = Variant(dtype=dtypes.BY_TEXT[args.dtype].name, layout=args.layout)
    in_suites = [layer.workload for name in SUITES for layer in suite(name)]
    known = {_shape(workload) for workload in in_suites if isinstance(workload, Conv2d)}
    rng = np.random.default_rng(args.seed)
    found: dict[str, Workload] = {}
    while len(found) < args.count:
        workload = draw(rng)
        if workload and _shape(workload) not in known:
            found.setdefault(workload.text, workload)
    layers = [
        json.dumps({"name": f"{number:03}", "text": variant.of(workload).text})
        for number, workload in enumerate(found.values())
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("[\n" + ",\n".join(layers) + "\n]\n", encoding="utf-8")
    print(f"{len(layers)} layers in {args.out}")
    return 0


def _shape(w: Any) -> tuple[int, ...]:
    """What makes a layer the same whatever its batch, dtype and layout."""
    return (w.C, w.H, w.W, w.O, w.R, w.S, *w.stride, *w.dilation, w.groups)


def draw(rng: np.random.Generator) -> Workload | None:
    """A convolution at random; None for one that makes no sense, or is too small or too large."""
    kind = rng.choice([*KINDS], p=np.array([*KINDS.values()]) / sum(KINDS.values()))
    side, batch = _any(rng, SIDES), _any(rng, BATCHES) if rng.random() < 0.4 else 1
    channels, outputs = _channels(rng, side), _channels(rng, side)
    filter_sides, stride, dilation, groups = (3, 3), 1, 1, 1
    match kind:
        case "pointwise" | "pointwise strided":
            filter_sides = (1, 1)
        case "first":
            channels, side, outputs = _any(rng, (1, 3, 4)), _any(rng, SIDES[-18:]), _any(rng, CHANNELS[2:13])
            size, stride = _any(rng, (3, 4, 5, 7)), _any(rng, (1, 2, 4))
            filter_sides = (size, size)
        case "large":
            size = _any(rng, (2, 4, 5, 5, 7))
            filter_sides = (size, size)
        case "oblong":
            size = _any(rng, (3, 5, 7))
            filter_sides = (1, size) if rng.random() < 0.5 else (size, 1)
        case "dilated":
            dilation = _any(rng, (2, 3, 4, 6, 12))
        case "grouped":
            groups = _any(rng, (2, 4, 8, 16, 32))
        case "depthwise":
            size, stride = _any(rng, (3, 3, 5, 7)), _any(rng, (1, 1, 2))
            outputs = groups = channels
            filter_sides = (size, size)
    if str(kind).endswith("strided"):
        stride = 2
    if channels % groups or outputs % groups:
        return None
    padding = tuple((size - 1) * dilation // 2 for size in filter_sides)
    spread = (f"s{stride}", f"p{padding[0]}x{padding[1]}", f"d{dilation}", *([f"g{groups}"] if groups > 1 else []))
    text = f"conv2d:{batch}x{channels}x{side}x{side},{outputs}x{channels // groups}x{filter_sides[0]}x{filter_sides[1]}"
    try:
        workload = parse(",".join([text, *spread]))
    except WorkloadError:
        return None
    return workload if FEWEST_FLOPS <= workload.flops <= MOST_FLOPS else None


def _any(rng: np.random.Generator, values: Sequence[int]) -> int:
    return int(rng.choice(values))


def _channels(rng: np.random.Generator, side: int) -> int:
    """Channels of an image."""
    wanted = CHANNELS_BY_SIDE / side * 2.0 ** rng.uniform(-2, 2)
    return min(CHANNELS, key=lambda channels: abs(np.log(channels / wanted)))


if __name__ == "__main__":
    sys.exit(main())
