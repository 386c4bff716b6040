"""Hypothesis strategies that draw what the package works on."""

import math

from hypothesis import strategies as st

from tvmconv.logs.record import ErrorKind, Record
from tvmconv.workloads import Conv2d, Filter1d, Filter2d

MAX_FLOPS = 200_000


@st.composite
def workloads(draw: st.DrawFn, max_flops: int = MAX_FLOPS, dtypes: tuple[str, ...] = ("float32",)) -> Conv2d:
    """Valid convolutions with every option, small enough to be computed in a moment."""

    def draw_int(low: int, high: int) -> int:
        return draw(st.integers(low, max(low, high)))

    groups = draw(st.sampled_from((1, 1, 2, 3, 5)))
    N, C, O = draw_int(1, 3), groups * draw_int(1, 4), groups * draw_int(1, 4)  # noqa: E741
    kernel = R, S = draw_int(1, 5), draw_int(1, 5)
    dilation = draw_int(1, 3), draw_int(1, 3)
    stride = draw_int(1, 3), draw_int(1, 3)
    padding = tuple(draw_int(0, 3) for _ in range(4))
    pixels = max(1, math.isqrt(max_flops // (2 * N * O * (C // groups) * R * S)))  # per side of the output
    sizes = []
    for axis in range(2):
        window = (kernel[axis] - 1) * dilation[axis] + 1
        smallest = max(1, window - padding[axis] - padding[axis + 2])
        sizes.append(draw_int(smallest, smallest + (min(pixels, 20) - 1) * stride[axis]))
    H, W = sizes
    return Conv2d(N, C, H, W, O, R, S, stride, padding, dilation, groups, draw(st.sampled_from(dtypes)))


@st.composite
def filters(draw: st.DrawFn) -> Filter1d | Filter2d:
    """Valid filters, small enough to be computed in a moment; also with masks that are wider than what they filter."""
    sizes, odd, clamp = st.integers(1, 20), st.integers(0, 8).map(lambda radius: 2 * radius + 1), draw(st.booleans())
    if draw(st.booleans()):
        return Filter1d(draw(st.integers(1, 300)), draw(odd | st.just(31)), clamp)
    return Filter2d(draw(sizes), draw(sizes), draw(st.integers(1, 4)), draw(odd), draw(odd), clamp)


_finite = st.floats(allow_nan=False, allow_infinity=False)
_counts = st.integers(0, 2**40)
_knob_values = st.one_of(
    st.lists(st.integers(-1, 2**31), min_size=1, max_size=4).map(tuple),
    st.booleans(),
    st.integers(),
    _finite,
    st.text(),
)


@st.composite
def records(draw: st.DrawFn, schedules: tuple[str, ...] = ("direct", "depthwise", "vthread")) -> Record:
    """Records of every kind: timed and failed, with and without what need not be there."""
    error = draw(st.sampled_from(ErrorKind))
    return Record(
        workload=draw(workloads(dtypes=("float32", "float16")) | filters()),
        schedule=draw(st.sampled_from(schedules)),
        config=draw(st.dictionaries(st.text(), _knob_values, max_size=4)),
        device=draw(st.text()),
        target=draw(st.sampled_from(("cuda -arch=sm_90", "cuda -model=v100", "opencl"))),
        times=() if error else tuple(draw(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=5))),
        error=error,
        message=draw(st.text()),
        deviation=draw(st.none() | _finite),
        cost_seconds=draw(_finite),
        timestamp=draw(_finite),
        elapsed=draw(st.none() | _finite),
        resources=draw(st.dictionaries(st.text(), _counts, max_size=3)),
        versions=draw(st.dictionaries(st.sampled_from(("tvm", "tvmconv", "nvrtc")), st.text())),
        index=draw(_counts),
    )
