"""Convolution on Hopper's tensor cores: one warp has TMA copy operands, warpgroups multiply them where they lie.

Nobody computes an address of an operand. The copy engine (TMA) is told of the input as an image of which it takes the
pixels under one tap of the filter (im2col): padding, stride, dilation and the ends of lines and images are its own.
Of both operands it brings rows of up to 128 bytes of channels, swizzled as `wgmma` reads them from shared memory. Three
parts of a block are at work at a time, and tell each other by barriers in shared memory what is full and what is empty:

```
 producer, one thread            ring of stages                 warpgroups of 128 threads
 for each step (tap, channels):  +---------+---------+---       for each step:
   wait until a stage is empty   | pixels  | pixels  | ...        wait until the stage is full
   TMA: pixels  × channels  ---> | ------- | ------- |      --->  wgmma: sums += pixels × weights
   TMA: weights × channels  ---> | weights | weights | ...        tell that the step before is empty
                                 +---------+---------+---       for each slab of channels:
                                                                  epilogue; sums to shared memory
                                                                  TMA: slab to the output
```

- As many blocks as the GPU runs at a time take tiles in turn: while a tile is stored, the next one's operands come.
- Blocks of a cluster with neighbouring tiles share operands: each fetches a part, and TMA hands it to all of them.
- Where tiles are few, the blocks of a cluster share the reduction of one tile instead, and add up their sums through
  each other's shared memory.
- A residual comes by TMA as well, into the slabs that become the output; biases lie in shared memory by then.
- `griddepcontrol` lets the next launch begin while this one ends.

Sources: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions", "Tensors: im2col mode",
"mbarrier"; NVIDIA CUTLASS, `sm90_mma_tma_gmma_ss_warpspecialized` (the roles).
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, all_of
from tvmconv.space import Knobs
from tvmconv.workloads import Conv

from ....tir_builder import build_schedule
from ..space_to_depth import fold_filter_row_into_channels, split_filter_height
from .kernel import HopperKernel
from .knobs import compute_usage, declare_knobs
from .tma_requirements import can_load_by_tma, is_promising

DTYPES = ("float16", "bfloat16", "tf32")


def view_for_tma(w: Conv) -> Conv:
    """The workload as TMA sees it: the same arrays, of other axes where the filter cuts the image into patches."""
    return split_filter_height(fold_filter_row_into_channels(w))


def can_load_view_by_tma(w: Conv) -> bool:
    """Whether TMA can copy the operands: rows of whole chunks, filters that its corners and offsets have room for."""
    return can_load_by_tma(view_for_tma(w))


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=DTYPES,
    usage=lambda w, c: compute_usage(view_for_tma(w), c),
    condition=all_of(CHANNELS_LAST_LAYOUT, can_load_view_by_tma),
    search_if=lambda w: is_promising(view_for_tma(w)),
    supersedes=("direct", "implicit_gemm", "tensor_core"),
    device_kinds=("cuda",),
    exact_arch=90,
)
def hopper(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """A producer, a ring of stages, warpgroups that multiply, and tiles stored behind them."""
    viewed_workload = view_for_tma(w)
    config = declare_knobs(viewed_workload, k)
    return build_schedule(w, lambda arguments: HopperKernel(viewed_workload, config, arguments).emit())
