"""Kernels of all schedules of the library, for what has to hold for each of them."""

import functools

import tvmconv as tc

WORKLOADS = (
    "conv2d:1x64x56x56,64x64x3x3,s1,p1,bias,relu",
    "conv2d:1x512x7x7,512x512x3x3,s1,p1,f16,nhwc",  # in several steps
    "conv2d:1x64x56x56,64x1x3x3,s1,p1,g64",
    "conv2d:1x64x56x56,64x1x3x3,s1,p1,g64,f16,nhwc",
    "conv2d:1x64x56x56,64x2x3x3,s1,p1,g32,f16,nhwc",
    "conv2d:1x3x224x224,64x3x7x7,s2,p3,f16,nhwc",
    "filter1d:16777216,k5",
    "filter2d:4096x4096x3,5x5",
)
LADDER = ("default", "tiling", "vthread", "conflict_free", "columns", "direct")


@functools.cache
def every_kernel(arch: str = "sm_90") -> tuple[tc.Kernel, ...]:
    """A kernel of each schedule in each dtype, of the first of the workloads that it takes, with its default config."""
    first: dict[tuple[str, str, str], tc.workloads.Workload] = {}
    for w in map(tc.parse, WORKLOADS):
        for each in tc.schedules(w):
            first.setdefault((w.operator, each.name, w.dtype), w)
    return tuple(tc.build(w, name, arch=arch) for (_, name, _), w in first.items())


def named(kernel: tc.Kernel) -> str:
    """What a kernel is called in a failure."""
    return f"{kernel.schedule.name} of {kernel.workload}"
