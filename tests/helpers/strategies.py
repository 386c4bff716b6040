"""Hypothesis strategies that draw what the package works on."""

import math
from collections.abc import Sequence

from hypothesis import strategies as st

from tvmconv.logs.record import MAX_ELAPSED_SECONDS, ErrorKind, Record
from tvmconv.workloads import Conv, Filter1d, Filter2d
from tvmconv.workloads.dtypes import DTYPES
from tvmconv.workloads.epilogue import load_ops
from tvmconv.workloads.layout import LAYOUTS
from tvmconv.workloads.registry import operators

MAX_FLOPS = 200_000
MAX_OPERATIONS = 4  # of an epilogue


RANKS = ("conv1d", "conv2d", "conv3d")


@st.composite
def convolutions(
    draw: st.DrawFn,
    max_flops: int = MAX_FLOPS,
    operator: str = "conv2d",
    dtypes: Sequence[str] = ("float32",),
    layouts: Sequence[str] = ("nchw",),
    *,
    epilogues: bool = False,
) -> Conv:
    """Valid convolutions with every option, small enough to be computed in a moment."""

    def draw_int(low: int, high: int) -> int:
        return draw(st.integers(low, max(low, high)))

    def draw_each(low: int, high: int, count: int) -> tuple[int, ...]:
        return tuple(draw_int(low, high) for _ in range(count))

    rank = RANKS.index(operator) + 1
    groups = draw(st.sampled_from((1, 1, 2, 3, 5)))
    N, C, O = draw_int(1, 3), groups * draw_int(1, 4), groups * draw_int(1, 4)  # noqa: E741
    kernel = draw_each(1, 5 if rank < 3 else 3, rank)
    dilation, stride = draw_each(1, 3, rank), draw_each(1, 3, rank)
    padding = draw_each(0, 3, 2 * rank)
    pixels = max(1, max_flops // (2 * N * O * (C // groups) * math.prod(kernel)))
    side = min(20, int(pixels ** (1 / rank)))  # of the output
    space = []
    for taps, gap, step, before, behind in zip(kernel, dilation, stride, padding[:rank], padding[rank:], strict=True):
        smallest = max(1, (taps - 1) * gap + 1 - before - behind)
        space.append(draw_int(smallest, smallest + (max(1, side) - 1) * step))
    # An activation reads its operand several times, so that the expression of a chain grows exponentially.
    names = sorted({*load_ops()} - {"stats", "quantize", "zero_point"})  # of few schedules, and of 8-bit outputs
    operations = st.lists(st.sampled_from(names), unique=True, max_size=MAX_OPERATIONS)
    chosen = draw(operations) if epilogues else ()
    how = draw(st.sampled_from(dtypes)), draw(st.sampled_from(layouts)), tuple(chosen)
    return operators()[operator](N, C, *space, O, *kernel, stride, padding, dilation, groups, *how)


def any_convolutions(max_flops: int = MAX_FLOPS) -> st.SearchStrategy[Conv]:
    """Convolutions of any rank, dtype, layout and epilogue."""
    return st.sampled_from(RANKS).flatmap(
        lambda operator: convolutions(max_flops, operator, tuple(DTYPES), LAYOUTS, epilogues=True)
    )


@st.composite
def filters(draw: st.DrawFn) -> Filter1d | Filter2d:
    """Valid filters, small enough to be computed in a moment; also with masks that are wider than what they filter."""
    sizes, odd, clamp = st.integers(1, 20), st.integers(0, 8).map(lambda radius: 2 * radius + 1), draw(st.booleans())
    if draw(st.booleans()):
        return Filter1d(draw(st.integers(1, 300)), draw(odd | st.just(31)), clamp)
    return Filter2d(draw(sizes), draw(sizes), draw(st.integers(1, 4)), draw(odd), draw(odd), clamp)


_finite = st.floats(allow_nan=False, allow_infinity=False)
_counts = st.integers(0, 2**40)
_names = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")))
_knob_values = st.one_of(
    st.lists(st.integers(-1, 2**15), min_size=1, max_size=4).map(tuple),
    st.booleans(),
    st.integers(1 - 2**63, 2**63 - 1),
    _finite,
    _names,
)


@st.composite
def records(draw: st.DrawFn, schedules: tuple[str, ...] = ("direct", "depthwise", "vthread")) -> Record:
    """Records of every kind: timed and failed, with and without what need not be there."""
    error = draw(st.sampled_from(ErrorKind))
    return Record(
        workload=draw(any_convolutions() | filters()),
        schedule=draw(st.sampled_from(schedules)),
        config=draw(st.dictionaries(_names, _knob_values, max_size=4)),
        device=draw(_names),
        target=draw(st.sampled_from(("cuda -arch=sm_90", "cuda -model=v100", "opencl"))),
        times=() if error else tuple(draw(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=5))),
        error=error,
        message=draw(st.text()),
        relative_error=draw(st.none() | _finite),
        cost_seconds=draw(_finite),
        timestamp=draw(_finite),
        elapsed=draw(st.none() | st.floats(0, MAX_ELAPSED_SECONDS)),
        resources=draw(st.dictionaries(st.text(), _counts, max_size=3)),
        versions=draw(st.dictionaries(st.sampled_from(("tvm", "tvmconv", "nvrtc")), st.text())),
        index=draw(_counts),
        final=draw(st.booleans()),
    )
