"""Random workloads of gradients and transposed convolutions."""

import random

import tvmconv as tc
from tvmconv.errors import WorkloadError

KINDS = ("dgrad", "wgrad", "transpose")
DTYPES = ("f32", "f16", "bf16", "tf32")


def draw_text(seed, max_size=9, channel_multiple=1, dtypes=DTYPES, layouts=("nchw", "nhwc")):
    """Draw a workload; sizes, options and epilogues are random, and the operators take turns.

    `channel_multiple` divides the channels of each group, unless there is one.
    """
    rng = random.Random(seed)
    while True:
        rank, kind = rng.choice((1, 2, 2, 3)), KINDS[seed % 3]
        groups = rng.choice((1, 1, 2, 3))
        c, o = (groups * channel_multiple * rng.randint(1, 5) for _ in range(2))
        if rng.random() < 0.2:
            groups = c = o = channel_multiple * rng.randint(2, 9)

        def sizes(low, high, rank=rank, rng=rng):
            return "x".join(str(rng.randint(low, high)) for _ in range(rank))

        weight = f"{c}x{o // groups}" if kind == "transpose" else f"{o}x{c // groups}"
        text = f"conv{rank}d_{kind}:{rng.randint(1, 3)}x{c}x{sizes(1, max_size)},{weight}x{sizes(1, 4)}"
        padding = sizes(0, 3) if rng.random() < 0.7 else f"{sizes(0, 3)}x{sizes(0, 3)}"
        text += f",s{sizes(1, 3)},p{padding},d{sizes(1, 2)},g{groups},{rng.choice(dtypes)},{rng.choice(layouts)}"
        if kind == "transpose":
            text += f",op{sizes(0, 2)}" + rng.choice(("", ",bias,relu", ",add", ",bias,add,silu"))
        else:
            text += rng.choice(("", ",add", ",add,drelu") if kind == "dgrad" else ("", ",add", ",out-f32,add"))
        try:
            return tc.parse(text).text
        except WorkloadError:
            continue
